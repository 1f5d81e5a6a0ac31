"""A hostile client beside two good ones: they notice nothing, and nobody ends.

``python -m tests.acceptance.hostile --minutes 10`` starts a lab and three client processes
with ordinary invitations.  Two compute and check every value.  The third first does honest
work and remembers what it sent; then it sends that again with one thing changed, out of
order and repeated, to the control plane and to the data doors of the hosts, and comes again
whenever it is cut off.  Phases take turns: the third client is quiet, honest or hostile.  It
sends at most so many messages a second in the latter two, and ends by itself.

At the end every value of the good ones was right, the processes of hosts and control plane
are those of the beginning, and the pace of the good ones in hostile phases is told beside
that in quiet and in honest ones: a third client shares the processors whatever it sends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pathways_lab as pw
from pathways_lab.runtime.cluster.attach import ControlAddress, read_lab_file
from pathways_lab.transport.auth import AuthenticationError
from pathways_lab.transport.framing import Decoder, Letter, WireError, encode
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor
from tests.runtime.mutate import Mutator, Said

ROOT = Path(__file__).parents[2]
PHASE = 5.0
"""Seconds in which the third client does one thing."""
PHASES = ("quiet", "honest", "hostile")
SETTLE = 0.5
"""Seconds at the beginning of a phase that do not count."""
RATE = 50.0
"""Messages a second that the hostile client sends at most, those of its beginnings included."""
STAY = 200
"""Messages of one stay, if it is not cut off before."""
PATIENCE = 120.0


# --- a good client --------------------------------------------------------------------------


def good(file: str, name: str, island: str | None = None) -> None:
    """Compute and check until the end of input; now and then a line: when, and how many."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    draw = np.random.default_rng(len(name))
    with pw.connect(file, name=name) as lab:
        on = lab.slice((2,), ("x",), island=island)
        weights = draw.integers(-8, 8, (32, 32)).astype(np.float32)
        call = pw.jit(lambda w, x: x @ w + 1, on=on)
        step = pw.program(lambda w, x: call(w, call(w, x)), name=name)
        kept = pw.device_put(weights, on)
        lab.publish(f"of {name}", kept)
        count, since = 0, time.monotonic()
        while not ended.is_set():
            x = draw.integers(-8, 8, (16, 32)).astype(np.float32)
            found = step(kept, x).result(timeout=PATIENCE)
            expected = (x @ weights + 1) @ weights + 1
            if not np.array_equal(found, expected):
                print("wrong", flush=True)
                return
            count += 1
            if time.monotonic() - since >= 0.25:
                now = time.monotonic()
                print(f"{since} {now} {count}", flush=True)
                count, since = 0, now
        if not np.array_equal(kept.result(timeout=PATIENCE), weights):
            print("wrong", flush=True)


# --- the hostile one --------------------------------------------------------------------------


def recorded(file: str) -> tuple[int, list[tuple[str, Said]]]:
    """What an honest client says: its number, and to whom it sent what, in order.

    To whom: "control", or the name of a host.
    """
    said: list[tuple[str, Said]] = []
    forward = Link.forward

    def noted(link: Link, letter: Letter) -> int:
        data = b"".join(bytes(p) for p in encode(letter.op, letter.fields, letter.buffers))
        for op, fields, buffers, _ in Decoder().feed(data):
            whom = link.name if "/" in link.name else "control"
            said.append((whom, (op, fields, [bytes(buffer) for buffer in buffers])))
        return forward(link, letter)

    Link.forward = noted  # type: ignore[method-assign]
    with pw.connect(file, name="honest") as lab:
        number = lab.session.connection.number
        for work in (_compute, _share, _ask):
            work(lab)
    Link.forward = forward  # type: ignore[method-assign]
    return number, [(whom, message) for whom, message in said if message[0][:1] != "\0"]


def _compute(lab: pw.Lab) -> None:
    on, other = lab.slice((2,), ("x",)), lab.slice((2,), ("y",))
    first = pw.jit(lambda x: x + 1, on=on)
    second = pw.jit(lambda x: x * 2, on=other)
    step = pw.program(lambda x: second(first(x)), name="step")
    x = pw.device_put(np.ones((4, 8), np.float32), on)
    for _ in range(2):
        step(x).result(timeout=PATIENCE)
    first(np.ones((4, 8), np.float32)).block_until_ready()
    del x
    other.release()


def _share(lab: pw.Lab) -> None:
    value = pw.device_put(np.ones(4, np.float32), lab.slice(1))
    lab.publish("of honest", value)
    lab.take("of good0").result(timeout=PATIENCE)
    lab.unpublish("of honest")


def _ask(lab: pw.Lab) -> None:
    """Questions, and what only owners decide."""

    lab.accounts()
    lab.stuck()
    with contextlib.suppress(pw.PathwaysError):
        lab.policy = pw.Priority()
    with contextlib.suppress(pw.PathwaysError):
        lab.quota("honest", devices=8)


