"""The gang scheduler: runs, their order, and the grants that hosts obey."""
