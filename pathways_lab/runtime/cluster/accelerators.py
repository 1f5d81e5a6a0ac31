"""Which devices each host of an embedded lab gets: accelerators, or emulated ones.

Problem: several device processes on one machine must not all grab the same
GPU, and finding out must not initialise anything in the notebook's process.

The rule of ``platform="auto"``: GPUs when JAX's plugin for them is installed
and there are enough for all hosts; TPUs when libtpu is installed and one host
is to have them all; else CPU devices.

A GPU's memory belongs to the process that computes on it first: JAX claims three quarters of it
then.  So hosts claim theirs when they start, and the kernel's own JAX takes only what it needs.

Rule for maintainers: files and environment variables only; JAX is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pathways_lab.core.errors import refused

_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""The variable by which JAX claims a part of a GPU's memory at its first use, or does not."""

_RESTRAINED = "PATHWAYS_LAB_RESTRAINED"
"""The variable that says that the other one is ours and not the user's."""


@dataclass(frozen=True, slots=True)
class Found:
    """The accelerators of this machine that JAX could use here.

    gpus: as CUDA_VISIBLE_DEVICES names them.  tpus: number of chips.
    """

    gpus: tuple[str, ...] = ()
    tpus: int = 0

    def __str__(self) -> str:
        kind, count = ("GPU", len(self.gpus)) if self.gpus else ("TPU", self.tpus)
        return f"{count} {kind}{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """platform: ``"cpu"``, or ``"auto"`` for what JAX finds.

    environments: one per host, if hosts differ in it.
    """

    platform: str
    environments: tuple[dict[str, str], ...] = ()

    def environment(self, host: int) -> dict[str, str]:
        """The environment with which host number *host* starts."""
        return self.environments[host] if self.environments else {}


def find(devices: Path = Path("/dev")) -> Found:
    """Look at this machine."""
    gpus: tuple[str, ...] = ()
    if any(_installed(plugin) for plugin in _GPU_PLUGINS):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            gpus = tuple(name for name in visible.split(",") if name not in ("", "-1"))
        else:
            gpus = tuple(_numbers(devices, "nvidia"))
    tpus = 0
    if _installed("libtpu"):
        tpus = len(_numbers(devices, "accel")) or len(_numbers(devices / "vfio", ""))
    return Found(gpus, tpus)


def assign(hosts: int, devices_per_host: int, platform: str, found: Found) -> Assignment:
    """Devices for every host.

    platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``"auto"``: see the module's rule.
    Raises PathwaysError with the numbers when there are too few of the kind asked for.
    """
    if platform not in ("cpu", "auto", "gpu", "tpu"):
        raise refused(f"platform is {platform!r}", "use 'auto', 'cpu', 'gpu' or 'tpu'")
    wanted = hosts * devices_per_host
    if platform in ("auto", "gpu") and len(found.gpus) >= wanted:
        shares = [
            found.gpus[host * devices_per_host : (host + 1) * devices_per_host]
            for host in range(hosts)
        ]
        return Assignment(
            "auto", tuple({"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares)
        )
    if platform in ("auto", "tpu") and hosts == 1 and found.tpus == wanted:
        return Assignment("auto")
    if platform in ("gpu", "tpu"):
        there = len(found.gpus) if platform == "gpu" else found.tpus
        raise refused(
            f"{hosts} hosts with {devices_per_host} {platform.upper()}s each need {wanted}; JAX "
            f"can use {there} here",
            "ask for fewer (TPUs: one host with all chips), install JAX's plugin for them, "
            "or platform='cpu' for emulated devices",
        )
    return Assignment("cpu")


def claims() -> bool:
    """Whether JAX, as the environment stands, claims a GPU's memory at its first use."""
    return os.environ.get(PREALLOCATE, "1") not in ("0", "false", "False")


def restrain_kernel() -> None:
    """The JAX of this process, if it computes on a GPU later, takes no more than it needs."""
    if PREALLOCATE not in os.environ:
        os.environ[PREALLOCATE], os.environ[_RESTRAINED] = "false", "1"


def unrestrained() -> None:
    """This process is a host, and its kernel's restraint is not for it."""
    if os.environ.pop(_RESTRAINED, ""):
        del os.environ[PREALLOCATE]


def _numbers(folder: Path, prefix: str) -> list[str]:
    """The N of files ``<prefix>N``, ascending."""
    matches = [re.fullmatch(prefix + r"(\d+)", path.name) for path in folder.glob(prefix + "*")]
    return sorted((match[1] for match in matches if match), key=int)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
