"""``lab.trunk``: a function with its weights, which other clients call.

Problem: several notebooks fine-tune, or ask, one large model.  A copy of its weights for each of
them takes the memory several times, and their gangs, one after the other, read the same weights
several times.  So one client has the weights, and the calls of all others go through them together.

How: the client that has the trunk is its *server*: a thread of it takes what others give it
(:meth:`Lab.publish` with ``to=``), joins what waits (:mod:`.lineup`) into one gang
(:mod:`.joined`), and gives each client its own results, before they are computed.  A gang that is
not full waits until none is under way, so that calls which come meanwhile go together.

Rule for maintainers: no code travels to the server: calls are arrays.  Nobody else can take what
a client and the server give each other.  A call that cannot be made is answered with the reason;
nothing that a client sends ends the thread.

Paper: section 2 (fine-tunes that share the layers of a foundation model), section 4.2.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pathways_lab.client.functions import scopes
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.sharing import give, publish, take
from pathways_lab.client.parts import Parts
from pathways_lab.client.program.program import device_put
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.session import Session, buffer_of
from pathways_lab.client.trunk.joined import CALL, PULL, Joined
from pathways_lab.client.trunk.lineup import Call, Lineup
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.scheduling.policies import INITIAL, Policy, validate

AHEAD = 2
"""Gangs of a trunk that are under way at a time, if the last of them is full."""


class Trunk:
    """A function with its weights: call it.

    name: what it is published as.  server: the client whose it is.

    place(): the slice for arguments that are no handles.
    """

    def __init__(
        self, session: Session, name: str, server: str, place: Callable[[], Slice]
    ) -> None:
        self.name, self.server = name, server
        self._session = session
        self._place = place

    def __call__(self, x: Any, adapter: Any = None) -> Any:
        """``fn(params, x)``, or ``fn(params, x, adapter)``, in one gang with calls of others.

        x: an array, a handle, or a tree of them.  Returns handles as soon as the call has its place
        in a gang, which may wait for the calls before it.  Raises PathwaysError when the function
        refuses these arguments, or the trunk is gone.
        """
        return self._call(CALL, (x, adapter))

    def vjp(self, x: Any, adapter: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The same, and a function from a cotangent of the result to gradients of the adapter.

        The weights of the trunk have none.  ``jax.vjp`` is taken where the trunk is, and the
        function is computed a second time for it.
        """
        return self(x, adapter), lambda cotangent: self._call(PULL, (x, adapter, cotangent))

    def _call(self, what: str, args: tuple[Any, ...]) -> Any:
        if not scopes.outermost():
            raise failures.refused(
                f"the trunk {self.name!r} was called inside of a program or compiled function",
                "call it outside: its result is a handle, and programs take handles",
            )
        answer = self._ask(what, jax.tree.map(self._put, args))
        if answer is None:
            self._session.connection.check()
            raise failures.failure(
                "lost",
                f"the trunk {self.name!r} is gone: {self.server} has closed it, or left the lab",
                "call lab.trunk(name) again when somebody has it",
            )
        if "refused" in answer:
            raise failures.refused(f"the trunk {self.name!r} of {self.server}: {answer['refused']}")
        return answer["made"]

    def _ask(self, what: str, args: tuple[Any, ...]) -> Any:
        """The answer; None: nobody will answer."""
        raise NotImplementedError

    def _put(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, Handle) else device_put(leaf, self._place())

    def __repr__(self) -> str:
        return f"<trunk {self.name!r} of {self.server}>"


