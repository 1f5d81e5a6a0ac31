"""A lab on a Dask cluster: its own, or one that is there."""
