"""Simulated schedules are near to theory, and stand beside 1F1B in the table."""

from __future__ import annotations

import pytest

from benchmarks import bubbles


def test_simulated_schedules_are_near_to_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubbles, "SIZES", ((4, 8),))
    found = {name: bubbles.simulated(name, 4, 8, 2) for name in ("1f1b", "zb-h2", "dualpipev")}
    for one in found.values():
        assert one.theory - 1e-3 < one.bubble < one.theory + 0.04
    lines = bubbles.table({name: [one, one] for name, one in found.items()}).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[1:3] for row in rows[2:]] == [
        ["1f1b", "1.00"], ["zb-h2", "1.75"], ["dualpipev", "1.12"],
    ]  # fmt: skip
    assert found["dualpipev"].seconds < found["zb-h2"].seconds < found["1f1b"].seconds
