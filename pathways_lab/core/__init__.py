"""The pure core: it decides and does nothing else (standard library only)."""
