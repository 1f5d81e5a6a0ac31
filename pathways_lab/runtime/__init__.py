"""The effects: processes, Dask and JAX around the pure cores."""