class RemoteTrunk(Trunk):
    """Another client's trunk."""

    _numbers = itertools.count(1)  # of all objects of this class: names are used once

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unwanted: set[str] = set()

    def _ask(self, what: str, args: tuple[Any, ...]) -> Any:
        connection = self._session.connection
        label = _label(self.name, connection.name, next(self._numbers))
        answered, refused = (self.server, label), list[Failure]()
        self._drop_unwanted()
        try:
            call = {"what": what, "args": args}
            give(self._session, label, call, self.server, refused.append)
            connection.board.wait(
                lambda: answered in connection.given or bool(refused) or self._gone,
                None,
                f"the trunk {self.name!r}",
            )
        except BaseException:
            self._take_back(label)
            raise
        if answered in connection.given:
            return take(self._session, label, giver=self.server)
        if self._gone:
            self._take_back(label)
            return None
        raise failures.told(refused[0])

    def _take_back(self, label: str) -> None:
        """Nobody waits for this call any more; if it is under way, its answer still comes."""
        try:
            self._session.connection.questions.ask("unpublish", {"name": label})
        except PathwaysError:
            self._unwanted.add(label)

    def _drop_unwanted(self) -> None:
        given = self._session.connection.given
        for label in [each for each in self._unwanted if (self.server, each) in given]:
            self._unwanted.discard(label)
            with contextlib.suppress(PathwaysError):
                take(self._session, label, giver=self.server)

    @property
    def _gone(self) -> bool:
        connection = self._session.connection
        return connection.closed is not None or (
            connection.topology["published"].get(self.name) != self.server
        )


