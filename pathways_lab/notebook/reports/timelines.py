"""Several stretches of time below each other, on one scale: which way is faster, and why.

Problem: the same model as one SPMD program and as an MPMD pipeline; a reader
wants to lay one over the other.

Rule for maintainers: a static picture, drawn by the same panels as everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from pathways_lab.notebook.draw.svg import picture
from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.panels.legend import legend
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.palette import palette_of
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import merged_note, table
from pathways_lab.notebook.view.frozen import FINEST, LIMIT, Bundle, image
from pathways_lab.timeline.busy import computed
from pathways_lab.timeline.log import Recording
from pathways_lab.timeline.records import Record, Span

BUDGETS = (2400, 1200, 600, 200, 60)
"""Bars of all stretches together."""


class Comparison:
    """Recordings by title, shown stacked; the value of the cell that compares them.

    panels: what is drawn of each.
    """

    def __init__(
        self,
        recordings: Mapping[str, Recording],
        panels: Sequence[str] = ("queues", "utilisation"),
    ) -> None:
        if not recordings:
            raise ValueError("there is nothing to compare: give at least one recording")
        if not (
            isinstance(recordings, Mapping)
            and all(isinstance(each, Recording) for each in recordings.values())
        ):
            raise ValueError(
                f"{recordings!r:.60} are not recordings by title: with lab.timeline.recording()"
                " as a: ..., then {'a': a}"
            )
        for recording in recordings.values():
            recording.settle()
        self.recordings = dict(recordings)
        self._panels = tuple(panels)

    def bundle(self) -> Bundle:
        """The picture as MIME data and metadata."""
        longest = max(_seconds(recording) for recording in self.recordings.values())
        for budget in BUDGETS:
            data, metadata = self._draw(longest, budget // len(self.recordings))
            if sum(map(len, data.values())) <= LIMIT:
                break
        return data, metadata

    def _draw(self, longest: float, budget: int) -> Bundle:
        plots: list[Plot] = []
        texts: list[str] = []
        coarsest = 0.0
        facts: dict[str, dict[str, float]] = {}
        scenes: list[Scene] = []
        palette = palette_of(next(iter(self.recordings.values())).timeline)
        for number, (title, recording) in enumerate(self.recordings.items()):
            start, seconds = recording.start, _seconds(recording)
            scene = Scene(start, longest, palette, final=True, budget=FINEST)
            scene.add(_taking_part(recording.records), start + seconds)
            if len(scene.computed.bars.items) > budget:
                scene.coarsen(budget)
                coarsest = max(coarsest, scene.resolution)
            share = computed(recording.records, start).busy
            scenes.append(scene)
            head = f"{duration(seconds)}, devices in use busy {100 * share:.0f} % from the first"
            head += " computation to the last"
            for place, name in enumerate(self._panels):
                plot = PANELS[name](scene, start + longest)
                if not place:
                    plot = replace(plot, title=title, note=head)
                # The numbers at the right would be over the longest of all: neither they nor
                # what tells of them is shown.
                note = plot.note.partition("; at the right")[0]
                plot = replace(plot, name=f"{name}-{number}", note=note, readouts={})
                plots.append(replace(plot, x=(0.0, longest)))
            texts.append(f"{title}: {head}\n{table(scene, start + seconds, title)}")
            facts[title] = {"seconds": round(seconds, 6), "busy": round(share, 4)}
        summary = "; ".join(text.splitlines()[0] for text in texts)
        svg = picture(
            plots,
            "Timelines on one scale",
            (merged_note(coarsest),) if coarsest else (),
            legend(self._panels, *((scene, scene.origin + longest) for scene in scenes)),
            {"recordings": facts},
            summary,
        )
        data = {"text/html": image(svg, summary), "text/plain": "\n\n".join(texts)}
        return data, {"pathways_lab": deepcopy(facts)}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        return self.bundle()

    def __repr__(self) -> str:
        return self.bundle()[0]["text/plain"]


def compare_timelines(recordings: Mapping[str, Recording]) -> Comparison:
    """Show recordings (``lab.timeline.recording()``) below each other on one time scale."""
    return Comparison(recordings)


def _taking_part(records: Sequence[Record]) -> list[Record]:
    """Without the islands on which nothing was computed meanwhile."""
    islands = {r.island for r in records if isinstance(r, Span) and r.kind == "gang"}
    return [r for r in records if not r.island or not islands or r.island in islands]


def _seconds(recording: Recording) -> float:
    end = recording.end if recording.end is not None else recording.timeline.clock()
    return end - recording.start
