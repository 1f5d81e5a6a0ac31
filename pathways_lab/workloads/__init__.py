"""Example workloads: plain JAX that notebooks show and tests import.

Rule for maintainers: nothing in the package imports a workload; a workload
imports JAX and data libraries only, so that the same functions can be run
without the lab and compared with it.
"""
