"""The simulator: the same core, driven by one heap of future events."""
