"""Programs that know nothing of the lab, in processes of their own, on one lab."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.timeline.records import Span
from tests.pipeline.test_load import TWO_MESHES
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster
HERE = Path(__file__).parent
_ANOTHER_ACCOUNT = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""
"""A program that connects to a socket as nobody."""


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4, progress=False) as started:
        yield started


def pids(lab: pw.Lab) -> list[int]:
    return [host.pid for island in lab.islands for host in island.hosts]


def gangs(lab: pw.Lab) -> list[Span]:
    """Those of all clients, as far as their records have come."""
    return [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "gang"]


def begin(script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env=os.environ | variables,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def plainly() -> dict[str, str]:
    """Four CPU devices, whose compiler has the options of the lab's."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def unexpected(err: str) -> list[str]:
    """Lines of a script's standard error, but for those of JAX's client about its own end."""
    return [line for line in err.splitlines() if "IFRT proxy server was terminated" not in line]


def test_two_scripts_at_once_compute_what_they_compute_alone(lab):
    """To the bit, beside plain JAX on as many CPU devices."""
    with lab.door() as variables:
        scripts = [begin("plain_training.py", seed, **variables) for seed in "12"]
        scripts += [begin("plain_training.py", seed, **plainly()) for seed in "12"]
        said = [script.communicate(timeout=120) for script in scripts]
    assert [script.returncode for script in scripts] == [0] * 4, said
    first, second, *plain = [out for out, _ in said]
    assert [first, second] == plain
    assert [unexpected(err) for _, err in said[:2]] == [[], []]
    assert first != second
    assert len({gang.client for gang in gangs(lab)}) == 2


LIBRARIES = {
    "with_libraries.py": ["equinox", "optax"],
    "with_flax.py": ["flax", "orbax.checkpoint"],
    "with_numpyro.py": ["numpyro"],
    "with_pathwaysutils.py": ["pathwaysutils"],
    "with_tools.py": [],
}
"""Scripts that use libraries over JAX, and these; they print their results, exactly."""


@pytest.mark.parametrize(("name", "libraries"), LIBRARIES.items(), ids=LIBRARIES)
def test_libraries_over_jax_compute_on_the_lab_as_on_cpu_devices(lab, tmp_path, name, libraries):
    """To the bit, what they save included."""
    for library in libraries:
        if find_spec(library.split(".")[0]) is None:
            pytest.skip(f"{library} is not installed")
    with lab.door() as variables:
        folders = [str(tmp_path / where) for where in ("there", "here")]
        environments = zip(folders, (variables, plainly()), strict=True)
        scripts = [begin(name, folder, **each) for folder, each in environments]
        said = [script.communicate(timeout=300) for script in scripts]
    assert [script.returncode for script in scripts] == [0, 0], said
    (there, _), (here, _) = said
    assert there == here
    assert there.count("\n") > 3


