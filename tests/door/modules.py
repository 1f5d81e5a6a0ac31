"""Modules are read, and spoilt, in a process that they may end.

Problem: MLIR in jaxlib does not survive all damaged modules.  It ends the door of the program
that sent one (docs/door.md); a fuzzer that has the door in its own process would end too.

How: a process that starts no threads forks for each module.  Its child's answer counts; a module
that ended the child is refused here.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from jax._src.interpreters import mlir
from jaxlib import _jax
from jaxlib.mlir import ir

from pathways_lab.door.dtypes import UnknownType
from pathways_lab.door.protocol.status import INVALID, Status
from tests.door.requests import artefact

Load = Callable[..., Any]
Spoil = Callable[[bytes, float], bytes]
NO_MODULE = b"no module"


def spoilt(data: bytes, seed: float) -> bytes:
    """A module with another word or number in it; or none, where MLIR does not read it.

    Damaged bytes of one are not tried: MLIR's reader corrupts its process's memory on some.
    """
    rng = random.Random(seed)
    try:
        with mlir.make_ir_context():
            parsed = _jax.mlir.deserialize_portable_artifact(data)
            words = str(parsed.operation).split(" ")
            place = rng.randrange(len(words))
            words[place] = rng.choice(
                (rng.choice(words), "0", "2", "9" * 30, "f64", "tensor<xf32>")
            )
            return artefact(ir.Module.parse(" ".join(words)))
    except Exception:  # MLIR raises anything
        return NO_MODULE


class Fatal:
    """The modules that ended the process that read or made them."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def elsewhere(load: Load) -> Iterator[tuple[Load, Spoil, Fatal]]:
    """*load*, ``programs.load``, for modules that another process has survived, and
    :func:`spoilt` in that process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, load))
    process.start()
    there.close()
    fatal = Fatal()

    def asked(*given: Any) -> Any:
        here.send(given)
        found = here.recv()
        fatal.count += found is None
        return found

    def read(module: bytes, devices: tuple[int, ...], kind: str, remote: Any) -> Any:
        found = asked(module, devices, kind)
        if found is None:
            raise Status(INVALID, "compile_request: a module that ends the process that reads it")
        raised, values = found
        if raised is not None:
            raise raised(*values)
        return load(module, devices, kind, remote)

    def spoil(module: bytes, seed: float) -> bytes:
        found = asked(module, seed)
        return NO_MODULE if found is None else bytes(found)

    try:
        yield read, spoil, fatal
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
            answer.send(_found(load, given) if len(given) == 3 else spoilt(*given))
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
