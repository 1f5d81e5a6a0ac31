"""Awaited: the computation that a device waits for, and where it is made.

Problem: "an earlier computation" is no answer to a reader who asks why a device is idle.

Rule for maintainers: nothing is guessed.  A gang waits for the makers of its inputs, which its
program names, or for the computation until whose end its run had no places; where neither is in
the records, nothing is told.

Paper: section 4.2 (programs as sharded dataflow), 4.5 (grants ahead of the data).
"""

from __future__ import annotations

import math

from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.flow import Flow
from pathways_lab.timeline.gangs import Gang
from pathways_lab.timeline.machine import Lane

SAME = 1e-6
"""Seconds by which times may differ that mean the same moment."""


def makers(flow: Flow, step: int) -> list[int]:
    """The computations that make the inputs of a step."""
    made = flow[step].after if step < len(flow) else ()
    found = [s for n in made for s in (flow[n].after if flow[n].transfer else (n,))]
    return list(dict.fromkeys(found))


def maker(scene: Scene, run: int, step: int, until: float) -> tuple[str, str]:
    """The node for whose end a gang was waited until some moment (seconds on the records' clock),
    and its island; both "" where that is not known."""
    ended, node, where = scene.waits.ahead(run)
    flow = scene.flows.run(run)
    made = makers(flow, step)
    if made and abs(ended - until) > SAME:
        last = max(made, key=lambda step: ended_at(scene, run, step))
        node, where = flow[last].node, flow[last].slice
    bound = scene.machine.slices.get(where)
    return node, bound.island if bound else ""


def ended_at(scene: Scene, run: int, step: int) -> float:
    """When all hosts had ended a gang (seconds); infinite where one has not."""
    gang = scene.gangs.by_key.get((run, step))
    return max(gang.ended.values()) if gang is not None and gang.state == "done" else math.inf


def later(scene: Scene, run: int, step: int, moment: float) -> str:
    """The first node after a step, of its run and on its slice, that others wait for and whose
    inputs were there at a moment (seconds on the records' clock): it might have computed then."""
    flow = scene.flows.run(run)
    leaves = {n for stage in flow for n in stage.after if stage.transfer}
    for number, stage in enumerate(flow[step + 1 :], step + 1):
        if stage.transfer or stage.slice != flow[step].slice or number not in leaves:
            continue
        if all(ended_at(scene, run, made) <= moment for made in makers(flow, number)):
            return stage.node
    return ""


def missing(scene: Scene, gang: Gang, host: str) -> tuple[str, Gang | None]:
    """The node whose value a gang has not got on a host, "" for none, and the gang that makes it
    if that has not ended."""
    flow = scene.flows.run(gang.run)
    for step in flow[gang.step].after if gang.step < len(flow) else ():
        source = step
        while flow[source].transfer and flow[source].after:
            source = flow[source].after[0]
        made = scene.gangs.by_key.get((gang.run, source))
        if made is not None and made.state != "done":
            return made.node, made
        if step != source and not scene.arrived(gang.run, step, host):
            return flow[source].node, None
    return "", None


def needed(scene: Scene) -> dict[Lane, str]:
    """The nodes whose values the next gangs of devices have not got."""
    out: dict[Lane, str] = {}
    for island in () if scene.final else scene.machine.islands:
        seen: set[int] = set()
        for gang in scene.gangs.order(island):
            bound = scene.machine.slices.get(gang.slice)
            if gang.over or bound is None or gang.slice in seen:
                continue
            seen.add(gang.slice)
            for host, device in bound.devices:
                lane = Lane(island, host, device)
                if lane not in out and gang.state_on(host) == "granted":
                    out[lane], _ = missing(scene, gang, host)
    return {lane: node for lane, node in out.items() if node}
