"""Pathways Lab: one notebook drives many accelerators as one machine."""
