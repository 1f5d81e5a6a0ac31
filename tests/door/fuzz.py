"""Almost right requests at the door of JAX's client, by the million; nobody else may notice.

``python -m tests.door.fuzz --inputs 1000000`` gives the methods of a door what JAX's client
says: requests of each kind with one thing changed in the message or in its bytes, again, out of
order, with numbers of others, over sessions without the secret, and bytes beside the sessions.
Two clients beside it work, through the same door and through another one.  Behind the doors is a
lab without processes, which believes nothing (:mod:`tests.door.labs`); ``--real`` takes a lab with
devices, of which both doors are clients.  It must hold that

* nothing is raised behind the edge: a request has one answer, or one error that says why, and
  bytes that are no request end their session;
* nothing is taken of memory, and no session, value or thread is left when a client has gone;
* the other client's values are right, the lab's processes are those of the beginning, and the
  lab has never closed the link of the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import resource
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import psutil
from google.protobuf.message import DecodeError

from pathways_lab.door import arrays, dtypes, programs, shardings
from pathways_lab.door.callbacks import Remote
from pathways_lab.door.protocol import buffers, server
from pathways_lab.door.protocol.messages import message
from pathways_lab.door.protocol.server import Door
from pathways_lab.door.session import Session
from tests.door import labs
from tests.door.changes import Changes
from tests.door.labs import Behind
from tests.door.modules import NO_MODULE, Load, Spoil, elsewhere, spoilt
from tests.door.requests import KIND, Requests, codes, shape_of
from tests.door.wire import Refused, Stream, Unanswered, Wire, of_secret, of_store
from tests.runtime import fuzz_command

ROUND = 500
"""Inputs of an attacker's stay."""
_BATCH = 16
"""Requests that are sent before their answers are read."""
_LOOK = 20
"""Rounds between two looks at what is left."""
LEAVING = 20.0
"""Seconds after which nothing may be left of a client that has gone."""
_ROOM = 3 << 30
"""Bytes that this process may take beyond what it has at the beginning."""
_GROWTH = 400 << 20
"""Bytes of it that may stay."""
SECRET = b"the secret"
_OFTEN = {
    "make_array_from_host_buffer_request": 8, "make_arrays_from_host_buffer_shards_request": 6,
    "loaded_executable_execute_request": 8, "destruct_array_request": 6,
    "loaded_executable_fetch_execute_result_request": 3, "compile_request": 0.3,
    "loaded_executable_human_readable_program_text_request": 0.05, "init_request": 0.2,
    "loaded_executable_delete_request": 0.1, "loaded_executable_destruct_request": 0.1,
}  # fmt: skip
"""How often a kind of request is made; the others once."""


class Broken(AssertionError):
    """What must hold does not."""


class Heard(logging.Handler):
    """Keeps what the door says of itself: it speaks of nothing but faults."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.wrong.append(self.format(record))

    def hook(self, said: Any) -> None:
        """For what threads and destructors raise."""
        self.wrong.append(f"{said.exc_type.__name__}: {said.exc_value} in {said!r:.500}")


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Hear what is raised anywhere in this process while the block lasts."""
    heard, log = Heard(), logging.getLogger("pathways_lab.door")
    hooks = threading.excepthook, sys.unraisablehook
    log.addHandler(heard)
    threading.excepthook = sys.unraisablehook = heard.hook
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "coroutine .* was never awaited")
        yield heard
    threading.excepthook, sys.unraisablehook = hooks
    log.removeHandler(heard)


