"""Links to hosts are made when they are needed, each for itself."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from pathways_lab.client.session.transfers import DataLinks
from pathways_lab.core.errors import PathwaysError


def test_a_host_that_does_not_answer_holds_up_nobody_who_asks_another_one() -> None:
    hosts = [{"name": name, "data_address": name} for name in ("mute", "good")]
    connection = Mock(topology={"islands": [{"hosts": hosts}]}, silence=30.0, address="unix:/c")
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


def test_behind_dasks_scheduler_the_way_leads_through_it_to_the_worker() -> None:
    hosts = [{"name": "west/one", "data_address": "tcp://10.0.0.2:9001", "worker": "worker-1"}]
    connection = Mock(topology={"islands": [{"hosts": hosts}]}, silence=30.0)
    connection.address = "dask+tls://gate:8786#control"
    links = DataLinks(connection)
    links._link("west/one")
    assert connection.reactor.connect.call_args.args[0] == "dask+tls://gate:8786#worker-1"
    assert links.address("west/one") == "tcp://10.0.0.2:9001", "where a worker finds it"


@pytest.mark.parametrize("error", [TimeoutError("silence"), ConnectionRefusedError("silence")])
def test_a_cut_is_waited_for_as_long_as_the_lab_bears_silence(error: OSError) -> None:
    hosts = [{"name": "far", "data_address": "far"}]
    connection = Mock(topology={"islands": [{"hosts": hosts}]}, silence=30.0, address="unix:/c")
    link, tried = Mock(closed=None), []

    def connect(address: str, key: Any, hello: Any, timeout: float, **_: Any) -> Any:
        tried.append(timeout)
        if len(tried) < 3:
            raise error
        return link

    connection.reactor.connect = connect
    assert DataLinks(connection)._link("far") is link
    assert tried == [5.0] * 3
    connection.silence, tried[:] = -1.0, []
    with pytest.raises(PathwaysError, match="host far cannot be reached: silence"):
        DataLinks(connection)._link("far")
    connection.silence, hosts[:] = 30.0, []
    with pytest.raises(PathwaysError, match="it is not in the lab any more"):
        DataLinks(connection)._link("far")
