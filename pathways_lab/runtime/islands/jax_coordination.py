"""The private JAX API of the coordination process, which loads nothing else of JAX.

Problem: the coordination process needs one class of jaxlib.  Beside the other
private doors, in :mod:`pathways_lab.runtime.jax_private`, it would load all of
JAX for it: 1.2 s of processor time and 55 MB at the start of every lab.

Rule for maintainers: imports jaxlib only; this one function.  Its test is in
``tests/runtime/test_jax_joint.py`` with those of the other half.
"""

from __future__ import annotations

from typing import Any

from jaxlib import _jax

_AGES = 10**8
"""Seconds.  The control plane knows which hosts are alive; this service need not."""


def coordination_service(address: str, processes: int) -> Any:
    """Serve *processes* ranks at *address* (``"unix:/path"`` or ``"host:port"``).

    Serves until ``shutdown()``, which takes milliseconds, but seconds while a
    rank waits there for another.  An address that cannot be
    bound ends the process instead of raising: try it before.
    """
    return _jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=_AGES,
        cluster_register_timeout=_AGES,
        shutdown_timeout=1,
        # A rank that dies must not end the others.
        recoverable=True,
    )
