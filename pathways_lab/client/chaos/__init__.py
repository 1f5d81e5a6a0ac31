"""Faults on purpose, and the reports of them."""
