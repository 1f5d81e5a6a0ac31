"""Input pipelines: host computations on Dask workers."""
