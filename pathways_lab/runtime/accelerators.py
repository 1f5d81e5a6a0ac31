"""Which accelerators of this machine each host of an embedded lab may see.

Problem: several device processes on one machine must not all grab the same
GPU, and finding out must not initialise anything in the notebook's process.

Rule for maintainers: environment variables only, the ones that the platforms
define for this; a machine without accelerators gets emulated devices (CPU).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pathways_lab.core.errors import Failure, PathwaysError


def gpus(devices: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    found = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [name.removeprefix("nvidia") for name in sorted(found, key=lambda n: int(n[6:]))]


def assign_accelerators(
    hosts: int, devices_per_host: int, platform: str, found: list[str] | None = None
) -> list[dict[str, str]]:
    """The environment of each host; empty ones mean CPU devices.

    platform: ``"cpu"``; ``"auto"``: GPUs if there are enough for all hosts, else
        CPU; ``"gpu"``: GPUs, and a PathwaysError with the numbers if there are too few.
    found: the GPUs (default: :func:`gpus`).
    """
    if platform not in ("cpu", "auto", "gpu"):
        raise _error(f"platform is {platform!r}", "use 'auto', 'cpu' or 'gpu'")
    names: list[str] = []
    if platform != "cpu":
        names = gpus() if found is None else found
    if names and len(names) >= hosts * devices_per_host:
        return [
            {
                "CUDA_VISIBLE_DEVICES": ",".join(
                    names[host * devices_per_host : (host + 1) * devices_per_host]
                )
            }
            for host in range(hosts)
        ]
    if platform == "gpu":
        raise _error(
            f"{hosts} hosts with {devices_per_host} GPUs each need {hosts * devices_per_host}; "
            f"this machine has {len(names)}",
            "ask for fewer, or platform='cpu' for emulated devices",
        )
    return [{} for _ in range(hosts)]


def _error(message: str, remedy: str) -> PathwaysError:
    return PathwaysError(Failure("refused", message, remedy))
