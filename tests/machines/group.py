"""A group's Dask cluster on machines of a test: a scheduler, workers, and scripts of clients."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Any

import yaml
from distributed import Security

from tests.machines.bench import Machines


class Group:
    """machines: one of them is called ``"sched"``.  options: of its scheduler."""

    def __init__(self, machines: Machines, *options: str) -> None:
        self.machines = machines
        self.address = "tls://sched:8786"
        self._folder = machines.shared
        self._environment = {"DASK_CONFIG": str(self._folder / "dask")}
        self._certify()
        self._logs: list[IO[str]] = []
        self._start("sched", "scheduler", "--protocol", "tls", *options)

    def worker(self, machine: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        """A worker on a machine, with one device."""
        command = ("worker", self.address, "--no-nanny", "--nthreads", "1")
        return self._start(machine, *command, *options, **environment)

    def client(self, machine: str, source: str, **environment: str) -> subprocess.Popen[str]:
        """A script of a client; what it says, errors too, is in its standard output."""
        return self.machines[machine].python(
            source, self.address, env={**self._environment, **environment}, stderr=subprocess.STDOUT
        )

    def close(self) -> None:
        """Close the logs; processes end with their machines."""
        for log in self._logs:
            log.close()

    def _start(
        self, machine: str, what: str, *options: str, **environment: str
    ) -> subprocess.Popen[str]:
        log = (self._folder / f"{machine}.log").open("a")
        self._logs.append(log)
        command = (sys.executable, "-m", f"distributed.cli.dask_{what}", *options, "--no-dashboard")
        return self.machines[machine].start(
            *command, env={**self._environment, **environment}, stdout=log, stderr=log
        )

    def _certify(self) -> None:
        made = Security.temporary()
        texts = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
        for name, text in texts.items():
            (self._folder / f"{name}.pem").write_text(text)
        own = {name: str(self._folder / f"{name}.pem") for name in ("cert", "key")}
        tls: dict[str, Any] = dict.fromkeys(("client", "scheduler", "worker"), own)
        tls["ca-file"] = str(self._folder / "ca.pem")
        (self._folder / "dask").mkdir()
        (self._folder / "dask" / "tls.yaml").write_text(
            yaml.safe_dump({"distributed": {"comm": {"require-encryption": True, "tls": tls}}})
        )
