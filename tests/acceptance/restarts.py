"""Kill the kernel of a kept training again and again, and compare it with one that nobody disturbs.

``python -m tests.acceptance.restarts --kills 500`` trains on a lab that is kept. The kernel keeps
its state after each step, or detaches the step, and is killed at a random moment (alone, with its
whole process group, or after a Ctrl-C in its terminal); the next one finds the state and trains on.
Every state that any kernel finds or makes must be, to the bit, that of the same step of the
undisturbed training, none may be older than what was kept, and nothing may be compiled twice. At
the end the lab is stopped, and no process, folder or record may be left.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from pathways_lab.runtime.processes import kept_labs
from tests.runtime.processes import gone

SECONDS = 120.0
"""A kernel that says nothing for so long is stuck."""


def step(state: Any) -> Any:
    """One step of a small network; its batch follows from its number."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), state["n"]), (64, 16))

    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - jnp.sin(x[:, :1])) ** 2)

    value, slope = jax.value_and_grad(loss)(state["w"])
    w = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], slope)
    return {"w": w, "n": state["n"] + 1, "loss": value}


def first(on: pw.Slice) -> Any:
    """The state that a training begins with."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(16, 32)), rng.normal(size=(32, 1))
    w = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
    return pw.device_put({"w": w, "n": np.int32(0), "loss": np.float32(0)}, on.sharding())


def digest(state: Any) -> tuple[int, str]:
    """The number of a state, and all its bits in short."""
    there = jax.device_get(state)
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(there))
    return int(there["n"]), hashlib.sha256(bits).hexdigest()[:16]


def train(lab: pw.Lab, most: int, say: Callable[..., None], name: str = "state") -> None:
    """Train on what is kept under *name* until step *most*, and keep every state.

    Every second step goes on without its kernel.
    """
    if name in lab.kept:
        state = lab.kept[name]
        say("found", *digest(state))
        on = lab.slices[0]
    else:
        on = lab.slice(2)
        state = first(on)
    call = pw.jit(step, on=on)
    while (number := digest(state)[0]) < most:
        state = call(state)
        (lab.detach if number % 2 else lab.keep)(**{name: state})
        say("kept", *digest(state))
    say("compiled", lab.stats().compiled)


class Kernel:
    """A kernel in a process group of its own, forked before anything had threads.

    said: what it said so far.  waited: seconds until it first said that something was kept.
    """

    def __init__(self, work: Callable[[Callable[..., None]], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            self._be(work, writing)
        os.close(writing)
        self._reading = reading
        self._rest = b""
        self.said: list[list[Any]] = []
        self.waited = 0.0
        self._begun = time.monotonic()

    def _be(self, work: Callable[[Callable[..., None]], None], writing: int) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work(lambda *said: (os.write(writing, json.dumps(said).encode() + b"\n"), None)[1])
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException as error:
            os.write(writing, json.dumps(["failed", repr(error)]).encode() + b"\n")
        finally:
            os._exit(status)

    def listen(self, seconds: float) -> bool:
        """Hear what it says for so long; whether it goes on."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._reading], [], [], left)[0]:
                break
            part = os.read(self._reading, 1 << 16)
            if not part:
                return False
            *lines, self._rest = (self._rest + part).split(b"\n")
            self.said += [json.loads(line) for line in lines]
            if not self.waited and any(said[0] == "kept" for said in self.said):
                self.waited = time.monotonic() - self._begun
        return True

    def end(self, how: str = "") -> None:
        """Kill it, if *how* says so, and wait for its end."""
        if how == "interrupt":
            os.killpg(self.pid, signal.SIGINT)
            self.listen(0.2)
        if how:
            (os.killpg if how == "group" else os.kill)(self.pid, signal.SIGKILL)
        heard = -1
        while self.listen(SECONDS):
            if len(self.said) == heard:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"a kernel is silent for {SECONDS:g} s after {self.said[-3:]}")
            heard = len(self.said)
        os.waitpid(self.pid, 0)
        os.close(self._reading)


