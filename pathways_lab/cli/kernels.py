"""How kernels are started: with encrypted channels where Jupyter can do it.

Problem: a kernel listens on loopback ports.  Jupyter signs what travels there,
so that no other account can run code; encrypted, none can read it either.
"""

from __future__ import annotations

POLICY = "auto"
"""Encrypt for kernels that declare that they can; ipykernel does from 7.4 on."""


def can_encrypt() -> bool:
    """Whether the installed jupyter_client and its ZeroMQ know encrypted channels."""
    try:
        import zmq
        from jupyter_client.manager import KernelManager
    except ImportError:
        return False
    return "transport_encryption" in KernelManager.class_trait_names() and bool(zmq.has("curve"))
