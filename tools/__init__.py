"""Tools of maintainers: what is written from the code, and looked at by tests."""
