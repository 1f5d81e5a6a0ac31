"""Processes that end with their parent, and are told secrets only through a pipe.

Problem: a killed notebook kernel runs no clean-up, yet nothing that it
started may outlive it; and a child's secrets (keys, certificates) may
not appear in its arguments or environment, where others can read them.

How: a child's standard input is a pipe whose only writer is its parent.  The
first line is the configuration, as JSON; the end of the file means that the
parent is gone, however it died, and the child exits at once.  Its own
children have lifelines of their own, so the whole tree goes.  A child reports to
its parent by JSON lines on the pipe that was its standard output; everything that
libraries print goes to a log file.

Rule for maintainers: a child calls :func:`begin` before anything slow (but for
those that make copies of themselves first, see :mod:`.processes.child_copies`), and
nothing in it relies on exit handlers; what must be undone at the end is given
to :func:`at_end` and takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from pathways_lab.runtime.processes.deaths import ASSERTION
from pathways_lab.transport.addresses import remove_folder

_NOTEBOOK = (
    "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "JPY_PARENT_PID",
    "JPY_SESSION_NAME", "MPLBACKEND", "PAGER", "PYTHONSTARTUP",
)  # fmt: skip
"""Environment that belongs to a notebook kernel and would mislead its children."""
_FILES = 1 << 16
"""Soft limit of descriptors of a child, where its hard limit allows: some programs, started by
user code on hosts, close every number up to their limit."""


# --- the child's end -------------------------------------------------------------

REMOVE = "remove_at_end"
"""A configuration may name private folders here: the child removes them when it ends, because
its parent may be killed."""

_configurations: queue.Queue[dict[str, Any]] = queue.Queue()
_leaving = threading.Lock()
_endings: list[Callable[[], object]] = []
_reports: BinaryIO | None = None
_reporting = threading.Lock()
_patience = 1.0


def early_configuration() -> dict[str, Any]:
    """The first configuration, read before :func:`begin`: no thread is started."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # No byte more: the rest is for begin.
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)
        line += byte
    return _configuration_of(bytes(line))


def begin(patience: float = 1.0) -> None:
    """Attach this process to its parent's lifeline.  Once, first thing in a child.

    From now on the process exits when the parent does, Ctrl-C in a terminal is
    the parent's business, and standard output goes where standard error goes.  So is a request
    to end (SIGTERM): a scheduler of jobs sends it to every process of a job at once, and the
    parent ends what runs first.

    patience: seconds that the functions given to :func:`at_end` may take together.
    """
    global _reports, _patience
    _patience = patience
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler, so that programs that the process starts can be ended as usual.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    _raise_file_limit()
    _wake_when_parent_dies()
    _reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lifeline = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _raise_file_limit() -> None:
    """Links to hundreds of hosts and clients take more descriptors than most soft limits allow.

    The kernel keeps its limit: it is the user's, whose children inherit it and may use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _wake_when_parent_dies() -> None:
    """A stopped process cannot see the end of its lifeline: let the system continue it then."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGCONT))


def _watch(lifeline: BinaryIO) -> None:
    with contextlib.suppress(Exception):
        for line in lifeline:
            _configurations.put(_configuration_of(line))
    # The end, or a line that is no JSON: nobody is there whom to obey.
    leave()


def _configuration_of(line: bytes) -> dict[str, Any]:
    configuration: dict[str, Any] = json.loads(line)
    for folder in configuration.get(REMOVE, ()):
        at_end(functools.partial(remove_folder, Path(folder)))
    return configuration


def leave(code: int = 0) -> None:
    """End this process now: functions given to at_end first, newest first.

    Another thread that comes meanwhile waits: its exit would cut them off.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    guard = threading.Timer(_patience, os._exit, (code,))
    guard.daemon = True
    with contextlib.suppress(RuntimeError):  # an account may have no thread to spare
        guard.start()
    while _endings:
        with contextlib.suppress(Exception):
            _endings.pop()()
    os._exit(code)


def at_end(function: Callable[[], object]) -> None:
    """Call function() when the parent is gone or :func:`leave` is called."""
    _endings.append(function)


def configuration() -> dict[str, Any]:
    """The next configuration from the parent; waits for it."""
    return _configurations.get()


def report(**fields: Any) -> None:
    """Tell the parent: one JSON line.  A parent that does not listen is no error."""
    assert _reports is not None, "begin() comes first"
    with _reporting, contextlib.suppress(OSError):
        _reports.write(json.dumps(fields).encode() + b"\n")


# --- the parent's end ------------------------------------------------------------


class ChildDied(RuntimeError):
    """A child could not be started, ended, or said nothing in time; ``str()`` has the system's
    reason or the end of its log."""


class Process(Protocol):
    """The part of a ``subprocess.Popen`` that is needed here."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


