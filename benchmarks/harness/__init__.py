"""What all benchmarks share: interleaved rounds, honest numbers, tables and figures.

A benchmark makes systems (:mod:`.rounds`), possibly in processes of their own
(:mod:`.child`), measures them in turn, and publishes a :class:`.report.Report`.
This module imports nothing: children run in environments without this project.
"""
