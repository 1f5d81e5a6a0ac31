"""Law: nothing makes a step that its table does not have."""

from __future__ import annotations

import pytest

from pathways_lab.core.errors import InvalidTransition
from pathways_lab.core.scheduling.lifecycles import BUFFER, GANG, RUN, LifeCycle
from tools.diagrams import cycles, diagram


@pytest.mark.parametrize("cycle", cycles(), ids=lambda c: c.name)
def test_every_state_can_be_reached_and_every_life_can_end(cycle: LifeCycle) -> None:
    reached = {cycle.start}
    while True:
        more = {to for (state, _), to in cycle.moves.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == {s for s, _ in cycle.moves} | set(cycle.moves.values())
    ending = set(cycle.ends)
    assert ending
    for _ in reached:
        ending |= {state for (state, _), to in cycle.moves.items() if to in ending}
    assert ending == reached


def test_a_forbidden_move_names_the_thing_and_the_legal_moves() -> None:
    with pytest.raises(InvalidTransition, match=r"run 7 is granted and cannot cancel.*finish"):
        RUN.next("granted", "cancel", 7)
    with pytest.raises(InvalidTransition, match="it is over"):
        GANG.next("finished", "grant")


def test_diagrams_show_every_move() -> None:
    drawn = diagram(BUFFER)
    assert "    [*] --> promised" in drawn
    assert "    resident --> donated: donate" in drawn
    assert "    freed --> [*]" in drawn
    assert drawn.count("-->") == len(BUFFER.moves) + 1 + len(BUFFER.ends)