def renumbered(plain: Any, old: int, new: int) -> Any:
    """The same with the ids of another client."""
    if isinstance(plain, list):
        return [renumbered(value, old, new) for value in plain]
    if isinstance(plain, dict):
        return {key: renumbered(value, old, new) for key, value in plain.items()}
    if type(plain) is int and plain >> 32 == old:
        return new << 32 | plain & 0xFFFFFFFF
    return plain


class Stay:
    """One connection to the lab and to its hosts.  Raises OSError when it is not let in."""

    def __init__(self, control: ControlAddress) -> None:
        self.reactor = Reactor("hostile", lambda *_: None, lambda *_: None)
        self.reactor.start()
        try:
            hello = {"role": "client", "name": "hostile", "pid": 1}
            self.link = self.reactor.connect(
                control.address, control.key, hello, holder=control.holder
            )
        except BaseException:
            self.reactor.close()
            raise
        self.number = int(self.link.peer["number"])
        self._key = bytes(self.link.peer["data_key"])
        hosts = [h for island in self.link.peer["topology"]["islands"] for h in island["hosts"]]
        self._addresses = {host["name"]: host["data_address"] for host in hosts}
        self._links: dict[str, Link] = {}

    def say(self, whom: str, message: Said) -> bool:
        """Send it; whether the link is still open.  A closed data link is made anew."""
        link = self.link
        if whom != "control":
            known = self._links.get(whom)
            if known is None or known.closed is not None:
                hello = {"role": "client", "name": "hostile"}
                known = self._links[whom] = self.reactor.connect(
                    self._addresses[whom], self._key, hello, holder=self.number, bulk=True
                )
            link = known
        with contextlib.suppress(LinkClosed, WireError):
            link.send(*message)
        return self.link.closed is None

    def close(self) -> None:
        self.reactor.close()


def hostile(file: str, seed: int, seconds: float) -> None:
    """Do what the last line of input says: one of PHASES.

    Hostile: send what it sent before, almost.  Honest: call, as often.

    It says when it has begun to do so.  At the end, or after *seconds*, it tells how many
    messages it sent, and how often it came.
    """
    os.nice(10)  # its own work is not the lab's
    control = read_lab_file(file)
    old, said = recorded(file)
    print("ready", sorted({f"{message[0]}" for _, message in said}), flush=True)
    told, changed, ended = [PHASES[0]], threading.Event(), threading.Event()

    def hear() -> None:
        for line in sys.stdin:
            told.append(line.strip())
            changed.set()
        ended.set()

    threading.Thread(target=hear, daemon=True).start()
    rng, deadline = random.Random(seed), time.monotonic() + seconds
    counts: Counter[str] = Counter()

    began: set[int] = set()

    def going(phase: str) -> bool:
        return time.monotonic() < deadline and not ended.is_set() and told[-1] == phase

    def does(what: str) -> None:
        counts[what] += 1
        number = len(told) - 1
        if number not in began:
            began.add(number)
            print("began", number, flush=True)

    while time.monotonic() < deadline and not ended.is_set():
        phase = told[-1]
        changed.clear()
        try:
            if phase == "hostile":
                _stay(control, rng, old, said, does, lambda: going("hostile"))
            elif phase == "honest":
                _visit(file, does, lambda: going("honest"))
            else:
                changed.wait(0.1)
        except (OSError, AuthenticationError, WireError):
            counts["not let in"] += 1
            time.sleep(1.0 / RATE)
    print("told", dict(counts), flush=True)


def _visit(file: str, does: Callable[[str], None], going: Callable[[], bool]) -> None:
    """Come as everybody does, and call."""
    with pw.connect(file, name="visitor") as lab:
        call = pw.jit(lambda x: x + 1, on=lab.slice((2,), ("x",)))
        value = np.ones((4, 8), np.float32)
        while going():
            value = call(value)
            does("honest calls")
            time.sleep(1.0 / RATE)


def _stay(
    control: ControlAddress,
    rng: random.Random,
    old: int,
    said: Sequence[tuple[str, Said]],
    does: Callable[[str], None],
    going: Callable[[], bool],
) -> None:
    """Come, begin honestly, and go on until it is cut off."""
    stay = Stay(control)
    does("stays")
    others = [n << 32 | low for n in range(1, 4) for low in (1, 2, 3, 100)]
    mutator = Mutator(rng, [*others, "good0", "good1", "of good0", "of good1"])
    mine = [
        (whom, (op, renumbered(fields, old, stay.number), buffers))
        for whom, (op, fields, buffers) in said
    ]

    def spoilt() -> Iterator[tuple[str, Said]]:
        for _ in range(STAY):
            whom, message = rng.choice(mine)
            if rng.random() < 0.8:
                op, fields, buffers = mutator.said(message, [m[0] for _, m in mine])
                # Code does what its author wants; what is fuzzed is how it is announced.
                message = (
                    op,
                    fields,
                    message[2] if message[0] in ("function", "policy") else buffers,
                )
            yield whom, message

    begin = mine[: rng.randrange(len(mine))] if rng.random() < 0.5 else []
    try:
        for whom, message in itertools.chain(begin, spoilt()):
            if not (going() and stay.say(whom, message)):
                break
            does("to hosts" if whom != "control" else "to the control plane")
            time.sleep(1.0 / RATE)
    finally:
        stay.close()


