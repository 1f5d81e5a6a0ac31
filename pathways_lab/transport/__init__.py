"""Bytes between processes: sockets, shared memory, typed messages.  No JAX."""
