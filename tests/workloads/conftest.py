"""A lab without a cluster, as for the tests of the client."""

import pathways_lab.client.lab.lab  # noqa: F401  (with it, calls outside of programs run)
from tests.client.conftest import fake

__all__ = ["fake"]