class Caller:
    """A client of a door."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.come()

    def come(self) -> None:
        """Begin a session."""
        self.operations = 0
        self.stream: Stream = self.wire.session(of_secret(SECRET))
        self.session: int = self.ask("init_request", message("InitRequest")()).session_id

    def wrapped(self, kind: str, fields: Any) -> Any:
        """A request of a kind."""
        self.operations += 1
        made = message("IfrtRequest")()
        made.request_metadata.op_id = self.operations
        getattr(made, kind).CopyFrom(fields)
        getattr(made, kind).SetInParent()
        return made

    def ask(self, kind: str, fields: Any) -> Any:
        """One request and its answer.  Raises Broken when it is an error."""
        self.stream.send(self.wrapped(kind, fields).SerializeToString())
        answer = self.stream.answer()
        if answer is None or answer.response_metadata.status.code:
            raise Broken(f"{kind} of an honest client: {answer}")
        return getattr(answer, kind.removesuffix("_request") + "_response")

    def store(self, handle: int, data: bytes) -> None:
        """Send bytes beside the session."""
        part = message("GrpcHostBufferStoreRequest")(data=data).SerializeToString()
        told = of_store(self.session, handle, len(data))
        self.wire.ask("HostBufferStore", [part], told)


class Good(Caller):
    """A client that computes, and checks what comes of it."""

    def __init__(self, wire: Wire, rng: random.Random) -> None:
        super().__init__(wire)
        self._rng = rng
        self._code = next(code for code in codes() if code.name == "halves")
        compiled = self.ask("compile_request", Requests.compile(self._code))
        self._program = compiled.loaded_executable_handle
        self.work()

    def work(self) -> None:
        """One call.  Raises Broken when its result is wrong."""
        data = np.array([self._rng.random() for _ in range(8)], np.float32).reshape(4, 2)
        self.store(1, data.tobytes())
        given = message("MakeArrayFromHostBufferRequest")(
            dtype=dtypes.proto("float32"), shape=shape_of(KIND.shape), host_buffer_handle=1,
            sharding=shardings.sharding_proto(self._code.places[0]), array_handle=2,
        )  # fmt: skip
        self.ask("make_array_from_host_buffer_request", given)
        called = message("LoadedExecutableExecuteRequest")(
            loaded_executable_handle=self._program, args_handles=[2], result_array_handle=[3]
        )
        self.ask("loaded_executable_execute_request", called)
        copied = message("CopyToHostBufferRequest")(array_handle=3, host_buffer_handle=4)
        self.ask("copy_to_host_buffer_request", copied)
        asked = message("GrpcHostBufferLookupRequest")(session_id=self.session, handle=4)
        found = b"".join(
            part.data for part in self.wire.ask("HostBufferLookup", asked.SerializeToString())
        )
        if found != (data * 2 + 1).tobytes():
            raise Broken(f"another client's value is wrong: {found!r}")
        done = message("GrpcHostBufferDeleteRequest")(session_id=self.session, handle=4)
        self.wire.ask("HostBufferDelete", done.SerializeToString())
        self.ask("destruct_array_request", message("DestructArrayRequest")(array_handle=[2, 3]))


class Evil(Caller):
    """A client whose requests are almost right.

    answered, refused: how often each kind was, and with which code.  unreadable: bytes that were
    no request.  turned_away: calls beside sessions that the door has refused.
    """

    def __init__(self, wire: Wire, rng: random.Random, spoil: Spoil) -> None:
        self._rng, self._spoil = rng, spoil
        self.answered: Counter[str] = Counter()
        self.refused: Counter[tuple[str, int]] = Counter()
        self.unreadable = self.turned_away = self.others = 0
        self._changes = Changes(rng, lambda: self._numbers)
        self._sent: list[bytes] = []
        super().__init__(wire)
        self._kinds = self.requests.kinds()
        self._weights = [_OFTEN.get(kind, 1) for kind in self._kinds]

    def come(self) -> None:
        super().come()
        self.requests = Requests(self._rng, self.store)
        self._numbers = self.requests.numbers
        self._sent.clear()
        for code in codes():
            asked = Requests.compile(code)
            self.requests.learn("compile_request", asked, self.ask("compile_request", asked))

    def stay(self, inputs: int) -> None:
        """Say so much, and leave."""
        while inputs > 0:
            batch = [data for _ in range(min(_BATCH, inputs)) for data in self._input()]
            inputs -= _BATCH
            if self._rng.random() < 0.1:
                self._rng.shuffle(batch)
            self._say(batch)
            if self.stream.ended:
                self.stream.end()
                self.come()
        self.stream.end()

    def _input(self) -> Iterator[bytes]:
        """A request, or nothing: then something was tried beside the session."""
        rng, chance = self._rng, self._rng.random()
        self._numbers = self.requests.numbers
        if chance < 0.06:
            self._beside()
        elif chance < 0.2 and self._sent:
            yield rng.choice(self._sent[-40:])
        else:
            (kind,) = rng.choices(self._kinds, self._weights)
            made = self.wrapped(kind, self.requests.one(kind))
            for _ in range(rng.choice((0, 1, 1, 1, 2)) if chance > 0.4 else 0):
                made = self._another(kind, made)
            data: bytes = made.SerializeToString()
            if rng.random() < 0.005 and kind != "compile_request":
                data = self._changes.damaged(data)
            self._sent.append(data)
            yield data

    def _another(self, kind: str, made: Any) -> Any:
        """A request with one thing changed."""
        rng, chance = self._rng, self._rng.random()
        if chance < 0.04:
            return self._changes.changed(made)
        if chance < 0.08:
            fields = [f for f in made.DESCRIPTOR.fields if f.containing_oneof]
            inside = getattr(made, rng.choice(fields).name)
            inside.SetInParent()
            self._changes.fill(inside)
            return made
        if made.WhichOneof("request") != kind:
            return made
        if kind == "compile_request" and rng.random() < 0.5:
            module = made.compile_request.program.data
            made.compile_request.program.data = self._spoil(module, self._rng.random())
            return made
        before = made.compile_request.program.data if kind == "compile_request" else b""
        getattr(made, kind).CopyFrom(self._changes.changed(getattr(made, kind)))
        if kind == "compile_request" and made.compile_request.program.data != before:
            made.compile_request.program.data = NO_MODULE
        return made

    def _say(self, batch: Sequence[bytes]) -> None:
        """Send requests and hear all their answers."""
        waiting: defaultdict[int, list[Any]] = defaultdict(list)
        cut = False
        for data in batch:
            try:
                asked = message("IfrtRequest").FromString(data)
            except DecodeError:
                self.unreadable += 1
                cut = True
            else:
                same = waiting[asked.request_metadata.op_id]
                if same and same[0] != asked:
                    continue  # nobody could tell their answers apart
                same.append(asked)
            self.stream.send(data)
            if cut:
                break
        while cut or any(waiting.values()):
            try:
                answer = self.stream.answer()
            except Refused:
                answer = None
            if answer is None:
                if not cut:
                    left = [asked for several in waiting.values() for asked in several]
                    raise Broken(f"the session has ended, and no answer came to {left!s:.3000}")
                return
            self._heard(answer, waiting[answer.response_metadata.op_id])

    def _heard(self, answer: Any, asked: list[Any]) -> None:
        if not asked:
            raise Broken(f"an answer to nothing: {answer}")
        status, given = answer.response_metadata.status, answer.WhichOneof("response")
        if status.code:
            kind = asked.pop().WhichOneof("request") or "none"
            self.refused[kind, status.code] += 1
            if given or not status.message:
                raise Broken(f"an error without a reason, or with an answer: {answer}")
            return
        kind = given.removesuffix("_response") + "_request"
        one = next((each for each in asked if each.WhichOneof("request") == kind), None)
        if one is None:
            raise Broken(f"{given} answers none of {asked}")
        asked.remove(one)
        self.answered[kind] += 1
        self.requests.learn(kind, getattr(one, kind), getattr(answer, given))

    # --- beside the session ---------------------------------------------------------------

    def _beside(self) -> None:
        """A call of another method, or a session of somebody else."""
        ways = (self._store, self._store, self._lookup, self._delete, self._version, self._stranger)
        self.others += 1
        try:
            self._rng.choice(ways)()
        except (Refused, Unanswered):
            self.turned_away += 1

    def _changed(self, made: Any) -> bytes:
        """As bytes, mostly with something changed."""
        if self._rng.random() < 0.7:
            made = self._changes.changed(made)
        data: bytes = made.SerializeToString()
        return self._changes.damaged(data) if self._rng.random() < 0.1 else data

    def _number(self) -> int:
        return self._rng.choice(self._numbers)

    def _store(self) -> None:
        rng, number = self._rng, self._number()
        parts = [rng.randbytes(rng.choice((0, 1, 7, 4096))) for _ in range(rng.randrange(3))]
        size = sum(map(len, parts))
        ((name, told),) = of_store(self.session, number, size)
        with contextlib.suppress(DecodeError):
            told = self._changed(message("GrpcHostBufferStoreMetadata").FromString(told))
        kept = () if rng.random() < 0.05 else ((name, told),)
        made = message("GrpcHostBufferStoreRequest")
        self.wire.ask("HostBufferStore", [made(data=p).SerializeToString() for p in parts], kept)

    def _lookup(self) -> None:
        made = message("GrpcHostBufferLookupRequest")
        number = self._rng.choice(self.requests.buffers or [0])
        asked = made(session_id=self.session, handle=number)
        self.wire.ask("HostBufferLookup", self._changed(asked), patience=0.002)

    def _delete(self) -> None:
        made = message("GrpcHostBufferDeleteRequest")
        self.wire.ask(
            "HostBufferDelete", self._changed(made(session_id=self.session, handle=self._number()))
        )

    def _version(self) -> None:
        made = message("GrpcGetVersionRequest")()
        made.min_version.protocol_version, made.max_version.protocol_version = 16, 25
        (answer,) = self.wire.ask("GetVersion", self._changed(made))
        if answer.version.protocol_version not in server.VERSIONS:
            raise Broken(f"the door speaks a version that it does not know: {answer}")

    def _stranger(self) -> None:
        """Somebody who does not know the secret."""
        said = self._changes.damaged(SECRET)
        metadata = of_secret(None if said == SECRET else said)
        if self._rng.random() < 0.3:
            metadata = [(name, self._changes.damaged(told)) for name, told in metadata]
        stream = self.wire.session(metadata)
        stream.send(self.wrapped("init_request", message("InitRequest")()).SerializeToString())
        answer = stream.answer()
        raise Broken(f"it does not know the secret and is served: {answer}")


def _remote(number: int, ordered: bool) -> Remote:
    return Remote("/nobody/is/there", SECRET, number, ordered)


class Fuzz:
    """inputs: so far."""

    def __init__(self, seed: int, behind: Behind, heard: Heard, spoil: Spoil) -> None:
        self.rng = random.Random(seed)
        self.inputs = self.rounds = 0
        self._behind, self._heard = behind, heard
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, told: heard.wrong.append(str(told)))
        threading.Thread(target=self._loop.run_forever, name="values", daemon=True).start()
        self.doors = [
            Door(
                lambda buffers, lab=lab: Session(lab, buffers, self._loop, _remote, mock.Mock()),
                SECRET,
            )
            for lab in (behind.evil, behind.other)
        ]
        wires = [Wire(door) for door in self.doors]
        self.good = [Good(wire, self.rng) for wire in wires]
        self.evil = Evil(wires[0], self.rng, spoil)
        self.evil.stream.end()
        self._hosts = behind.pids()
        self._begun = 0

    def round(self) -> None:
        """An attacker's stay, and a look at the others."""
        self.evil.come()
        self.evil.stay(ROUND)
        self.inputs += ROUND
        for good in self.good:
            good.work()
        self.rounds += 1
        if self._heard.wrong:
            raise Broken("\n".join(self._heard.wrong[:3]))
        if self.rounds % _LOOK == 0:
            self._look()

    def _look(self) -> None:
        """Nothing of the attacker is left, and all others are there."""
        behind = self._behind
        closed = behind.evil.session.connection.closed
        if closed is not None:
            raise Broken(f"the lab has closed the link of the door: {closed.message}")
        if behind.pids() != self._hosts:
            raise Broken(f"processes of hosts are {behind.pids()}, and were {self._hosts}")
        left = [len(door._sessions) for door in self.doors]
        if left != [1, 1]:
            raise Broken(f"sessions of the doors are left: {left}")
        until = time.monotonic() + LEAVING
        while behind.kept() and time.monotonic() < until:
            gc.collect()
            time.sleep(0.02)
        if behind.kept():
            raise Broken(f"values are left: {behind.kept()}")
        self._measure()

    def _measure(self) -> None:
        """What this process takes stays what it was after the first looks."""
        taken = psutil.Process().memory_info().rss
        if self.rounds == 5 * _LOOK:
            self._begun = taken
        elif self._begun and taken > self._begun + _GROWTH:
            raise Broken(f"it takes {taken >> 20} MiB, and has taken {self._begun >> 20}")


