"""The last words of a lab whose core has failed.

Problem: an exception in the core is a bug, and leaves behind a state that nobody vouches
for: a run may be admitted and not granted, a byte counted twice.  A lab that goes on grants
on that ground.  So it ends, and says why, and where the events are that lead to the bug.

Rule for maintainers: nothing in here may raise; the lab is over already.
"""

from __future__ import annotations

import sys
import traceback

from pathways_lab.core.messages import Event
from pathways_lab.runtime.control_plane.transcript import LastEvents


def last_words(event: Event, error: Exception, record: LastEvents) -> dict[str, str]:
    """For clients: reason, remedy and details (the traceback).  Ends *record*."""
    failed = f"the control plane failed on {type(event).__name__} ({event.cause}): {error!r:.500}"
    details = "".join(traceback.format_exception(error))
    print(f"{failed}\n{details}", file=sys.stderr, flush=True)
    try:
        events = record.end(f"{failed}\n{details}")
    except Exception as lost:
        events = f"this text (the events could not be written: {lost})"
    return {
        "reason": f"{failed}. This is a bug in pathways_lab. The state of the lab may be wrong"
        " since, so the lab ended, and granted nothing more",
        "remedy": "start another lab with pw.start(), or pw.connect(...) again; and report the bug"
        f" with {events}; in it are names, shapes, lines and errors of programs, and no arrays",
        "details": details,
    }
