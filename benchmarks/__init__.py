"""Measurements: how fast it is, and against whom.

Every benchmark is one command, ``python -m benchmarks.NAME`` in the repository's
root (``--help`` says more): it prints a table and leaves JSON and a figure in
``benchmarks/results/``.  Recorded results: RESULTS.md.
"""
