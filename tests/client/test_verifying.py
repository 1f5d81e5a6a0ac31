"""Law: only devices of one make are compared; what most of these agree on is right; nothing is
called right that nobody knows to be."""

from __future__ import annotations

from typing import Any

import pytest

import pathways_lab as pw
from pathways_lab.client.lab.topology_view import Host, Island
from pathways_lab.client.verify import device_check, step_check
from pathways_lab.core.diagnosis.suspects import Replay
from pathways_lab.runtime.checksums import UNITS, WORDS

SIZE = 4 * WORDS
RIGHT = tuple(bytes([number]) * SIZE * len(UNITS) for number in range(2))


def host(name: str, devices: int, make: str = "one") -> Host:
    return Host(f"island0/{name}", 1, 1, devices, "cpu", 1 << 30, "", make=make)


class Bench:
    """A lab of these hosts.  made: what devices make otherwise."""

    session: Any = None

    def __init__(self, *hosts: Host) -> None:
        self.islands = (Island("island0", hosts),)
        self.made: dict[tuple[str, int], device_check.Sums] = {}

    def slice_at(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing runs here")

    def computed(self, *_: Any) -> dict[tuple[str, int], device_check.Sums]:
        devices = [(h.name, n) for h in self.islands[0].hosts for n in range(h.devices)]
        return {device: self.made.get(device, RIGHT) for device in devices}

    def scan(self, monkeypatch: pytest.MonkeyPatch) -> device_check.Verification:
        monkeypatch.setattr(device_check, "_computed", self.computed)
        return device_check.scan(self, 2, True)


def test_what_was_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(host("a", 2), host("b", 1))
    wrong = RIGHT[1][: 2 * SIZE] + b"x" * SIZE + RIGHT[1][3 * SIZE :]
    bench.made["island0/a", 1] = (RIGHT[0], wrong)
    found = bench.scan(monkeypatch)
    assert repr(found).splitlines() == [
        "wrong results on device 1 of island0/a: most of 3 devices make others",
        "  [!!] island0/a: device 1: otherwise in 1 of 2 rounds, in functions",
        "  [ok] island0/b: 1 device as most others",
    ]
    assert [(device.host, device.number) for device in found.suspects] == [("island0/a", 1)]
    assert "\u2717" in found._repr_html_()


def test_who_is_of_another_make_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors round otherwise."""
    bench = Bench(host("a", 4), host("b", 2, "other"), host("c", 1, "third"))
    bench.made |= {("island0/b", 0): (b"y", b"y"), ("island0/b", 1): (b"y", b"y")}
    bench.made["island0/c", 0] = (b"z", b"z")
    found = bench.scan(monkeypatch)
    assert (found.ok, found.suspects) == (True, ())
    assert "island0/c: there is no other device of its make" in repr(found)


def test_of_two_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(host("a", 2))
    bench.made["island0/a", 0] = (b"y", b"y")
    found = bench.scan(monkeypatch)
    assert (found.ok, found.suspects) == (False, ())
    assert "2 devices do not compute the same, and no result is that of most" in found.story


@pytest.mark.parametrize("hosts", [[host("a", 1)], [host("a", 1), host("b", 1, "other")]])
def test_who_is_alone_is_refused(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pw.PathwaysError, match="nobody to compare with") as caught:
        Bench(*hosts).scan(monkeypatch)
    assert caught.value.failure.remedy


# --- of sets --------------------------------------------------------------------------------------

A, B, C = (tuple((f"island0/{name}", number) for number in range(2)) for name in "abc")
GOOD, SPOILT = ((b"1",), (b"1",)), ((b"1",), (b"2",))


def verdict(*replays: Replay) -> device_check.Verification:
    return step_check._verdict(Bench(host("a", 2), host("b", 2), host("c", 2)), "f", replays)


def test_of_two_sets_that_differ_none_is_called_right() -> None:
    found = verdict(Replay(A, SPOILT), Replay(B, GOOD))
    assert repr(found).splitlines() == [
        "'f': one of these computes wrong, and no set tells which: devices 0, 1 of island0/a and"
        " devices 0, 1 of island0/b; lab.verify(), without a function, looks at each device alone",
        "  [!!] devices 0, 1 of island0/a: what may be right or not",
        "  [!!] devices 0, 1 of island0/b: otherwise, in what is on device 1 of island0/b",
    ]
    assert len(found.suspects) == 4


def test_a_third_one_tells_which_is_right() -> None:
    found = verdict(Replay(A, SPOILT), Replay(B, GOOD), Replay(C, GOOD))
    assert [(check.holds, check.seen) for check in found.checks] == [
        (False, "otherwise, in what is on device 1 of island0/a"), *[(True, "the same")] * 2
    ]  # fmt: skip
    assert [device.host for device in found.suspects] == ["island0/a"] * 2


def test_several_that_are_bad_are_not_guessed_at() -> None:
    found = verdict(Replay(A, SPOILT), Replay(B, GOOD), Replay(C, ((b"3",), (b"3",))))
    assert (found.ok, found.suspects) == (False, ())
    assert "no single device explains what differs" in found.story
    assert not any(check.holds for check in found.checks)


def test_who_was_in_all_sets_is_told_of() -> None:
    found = verdict(Replay(A, GOOD), Replay((A[0], B[0]), GOOD))
    assert found.ok
    assert found.story.endswith("device 0 of island0/a: in all of them, so compared with nobody")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(pw.PathwaysError, match="step=3 is not a function"):
        step_check.replay(Bench(host("a", 2)), 3, (), True)  # type: ignore[arg-type]
