"""JAX itself on a lab: a server for the protocol by which JAX reaches remote devices."""
