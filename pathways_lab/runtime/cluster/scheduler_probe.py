"""Finds out whether a Dask scheduler answers, before a Dask client waits for it.

Problem: a Dask client waits for half a minute at an address without a listener, and for
ever at a listener that says nothing.  An interrupt leaves its thread behind, and the
interpreter waits for that at its end.

How: one connection of Dask's own, with a limit, in a thread that ends with it; a client
is made once the scheduler has answered.

Rule for maintainers: documented Dask API only (``distributed.comm``); the waiting thread shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from pathways_lab.runtime.cluster.start_progress import Tell

PATIENCE = 1.0
"""Seconds after which whoever waits is told for what."""


def knock(address: str, security: Any, seconds: float, tell: Tell) -> None:
    """Return when a Dask scheduler answers at *address*.

    Raises OSError when none does within so many seconds, and TypeError or ValueError for
    what can be no address, or where something else answers.
    """
    loop = asyncio.new_event_loop()
    refusals: list[BaseException] = []
    task = loop.create_task(_meet(address, security, seconds, refusals))
    thread = threading.Thread(target=_run, args=(loop, task), name="knocking", daemon=True)
    thread.start()
    try:
        thread.join(PATIENCE)
        if thread.is_alive():
            why = f" ({refusals[-1]})" if refusals else ""
            with waiting(f"a Dask scheduler at {address}{why}", seconds - PATIENCE, tell):
                thread.join()
                task.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
    task.result()


@contextlib.contextmanager
def waiting(what: str, seconds: float, tell: Tell) -> Iterator[None]:
    """Say for what the block waits, and until when; in the end, whether it came."""
    until = time.localtime(time.time() + seconds)
    tell(f"waiting for {what}, until {time.strftime('%H:%M:%S', until)}; Ctrl-C ends the wait")
    outcome = "waited in vain for"
    try:
        yield
        outcome = "found"
    finally:
        tell(f"{outcome} {what}")


def first_cause(error: BaseException) -> BaseException:
    """The exception at the end of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


async def _meet(address: str, security: Any, seconds: float, refusals: list[BaseException]) -> None:
    """refusals: takes why attempts failed."""
    from distributed.comm.core import connect

    arguments = security.get_connection_args("client")
    # The first is short, so that there is a reason to tell.
    patience = min(PATIENCE, seconds) / 2
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    # Dask's own limit is for the connection, and not for the answer. It says
                    # only of what the last attempt failed, which the limit may have cut short.
                    comm = await connect(address, timeout=patience, **arguments)
                    break
                except OSError as error:
                    if error.__cause__ is None:
                        raise
                    if not isinstance(error.__cause__, TimeoutError):
                        refusals.append(first_cause(error))
                except (TypeError, ValueError):
                    raise
                except Exception:
                    # Dask takes the first bytes for lengths: even a MemoryError may come of them.
                    raise ValueError("what answers there is no Dask scheduler") from None
                patience = seconds / 4
    except TimeoutError:
        if refusals:
            raise OSError(f"no connection within {seconds:g} s") from refusals[-1]
        raise OSError(f"nobody has answered for {seconds:g} s") from None
    comm.abort()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(BaseException):  # it is the task's
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
