"""A function with its weights that several clients call, and whose calls run together."""
