"""Buffers and the bytes that they take: reserved before they are written, then freed."""
