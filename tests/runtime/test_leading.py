"""A thread that waits reads the links itself: who handles what, hand-over, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from pathways_lab.client.session.waiting import Board, Pending
from pathways_lab.transport import deferred_signals
from pathways_lab.transport import reactor as reactor_module
from pathways_lab.transport.auth import new_key
from pathways_lab.transport.deferred_signals import HeldBack
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from tests.runtime.processes import until

KEY = new_key()


class Pair:
    """A client that asks, and a server that answers each question, both in this process."""

    def __init__(self, address: str, **how: Any) -> None:
        self.readers: list[str] = []
        self.answers: dict[int, Pending] = {}
        self.got: list[int] = []
        self.server = Reactor("server", self._asked, lambda *_: None)
        self.client = Reactor("client", self._answered, lambda *_: None, **how)
        self.board = Board(self.client)
        self.opened = threading.Event()
        real = self.server.listen(address, KEY, {"name": "server"})
        self.server.start()
        self.client.start()
        self.link = self.client.connect(real, KEY, {"name": "client"})

    def _asked(self, link: Link, op: str, fields: dict[str, Any], _: list[memoryview]) -> None:
        self.server.call_later(fields["seconds"], link.send, "answer", {"number": fields["number"]})

    def _answered(self, link: Link, op: str, fields: dict[str, Any], _: list[memoryview]) -> None:
        self.readers.append(threading.current_thread().name)
        self.got.append(fields["number"])
        self.board.settle([self.answers[fields["number"]]], None)

    def ask(self, number: int, seconds: float = 0.0) -> Pending:
        answer = self.answers[number] = Pending()
        self.link.send("ask", {"number": number, "seconds": seconds})
        return answer

    def wait(self, answer: Pending, timeout: float = 20.0) -> None:
        self.board.wait(lambda: answer.done, timeout, "the answer")

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def pair(tmp_path: Any) -> Iterator[Pair]:
    made = Pair(f"unix:{tmp_path}/s")
    yield made
    made.close()


def test_whoever_waits_reads(pair: Pair) -> None:
    for number in range(50):
        pair.wait(pair.ask(number))
    here = threading.current_thread().name
    # Not all: the reactor's own thread reads what comes before it stands back.
    assert pair.readers.count(here) > 5
    assert not pair.client.is_current()


def test_its_own_thread_stands_back_until_it_hears_that_nobody_will_read(tmp_path: Any) -> None:
    pair = Pair(f"unix:{tmp_path}/s", stand_back=60.0)
    # Nobody leads for an answer that is there before it is waited for.
    until(lambda: pair.wait(pair.ask(0)) or pair.client._leads)
    until(lambda: pair.client._parked)
    pair.readers.clear()
    for number in range(1, 21):
        pair.wait(pair.ask(number))
    assert pair.readers == [threading.current_thread().name] * 20
    pair.readers.clear()
    pair.client.take_back()
    for number in range(21, 24):
        answer = pair.ask(number)
        until(lambda: answer.done, 10)  # noqa: B023
    assert pair.readers == ["client"] * 3
    pair.close()


def test_when_nobody_waits_the_reactor_reads(pair: Pair) -> None:
    pair.wait(pair.ask(1))
    answer = pair.ask(2)
    deadline = time.monotonic() + 10
    while not answer.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert answer.done
    assert pair.readers[-1] == "client"


def test_several_threads_wait_at_once(pair: Pair) -> None:
    """One reads for all; when it has what it wants, another goes on."""
    ended: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            pair.wait(pair.ask(number * 100 + turn, 0.0005 * (number % 3)))
        ended.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == list(range(6))


def test_what_another_thread_settles_ends_the_wait(pair: Pair) -> None:
    mine = Pending()
    threading.Timer(0.02, pair.board.settle, ([mine], None)).start()
    began = time.monotonic()
    pair.wait(mine)
    assert time.monotonic() - began < 30


def test_calls_and_timers_go_on_while_somebody_leads(pair: Pair) -> None:
    ran: list[str] = []
    pair.client.call_later(0.01, ran.append, "timer")
    threading.Timer(0.005, pair.client.call_soon, (ran.append, "call")).start()
    pair.wait(pair.ask(1, 0.05))
    assert sorted(ran) == ["call", "timer"]


def test_a_wait_has_its_timeout_and_the_end_of_the_reactor_ends_it(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match="the answer took longer"):
        pair.wait(Pending(), 0.01)
    threading.Timer(0.02, pair.client.close).start()
    assert pair.client.lead(lambda: False, 20)
    pair.client.close()


def test_a_handler_does_not_lead(pair: Pair) -> None:
    led: list[bool] = []
    pair.client.call_soon(lambda: led.append(pair.client.lead(lambda: False, 5)))
    pair.wait(pair.ask(1))
    assert led == [False]


def test_ctrl_c_gets_through_a_wait(pair: Pair) -> None:
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.wait(Pending())
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pair.wait(pair.ask(1))


def ctrl_c(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def too_long(*_: object) -> None:
    raise KeyboardInterrupt


def strikes(pair: Pair, count: int, strike: Callable[..., None] = ctrl_c) -> int:
    """An alarm at random moments of *count* waits; how often what it does came through."""
    through = 0
    old = signal.signal(signal.SIGALRM, strike)
    try:
        for number in range(count):
            answer = pair.ask(number)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + (number % 97) * 2e-6)
                pair.wait(answer, 1)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                through += 1
                pair.wait(answer, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    return through


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("strike", [ctrl_c, too_long])
def test_interrupts_while_reading_lose_nothing(
    pair: Pair, strike: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if strike is ctrl_c:
        # Else the alarm would be held back, and Ctrl-C never strike while something is read.
        monkeypatch.setattr(deferred_signals, "_SIGNALS", (signal.SIGINT,))
    assert strikes(pair, 2000, strike) > 200
    assert pair.got == list(range(2000))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_holding_back_they_would(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotHeldBack:
        struck = False

    def off(_: Callable[[], object]) -> AbstractContextManager[Any]:
        return nullcontext(NotHeldBack())

    monkeypatch.setattr(reactor_module, "HeldBack", off)
    pair = Pair(f"unix:{tmp_path}/s")
    lost = False
    try:
        for _ in range(5):
            strikes(pair, 1000)
    except (TimeoutError, KeyboardInterrupt, KeyError, RuntimeError):
        lost = True
    assert lost or pair.got != list(range(1000)) * 5
    # The client's reactor may be beyond closing; its thread is a daemon.
    pair.server.close()


def test_other_threads_and_foreign_handlers_are_left_alone() -> None:
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldBack(lambda: None):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


def fails(*_: object) -> None:
    raise TimeoutError


@pytest.fixture
def all_fail() -> Iterator[list[int]]:
    """All signals that are held back have a handler that raises."""
    before = {number: signal.signal(number, fails) for number in deferred_signals._SIGNALS}
    yield list(before)
    for number, handler in before.items():
        signal.signal(number, handler)


def hold(strike: int = 0) -> None:
    with HeldBack() as held:
        if strike:
            signal.raise_signal(strike)
            assert held.struck == [strike]


def test_each_signal_counts_afterwards(all_fail: list[int]) -> None:
    for number in all_fail:
        with pytest.raises(TimeoutError):
            hold(number)
        assert all(signal.getsignal(other) is fails for other in all_fail)


def test_what_strikes_first_keeps_no_other_handler_away(
    all_fail: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, struck = deferred_signals._signal.signal, []

    def put(number: int, handler: Any) -> Any:
        before = real(number, handler)
        if handler is fails and not struck:
            struck.append(number)
            raise TimeoutError
        return before

    with monkeypatch.context() as patch:
        patch.setattr(deferred_signals._signal, "signal", put)
        with pytest.raises(TimeoutError):
            hold()
    assert struck == all_fail[:1]
    assert all(signal.getsignal(number) is fails for number in all_fail)


def test_what_nobody_handles_is_handled_here(pair: Pair) -> None:
    done: list[str] = []
    pair.client.call_here(lambda: done.append(threading.current_thread().name))
    assert done == [threading.current_thread().name]


def test_what_somebody_handles_is_handled_there(pair: Pair) -> None:
    done: list[str] = []
    entered, leave = threading.Event(), threading.Event()
    pair.client.call_soon(lambda: (entered.set(), leave.wait(10)))
    assert entered.wait(10)
    pair.client.call_here(lambda: done.append(threading.current_thread().name))
    assert done == []
    leave.set()
    until(lambda: done == ["client"])


def test_a_timer_that_is_set_here_is_kept_there(pair: Pair) -> None:
    """Whoever sleeps in the selector has been told of no timer."""
    fired = threading.Event()
    time.sleep(0.05)
    began = time.monotonic()
    pair.client.call_here(lambda: pair.client.call_later(0.01, fired.set))
    assert fired.wait(10)
    assert time.monotonic() - began < reactor_module._SWEEP_SECONDS / 2