class ServingTrunk(Trunk):
    """A trunk that this client has.  calls: so many of each client so far, in so many *gangs*.

    A context manager; :meth:`close` ends it, and so does the end of the lab.
    """

    def __init__(self, session: Session, joined: Joined, lineup: Lineup) -> None:
        name = lineup.name
        super().__init__(session, name, session.connection.name, lambda: joined.on)
        self.calls: Counter[str] = Counter()
        self.gangs = 0
        self._joined, self._lineup = joined, lineup
        self._own: deque[_Asked] = deque()
        self._ready: deque[_Asked] = deque()
        self._waiting: dict[int, _Asked] = {}
        self._under_way: dict[int, Handle] = {}  # nobody hears of the end of what has no handle
        self._numbers = itertools.count(1)
        self._closing = False
        self._prefix = _prefix(name)
        self._thread = threading.Thread(target=self._serve, name=f"trunk {name}", daemon=True)

    def open(self) -> ServingTrunk:
        """Let others call it."""
        publish(self._session, self.name, {"trunk": self._lineup.most})
        self._thread.start()
        return self

    def close(self) -> None:
        """Take it back: calls that wait are refused."""
        self._closing = True
        self._session.connection.board.settle((), None)
        self._thread.join()

    @property
    def waiting(self) -> int:
        """How many calls wait for their gang."""
        return len(self._waiting)

    def __enter__(self) -> ServingTrunk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        removed = self._lineup.removed
        told = f"; calls in order, for {removed.message}" if removed is not None else ""
        closed = ", closed" if self._closing else ""
        called = f"{self.calls.total():,} calls of {len(self.calls)} clients"
        return f"<trunk {self.name!r}{closed}: {called} in {self.gangs:,} gangs{told}>"

    def _ask(self, what: str, args: tuple[Any, ...]) -> Any:
        answers: deque[Any] = deque()
        board = self._session.connection.board
        self._own.append(_Asked(self.server, what, args, _told(answers, board)))
        board.settle((), None)
        board.wait(lambda: bool(answers) or not self._alive, None, f"the trunk {self.name!r}")
        return answers[0] if answers else None

    @property
    def _alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    # --- the thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._answer_all()
        finally:  # nobody waits for a thread that has ended
            self._closing = True
            with contextlib.suppress(PathwaysError):
                self._session.connection.questions.ask("unpublish", {"name": self.name})

    def _answer_all(self) -> None:
        connection = self._session.connection
        while not self._closing and connection.closed is None:
            with contextlib.suppress(PathwaysError):
                self._hear()
                now = time.monotonic()
                due, most = self._lineup.due(now), AHEAD if self._lineup.full(now) else 1
                ready = due is not None and len(self._under_way) < most
                if ready and due is not None and due <= now:
                    self._launch(now)
                    continue
                with contextlib.suppress(TimeoutError):
                    busy = len(self._under_way)
                    connection.board.wait(
                        functools.partial(self._news, busy),
                        max(0.0, due - now) if due is not None and ready else None,
                        "calls",
                    )

    def _news(self, busy: int) -> bool:
        connection = self._session.connection
        return (
            self._closing
            or connection.closed is not None
            or bool(self._own or self._ready)
            or len(self._under_way) < busy
            or bool(self._letters())
        )

    def _letters(self) -> list[tuple[str, str]]:
        """Clients and names of calls that they have given, and that are not taken yet."""
        # The reactor's thread adds to it: what is looked at is a copy.
        given = tuple(self._session.connection.given)
        return [(client, name) for client, name in given if name.startswith(self._prefix)]

    def _hear(self) -> None:
        """Take in the calls that have come."""
        while self._own:
            self._take_in(self._own.popleft())
        for client, name in self._letters():
            answer = self._answer(name, client)
            try:
                call = take(self._session, name, giver=client)
            except PathwaysError as error:
                answer({"refused": error.failure.message})
                continue
            if (asked := _Asked.read(client, call, answer)) is not None:
                self._take_in(asked)
        there = self._session.connection.topology["clients"]
        for client in self._lineup.clients - {*there}:
            for call in self._lineup.left(client, time.monotonic()):
                del self._waiting[call.number]
        while self._ready:
            asked = self._ready.popleft()
            failed = next((h.failure for h in asked.handles if h.failure is not None), None)
            if failed is not None:
                asked.answer({"refused": f"an argument failed: {failed.message}"})
                continue
            self._waiting[number := next(self._numbers)] = asked
            self._lineup.came(Call(number, asked.client, asked.kind, time.monotonic()))

    def _answer(self, name: str, client: str) -> Callable[[Any], None]:
        def answer(made: Any) -> None:
            with contextlib.suppress(PathwaysError):
                try:
                    give(self._session, name, made, client, _nobody)
                except TypeError as error:
                    told = {"refused": f"what the function returns cannot be given: {error}"}
                    give(self._session, name, told, client, _nobody)

        return answer

    def _take_in(self, asked: _Asked) -> None:
        """A call waits for its own arguments: nobody else waits for them, or fails of them."""
        board, handles, arrived = self._session.connection.board, asked.handles, itertools.count(1)

        def arrives() -> None:
            if next(arrived) >= len(handles):
                self._ready.append(asked)
                board.settle((), None)

        try:
            buffers = [buffer_of(handle, self._session) for handle in handles]
        except PathwaysError as error:
            asked.answer({"refused": f"an argument failed: {error.failure.message}"})
            return
        for buffer in buffers:
            board.when_done(buffer, arrives)

    def _launch(self, now: float) -> None:
        together = self._lineup.take(now)
        asked = [self._waiting.pop(call.number) for call in together]
        # Gangs of the same clients are one program, in whatever order their calls came.
        asked.sort(key=lambda each: [handle.slice.id for handle in each.handles])
        try:
            made = self._joined(asked[0].what, [each.args for each in asked])
        except Exception as error:  # the user's function, for these arguments
            told = error.failure.message if isinstance(error, PathwaysError) else repr(error)
            for each in asked:
                each.answer({"refused": told})
            return
        self.gangs += 1
        self.calls.update(call.client for call in together)
        first = next((leaf for leaf in jax.tree.leaves(made[0]) if isinstance(leaf, Handle)), None)
        if first is not None:
            self._under_way[number := together[0].number] = first
            board = self._session.connection.board
            board.when_done(buffer_of(first, self._session), lambda: self._over(number))
        for each, result in zip(asked, made, strict=True):
            each.answer({"made": result})

    def _over(self, number: int) -> None:
        self._under_way.pop(number, None)


