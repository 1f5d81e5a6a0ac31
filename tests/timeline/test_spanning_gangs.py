"""A gang over two islands is one gang, with a place in the order of each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pathways_lab.notebook.panels import order as order_panel
from pathways_lab.notebook.scene.awaited import nexts
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.backlog import Backlog
from pathways_lab.timeline.gangs import Gangs
from pathways_lab.timeline.packed import Granted, Item, single
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.records_of import Placing

HOSTS = {"island0": "island0/host0", "island1": "island1/host0"}


def items(ended: Sequence[str] = ()) -> list[Item]:
    """Two gangs over both islands, and one of island1 between them; those of *ended* hosts end."""
    bound = {"slice": 7, "shape": (2,), "axes": ("x",), "devices": [(h, 0) for h in HOSTS.values()],
             "elsewhere": [(HOSTS["island1"], "island1")]}  # fmt: skip
    found: list[Item] = [
        Event("host-joined", 0.0, island, host, args={"devices": 1})
        for island, host in HOSTS.items()
    ]
    found.append(Event("slice-bound", 0.0, "island0", client="ann", args=bound))
    alone = Placing("island1", "alone", "bob", ((0, 0, "g", 8, "", (HOSTS["island1"],)),))
    for run, places in ((1, (0, 0)), (3, (1, 2))):
        for (island, host), place in zip(HOSTS.items(), places, strict=True):
            again = (0,) if island == "island1" else ()
            gang = (0, 0, "f", 7, "", (host,))
            found.append(
                Granted(0.1 * run, run, 0, place, Placing(island, "p", "ann", (gang,), again))
            )
        if run == 1:
            found.append(Granted(0.2, 2, 0, 1, alone))
    for n, host in enumerate(ended):
        island = host.partition("/")[0]
        found.append(Span("gang", 0.4, 0.5 + n, island, host, (0,), 1, 0, program="p", node="f"))
    return found


def folded(given: Sequence[Item], columns: bool) -> Gangs:
    gangs = Gangs()
    for item in given if columns else single(given):
        if isinstance(item, Granted):
            gangs.add_packed(item)
        elif isinstance(item, Event | Span):
            gangs.add(item)
    return gangs


@pytest.mark.parametrize("columns", [True, False])
def test_it_is_in_the_order_of_both(columns: bool) -> None:
    gangs = folded(items(), columns)
    orders = {island: [gang.run for gang in gangs.order(island)] for island in HOSTS}
    assert orders == {"island0": [1, 3], "island1": [1, 2, 3]}
    last = gangs.by_key[3, 0]
    assert last.placed == "#1 of island0 and #2 of island1"
    assert last.islands == ["island0", "island1"]
    assert last.where == tuple(HOSTS.values())
    assert gangs.known("island0") == 2
    assert gangs.known("island1") == 3


@pytest.mark.parametrize("columns", [True, False])
def test_it_is_done_and_counted_once_when_the_hosts_of_both_have_ended(columns: bool) -> None:
    for ended, state, done in ((1, "launched", 0), (2, "done", 1)):
        gangs = folded(items(list(HOSTS.values())[:ended]), columns)
        assert gangs.by_key[1, 0].state == state
        assert gangs.done.get(1, 0) == gangs.all_done == done


def test_pictures_show_it_on_the_hosts_of_both() -> None:
    scene = Scene()
    scene.add(items(), 1.0)
    plot = order_panel.plot(scene, 1.0)
    columns = next(layer for layer in plot.layers if layer.name.endswith("granted")).columns
    found = sorted(zip(columns["gang"], columns["place"], strict=True))
    assert len(found) == 5
    assert len({gang for gang, _ in found}) == 3, "one gang has one number, framed everywhere"
    lanes = {lane.host: gang.run for lane, gang in nexts(scene).items()}
    assert lanes == dict.fromkeys(HOSTS.values(), 1)


def test_a_gang_that_has_places_on_two_islands_leaves_the_backlog_once() -> None:
    scene = Scene()
    backlog = Backlog(scene.flows)
    backlog._left[1] = 2
    backlog.gangs = 2
    for item in single(items()):
        if isinstance(item, Event):
            backlog.add(item)
    assert backlog.gangs == 1
