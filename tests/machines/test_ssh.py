"""A lab over machines to which Dask logs in by a real sshd."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.machines.bench import until
from tests.machines.conftest import Make
from tests.machines.group import lines_of
from tests.machines.slurm import PATH

pytestmark = pytest.mark.cluster

NAMES = ("sched", "one", "two")
SETTINGS = "HostKey {0}/host\nAuthorizedKeysFile {0}/own.pub\nPidFile none\nStrictModes no\n"
"""StrictModes: the folder above is one of everybody's."""
SERVE = 'mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$0" -D -e -f "$1"'
HOME = """
mkdir -m 700 .ssh && cp "$1/own" .ssh/id_ed25519
for each in sched one two; do echo "$each $(cat "$1/host.pub")"; done > .ssh/known_hosts
"""
USE = """
import numpy as np
on = [lab.slice(1, island=island) for island in ("one", "two")]
add = [pw.jit(lambda x: x + 1, on=s) for s in on]
print("computed", add[1](add[0](np.arange(4.0))).result(), len(lab.islands), flush=True)
lab.close()
cluster.close()
"""


def test_the_lines_of_the_page_make_a_lab_of_logins(machines: Make) -> None:
    server = shutil.which("sshd", path=PATH)
    if server is None:
        pytest.skip("sshd cannot be found")
    pytest.importorskip("asyncssh")
    group = machines(("note", *NAMES))
    folder = group.shared
    for key in ("own", "host"):
        make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{key}")
        subprocess.run(make, check=True)
    (folder / "settings").write_text(SETTINGS.format(folder))
    group["note"].run("sh", "-ec", HOME, "sh", str(folder))
    group["note"].run(sys.executable, "-m", "pathways_lab", "cluster", "certs", f"{folder}/certs")
    with (folder / "log").open("w") as log:
        for name in NAMES:
            serve = ("sh", "-c", SERVE, server, f"{folder}/settings")
            group[name].start(*serve, stdout=log, stderr=log)
    for name in NAMES:
        until(lambda name=name: "sshd" in group[name].run("ls", "/run"), f"sshd on {name}")
    before = {name: group[name].files() for name in NAMES}
    environment = {"DASK_CONFIG": f"{folder}/certs"}
    source = lines_of("SSH", "python") + USE
    with group["note"].python(source, env=environment, stderr=subprocess.STDOUT) as client:
        told = client.communicate(timeout=120)[0]
    assert "computed [2. 3. 4. 5.] 2\n" in told
    for name in NAMES:
        until(lambda name=name: not group[name].pythons(), f"the end of processes on {name}")
        assert set(group[name].files()) - set(before[name]) <= {"dask-scratch-space"}
