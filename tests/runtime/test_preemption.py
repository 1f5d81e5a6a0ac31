"""Threads that give way to whoever wakes them."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from pathways_lab.runtime.islands.batch_threads import giving_way

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such threads")


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@linux
def test_threads_made_meanwhile_give_way_and_no_others() -> None:
    with giving_way():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert policy_of_a_new_thread() == os.SCHED_OTHER


@linux
def test_the_calling_thread_is_as_before_whatever_happens() -> None:
    with pytest.raises(ValueError, match="no"), giving_way():
        raise ValueError("no")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_it_is_not_allowed_threads_are_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused, raising=False)
    done: list[bool] = []
    with giving_way():
        done.append(True)
    assert done
