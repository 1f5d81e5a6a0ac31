"""Explanations: of a standstill, of a device that computes wrong, of a rule that broke."""
