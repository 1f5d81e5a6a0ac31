"""The second pure core: the decisions of one host (standard library and core only)."""