@pytest.mark.parametrize(
    ("chosen", "said"), [("'cpu'", True), ("'cpu,tpu'", True), ("'pathways,cpu'", False)]
)
def test_a_program_that_chooses_its_platforms_hears_that_the_lab_is_not_among_them(chosen, said):
    code = f"import jax; jax.config.update('jax_platforms', {chosen}); jax.devices('cpu')"
    environment = os.environ | {"PATHWAYS_LAB_DOOR": "/no/lab", "JAX_PLATFORMS": "pathways,cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ("not on those of the lab" in done.stderr) is said, done.stderr


def test_a_mesh_may_lie_on_all_devices_of_both_islands(lab):
    """Numbers are those of plain JAX on eight devices, and each device may have its island's."""
    with lab.door() as plain, lab.door(slice_index=True) as hybrid:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
        here = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        scripts = [begin("with_islands.py", **each) for each in (plain, hybrid, here)]
        said = [script.communicate(timeout=120) for script in scripts]
    assert [script.returncode for script in scripts] == [0] * 3, said
    assert len({out for out, _ in said}) == 1
    assert said[0][0].count("\n") == 4


def test_a_program_over_several_meshes_is_one_run(lab, tmp_path):
    """Compiled and called as Shardy's own front does it; each mesh is on an island of its own."""
    file = tmp_path / "train.mlir"
    file.write_text(TWO_MESHES)
    earlier = {gang.run for gang in gangs(lab)}
    with lab.door() as variables:
        script = begin("with_meshes.py", str(file), **variables)
        out, err = script.communicate(timeout=120)
    assert script.returncode == 0, err
    *calls, places = out.splitlines()
    w, x = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    for call in calls:
        y, w = 2 * (x @ w), w - x @ w
        assert call == f"{y.tolist()} {w.tolist()} True False"
    assert (len(calls), places) == (2, "[True, True]")
    wanted = {"forward", "double", "update"}
    until(lambda: sum(g.node in wanted for g in gangs(lab) if g.run not in earlier) == 6)
    runs = {gang.run for gang in gangs(lab) if gang.node in wanted and gang.run not in earlier}
    assert len(runs) == 2


def test_callbacks_run_in_the_script(lab):
    with lab.door() as variables:
        script = begin("with_callbacks.py", **variables)
        said = []
        while not (said and said[-1].startswith("error")):
            said.append(script.stdout.readline())
            assert said[-1], script.communicate()
        pid, log, address, secret = script.stdout.readline().split()
        key = json.loads(Path(variables["PATHWAYS_LAB_DOOR"]).read_text())["control"]["key"]
        see_no_secret((secret, key), script.pid, int(pid), Path(log))
        for name in ("door", "callbacks"):
            see_no_way_in(Path(address).with_name(name))
        out, err = script.communicate("\n", timeout=120)
    assert script.returncode == 0, err
    first, second, *others = "".join([*said, out]).splitlines()
    assert first == f"{[2.0 * n + 1 for n in range(8)]} [(8,)]"
    assert second == f"{[2.0 * n for n in range(8)]} {[(2,)] * 4 + [(8,)]}"
    before, *others, after = others
    assert (before, after) == ("compiled: 1", "compiled at the end: 0")
    noted, turns = others[:3], others[3:6]
    assert noted == ["noted 0", "noted 1", "noted 2"]
    assert turns == ["turn 0", "no turn 1", "turn 2"], "a failed callback ends no order"
    assert others[6:] == ["the sum is 28.0", "error: True"]


def test_colocated_functions_run_beside_the_devices(lab):
    with lab.door() as variables:
        out, err = begin("with_colocated.py", **variables).communicate(timeout=120)
    doubled = [2.0 * n for n in range(8)]
    assert out.splitlines() == [
        f"{doubled} {[each + 1 for each in doubled]}",
        "True",
        "[11, 12, 13]",
        f"{[n + 5.0 for n in range(8)]}",
        "True",
        f"{[float(n) for n in range(8)]}",
        "True",
    ], err


def see_no_secret(secrets: Sequence[str], script: int, door: int, log: Path) -> None:
    """In process lists, environments and the log of a script and its door."""
    lists = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    seen = [
        str(lists),
        log.read_text(),
        *[str(psutil.Process(p).environ()) for p in (script, door)],
    ]
    for secret in secrets:
        assert len(secret) >= 32
        assert not any(secret in each for each in seen)


def see_no_way_in(socket_path: Path) -> None:
    """For other accounts: the folder of a door's socket is of this one, and of no other."""
    assert socket_path.is_socket()
    about = socket_path.parent.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o700, os.getuid())
    if os.getuid() == 0:
        other = [sys.executable, "-c", _ANOTHER_ACCOUNT, str(socket_path)]
        tried = subprocess.run(other, capture_output=True, text=True)
        assert "PermissionError" in tried.stderr, tried


def test_errors_are_errors_and_the_process_lives():
    with (
        pw.start(2, 1, 1, memory="24 MiB", progress=False) as own,
        own.door("script") as variables,
    ):
        script = begin("failing.py", **variables)
        said = []
        while not (said and said[-1].startswith("value")):
            said.append(script.stdout.readline())
            assert said[-1], script.communicate()
        assert "script" in own.clients
        pid, _ = pids(own)
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in pids(own) and len(pids(own)) == 2)
        script.stdin.write("go on\n")
        script.stdin.flush()
        while not said[-1].startswith("again"):
            said.append(script.stdout.readline())
            assert said[-1], script.communicate()
        own.close()
    out, err = script.communicate("go on\n", timeout=60)
    assert "host: UNAVAILABLE" in "".join(said)
    assert said[-1] == "again: [2.0]\n"
    assert script.returncode == 0, err
    assert said[0] == "donated: RuntimeError\n"
    assert said[1] == "overwritten: 3\n"
    assert said[2] == "spans: [1.0, 1.0]\n"
    assert said[3].startswith("too large: RESOURCE_EXHAUSTED: a run of 'broadcast_in_dim' needs")
    assert "lost: UNAVAILABLE" in out
    assert out.endswith("alive\n")
