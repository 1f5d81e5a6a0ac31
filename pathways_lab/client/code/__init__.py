"""User code as code that travels, and the lines that it came from."""
