"""Two clients do anything, in any order, and every value is compared with NumPy.

``python -m tests.acceptance.anything --minutes 10`` starts a lab of two islands and lets
Hypothesis choose: slices, uploads, calls that donate and calls that do not, moves, programs,
published and taken handles, functions that fail, interrupts at random moments, hosts that are
killed, and slices that are bound again.  A finding is a wrong value, a failure without a cause
among these, anything that takes half a minute, or bytes that nobody has a handle to.  Each
batch of examples has a number; ``--seed`` begins with it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import pathways_lab as pw
from tests.acceptance.strikes import HANG, Wrong, alarm, struck
from tests.runtime.processes import until

P = jax.sharding.PartitionSpec
ISLANDS = ("island0", "island1")
DEVICES = 2
SMALL, LARGE = (4, 8), (256, 2048)
SPECS = (P(), P("x"), P(None, "x"))
BETWEEN_DEATHS = 15.0
"""Seconds: a host that dies more often is not started again."""

Number = np.ndarray[Any, Any]
some = st.integers(0, 1 << 16)
"""Which one, of as many as there are."""


def step(x: Any) -> Any:
    return 3 * x + 1


def both(x: Any, y: Any) -> Any:
    return 5 * x + y


def broken(x: Any) -> Any:
    def fail(_: Any) -> Any:
        raise ValueError("on purpose")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@dataclass(eq=False)
class Place:
    """A slice, and what computes there.  lost: it has lost its devices."""

    slice: pw.Slice
    lost: bool = False

    def __post_init__(self) -> None:
        on = self.slice
        self.step, self.both = pw.jit(step, on=on), pw.jit(both, on=on)
        self.consume = pw.jit(step, on=on, donate_argnums=0)
        self.broken = pw.jit(broken, on=on)

    @property
    def island(self) -> str:
        return self.slice.binding.island


@dataclass(eq=False)
class Value:
    """A handle and what must be in it.

    known: it was there once.  doubtful: it may have failed.  bad: it must have.
    taken: from the other client, by which the other's value cannot be donated.
    """

    handle: pw.Handle
    expected: Number
    place: Place | None
    island: str
    doubtful: bool = False
    bad: bool = False
    known: bool = False
    taken: Value | None = None
    names: set[str] = field(default_factory=set)
    takers: int = 0


@dataclass(eq=False)
class Client:
    lab: pw.Lab
    places: list[Place] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def left(self) -> str:
        """What it has in its kernel, and on devices as the control plane counts them."""
        connection = self.lab.session.connection
        buffers = {b.id: b.run for b in tuple(connection._buffers.values())}
        runs = [(run.id, [output.done for output in run.outputs]) for run in connection.runs]
        if buffers or runs:
            # Nothing is asked meanwhile: that would tell of handles that have gone.
            waiting = f"{len(connection._dropped)} drops wait"
            return f"buffers (id: run) {buffers}, runs (id, outputs there) {runs}; {waiting}"
        account = self.lab.accounts().clients.get(self.lab.name)
        return f"{account.nbytes:,} bytes" if account is not None and account.nbytes else ""


class Stage:
    """A lab with two clients, which all examples share."""

    def __init__(self) -> None:
        self.labs = [
            pw.start(
                islands=2, hosts_per_island=1, devices_per_host=DEVICES, memory="256 MB",
                name="ann", progress=False,
            )
        ]  # fmt: skip
        assert self.labs[0].embedded is not None
        self.labs.append(pw.Lab(self.labs[0].embedded.control, name="bob"))
        self.examples = self.steps = 0
        self._died = -BETWEEN_DEATHS

    def pid(self, island: str) -> int | None:
        hosts = [host for found in self.labs[0].islands for host in found.hosts]
        return {host.name: host.pid for host in hosts}.get(f"{island}/host0")

    def kill(self, island: str) -> bool:
        """Kill the island's host and wait until there is another; False: not so soon again."""
        if time.monotonic() - self._died < BETWEEN_DEATHS:
            return False
        before = self.pid(island)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        until(lambda: self.pid(island) not in (None, before), HANG)
        self._died = time.monotonic()
        return True

    def close(self) -> None:
        for lab in reversed(self.labs):
            lab.close()


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A rule that may not hang.  Errors of the lab that it lets out are findings."""

    @functools.wraps(method)
    def run(self: Anything, **drawn: Any) -> None:
        self.stage.steps += 1
        try:
            with alarm(f"{method.__name__}({drawn})"):
                method(self, **drawn)
        except BaseException:
            self.found = True
            raise

    return run


class Anything(RuleBasedStateMachine):
    """What may be done.  Numbers choose among what there is; where there is nothing, no step."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.stage.examples += 1
        self.clients = [Client(lab) for lab in self.stage.labs]
        self.published: dict[str, tuple[Client, Value]] = {}
        for client, island in zip(self.clients, ISLANDS, strict=True):
            client.places.append(Place(client.lab.slice(DEVICES, island=island)))

    # --- what there is -------------------------------------------------------------------

    def place_of(self, client: Client, which: int) -> Place | None:
        places = [place for place in client.places if not place.lost]
        return places[which % len(places)] if places else None

    def value_of(self, client: Client, which: int, like: Value | None = None) -> Value | None:
        """A value that can be computed with; of the same shape as another one."""
        values = [value for value in client.values if not value.bad]
        if like is not None:
            values = [value for value in values if value.expected.shape == like.expected.shape]
        return values[which % len(values)] if values else None

    def names_of(self, client: Client) -> list[str]:
        return [name for name, (owner, _) in self.published.items() if owner is client]

    def add(
        self, client: Client, place: Place, expected: Number, handle: pw.Handle, *inputs: Value
    ) -> Value:
        doubtful = any(value.doubtful for value in inputs)
        value = Value(handle, expected, place, place.island, doubtful)
        client.values.append(value)
        return value

    def remove(self, client: Client, value: Value) -> None:
        client.values.remove(value)
        if value.taken is not None:
            value.taken.takers -= 1

    def read(self, client: Client, value: Value) -> None:
        """Compare a value; one that failed, as it may, is dropped."""
        try:
            found = value.handle.result(timeout=HANG - 1)
        except pw.PathwaysError as error:
            if not (value.doubtful or value.bad):
                raise Wrong(f"a value failed without a cause: {error}") from error
            self.remove(client, value)
            return
        if value.bad:
            raise Wrong("a function failed, and its result has a value")
        if not np.array_equal(found, value.expected):
            raise Wrong(f"{found!r} came, {value.expected!r} was expected")
        value.known, value.doubtful = True, False

    def doubt(self, *, islands: tuple[str, ...] = ()) -> None:
        """What is on these islands has failed, and what was not there yet may have."""
        everywhere = [value for client in self.clients for value in client.values]
        for value in (*everywhere, *(value for _, value in self.published.values())):
            if value.island in islands or not value.known:
                value.doubtful = True

    def tried(self, inputs: tuple[Value, ...], do: Callable[[], pw.Handle]) -> pw.Handle | None:
        """do(); a call may be refused for what has failed."""
        try:
            return do()
        except pw.PathwaysError:
            if not any(value.doubtful for value in inputs):
                raise
            return None

    # --- what is done -----------------------------------------------------------------------

    @rule(who=st.sampled_from((0, 1)), size=st.sampled_from((1, 2)), at=st.sampled_from(ISLANDS))
    @guarded
    def slice(self, who: int, size: int, at: str) -> None:
        client = self.clients[who]
        if len(client.places) < 3:
            client.places.append(Place(client.lab.slice(size, island=at)))

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def release(self, who: int, which: int) -> None:
        client = self.clients[who]
        place = self.place_of(client, which)
        if place is not None:
            for value in [v for v in client.values if v.place is place]:
                self.remove(client, value)
            client.places.remove(place)
            place.slice.release()
            self.doubt()  # a run that waited for a place there has none for values elsewhere either

    @rule(
        who=st.sampled_from((0, 1)), which=some, shape=st.sampled_from((SMALL, LARGE)),
        spec=st.sampled_from(SPECS), number=st.integers(-99, 99),
    )  # fmt: skip
    @guarded
    def upload(self, who: int, which: int, shape: Any, spec: Any, number: int) -> None:
        client = self.clients[who]
        place = self.place_of(client, which)
        if place is not None:
            data = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * number
            self.add(client, place, data, pw.device_put(data, place.slice.sharding(spec)))

    @rule(who=st.sampled_from((0, 1)), which=some, other=some)
    @guarded
    def call(self, who: int, which: int, other: int) -> None:
        client = self.clients[who]
        value = self.value_of(client, which)
        if value is None or value.place is None or value.place.lost:
            return
        place = value.place
        mate = self.value_of(client, other, like=value)
        if mate is None or mate.place is not place:
            made = self.tried((value,), lambda: place.step(value.handle))
            if made is not None:
                self.add(client, place, step(value.expected), made, value)
        else:
            made = self.tried((value, mate), lambda: place.both(value.handle, mate.handle))
            if made is not None:
                self.add(client, place, both(value.expected, mate.expected), made, value, mate)

    @rule(who=st.sampled_from((0, 1)), which=some, scale=st.integers(1, 9))
    @guarded
    def call_with_an_array(self, who: int, which: int, scale: int) -> None:
        client = self.clients[who]
        place = self.place_of(client, which)
        if place is not None:
            data = np.full(LARGE if scale % 2 else SMALL, scale, np.int32)
            self.add(client, place, step(data), place.step(data))

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def donate(self, who: int, which: int) -> None:
        client = self.clients[who]
        value = self.value_of(client, which)
        if value is None or value.place is None or value.place.lost or value.taken is not None:
            return
        place = value.place
        if value.names or value.takers:
            with contextlib.suppress(pw.PathwaysError):
                place.consume(value.handle).result(timeout=HANG - 1)
                raise Wrong("what others keep was donated")
            self.read(client, value)
            return
        made = self.tried((value,), lambda: place.consume(value.handle))
        if made is not None:
            self.add(client, place, step(value.expected), made, value)
            self.remove(client, value)

    @rule(who=st.sampled_from((0, 1)), which=some, to=some)
    @guarded
    def move(self, who: int, which: int, to: int) -> None:
        client = self.clients[who]
        value, place = self.value_of(client, which), self.place_of(client, to)
        if value is not None and place is not None:
            made = self.tried(
                (value,), lambda: pw.device_put(value.handle, place.slice.sharding(P()))
            )
            if made is not None:
                self.add(client, place, value.expected, made, value)

    @rule(who=st.sampled_from((0, 1)), which=some, to=some)
    @guarded
    def program(self, who: int, which: int, to: int) -> None:
        """Computed where it is, moved, and computed there."""
        client = self.clients[who]
        value, place = self.value_of(client, which), self.place_of(client, to)
        if value is None or value.place is None or value.place.lost or place is None:
            return
        here = value.place

        @pw.program
        def twice(x: Any) -> Any:
            return place.step(here.step(x))

        made = self.tried((value,), lambda: twice(value.handle))
        if made is not None:
            self.add(client, place, step(step(value.expected)), made, value)

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def fail(self, who: int, which: int) -> None:
        client = self.clients[who]
        value = self.value_of(client, which)
        if value is None or value.place is None or value.place.lost:
            return
        place = value.place
        made = self.tried((value,), lambda: place.broken(value.handle))
        if made is not None:
            self.add(client, place, value.expected, made, value).bad = True

    @rule(who=st.sampled_from((0, 1)), which=some, name=st.sampled_from(("a", "b", "größe")))
    @guarded
    def publish(self, who: int, which: int, name: str) -> None:
        client = self.clients[who]
        value = self.value_of(client, which)
        if value is None or value.taken is not None or value.doubtful:
            return
        owner, before = self.published.get(name, (client, None))
        if owner is not client:
            return
        client.lab.publish(name, value.handle)
        if before is not None:
            before.names.discard(name)
        self.published[name] = client, value
        value.names.add(name)

    @rule(who=st.sampled_from((0, 1)), which=some, length=st.sampled_from((60, 200, 201, 5000)))
    @guarded
    def publish_under_a_long_name(self, who: int, which: int, length: int) -> None:
        """Taken or refused, at once."""
        client = self.clients[who]
        value = self.value_of(client, which)
        if value is None or value.taken is not None or value.doubtful:
            return
        name = "n" * length
        try:
            client.lab.publish(name, value.handle)
        except pw.PathwaysError:
            if length <= 200:
                raise
            for ask in (client.lab.take, client.lab.unpublish):
                with contextlib.suppress(pw.PathwaysError):
                    ask(name)
        else:
            client.lab.unpublish(name)

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def take(self, who: int, which: int) -> None:
        client = self.clients[who]
        names = self.names_of(self.clients[1 - who])
        if names:
            name = names[which % len(names)]
            _, origin = self.published[name]
            taken = Value(client.lab.take(name), origin.expected, None, origin.island)
            taken.doubtful, taken.taken = origin.doubtful, origin
            origin.takers += 1
            client.values.append(taken)

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def unpublish(self, who: int, which: int) -> None:
        client = self.clients[who]
        names = self.names_of(client)
        if names:
            self._unpublish(client, names[which % len(names)])

    def _unpublish(self, client: Client, name: str) -> None:
        client.lab.unpublish(name)
        _, value = self.published.pop(name)
        value.names.discard(name)

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def look(self, who: int, which: int) -> None:
        client = self.clients[who]
        if client.values:
            self.read(client, client.values[which % len(client.values)])

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def drop(self, who: int, which: int) -> None:
        client = self.clients[who]
        if client.values:
            self.remove(client, client.values[which % len(client.values)])

    @rule(
        who=st.sampled_from((0, 1)), which=some, after=st.integers(0, 40),
        doing=st.sampled_from(("upload", "call", "donate", "move", "read")),
    )  # fmt: skip
    @guarded
    def interrupt(self, who: int, which: int, after: int, doing: str) -> None:
        """Ctrl-C so many ms later: what was under way is done, or nothing of it is left."""
        client = self.clients[who]
        place, value = self.place_of(client, which), self.value_of(client, which)
        if place is None:
            return
        if doing == "upload":
            data = np.full((LARGE[0] * 8, LARGE[1]), which, np.int32)
            to = place.slice.sharding(SPECS[which % 3])
            made = struck(after, lambda: pw.device_put(data, to))
            if made is not None:
                self.add(client, place, data, made)
        elif doing == "call":
            data = np.full(LARGE, which, np.int32)
            made = struck(after, lambda: place.step(data))
            if made is not None:
                self.add(client, place, step(data), made)
        elif value is None:
            return
        elif doing == "move":
            to = place.slice.sharding(P())
            moved = struck(
                after, lambda: self.tried((value,), lambda: pw.device_put(value.handle, to))
            )
            if moved is not None:
                self.add(client, place, value.expected, moved, value)
        elif doing == "read":
            struck(after, lambda: self.tried((value,), lambda: value.handle.result()))
            self.doubt()
            self.read(client, value)
        else:
            self._interrupted_donation(client, value, after)

    def _interrupted_donation(self, client: Client, value: Value, after: int) -> None:
        place = value.place
        if place is None or place.lost or value.taken is not None or value.names or value.takers:
            return
        made = struck(after, lambda: self.tried((value,), lambda: place.consume(value.handle)))
        if made is not None:
            self.add(client, place, step(value.expected), made, value)
        if value.handle.state == "dead":
            self.remove(client, value)
        elif made is not None:
            raise Wrong("a donated handle is not dead")

    @rule(at=st.sampled_from(ISLANDS))
    @guarded
    def kill(self, at: str) -> None:
        if self.stage.kill(at):
            self.doubt(islands=(at,))
            for client in self.clients:
                for place in client.places:
                    if place.island == at:
                        until(lambda place=place: place.slice.state == "lost", HANG)  # type: ignore[misc]
                        place.lost = True

    @rule(who=st.sampled_from((0, 1)), which=some)
    @guarded
    def rebind(self, who: int, which: int) -> None:
        places = [place for place in self.clients[who].places if place.lost]
        if places:
            place = places[which % len(places)]
            place.slice.rebind()
            place.lost = False

    # --- the end ------------------------------------------------------------------------

    def teardown(self) -> None:
        """All that is left is right; and when everything is dropped, nothing is."""
        if self.found:
            # Its traceback keeps handles, and one finding is enough.
            return self._clear()
        try:
            self._look_at_all()
        finally:
            self._clear()
        deadline = time.monotonic() + HANG
        for client in self.clients:
            while found := client.left():
                if time.monotonic() > deadline:
                    raise Wrong(f"nobody has a handle, and {client.lab.name} has {found}")
                time.sleep(0.01)

    def _look_at_all(self) -> None:
        for client in self.clients:
            for value in list(client.values):
                with alarm("the last look at a value"):
                    self.read(client, value)

    def _clear(self) -> None:
        with alarm("the end of an example"):
            for client in self.clients:
                for name in self.names_of(client):
                    with contextlib.suppress(pw.PathwaysError):
                        self._unpublish(client, name)
                client.values.clear()
                for place in client.places:
                    place.slice.release()
                client.places.clear()
            self.published.clear()
            gc.collect()


def attack(stage: Stage, seconds: float, first: int = 0, shrink: bool = False) -> int:
    """Examples for so long, in batches; the number of the last one.  Raises what it finds."""
    until = time.monotonic() + seconds
    rules = settings(
        max_examples=10, stateful_step_count=30, deadline=None, database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=tuple(HealthCheck),
    )  # fmt: skip
    for number in itertools.count(first):
        machine = seed(number)(type("Anything", (Anything,), {"stage": stage}))
        try:
            run_state_machine_as_test(machine, settings=rules)
        except BaseException as error:
            error.add_note(f"python -m tests.acceptance.anything --seed {number}")
            raise
        if time.monotonic() > until:
            return number
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", action="store_true", help="look for a shorter story, long")
    wanted = parser.parse_args()
    stage = Stage()
    try:
        last = attack(stage, 60 * wanted.minutes, wanted.seed, wanted.shrink)
    finally:
        print(f"{stage.examples} examples, {stage.steps} steps", flush=True)
        stage.close()
    print(f"no finding; batches {wanted.seed} to {last}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
