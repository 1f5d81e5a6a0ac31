"""How a process ended is told in one sentence, from exit code, log and the kernel's records."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathways_lab.runtime.processes.deaths import Records, story

NONE = Records()
SEGFAULT = """Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/usr/lib/python3.12/ctypes/__init__.py", line 519 in string_at
  File "/ann/boom.py", line 7 in boom
  File "/usr/lib/python3.12/threading.py", line 982 in run"""
THREAD = (
    "F1125 03:18:41.29 25696 env.cc:93] Check failed: ret == 0 (11 vs. 0) Thread tf_XLAEigen"
    " creation via pthread_create() failed."
)
ASSERTION = "F0000 00:00:1795561629.35 4242 mlir.cc:12] Check failed: name is not ASCII"


@pytest.mark.parametrize(
    ("code", "words", "after", "told"),
    [
        (-11, SEGFAULT, NONE, "was ended by signal 11 (SIGSEGV, Segmentation fault), in boom at"),
        (-11, SEGFAULT, NONE, "/ann/boom.py:7"),
        (-6, ASSERTION, NONE, "SIGABRT, Aborted): Check failed: name is not ASCII"),
        (-9, "", NONE, "was ended by signal 9 (SIGKILL, Killed)"),
        (-9, "", Records(memory=1), "for want of memory (oom_kill in its control group)"),
        (-9, "", Records(machine=1), "processes of this machine for want of memory"),
        (-15, "", Records(memory=1), "was ended by signal 15 (SIGTERM, Terminated)"),
        (
            70,
            "the device process ends: Traceback\nValueError: no\n",
            NONE,
            "itself: ValueError: no",
        ),
        (3, "", NONE, "ended with exit code 3"),
        (None, "it said nothing for 60 s\n", NONE, "it said nothing for 60 s"),
        (1, "RuntimeError: can't start new thread", Records(processes=2), "may (pids.max)"),
        (
            -6,
            f"{THREAD}\n    @ 0x7f",
            Records(processes=2),
            "creation via pthread_create() failed: its",
        ),
        (-6, THREAD, Records(processes=2), "as many processes and threads as it may (pids.max)"),
        (None, "[Errno 11] Resource temporarily unavailable", NONE, "processes and threads"),
    ],
)
def test_the_sentence(code: int | None, words: str, after: Records, told: str) -> None:
    found = story(code, words, NONE, after)
    assert told in found
    assert "\n" not in found


def test_memory_that_was_short_before_is_no_reason() -> None:
    assert "memory" not in story(-9, "", Records(memory=3, machine=4), Records(memory=3, machine=4))


def test_the_records_are_those_of_the_own_group(tmp_path: Path) -> None:
    def write(file: str, text: str) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    assert Records.read(tmp_path) == NONE
    write("proc/self/cgroup", "8:pids:/job\n4:memory:/job\n0::/new\n")
    write("proc/vmstat", "nr_free 7\noom_kill 9\n")
    assert Records.read(tmp_path) == Records(0, 9, 0)
    write("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n")
    write("sys/fs/cgroup/pids/job/pids.events", "max 4\n")
    assert Records.read(tmp_path) == Records(2, 9, 4)
    write("sys/fs/cgroup/new/memory.events", "low 0\noom 7\noom_kill 5\n")
    write("sys/fs/cgroup/new/pids.events", "max 6\n")
    assert Records.read(tmp_path) == Records(5, 9, 6)
