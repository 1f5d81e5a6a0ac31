"""Hosts of one island that compute as one JAX runtime."""