def run(kills: int, seed: int, seconds: float, show: Callable[[str], object]) -> dict[str, Any]:
    """So many kills, or as many as *seconds* allow, and what was seen.

    Raises AssertionError where something is wrong.
    """
    rng, name = random.Random(seed), f"restarts-{os.getpid()}"
    right: dict[int, str] = {}
    newest, compiled, found, longest = 0, 1, 0, 4.0
    pids: list[int] = []
    until = time.monotonic() + seconds
    assert all(map(callable, (pw.connect, pw.jit, pw.device_put))), "loaded before kernels fork"
    folder = ""

    def begin(say: Callable[..., None]) -> None:
        lab = pw.start(1, 1, 2, keep=name, progress=False, idle_close=600)
        hosts = lab.islands[0].hosts
        control = kept_labs.record(name).read_text()
        say("lab", [pid for h in hosts for pid in (h.pid, h.worker_pid)], control)
        lab.close()

    def work(most: int) -> Callable[[Callable[..., None]], None]:
        return lambda say: train(pw.connect(name), most, say)

    def undisturbed(say: Callable[..., None]) -> None:
        train(pw.connect(name, name="undisturbed"), newest, say, "other")

    def heed(kernel: Kernel) -> None:
        nonlocal newest, compiled, found
        for what, *told in kernel.said:
            assert what != "failed", told
            if what == "compiled":
                compiled = max(compiled, told[0])
            elif what in ("found", "kept"):
                number, bits = told
                assert right.setdefault(number, bits) == bits, f"step {number} is not as before"
                assert number >= newest, f"step {number} was found, and {newest} was kept"
                newest = number
                found += what == "found"

    try:
        kernel = Kernel(begin)
        kernel.end()
        (_, pids, control), *_ = kernel.said
        known = json.loads(control)
        pids.append(known["keeper"])
        folder = os.path.dirname(known["control"]["address"].removeprefix("unix:"))
        for kill in range(kills):
            if time.monotonic() > until:
                kills = kill
                break
            kernel = Kernel(work(1 << 30))
            kernel.listen(rng.random() * longest)
            kernel.end(rng.choice(("kill", "kill", "group", "interrupt")))
            heed(kernel)
            # Half of the kernels shall live to keep something, however busy the machine is.
            longest = longest / 2 + kernel.waited if kernel.waited else min(60.0, 1.2 * longest)
            if (kill + 1) % 20 == 0:
                show(f"{kill + 1} kills, {found} times found again, step {newest}")
        kernel = Kernel(work(newest + 20))
        kernel.end()
        heed(kernel)
        # The same from the first step on, by a client whom nobody kills.
        kernel = Kernel(undisturbed)
        kernel.end()
        steps = {said[1]: said[2] for said in kernel.said if said[0] == "kept"}
        compared = [number for number, bits in right.items() if number in steps]
        wrong = [number for number in compared if right[number] != steps[number]]
        assert not wrong, f"steps {wrong} are not those of the undisturbed training"
        assert len(compared) == len(right), f"not all were compared: {kernel.said[-1]}"
    finally:
        if kept_labs.is_there(name):
            kept_labs.stop(name)
    left = gone(pids, 10.0)
    assert not left, f"processes {left} are left"
    assert not os.path.exists(folder), f"{folder} is left"
    assert not list(kept_labs.folder().glob(f"{name}*")), "its record is left"
    assert compiled == 1, f"the step was compiled {compiled} times"
    return {"kills": kills, "found": found, "steps": newest, "compared": len(compared)}


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.acceptance.restarts", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="kill for so long only")
    chosen = parser.parse_args(arguments)
    begun = time.monotonic()
    show = functools.partial(print, flush=True)
    seen = run(chosen.kills, chosen.seed, chosen.seconds, show)
    print(f"{seen} in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
