"""The memory that an embedded lab will take of this machine, estimated before it starts.

Problem: a laptop that starts to swap is worse than a refusal with numbers.

Rule for maintainers: the constants are measured (private bytes of each kind of
process, Linux, Python 3.11); a test compares them with a running lab.
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.core.memory.holdings import size
from pathways_lab.runtime.processes.child_copies import can_fork

MIB = 1 << 20
SCHEDULER = 70 * MIB
CONTROL = 20 * MIB
LIBRARIES = 160 * MIB
"""Memory of modules imported once, where processes are copies of one that has imported them."""
WORKER, COPIED_WORKER = 65 * MIB, 20 * MIB
DEVICE_PROCESS, COPIED_DEVICE_PROCESS = 200 * MIB, 100 * MIB
"""A copy's, when it has compiled some functions: idle it takes a tenth of that."""
ACCELERATOR_PROCESS = 2048 * MIB
"""Assumed, not measured: libraries, pinned buffers and contexts of an accelerator's runtime."""
DEVICE = 5 * MIB
_DEFAULT_DEVICE_MEMORY = 1024 * MIB
_LEAST_DEVICE_MEMORY = 256 * MIB
_HOSTS_PER_ISLAND = 2
_DEVICES_PER_HOST = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes.  processes: all of them, idle.  available: what the machine (or container) has left.

    device_memory: of one device, at most; None when it is an accelerator's own.
    """

    processes: int
    device_memory: int | None
    devices: int
    available: int

    @property
    def total(self) -> int:
        """With every device full."""
        return self.processes + (self.device_memory or 0) * self.devices

    def __str__(self) -> str:
        free = f"{size(self.available)} are free"
        if self.device_memory is None:
            return f"{size(self.processes)} for processes ({free}), and its accelerators' memory"
        return (
            f"{size(self.processes)} for processes, and up to {size(self.device_memory)} on each "
            f"of {self.devices} devices ({size(self.total)} in all; {free})"
        )


def plan_budget(
    hosts: int, devices_per_host: int, memory: int | None, available: int, emulated: bool = True
) -> Budget:
    """The budget of a lab on this machine.

    memory: bytes per device, or None: 1 GiB, or half of what is left if that is less.
    available: bytes that can be taken without swapping.
    emulated: CPU devices, whose memory is the machine's own.
    Raises PathwaysError when it does not fit.
    """
    shared, worker, device_process = 0, WORKER, DEVICE_PROCESS
    if can_fork():
        shared, worker, device_process = LIBRARIES, COPIED_WORKER, COPIED_DEVICE_PROCESS
    if not emulated:
        device_process = ACCELERATOR_PROCESS
    each = worker + device_process + devices_per_host * DEVICE
    processes = SCHEDULER + CONTROL + shared + hosts * each
    devices = hosts * devices_per_host
    if not emulated:
        memory = None
    elif memory is None:
        left = max(0, available - processes)
        memory = min(_DEFAULT_DEVICE_MEMORY, left // 2 // devices)
    budget = Budget(processes, memory, devices, available)
    if budget.total > available or memory == 0:
        raise refused(
            f"a lab of {hosts} hosts with {devices_per_host} devices each needs {budget}",
            "ask for fewer islands, hosts or devices, or for less memory= per device "
            "(bytes), or close other programs",
        )
    return budget


def usual_hosts(
    islands: int, devices_per_host: int | None, memory: int | None, available: int, apart: str
) -> tuple[int, int, str]:
    """Hosts per island and devices per host when nobody says how many hosts; and why not two.

    apart: why hosts cannot compute together here, or "".  Two hosts of two
    devices, where each device still gets 256 MiB; else one host with as many.
    """
    devices = devices_per_host or _DEVICES_PER_HOST
    alone = devices_per_host or _HOSTS_PER_ISLAND * _DEVICES_PER_HOST
    if apart:
        return 1, alone, apart
    try:
        budget = plan_budget(islands * _HOSTS_PER_ISLAND, devices, memory, available)
    except PathwaysError as error:
        return 1, alone, error.failure.message
    if memory is None and (budget.device_memory or 0) < _LEAST_DEVICE_MEMORY:
        return 1, alone, f"two hosts per island leave little for their devices: {budget}"
    return _HOSTS_PER_ISLAND, devices, ""
