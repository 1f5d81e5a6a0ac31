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
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pathways_lab.runtime.processes.program_environment import (
    LAB_FILE,
    NAME,
    PLATFORM,
    SLICE_INDEX,
)

_PATIENCE = 90.0
"""Seconds that a door may take to open, on a busy machine."""

_doors: list[Connected] = []
"""This process's doors; each process ends with its lifeline."""


@dataclass(eq=False)
class Connected:
    """JAX's client of a door, the functions that hosts may call, and the door's process.

    name: of the door as a client of the lab.
    """

    client: Any
    name: str
    callables: Any
    process: Any

    def close(self) -> None:
        """End the door.  Arrays that are left raise an error when they are read."""
        import gc
        import weakref

        from pathways_lab.runtime.processes import native_log

        self.forget_compiled()
        atexit.unregister(self.forget_compiled)
        _doors.remove(self)
        left = weakref.ref(self.client)
        with native_log.clean():
            self.client = None
            gc.collect()
        # Where arrays are left, the client is, too, and says that it has been left.
        with native_log.clean(b"" if left() is None else b"End stack trace ***"):
            self.callables.close()
            self.process.end()

    def forget_compiled(self) -> None:
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
            first = self.client.local_devices()[0]
            self.client.get_default_layout(np.dtype("float32"), (os.getpid(),), first)


_SLACK = 10_000_000
"""Nanoseconds by which Linux may wake the threads of JAX's client late."""


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads that start meanwhile may sleep longer than they ask for, where there is Linux.

    One of JAX's client asks every 100 us whether it has something to send, and would take a tenth
    of a core for that.  It wakes the others when there is something.
    """
    import ctypes
    import sys

    set_timer_slack = 29
    if sys.platform != "linux":
        yield
        return
    set_slack = functools.partial(ctypes.CDLL(None).prctl, set_timer_slack)
    set_slack(_SLACK)
    try:
        yield
    finally:
        set_slack(0)  # as it was


def initialize() -> None:
    """Called by JAX before its first use of a device."""
    if os.environ.get(LAB_FILE):
        from jax.extend.backend import register_backend_factory

        register_backend_factory(PLATFORM, open_client, priority=500, fail_quietly=False)
        _warn_of_others()


def _warn_of_others() -> None:
    """A program that chooses its platforms itself leaves the lab out, without an error."""
    import warnings

    import jax

    config: Any = jax.config
    asked = config.jax_platforms
    if asked and PLATFORM not in asked.split(","):
        warnings.warn(
            f"this program has JAX_PLATFORMS (or jax_platforms) {asked!r}: it computes on devices"
            f" of its own, and not on those of the lab. Leave it out, or name {PLATFORM!r} first",
            stacklevel=2,
        )


def open_client() -> Any:
    """Connect JAX's client to a door of its own.  Raises RuntimeError that says why not."""
    name, index = os.environ.get(NAME, ""), os.environ.get(SLICE_INDEX, "")
    return connect(os.environ[LAB_FILE], name, bool(index)).client


def connect(lab: str, name: str, slice_index: bool) -> Connected:
    """Start a door to the lab of a lab file, and connect JAX's client to it.

    name: of the program on the lab, or "".  slice_index: devices have the number of their island.
    Raises RuntimeError that says why not.
    """
    import secrets
    from pathlib import Path

    from jax.extend.backend import ifrt_proxy

    from pathways_lab.door.callbacks import Callables
    from pathways_lab.runtime import jax_backends, jax_callbacks
    from pathways_lab.runtime.processes import child_process, native_log
    from pathways_lab.transport.addresses import private_folder

    try:
        from pathways_lab.door.protocol.server import SECRET
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
            "lab": lab,
            "name": name,
            "slice_index": slice_index,
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
    said = child.hear(_PATIENCE)
    if "refused" in said:
        raise RuntimeError(said["refused"])
    options = ifrt_proxy.ClientConnectionOptions()
    options.initialization_data = {SECRET: secret}
    options.connection_timeout_in_seconds = int(_PATIENCE)
    with native_log.clean(), _patient_threads():
        client = ifrt_proxy.get_client(f"grpc://{said['address']}", options)
    jax_backends.carry_arrays_across()
    jax_backends.no_memory_statistics(client.runtime_type)
    jax_callbacks.say_once()
    jax_callbacks.keep_callables(client, callables.keep, callables.drop)
    made = Connected(client, said["client"], callables, child)
    _doors.append(made)
    # Registered after JAX's own, which ends the client: so this comes first.
    atexit.register(made.forget_compiled)
    return made
