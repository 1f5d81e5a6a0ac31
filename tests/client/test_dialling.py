"""Links to hosts are made when they are needed, each for itself."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

from pathways_lab.client.session.transfers import DataLinks


def test_a_host_that_does_not_answer_holds_up_nobody_who_asks_another_one() -> None:
    hosts = [{"name": name, "data_address": name} for name in ("mute", "good")]
    connection = Mock(topology={"islands": [{"hosts": hosts}]})
    dialled, reached = threading.Event(), threading.Event()
    meanwhile: list[bool] = []

    def connect(address: str, *_: Any, **__: Any) -> Any:
        if address == "mute":
            dialled.set()
            meanwhile.append(reached.wait(10))
        return Mock(closed=None)

    connection.reactor.connect = connect
    links = DataLinks(connection)
    thread = threading.Thread(target=links._link, args=("mute",))
    thread.start()
    assert dialled.wait(60)
    good = links._link("good")
    reached.set()
    thread.join()
    assert meanwhile == [True]
    assert links._link("good") is good
