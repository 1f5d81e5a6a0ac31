"""A Slurm on machines of a test: its daemons, without systemd, with files in the shared folder.

Rule for maintainers: :func:`refusal` says why there is none here; processes end with their
machines.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess

from tests.machines.bench import Machines, until

PATH = f"{os.environ['PATH']}:/usr/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
SETTINGS = """
ClusterName=test
SlurmctldHost={login}({address})
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/tmp/state
SlurmdSpoolDir=/tmp/spool
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
KillWait=15
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill
JobAcctGatherFrequency=task=1
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
PartitionName=all Nodes=ALL Default=YES
"""


@functools.cache
def refusal() -> str:
    """Why there is no Slurm here; "" where there is."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return f"{', '.join(missing)} of Slurm cannot be found" if missing else ""


class Slurm:
    """login: the machine of users and of the controller.  nodes: the others, which run jobs.

    cpus, memory (MB): of each node, as Slurm counts them.
    """

    def __init__(
        self, machines: Machines, login: str, *nodes: str, cpus: int = 2, memory: int = 2000
    ) -> None:
        self.machines, self.login, self.nodes = machines, login, nodes
        folder = machines.shared
        settings = SETTINGS.format(login=login, address=machines[login].address)
        for node in nodes:
            address = machines[node].address
            settings += f"NodeName={node} NodeAddr={address} CPUs={cpus} RealMemory={memory}\n"
        (folder / "slurm.conf").write_text(settings)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        self.environment = {"PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf"}
        munge = [f"--{what}-file=/tmp/munge.{what}" for what in ("pid", "seed", "log")]
        for name in (login, *nodes):
            self._daemon(
                *(name, "munged", "--foreground", "--socket=/tmp/munge.socket", *munge),
                f"--key-file={folder}/munge.key",
            )
        for name in (login, *nodes):
            until(lambda name=name: "munge.socket" in machines[name].files(), f"munged on {name}")
        self._daemon(login, "slurmctld", "-D")
        for node in nodes:
            self._daemon(node, "slurmd", "-D")
        until(lambda: self.run("sinfo", "-h", "-o", "%T") == "idle\n", "idle nodes")

    def run(self, *command: str) -> str:
        """What a command of Slurm says on the login machine."""
        return self.machines[self.login].run(*command, env=self.environment)

    def client(self, source: str, **environment: str) -> subprocess.Popen[str]:
        """A script of a user; what it says, errors too, is in its standard output."""
        return self.machines[self.login].python(
            source, env={**self.environment, **environment}, stderr=subprocess.STDOUT
        )

    def _daemon(self, machine: str, name: str, *options: str) -> None:
        program = shutil.which(name, path=PATH)
        assert program
        with (self.machines.shared / f"{name}.{machine}.log").open("a") as log:
            self.machines[machine].start(
                program, *options, env=self.environment, stdout=log, stderr=log
            )
