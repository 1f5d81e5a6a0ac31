"""Devices compared with each other."""