class Child:
    """One child process, and this end of its lifeline.

    log: the file with everything that it printed, from the byte *since* on.
    """

    def __init__(self, popen: Process, name: str, log: Path, since: int) -> None:
        self.name = name
        self.log = log
        self._since = since
        self.pid = popen.pid
        self._popen = popen
        self._kept: int | None = None
        self._heard = b""
        self._waiting: deque[dict[str, Any]] = deque()
        _held.add(self)

    def __repr__(self) -> str:
        return f"<{self.name}, process {self.pid}>"

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._popen.poll()

    def tell(self, configuration: dict[str, Any]) -> None:
        """Send one configuration.  Raises ChildDied when nobody reads it, or it was let go."""
        assert self._popen.stdin is not None
        line = json.dumps(configuration).encode() + b"\n"
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
        except (OSError, ValueError):
            raise self._died("ended early") from None

    def fileno(self) -> int:
        """For selectors: ready for reading when :meth:`reports` has something or raises."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def reports(self) -> list[dict[str, Any]]:
        """Reports that are there; waits for a part of one.  Raises ChildDied at the end."""
        try:
            part = os.read(self.fileno(), 65536)
        except (OSError, ValueError):
            part = b""
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(1.0)
            raise self._died("ended early")
        *lines, self._heard = (self._heard + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def hear(self, timeout: float) -> dict[str, Any]:
        """Its next report.  Raises ChildDied when it ends first or *timeout* seconds pass."""
        deadline = time.monotonic() + timeout
        while not self._waiting:
            left = max(0.0, deadline - time.monotonic())
            try:
                ready = select.select([self], [], [], left)[0]
            except ValueError:  # another thread has ended it
                raise self._died("was ended") from None
            if not ready:
                raise self._died(f"said nothing for {timeout:g} s")
            self._waiting.extend(self.reports())
        return self._waiting.popleft()

    def _died(self, how: str) -> ChildDied:
        code = self.exit_code
        state = "" if code is None else f" with exit code {code}"
        return ChildDied(f"{self.name} (process {self.pid}) {how}{state}; {self.last_words()}")

    def wait(self) -> None:
        """Until it has ended."""
        self._popen.wait()

    def last_words(self, limit: int = 2000) -> str:
        """The end of its log, at most *limit* characters, for error messages."""
        try:
            said = self.log.read_bytes()[self._since :]
        except OSError:
            said = b""
        text = _telling(said[-8 * limit :].decode(errors="replace"), limit)
        return f"its last lines:\n{text}" if text else "it printed nothing"

    def keep(self) -> None:
        """Let the child outlive all objects of this process: it ends with the process itself."""
        assert self._popen.stdin is not None
        self._kept = os.dup(self._popen.stdin.fileno())

    def let_go(self) -> None:
        """Close the lifeline: the child begins to end.  Does not wait."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            # One that was stopped would not hear of it.
            self._popen.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

    def finish(self, patience: float = 3.0) -> None:
        """Wait for the end after :meth:`let_go`; after *patience* seconds kill."""
        try:
            self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def end(self, patience: float = 3.0) -> None:
        """Close the lifeline and wait; after *patience* seconds kill.  Again is fine."""
        self.let_go()
        self.finish(patience)
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def spawn(
    module: str,
    configuration: dict[str, Any] | None,
    *,
    name: str,
    folder: Path,
    environment: dict[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start ``python -m module`` on a lifeline of this process.

    configuration: its first one, or None to :meth:`Child.tell` it later.
    name: for people, and for its log file in *folder*.
    environment: variables to set in addition to this process's own.
    pass_fds: open files that it inherits.

    Raises ChildDied when it cannot be started, or does not listen: whoever looks after a child
    knows one kind of end.
    """
    log = log_of(folder, name)
    try:
        with open(log, "ab") as output:
            since = output.tell()
            popen = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=pass_fds,
                env=_environment() | (environment or {}),
                # A process group of its own: Ctrl-C in a terminal is for the parent.
                start_new_session=True,
            )
    except OSError as error:
        # No memory, no process, no room for its log is left.
        raise ChildDied(f"{name} could not be started: {error}") from error
    child = Child(popen, name, log, since)
    if configuration is not None:
        child.tell(configuration)
    return child


def log_of(folder: Path, name: str) -> Path:
    """Where a child of this name writes what it prints."""
    return folder / f"{name.replace('/', '-')}.log"


_held: weakref.WeakSet[Child] = weakref.WeakSet()


def _forget_lifelines() -> None:
    """In a forked copy of this process: the lifelines are its parent's, not its own."""
    for child in _held:
        child.let_go()


os.register_at_fork(after_in_child=_forget_lifelines)


def _environment() -> dict[str, str]:
    """This process's environment, without what belongs to notebooks, able to import us."""
    environment = {k: v for k, v in os.environ.items() if k not in _NOTEBOOK}
    root = str(Path(__file__).resolve().parents[3])
    if "site-packages" not in root:
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    return environment


def _telling(log: str, limit: int) -> str:
    """Its last *limit* characters; after a fatal signal those around the line that names it.

    An assertion of native code that did not hold stands above a list of functions too, and is
    kept.  Python then lists the functions that were running, the innermost first, and all modules
    that are loaded: a list that is as long as everything else, and of no use.
    """
    lines = [line for line in log.splitlines() if not line.startswith("Extension modules: ")]
    text = "\n".join(lines).strip()
    asserted = ASSERTION.search(text)
    if asserted is not None and len(text) - asserted.start() > limit:
        first = asserted[0][: limit // 2]
        return f"{first}\n...\n{_around_signal(text, limit - len(first) - len('__...__'))}"
    return _around_signal(text, limit)


def _around_signal(text: str, limit: int) -> str:
    fatal = text.rfind("Fatal Python error: ")
    if fatal < 0 or len(text) - fatal <= limit:
        return text[-limit:].strip()
    return text[max(0, fatal - limit // 4) :][:limit].strip()