# --- the lab ------------------------------------------------------------------------------------


class Client:
    """A process of this module, and the lines that it says."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.hostile", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self.said = threading.Condition()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.said:
                self.lines.append(line.strip())
                self.said.notify_all()

    def wait(self, line: str = "") -> None:
        """Until it has said something, or this."""
        with self.said:
            heard = self.said.wait_for(lambda: any(line in each for each in self.lines), PATIENCE)
        assert heard, f"{self.process.args} has not said {line!r}"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Close its input, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)

    def pace(self, begin: float, end: float) -> float:
        """Runs a second between two moments."""
        counted = [tuple(map(float, line.split())) for line in self.lines if line[:1].isdigit()]
        inside = [(b - a, n) for a, b, n in counted if a >= begin and b <= end]
        return sum(n for _, n in inside) / max(1e-9, sum(seconds for seconds, _ in inside))


def processes(lab: pw.Lab) -> dict[str, int]:
    """Process ids by what they are."""
    islands = lab.session.connection.topology["islands"]
    pids = {host["name"]: host["pid"] for island in islands for host in island["hosts"]}
    assert lab.embedded is not None
    return {**pids, "control plane": lab.embedded.pids["control"][0]}


def attack(minutes: float, seed: int = 0, phase_seconds: float = PHASE) -> list[str]:
    """The whole of it; what was found, in lines.  Raises AssertionError."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.start(islands=2, hosts_per_island=1, devices_per_host=2, name="owner") as lab,
    ):
        file = str(Path(folder, "lab.json"))
        lab.invite(file)
        before = processes(lab)
        clients = [Client("--good", file, f"good{n}") for n in range(2)]
        for client in clients:
            client.wait()
        seconds = minutes * 60
        evil = Client("--hostile", file, str(seed), str(seconds + 600))
        evil.wait()
        paces: dict[str, list[list[float]]] = {phase: [] for phase in PHASES}
        for number, phase in enumerate(itertools.cycle(PHASES), 1):
            if phase == "quiet" and len(paces["hostile"]) * len(PHASES) * phase_seconds >= seconds:
                break
            evil.tell(phase)
            if phase != "quiet":
                evil.wait(f"began {number}")
            begin = time.monotonic() + SETTLE
            time.sleep(phase_seconds)
            now = time.monotonic()
            paces[phase].append([client.pace(begin, now) for client in clients])
            assert all(c.process.poll() is None for c in (*clients, evil)), "a client has ended"
            assert not any("wrong" in c.lines for c in clients), "a value was wrong"
        for client in (evil, *clients):
            client.end()
        assert all(client.process.returncode == 0 for client in clients), "a good client failed"
        assert not any("wrong" in c.lines for c in clients), "a value was wrong"
        assert processes(lab) == before, (before, processes(lab))
        rejected = sum(1 for r in lab.timeline.records if getattr(r, "kind", "") == "rejected")
        double = pw.jit(lambda x: 2 * x, on=lab.slice(1))
        assert np.array_equal(
            double(np.ones(4, np.float32)).result(timeout=PATIENCE), 2 * np.ones(4)
        )
        return [
            f"the same processes from beginning to end: {before}",
            f"hostile client: {evil.lines[-1]}; {rejected:,} of them in the timeline as rejected",
            *_compared(paces),
        ]


def _compared(paces: dict[str, list[list[float]]]) -> list[str]:
    found = []
    for number in range(2):
        of = {phase: [pace[number] for pace in paces[phase]] for phase in PHASES}
        runs = ", ".join(f"{statistics.median(of[phase]):.0f} {phase}" for phase in PHASES)
        found.append(f"good{number}: runs/s {runs}")
        for beside in PHASES[:2]:
            pairs = zip(of[beside], of["hostile"], strict=True)
            ratios = sorted(b / max(1e-9, a) for a, b in pairs)
            quarter = len(ratios) // 4
            found.append(
                f"  hostile beside {beside}: {statistics.median(ratios):.2f} (middle half"
                f" {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}, {len(ratios)} pairs)"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, and its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--good", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--hostile", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.good:
        good(*chosen.good)
    elif chosen.hostile:
        file, seed, seconds = chosen.hostile
        hostile(file, int(seed), float(seconds))
    else:
        for line in attack(chosen.minutes, chosen.seed):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