@dataclass(frozen=True)
class _Asked:
    """A call of a client.  answer(tree): to it."""

    client: str
    what: str
    args: tuple[Any, ...]
    answer: Callable[[Any], None]

    @property
    def handles(self) -> list[Handle]:
        """Its arguments."""
        handles: list[Handle] = jax.tree.leaves(self.args)
        return handles

    @functools.cached_property
    def kind(self) -> Any:
        """Calls of one kind can go together."""
        return Joined.kind(self.what, self.args)

    @classmethod
    def read(cls, client: str, call: Any, answer: Callable[[Any], None]) -> _Asked | None:
        """The call that a client has given; None, and it is told, if that is no call."""
        try:
            what, args = call["what"], tuple(call["args"])
            handles = jax.tree.leaves(args)
            if len(args) != {CALL: 2, PULL: 3}[what] or not handles:
                raise ValueError(f"{what!r} of {len(args)} arguments")
            if not all(isinstance(handle, Handle) for handle in handles):
                raise TypeError("its arguments are no arrays")
        except (KeyError, TypeError, ValueError) as error:
            answer({"refused": f"this is no call of a trunk: {error}"})
            return None
        return cls(client, what, args, answer)


def _nobody(_: Failure) -> None:
    """A client that has left needs no answer."""


def _told(answers: deque[Any], board: Any) -> Callable[[Any], None]:
    def answer(made: Any) -> None:
        answers.append(made)
        board.settle((), None)

    return answer


def _prefix(trunk: str) -> str:
    """No other trunk's names begin so."""
    return f"trunk {len(trunk)} {trunk} "


def _label(trunk: str, client: str, number: int) -> str:
    """The name of what goes to a trunk and comes back."""
    return f"{_prefix(trunk)}{client} {number}"


class Trunks(Parts):
    """The part of a lab that has to do with trunks."""

    def trunk(
        self,
        name: str,
        function: Callable[..., Any] | None = None,
        params: Any = None,
        *,
        on: Slice | None = None,
        most: int = 8,
        wait: float = 0.002,
        policy: Policy | None = None,
    ) -> Trunk:
        """A function with its weights, which all clients of the lab may call; see :class:`Trunk`.

            trunk = lab.trunk("gpt", apply, params, on=s)     # whoever has the weights
            trunk = lab.trunk("gpt")                          # everybody else
            y = trunk(x)
            y, pull = trunk.vjp(x, lora)                      # fine-tuning
            gradients = pull(dy)

        function: ``function(params, x)`` or ``function(params, x, adapter)``, in plain JAX.  None:
            the trunk of another client, as soon as it has one.
        params: handles on the slice *on*; nobody else can read them.
        on: where it runs; for another client's trunk a slice for arguments that are no handles,
            without one the newest that this client has, or a device.
        most: calls that go together at most.
        wait: seconds that a call waits for others.
        policy: whose calls go first when more wait, by ``client``; as for ``lab.policy``.

        Calls go together when their arguments have the same shapes, and adapters the same
        structure: of different ranks the smaller ones are filled up with zeros.  The gang is
        ``jax.vmap`` of the function over the calls, so no call sees another one, and results differ
        from those of a call alone by rounding.  Memory and device time count for the client
        that has the trunk.

        Raises PathwaysError when the name is another client's, or (without a function) nobody's.
        """
        connection = self.session.connection
        connection.check()
        name = slice_request.name("name", name)
        if function is None:
            place = functools.cache(lambda: self._own_slice() if on is None else on)
            return RemoteTrunk(self.session, name, self._server_of(name), place)
        function = slice_request.function("function", function)
        if on is None:
            raise failures.refused("a trunk runs on a slice", "give on=lab.slice(...)")
        chosen = INITIAL if policy is None else policy
        if (wrong := validate(chosen)) is not None:
            raise PathwaysError(wrong)
        lineup = Lineup(
            name,
            slice_request.count("most", most),
            slice_request.seconds("wait", wait),
            chosen,
        )
        return ServingTrunk(self.session, Joined(function, params, on, name), lineup).open()

    def _own_slice(self) -> Slice:
        bound = [each for each in self.slices if each.state == "bound"]
        return bound[-1] if bound else self.slice(1)

    def _server_of(self, name: str) -> str:
        connection = self.session.connection
        told = take(self.session, name)
        if not isinstance(told, Mapping) or "trunk" not in told:
            raise failures.refused(
                f"{name!r} is published, and is no trunk", f"take it as a value: lab.take({name!r})"
            )
        server: str = connection.topology["published"][name]
        return server
