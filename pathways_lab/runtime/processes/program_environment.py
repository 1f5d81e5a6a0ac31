"""The environment of other processes whose JAX shall be this lab.

Problem: a program that only imports JAX reads nothing but its environment, and environments are
seen by every process of the account, so that no key may be in them.

Rule for maintainers: nothing is imported at the top that costs time: JAX's plug-in reads these
names in every program (:mod:`pathways_lab.door.plugin`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

LAB_FILE = "PATHWAYS_LAB_DOOR"
"""The path of a lab file, which has the key."""
NAME = "PATHWAYS_LAB_CLIENT"
"""The name of the program on the lab; without it a number, as any client has."""
SLICE_INDEX = "PATHWAYS_LAB_SLICE_INDEX"
"""Not empty: devices have the number of their island as ``slice_index``."""
PLATFORM = "pathways"
"""The lab as JAX_PLATFORMS calls it."""
SETTINGS = {
    "JAX_PLATFORMS": f"{PLATFORM},cpu",
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    # The client warns of what a Unix socket in a private folder does not need, and of its own end.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Thousands of arrays at once would open a stream each, and be cut.
    "IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES": "16",
    "IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_LOOKUPS": "16",
}
"""JAX's own settings of such a program."""


@contextlib.contextmanager
def environment(
    invite: Callable[[Path], None], name: str, slice_index: bool
) -> Iterator[dict[str, str]]:
    """Variables for such a program, good while the block lasts.

    invite: writes a lab file.  name: the program's, or "".
    slice_index: its devices have the number of their island.
    """
    from pathways_lab.transport.addresses import private_folder, remove_folder

    folder = private_folder()
    try:
        invite(folder / "lab")
        told = {NAME: name, SLICE_INDEX: "1" if slice_index else ""}
        yield {LAB_FILE: str(folder / "lab"), **told, **SETTINGS}
    finally:
        remove_folder(folder)
