"""A group's cluster on machines of a test: a scheduler, workers, and scripts of clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.machines.bench import ROOT, Machines

BIN = str(Path(sys.executable).parent)


class Group:
    """machines: one of them is called ``"sched"``.  options, environment: of its scheduler."""

    def __init__(self, machines: Machines, *options: str, **environment: str) -> None:
        self.machines = machines
        self.address = "tls://sched:8786"
        self._folder = machines.shared
        self._logs: list[IO[str]] = []
        self._certs = f"{self._folder}/certs"
        self.certify()
        # With Dask's pages it takes three seconds longer.
        scheduler = ("distributed.cli.dask_scheduler", "--protocol", "tls", "--no-dashboard")
        self.start("sched", *scheduler, *options, **environment)

    def certify(self, *options: str) -> None:
        """Certificates for all, in the shared folder, as far as they are not there."""
        command = (sys.executable, "-m", "pathways_lab", "cluster", "certs", self._certs)
        self.machines["sched"].run(*command, *options)

    def worker(self, machine: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        """A worker of the island ``west`` on a machine."""
        command = ("cluster", "worker", "sched", "--island", "west", "--certs", self._certs)
        return self.start(machine, "pathways_lab", *command, *options, **environment)

    def start(self, machine: str, module: str, *options: str, **env: str) -> subprocess.Popen[str]:
        """A module that runs on, with a log in the shared folder."""
        log = (self._folder / f"{machine}.log").open("a")
        self._logs.append(log)
        env = {"DASK_CONFIG": self._certs, **env}
        return self.machines[machine].start(
            *(sys.executable, "-m", module, *options), env=env, stdout=log, stderr=log
        )

    def client(
        self, machine: str, source: str, *arguments: str, **environment: str
    ) -> subprocess.Popen[str]:
        """A script of a client; what it says, errors too, is in its standard output."""
        env = {"DASK_CONFIG": self._certs, **environment}
        return self.machines[machine].python(
            source, self.address, *arguments, env=env, stderr=subprocess.STDOUT
        )

    def close(self) -> None:
        """Close the logs; processes end with their machines."""
        for log in self._logs:
            log.close()


def tell(client: subprocess.Popen[str], order: str) -> None:
    """Write an order to a client."""
    into = client.stdin
    assert into
    into.write(f"{order}\n")
    into.flush()


def hear(client: subprocess.Popen[str]) -> dict[str, Any]:
    """The next answer of a client; other lines are shown."""
    answers = client.stdout
    assert answers
    for line in answers:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
        print("   ", line.rstrip()[:2000], flush=True)
    raise RuntimeError("a client has ended")


def lines_of(section: str, language: str) -> str:
    """The page's lines in a language, below a heading."""
    page = (ROOT / "docs" / "machines.md").read_text()
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return "".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def path() -> str:
    """The search path of commands where ``python`` is this one."""
    return f"{BIN}:{os.environ['PATH']}"
