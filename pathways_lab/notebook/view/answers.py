"""Things that a page asks for and its person takes away: the picture as text, and as a file.

Problem: a viewer for traces shows more than any figure, and whoever looks at a view has the
record there, but no path to it.

Rule for maintainers: an answer is one message to the page that asks; a file goes to the page as
bytes, and from there to the person's disk, through no other server.
"""

from __future__ import annotations

import gzip
import re

from pathways_lab.notebook.view.picture import Picture
from pathways_lab.notebook.view.stream import Message
from pathways_lab.timeline.export import perfetto
from pathways_lab.timeline.log import items_within
from pathways_lab.timeline.packed import single

ANSWERED = ("text", "save")
"""The wishes that have an answer."""


def answer(picture: Picture, name: str) -> Message:
    """The message for a wish of :data:`ANSWERED`."""
    if name == "text":
        return {"type": "text", "text": picture.text()}
    records = single(items_within(picture.timeline.items, picture.since))
    trace = perfetto.trace(list(records), picture.scene.dropped)
    plain = re.sub(r"[^\w-]+", "-", picture.wanted.title).strip("-") or "timeline"
    block = gzip.compress(trace.encode(), compresslevel=1, mtime=0)
    return {"type": "file", "name": f"{plain}.json.gz", "block": block}