@contextlib.contextmanager
def fuzzing(
    seed: int,
    lab: Callable[[], AbstractContextManager[Behind]],
    load: Load = programs.load,
    spoil: Spoil = spoilt,
) -> Iterator[Fuzz]:
    """A fuzzer, and what is behind its doors, which read modules by *load*."""
    with listening() as heard, lab() as behind, hurried(load), limited():
        yield Fuzz(seed, behind, heard, spoil)


@contextlib.contextmanager
def hurried(load: Load) -> Iterator[None]:
    """Bytes that do not come are not waited for, few have room, and a module is read once."""
    read = functools.lru_cache(1000)(load)
    with (
        mock.patch.object(buffers, "PATIENCE", 0.002),
        mock.patch.object(buffers, "ROOM", _ROOM // 4),
        mock.patch.object(server, "ROOM", _ROOM // 4),
        mock.patch.object(arrays, "ROOM", _ROOM // 4),
        mock.patch.object(programs, "load", read),
    ):
        yield


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """More memory than :data:`_ROOM` is refused to this process."""
    usual = resource.getrlimit(resource.RLIMIT_DATA)
    has = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (has + _ROOM, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, usual)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = fuzz_command.parser(__doc__)
    parser.add_argument("--real", action="store_true", help="a lab with processes and devices")
    chosen = parser.parse_args(arguments)
    lab = labs.real if chosen.real else labs.made_up
    with (
        elsewhere(programs.load) as (load, spoil, fatal),
        fuzzing(chosen.seed, lab, load, spoil) as fuzz,
    ):
        tried = fuzz_command.drive(fuzz, chosen.inputs, fuzz.round)
        evil = fuzz.evil
        print(
            f"{tried}: {evil.answered.total():,} answered, {evil.refused.total():,} refused with a"
            f" reason, {evil.others:,} beside sessions ({evil.turned_away:,} turned away),"
            f" {evil.unreadable:,} no requests; nothing raised; {fatal.count} modules ended the"
            " process that made or read them, and not the door; two other clients did"
            f" {2 * fuzz.rounds:,} calls, all right",
            flush=True,
        )
        codes_of = Counter[int]()
        for (_, code), count in evil.refused.items():
            codes_of[code] += count
        print(f"answers: {dict(evil.answered)}")
        print(f"errors by code: {dict(codes_of)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
