"""Every machine gets its verdict by name, on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathways_lab.cli import platforms
from pathways_lab.cli.platforms import Machine

LINUX = Machine("Linux", "6.1.0-13-amd64", "x86_64", (3, 12))
MAC = Machine("Darwin", "24.1.0", "arm64", (3, 12), libc="")
WSL2 = replace(LINUX, release="5.15.90.1-microsoft-standard-WSL2")


@pytest.mark.parametrize(
    "machine",
    [LINUX, replace(LINUX, processor="aarch64"), MAC, WSL2, replace(LINUX, python=(3, 11))],
)
def test_supported_machines_are_taken(machine):
    assert platforms.refusal(machine) is None
    assert platforms.doubt(machine) is None


@pytest.mark.parametrize(
    ("machine", "named", "way_out"),
    [
        (
            Machine("Windows", "11", "AMD64", (3, 12), libc=""),
            "Windows without WSL2",
            "wsl --install",
        ),
        (replace(LINUX, release="4.4.0-19041-Microsoft"), "WSL1", "set-version"),
        (replace(MAC, processor="x86_64"), "macOS on Intel", "Apple silicon"),
        (replace(LINUX, libc="musl"), "musl", "glibc"),
        (replace(LINUX, processor="ppc64le"), "ppc64le", "x86_64"),
        (replace(LINUX, system="FreeBSD"), "FreeBSD", "Supported"),
        (replace(LINUX, python=(3, 10)), "Python 3.10", "3.11"),
        (replace(LINUX, implementation="PyPy"), "PyPy", "CPython"),
        (replace(LINUX, bits=32), "32-bit", "64-bit"),
    ],
)
def test_others_are_refused_by_name_with_the_way_out(machine, named, way_out):
    refusal = platforms.refusal(machine)
    assert refusal is not None
    assert named in refusal
    assert way_out in refusal


def test_what_is_only_untested_is_said_and_not_refused():
    newer = replace(LINUX, python=(3, 14))
    assert platforms.refusal(newer) is None
    assert "3.14" in (platforms.doubt(newer) or "")
    assert "free-threaded" in (platforms.doubt(replace(LINUX, free_threaded=True)) or "")


def test_names_are_readable():
    assert platforms.name(MAC) == "macOS arm64"
    assert platforms.name(WSL2) == "Linux x86_64 (WSL2)"


def test_this_machine_can_be_described():
    machine = platforms.this_machine()
    assert machine.bits == 64
    assert platforms.refusal(machine) is None
