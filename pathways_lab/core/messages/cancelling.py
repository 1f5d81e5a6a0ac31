"""Messages with which clients cancel what they have asked for.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose unions have them.

Paper: section 4.6 (ownership: what its client does not want any more ends).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A client does not want runs of its own, or values that runs of its own make, any more.

    runs: whole ones.  buffers: single results; what reads them ends as well.
    steps: by run, those of some of the calls that travel in it as one; what reads what they
        make ends as well, and the other calls go on.
    request: the client's number for the question; 0: it waits for no answer.  Numbers of the
        Answer are the fates of the named runs that are not over.  ``cancelled``: how many end
        before anything of them has begun.  ``begun``: how many end after what has its place.
        ``going``: how many go on, all that was meant having its place already, or with results
        that somebody wants.
    """

    time: float
    cause: str
    client: str
    runs: tuple[int, ...]
    buffers: tuple[int, ...] = ()
    request: int = 0
    steps: tuple[tuple[int, tuple[int, ...]], ...] = ()
