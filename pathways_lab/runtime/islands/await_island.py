"""A device process without devices waits for the other hosts of its island.

Problem: accelerators of several hosts are one runtime only if all processes
join it before they touch a device; so the control plane must know them before
they can say what they have.

How: a link of its own to the control plane, which says "I wait", is answered
with where to meet and with whom, and stays open: when it closes, the island
starts anew, and so does this process.

Rule for maintainers: nothing here touches JAX.

Paper: section 4.5, appendix A (pluggable runtimes).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from pathways_lab.transport.auth import HOSTS
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context

_JOIN_SECONDS = 30.0


def wait_for_island(
    settings: dict[str, Any], end: Callable[[str], None]
) -> tuple[str, int, tuple[str, ...]]:
    """The address of the island's coordination service, its number, and its hosts by rank.

    settings: of the device process.  end(reason): the island is no more, now or later.
    """
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reactor = Reactor(
        "island",
        lambda link, op, fields, buffers: told.put(fields),
        lambda link, reason: end(reason),
    )
    reactor.start()
    over_network = settings["data_listen"].startswith("tcp")
    reactor.connect(
        settings["control"],
        bytes.fromhex(settings["key"]),
        {"role": "waiting", **{name: settings[name] for name in ("name", "island", "members")}},
        _JOIN_SECONDS,
        name="control",
        context=client_context(settings["tls"]) if over_network else None,
        holder=HOSTS,
        retry=True,
    )
    fields = told.get()
    return fields["address"], fields["number"], tuple(fields["hosts"])
