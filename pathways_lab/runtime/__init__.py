"""The real rim of the core: Dask, JAX, processes and sockets."""
