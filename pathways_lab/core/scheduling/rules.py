"""The rules of order, memory and pace, by name and by number.

Problem: each rule of the core exists because something breaks without it.  A
claim like that must be shown, so every rule that the core enforces can be
switched off *by a test or a simulation*, and a search must then find a run
that breaks.  The two rules that hosts keep (launch in the order of the grants;
launch poisoned gangs everywhere) are switched off in the simulator's machine.

Rule for maintainers: production code builds ``Rules()`` and nothing else.

Paper: section 4.4 (gang-scheduled dynamic dispatch), section 4.5 (parallel
asynchronous dispatch), section 4.6 (data management, back-pressure).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that the core keeps.

    together: a gang that spans islands gets its places on all of them in one step;
        without it each island gives its own by itself.
    predecessors: a gang is granted only after the gangs that make its inputs
        (and, if it donates a buffer, after the buffer's earlier readers).
    peak: a run is admitted only with the peak of its memory reserved;
        without it memory is granted gang by gang.
    liveness: that peak is taken along the order in which gangs are granted;
        without it along the order that would need the fewest bytes.
    producers: a run is admitted only after the runs that make its inputs.
    patience: seconds for which nothing can move any more before one run is failed; until then
        the word may come that a handle was dropped.  None: for ever.
    quotas: nothing is given to a client beyond its quota.
    overtaking: how many times a run that waits, for memory or for its next window, may be
        overtaken; None: for ever.
    ahead: estimated device seconds that may be granted and unfinished on a device,
        where nobody asks for less (0: nothing is granted ahead).
    close: the same on shared devices, where a policy has a choice (see
        :class:`~pathways_lab.core.scheduling.order.Pace`): a few round trips of the control plane.
    window: estimated device seconds that one grant covers: half of that at most, so
        that the next one is there before the devices have nothing to do.
    least: gangs granted and unfinished on a device below which no window waits,
        however long they take: one runs, and the next one is there already.
    assumed: device seconds of a function that was never measured on its slice, and at
        least what may be ahead: of what may take any time one gang runs and one is ahead.
    """

    together: bool = True
    predecessors: bool = True
    peak: bool = True
    liveness: bool = True
    producers: bool = True
    patience: float | None = 0.5
    quotas: bool = True
    overtaking: int | None = 64
    ahead: float = 0.1
    close: float = 0.01
    window: float = 0.05
    least: int = 2
    assumed: float = 0.1
