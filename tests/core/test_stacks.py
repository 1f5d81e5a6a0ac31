"""What ``lab.stacks(host)`` makes of what a process wrote."""

from __future__ import annotations

from pathlib import Path

from pathways_lab.core.diagnosis import stacks
from pathways_lab.core.diagnosis.stacks import Frame, Stacks

OURS = Path(stacks.__file__).resolve()
TEXT = f"""what a function printed
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "{OURS}", line 404 in turn

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "train.py", line 12 in wait_for_data
  File "train.py", line 40 in step
  File "/lib/python3.11/site-packages/jax/callback.py", line 71 in call

Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "{OURS}", line 404 in turn
"""


def test_lines_of_the_user_come_first_and_what_called_them_is_left_out() -> None:
    found = Stacks("island0/host0", 7, "S", TEXT)
    assert found.lines == (Frame("train.py", 12, "wait_for_data"),)
    assert [len(thread) for thread in found.threads] == [4, 2, 2]
    assert repr(found).splitlines() == [
        "island0/host0, process 7, 3 threads; lines of yours first",
        "> wait at /usr/lib/python3.11/threading.py:327",
        "    wait_for_data at train.py:12",
        "    step at train.py:40",
        "- select at /usr/lib/python3.11/selectors.py:468 (2 threads)",
    ]


def test_a_process_that_says_nothing_is_told_so() -> None:
    assert "is stopped" in repr(Stacks("h", 7, "T", ""))
    assert repr(Stacks("h", 7, "S", "")) == "h, process 7 did not answer"
    idle = Stacks("h", 7, "S", TEXT.replace("train.py", str(OURS)))
    assert idle.lines == ()
    assert "none is in code of yours" in repr(idle)


def test_what_a_debugger_says_is_shown_as_it_is() -> None:
    told = "Process 7: python\n\nThread 7 (idle)\n    clock_nanosleep (libc.so.6)"
    assert repr(Stacks("h", 7, "S", told)) == f"h, process 7:\n{told}"
