"""Machines of a test: Linux namespaces on this one, and the network between them.

Problem: faults of a group's machines (a link that is pulled, a machine that is killed, an
address that means another machine) do not happen between processes of one machine.

How: a machine has its own network, name, processes, IPC, ``/tmp``, ``/dev/shm``, hosts file
and boot id, so nothing of one works on another by accident.  As on Debian its own name stands
for 127.0.1.1.  All its processes die with its first one, so nothing stays behind.

Rule for maintainers: root only; :func:`refusal` says why there are no machines here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tests.machines import switch

ROOT = Path(__file__).resolve().parents[2]
FIRST = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
"""The first process of a machine: takes up what others leave, so that no zombies stay."""

PREPARE = """
set -e
hostname "$NAME"
mount -t tmpfs tmpfs /dev/shm
index=0
for place in $KEPT; do
    index=$((index + 1)); mkdir "/dev/shm/$index"; mount --bind "$place" "/dev/shm/$index"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
index=0
for place in $KEPT; do
    index=$((index + 1)); mkdir -p "$place"; mount --move "/dev/shm/$index" "$place"
    rmdir "/dev/shm/$index"
done
mkdir /tmp/home
printf '%s' "$HOSTS" > /tmp/hosts; mount --bind /tmp/hosts /etc/hosts
echo "$BOOT" > /tmp/boot; mount --bind /tmp/boot /proc/sys/kernel/random/boot_id
exec "$@"
"""

COMMANDS = """
for each in /proc/[0-9]*; do
    test $each = /proc/1 || { tr '\\0\\n' '  ' < $each/cmdline; echo; }
