"""The lab as a platform of JAX, in the process of the user's program.

Problem: a program that only imports JAX shall run on a lab, unchanged.

How: JAX asks all installed plug-ins (entry points of the group ``jax_plugins``) before its first
use of a device.  This one does nothing unless the environment names a lab file (see
:mod:`pathways_lab.runtime.processes.program_environment`); then it registers a platform whose
devices come from a process that it starts: :mod:`pathways_lab.door.process`.

Rule for maintainers: loaded by every use of JAX in an environment with Pathways Lab in it.  So
nothing is imported at the top but what costs nothing, and nothing raises.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

from pathways_lab.runtime.processes.program_environment import LAB_FILE, NAME, PLATFORM

_PATIENCE = 90.0
"""Seconds that a door may take to open, on a busy machine."""

_doors: list[Any] = []
"""Processes of this one's doors; each ends with its lifeline."""


def initialize() -> None:
    """Called by JAX before its first use of a device."""
    if os.environ.get(LAB_FILE):
        from jax.extend.backend import register_backend_factory

        register_backend_factory(PLATFORM, open_client, priority=500, fail_quietly=False)


def open_client() -> Any:
    """Start a door and connect JAX's client to it.  Raises RuntimeError that says why not."""
    import secrets
    from pathlib import Path

    from jax.extend.backend import ifrt_proxy

    from pathways_lab.door.callbacks import Callables
    from pathways_lab.runtime import jax_callbacks
    from pathways_lab.runtime.processes import child_process
    from pathways_lab.transport.addresses import private_folder

    try:
        from pathways_lab.door.server import SECRET
    except ImportError as error:
        raise RuntimeError(
            f"JAX on a lab needs one more package ({error}): pip install 'pathways_lab[door]'"
        ) from None
    folder: Path = private_folder()
    secret = secrets.token_bytes(32)
    callbacks = f"{folder}/callbacks"
    callables = Callables(callbacks, secret)
    child = child_process.spawn(
        "pathways_lab.door.process",
        {
            "lab": os.environ[LAB_FILE],
            "name": os.environ.get(NAME, ""),
            "secret": secret.hex(),
            "folder": str(folder),
            "callbacks": callbacks,
            child_process.REMOVE: [str(folder)],
        },
        name="door",
        folder=folder,
        environment={"JAX_PLATFORMS": "cpu", LAB_FILE: ""},
    )
    child.keep()  # JAX's last arrays go after the last object of Python
    _doors.append(child)
    said = child.hear(_PATIENCE)
    if "refused" in said:
        raise RuntimeError(said["refused"])
    options = ifrt_proxy.ClientConnectionOptions()
    options.initialization_data = {SECRET: secret}
    options.connection_timeout_in_seconds = int(_PATIENCE)
    client = ifrt_proxy.get_client(f"grpc://{said['address']}", options)
    jax_callbacks.keep_callables(client, callables.keep, callables.drop)
    # Registered after JAX's own, which ends the client: so this comes first.
    atexit.register(_forget_compiled, client)
    return client


def _forget_compiled(client: Any) -> None:
    """Destroy what JAX has compiled while the door still answers.

    Else its client writes of each function that it could not be destroyed.
    """
    import gc

    import jax
    import numpy as np

    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(Exception):  # a door that is gone has destroyed all of it
        # Answers come in order: after this one all is destroyed.
        client.get_default_layout(np.dtype("float32"), (os.getpid(),), client.local_devices()[0])
