"""The devices of a training: of plain JAX in this process, and of a lab."""

from __future__ import annotations

from typing import Any


def plain_mesh(devices: int) -> Any:
    """A mesh of so many CPU devices of this process, in which JAX has none yet."""
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", devices)
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))


def lab_and_slice(devices: int, hosts: int = 1) -> tuple[Any, Any]:
    """A new lab of one island with so many devices on so many hosts, and a slice of all of them."""
    import pathways_lab as pw

    lab = pw.start(
        islands=1, hosts_per_island=hosts, devices_per_host=devices // hosts, progress=False
    )
    return lab, lab.slice(devices)