done 2> /dev/null || true
"""

ALONE = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
INSIDE = ("--net", "--uts", "--mount", "--ipc", "--pid")
HOME = ("sh", "-c", 'cd && exec "$@"', "sh")


@functools.cache
def refusal() -> str:
    """Why machines cannot be had here; "" where they can."""
    if not sys.platform.startswith("linux"):
        return "machines are Linux namespaces"
    if os.geteuid():
        return "machines are Linux namespaces, and only root makes them"
    tried = subprocess.run(["unshare", *ALONE, "true"], capture_output=True, check=False)
    if tried.returncode or not os.access("/dev/net/tun", os.W_OK):
        return "this machine lets nobody make namespaces, or has no /dev/net/tun"
    return ""


class Machine:
    """One machine; *name* and *address* are known to all others of its network.

    clock: seconds by which its monotonic clock is ahead.
    """

    def __init__(self, name: str, number: int, hosts: str, shared: Path, clock: int = 0) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        kept = {ROOT, Path(sys.prefix), Path(sys.base_prefix), shared}
        outer = [path for path in kept if not any(other in path.parents for other in kept)]
        self.environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith("PYTEST")},
            "HOME": "/tmp/home",
            "PYTHONPATH": str(ROOT),
        }
        prepare = {
            "NAME": name,
            "HOSTS": f"127.0.0.1 localhost\n127.0.1.1 {name}\n{hosts}",
            "BOOT": str(uuid.uuid4()),
            "KEPT": " ".join(map(str, outer)),
        }
        ahead = ["--time", f"--monotonic={clock}"] if clock else []
        self._inside = [*INSIDE, "--time"] if clock else INSIDE
        self._first = subprocess.Popen(
            ["unshare", *ALONE, *ahead, "sh", "-c", PREPARE, "sh", sys.executable, "-c", FIRST],
            env={**self.environment, **prepare},
            stdout=subprocess.PIPE,
        )
        assert self._first.stdout
        assert self._first.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self.pid = int(children.read_text())

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A process of this machine, with pipes for what goes in and comes out."""
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
        environment = {**self.environment, **options.pop("env", {})}
        return Process(
            ["nsenter", "-t", str(self.pid), *self._inside, *HOME, *command],
            env=environment,
            text=True,
            **options,
        )

    def python(self, source: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """A Python process of this machine."""
        return self.start(sys.executable, "-c", source, *arguments, **options)

    def run(self, *command: str, **options: Any) -> str:
        """What a command says on this machine.  Raises AssertionError with it where it fails."""
        with self.start(*command, stderr=subprocess.STDOUT, **options) as process:
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said

    def files(self) -> list[str]:
        """The names in its temporary folder."""
        return self.run("ls", "/tmp").split()

    def pythons(self) -> list[str]:
        """The commands of its processes of Python, but for the first one."""
        told = self.run("sh", "-c", COMMANDS)
        return [line for line in told.splitlines() if "python" in line]

    def kill(self) -> None:
        """All its processes at once; its link stays up, so others hear that connections end."""
        self._first.kill()
        self._first.wait()
        assert self._first.stdout
        self._first.stdout.close()


class Process(subprocess.Popen[str]):
    """A process of a machine.  A test that fails does not wait for it; it ends with its machine."""

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


class Machines:
    """Machines of these names on one network; ``machines["west"]`` is one.

    delay: seconds one way.  loss: a share of the frames.  rate: bytes/s out of each; 0: any.
    shared: a folder that all of them see.  clocks: seconds by which those of some are ahead.
    """

    def __init__(
        self,
        names: Sequence[str],
        shared: Path,
        delay: float = 0.0,
        loss: float = 0.0,
        rate: float = 0.0,
        clocks: Mapping[str, int] = {},
    ) -> None:
        self.shared = shared
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        hosts = {name: f"10.77.0.{number} {name}\n" for name, number in self._numbers.items()}
        self._all: dict[str, Machine] = {}
        self._hosts, self._clocks = hosts, clocks
        with ExitStack() as undo:
            undo.callback(self.close)
            self._switch = subprocess.Popen(
                [sys.executable, switch.__file__, str(delay), str(loss), str(rate)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for name in self._numbers:
                self._start(name)
            undo.pop_all()

    def __getitem__(self, name: str) -> Machine:
        return self._all[name]

    def unplug(self, name: str) -> None:
        """Nothing comes to the machine or leaves it, and nobody is told."""
        self._order("unplug", self._numbers[name])

    def plug(self, name: str) -> None:
        """The machine reaches all others again."""
        self._order("plug", self._numbers[name])

    def cut(self, one: str, other: str) -> None:
        """Two machines do not reach each other, until one of them is plugged in."""
        self._order("cut", self._numbers[one], self._numbers[other])

    def wall(self, name: str, *ports: int) -> None:
        """A firewall swallows what asks the machine for a connection at other ports."""
        self._order("wall", self._numbers[name], *ports)

    def sniff(self, *texts: str) -> dict[str, int]:
        """Count frames with these texts from now on; the counts of those that were looked for."""
        counts: dict[str, int] = self._order("sniff", *texts)
        return counts

    def kill(self, name: str) -> None:
        """See :meth:`Machine.kill`."""
        self._all[name].kill()

    def boot(self, name: str) -> None:
        """The power of a machine goes and comes back: nobody is told, and it has its name again."""
        self.unplug(name)
        self.kill(name)
        self._start(name)

    def close(self) -> None:
        """End all machines and the network."""
        for machine in self._all.values():
            machine.kill()
        assert self._switch.stdin
        assert self._switch.stdout
        self._switch.stdin.close()
        self._switch.wait()
        self._switch.stdout.close()

    def _order(self, *order: Any) -> Any:
        into: IO[bytes] | None = self._switch.stdin
        answers = self._switch.stdout
        assert into
        assert answers
        into.write(json.dumps(order).encode() + b"\n")
        into.flush()
        return json.loads(answers.readline())

    def _start(self, name: str) -> None:
        number = self._numbers[name]
        others = "".join(line for other, line in self._hosts.items() if other != name)
        clock = self._clocks.get(name, 0)
        machine = self._all[name] = Machine(name, number, others, self.shared, clock)
        self._order("add", number)
        device = f"pw{self._switch.pid}.{number}"
        subprocess.run(["ip", "link", "set", device, "netns", str(machine.pid)], check=True)
        up = (
            f"ip link set lo up; ip link set {device} address {switch.mac(number)} name eth0;"
            f"ip addr add {machine.address}/24 dev eth0; ip link set eth0 up"
        )
        machine.run("sh", "-ec", up)


def until(done: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    """Wait until *done* says something true.  Raises TimeoutError that names *what*."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
