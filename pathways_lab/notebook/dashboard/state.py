"""The content of JupyterLab's side panel, as plain data.

Problem: the panel is a few lines of text and small boxes of the page, in the
colours of the views, and must be right when the records of joining clients are gone.

Rule for maintainers: a pure function of what the records tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pathways_lab.notebook.panels.islands import SHOWN
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.spent import by_device
from pathways_lab.timeline.machine import Lane, SliceSeen

LOOK_BACK = 0.5
"""Seconds that shares are of: the panel is asked for twice a second."""


def state(scene: Scene, clients: Iterable[str], now: float) -> dict[str, Any]:
    """islands: hosts: devices with their share, colour, holder and memory; clients; programs."""
    end = now - scene.origin
    computed = by_device(scene, end - LOOK_BACK, end)
    shares = {lane: min(1.0, sum(each.values())) for lane, each in computed.items()}
    return {
        "islands": [_island(scene, island, shares) for island in scene.machine.islands],
        "clients": [_client(scene, client, shares) for client in clients],
        "programs": _programs(scene, shares),
        "notes": _notes(scene, now),
        "dropped": scene.dropped,
    }


def _notes(scene: Scene, now: float) -> list[str]:
    notes = ["emulated devices"] if scene.machine.emulated else []
    if making := scene.compiling.now():
        seconds = int(max(0.0, now - making.since))
        notes.append(f"compiling {making.name}, {making.number} of {making.total}, {seconds} s")
    return notes


def _island(scene: Scene, island: str, shares: dict[Lane, float]) -> dict[str, Any]:
    hosts = scene.machine.hosts_of(island)
    lanes = [Lane(island, host.name, d) for host in hosts for d in range(host.devices)]
    busy = sum(shares.get(lane, 0.0) for lane in lanes) / max(1, len(lanes))
    return {
        "name": island,
        "busy": _rounded(busy),
        "hosts": [
            {
                "name": host.name,
                "kind": host.kind,
                "lost": host.lost,
                "devices": [
                    _device(scene, Lane(island, host.name, d), shares) for d in range(host.devices)
                ],
            }
            for host in hosts
        ],
    }


def _device(scene: Scene, lane: Lane, shares: dict[Lane, float]) -> dict[str, Any]:
    held = scene.machine.held.get((lane.host, lane.device))
    share = shares.get(lane, 0.0)
    what = scene.work_of(lane)
    return {
        "busy": _rounded(share) if share > SHOWN else 0.0,
        "colour": scene.palette.colour(what.program) if what and what.program else "",
        "slice": str(held) if held else "",
        "client": held.client if held else "",
        "work": f"{what.node} of {what.program}" if what else "",
        "memory": int(scene.memory.get(lane, 0)),
    }


def _client(scene: Scene, client: str, shares: dict[Lane, float]) -> dict[str, Any]:
    held: list[SliceSeen] = [s for s in scene.machine.slices.values() if s.client == client]
    places = {place for seen in held for place in seen.devices}
    using = sum(
        share
        for lane, share in shares.items()
        if (what := scene.work_of(lane)) and scene.clients.get(what.program, "") == client
    )
    return {
        "name": client,
        "slices": len(held),
        "devices": len(places),
        "using": round(using, 2),
    }


def _programs(scene: Scene, shares: dict[Lane, float]) -> list[dict[str, Any]]:
    """Programs that had a device lately, or still have gangs to go; by first appearance."""
    using: dict[str, float] = {}
    for lane, share in shares.items():
        what = scene.work_of(lane)
        if what and what.program and share > SHOWN:
            using[what.program] = using.get(what.program, 0.0) + share
    waiting: dict[str, int] = {}
    for island in scene.machine.islands:
        for gang in scene.gangs.order(island):
            if not gang.over and gang.run not in scene.ended:
                waiting[gang.program] = waiting.get(gang.program, 0) + 1
    for granted in scene.gangs.ahead:
        waiting[granted.program] = waiting.get(granted.program, 0) + granted.own
    names = sorted(using.keys() | waiting.keys(), key=scene.palette.number)
    return [
        {
            "name": name,
            "client": scene.clients.get(name, ""),
            "colour": scene.palette.colour(name),
            "using": round(using.get(name, 0.0), 2),
            "waiting": waiting.get(name, 0),
        }
        for name in names
    ]


def _rounded(share: float) -> float:
    return round(share, 2)
