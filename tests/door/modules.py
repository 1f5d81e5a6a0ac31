"""Damaged modules are read in a process that they may end.

Problem: MLIR's reader in jaxlib does not survive all damaged modules.  It ends the door of the
program that sent one (docs/door.md); a fuzzer that has the door in its own process would end too.

How: a process that starts no threads forks for each module.  What the child read or refused
counts; a module that ended it is refused here.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from pathways_lab.door.dtypes import UnknownType
from pathways_lab.door.server import INVALID, Status

Load = Callable[..., Any]


class Fatal:
    """The modules that ended the process that read them."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def read_elsewhere(load: Load) -> Iterator[tuple[Load, Fatal]]:
    """*load*, ``programs.load``, for modules that another process has survived."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, load))
    process.start()
    there.close()
    fatal = Fatal()

    def read(module: bytes, devices: tuple[int, ...], kind: str, remote: Any) -> Any:
        here.send((module, devices, kind))
        found = here.recv()
        if found is None:
            fatal.count += 1
            raise Status(INVALID, "compile_request: a module that ends the process that reads it")
        raised, values = found
        if raised is not None:
            raise raised(*values)
        return load(module, devices, kind, remote)

    try:
        yield read, fatal
    finally:
        here.close()
        process.kill()
        process.join()


def _serve(asked: Connection, load: Load) -> None:
    while True:
        try:
            given = asked.recv()
        except EOFError:
            return
        answers, answer = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            answer.send(_found(load, given))
            os._exit(0)
        answer.close()
        try:
            asked.send(answers.recv())
        except EOFError:
            asked.send(None)
        os.waitpid(child, 0)
        answers.close()


def _found(load: Load, given: tuple[Any, ...]) -> tuple[type | None, tuple[Any, ...]]:
    """The class and the arguments of the error with which it is refused, or None."""
    try:
        load(*given, lambda number, ordered: None)
    except Status as error:
        return Status, (error.code, str(error))
    except UnknownType as error:
        return UnknownType, (str(error),)
    except Exception as error:
        return RuntimeError, (repr(error),)
    return None, ()
