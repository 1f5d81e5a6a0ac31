"""The protocol by which JAX's client speaks to a door, and nothing of what its requests mean."""
