"""A system in a process of its own: its event loops and threads meet nobody else's.

Every framework gets the same: a fresh interpreter (another environment, if it
is installed elsewhere) whose main thread is the only client.  The two ends talk
in lines of JSON over pipes; nothing is sent while a round is timed, and time is
taken in the child.

Rule for maintainers: :func:`serve` runs in environments that have neither this
project nor its dependencies installed: standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.harness.rounds import Missing, Timed

ROOT = Path(__file__).parents[2]
START, ROUND, STOP = 180.0, 120.0, 20.0
"""Seconds after which a child counts as stuck."""
REASON = 2000
"""Characters of an error that a child tells."""
SETTLE = 0.05
"""Seconds for heartbeats and timers that became due while it rested."""


class Served(Protocol):
    """What a child does: a System without its name."""

    def start(self) -> None: ...

    def round(self, case: str, units: int) -> tuple[float, float]:
        """Seconds and units."""

    def stop(self) -> None: ...


def serve(make: Callable[..., Served]) -> None:
    """Be a child: obey the lines on stdin until they end.

    make: called with the keyword arguments that the parent chose.
    """
    # Frameworks print to stdout at will; the answers get a descriptor that they do not know.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    served: Served | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            if asked["do"] == "start":
                served = make(**asked["with"])
                served.start()
                answer = {}
            elif asked["do"] == "round":
                assert served is not None
                answer = {"timed": tuple(served.round(asked["case"], asked["units"]))}
            else:
                break
        except ImportError as error:
            answer = {"missing": f"not installed ({error})"}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}".strip()[:REASON]}
        answers.write(json.dumps(answer) + "\n")
    if served is not None:
        served.stop()
    answers.write("{}\n")


class Child:
    """A System that lives in a process of its own.

    module: run with ``-m``; its main calls :func:`serve`.  python: the
    interpreter, when it is not this one.  options: keyword arguments for what it
    serves.
    """

    def __init__(
        self,
        name: str,
        module: str,
        cases: Sequence[str],
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        self.name, self.cases = name, cases
        self._command = [python, "-m", module]
        # An environment of its own shall not find the packages of this one.
        found = os.environ.get("PYTHONPATH") if python == sys.executable else None
        self._path = os.pathsep.join(filter(None, [str(ROOT), found]))
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log: IO[str] | None = None
        self._resting: list[Any] = []

    def start(self) -> None:
        """Start the process and what it serves.  Raises Missing."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it ends with the child
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=ROOT,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": self._path},
            )
        except OSError as error:
            raise Missing(f"{self._command[0]}: {error.strerror}") from error
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        self._ask(START, {"do": "start", "with": self._options})

    def round(self, case: str, units: int) -> Timed:
        """One round, timed by the child."""
        return Timed(*self._ask(ROUND, {"do": "round", "case": case, "units": units})["timed"])

    def rest(self) -> None:
        """Stop it and all its processes, parents first, so that none misses another."""
        import psutil

        assert self._process is not None
        self._resting = [psutil.Process(self._process.pid), *_descendants(self._process.pid)]
        for process in self._resting:
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def wake(self) -> None:
        """Let its processes go on, and do what became due meanwhile."""
        import psutil

        while self._resting:
            with contextlib.suppress(psutil.Error):
                self._resting.pop().resume()
        time.sleep(SETTLE)

    def stop(self) -> None:
        """Ask it to end; kill it and its children when it does not."""
        if self._process is None:
            return
        self.wake()
        children = _descendants(self._process.pid)
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(STOP)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for child in children:
            _end(child)
        self._process = None
        if self._log is not None:
            self._log.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _ask(self, patience: float, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            line = self._answers.get(timeout=patience)
        except queue.Empty:
            raise RuntimeError(f"no answer within {patience:.0f} s{self._last_words()}") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"its process ended{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        said = [line.strip() for line in self._log if line.strip()]
        return f"; it said: {said[-1]}" if said else ""


def _descendants(pid: int) -> list[Any]:
    import psutil

    try:
        found: list[Any] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return found


def _end(process: Any) -> None:
    import psutil

    try:
        process.wait(timeout=2)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.Error:
        return
