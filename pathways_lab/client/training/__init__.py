"""Training loops: across lost islands, and without a controller."""
