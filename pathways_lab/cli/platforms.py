"""Where the lab runs, where it does not, and why: one table in one place.

Problem: on a machine that cannot work, the error comes from the bottom of some
wheel and helps nobody.  So every unsupported machine is refused by its name,
with the reason and the way out.

Rule for maintainers: :func:`refusal` is pure, so that every machine can be
tested on any machine; only :func:`this_machine` looks around.
"""

from __future__ import annotations

import platform
import struct
import sys
import sysconfig
from dataclasses import dataclass

OLDEST, NEWEST = (3, 11), (3, 13)
SUPPORTED = "Linux, macOS on Apple silicon, Windows through WSL2"


@dataclass(frozen=True)
class Machine:
    """The facts that decide the verdict, as the standard library reports them.

    system: ``platform.system()``; release: the kernel's; processor:
    ``platform.machine()``; libc: ``"glibc"``, ``"musl"`` or ``""``.
    """

    system: str
    release: str
    processor: str
    python: tuple[int, int]
    implementation: str = "CPython"
    bits: int = 64
    libc: str = "glibc"
    free_threaded: bool = False


def this_machine() -> Machine:
    """The machine and the Python that run this line."""
    libc = platform.libc_ver()[0]
    if not libc and "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        libc = "musl"
    return Machine(
        system=platform.system(),
        release=platform.release(),
        processor=platform.machine(),
        python=sys.version_info[:2],
        implementation=platform.python_implementation(),
        bits=struct.calcsize("P") * 8,
        libc=libc,
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    )


def name(machine: Machine) -> str:
    """One short name: ``"Linux x86_64 (WSL2)"``."""
    system = {"Darwin": "macOS"}.get(machine.system, machine.system or "unknown system")
    wsl = " (WSL2)" if "microsoft" in machine.release.lower() else ""
    return f"{system} {machine.processor}{wsl}".strip()


def refusal(machine: Machine) -> str | None:
    """Why the lab cannot run on *machine*, with the way out; None when it can."""
    version = ".".join(map(str, machine.python))
    if machine.implementation != "CPython":
        return (
            f"{machine.implementation}: JAX has wheels for CPython only. Use CPython 3.11 to 3.13."
        )
    if machine.python < OLDEST:
        return f"Python {version}: JAX from 0.10 on needs 3.11. Use Python 3.11 to 3.13."
    if machine.bits != 64:
        return f"{machine.bits}-bit Python: JAX has wheels for 64-bit systems only."
    if machine.system == "Windows":
        return (
            "Windows without WSL2: the lab needs Unix sockets in private folders and JAX "
            "collectives between processes, and native Windows has neither. Run `wsl --install`, "
            "then do the same inside WSL2."
        )
    if machine.system == "Darwin":
        if machine.processor == "arm64":
            return None
        return (
            "macOS on Intel: JAX no longer has wheels for it. Use a Mac with Apple silicon and a "
            "native arm64 Python (under Rosetta it looks like Intel), or a Linux machine."
        )
    if machine.system != "Linux":
        return f"{machine.system}: JAX has no wheels for it. Supported: {SUPPORTED}."
    if machine.release.endswith("-Microsoft"):
        return (
            "WSL1: it emulates Linux without the sockets and the shared memory that the lab needs. "
            "Run `wsl --set-version <distribution> 2`."
        )
    if machine.libc == "musl":
        return (
            "Linux with musl (Alpine): JAX has wheels for glibc only. Use a glibc distribution "
            "such as Debian, also as container image."
        )
    if machine.processor not in ("x86_64", "aarch64"):
        return f"Linux on {machine.processor}: JAX has wheels for x86_64 and aarch64 only."
    return None


def doubt(machine: Machine) -> str | None:
    """The reason why *machine* is untested though not refused, or None."""
    if machine.python > NEWEST:
        return f"Python {'.'.join(map(str, machine.python))} is newer than what is tested (3.13)."
    if machine.free_threaded:
        return "The free-threaded build of Python is not tested. The ordinary one is."
    return None
