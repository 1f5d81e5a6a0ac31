"""The services at which hosts meet, as the control plane's reactor sees them.

Problem: the book of formations is pure and lives in the reactor's thread, while
the coordination process answers whenever it likes, in a thread of its own, and
may be gone.

Rule for maintainers: everything comes back through *post*; nothing is decided
here.  The process is started by the first formation: a lab whose slices all
lie on one host never has it.

Paper: section 4.5.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from pathways_lab.runtime.islands.coordination_relay import to_service
from pathways_lab.runtime.islands.coordination_service import Coordination, CoordinationLost
from pathways_lab.runtime.islands.process_groups import Book
from pathways_lab.runtime.islands.tls_tunnel import carry
from pathways_lab.runtime.processes.child_process import ChildDied


class Introductions:
    """Implements :class:`pathways_lab.runtime.islands.process_groups.Services` with a process.

    folder: see :class:`Coordination`.
    post(function, *args): run it in the reactor's thread.
    """

    def __init__(self, folder: Path, post: Callable[..., None]) -> None:
        self._post = post
        self._books: dict[int, Book] = {}
        self._addresses: dict[int, str] = {}
        self._coordination = Coordination(folder, self._lost)

    @property
    def pid(self) -> int | None:
        """The process number of the coordination process, while there is one."""
        return self._coordination.pid

    def open(self, formation: int, processes: int, book: Book) -> None:
        """The book hears :meth:`Book.opened` or :meth:`Book.refused` later."""
        self._books[formation] = book

        def done(answer: str | CoordinationLost) -> None:
            if isinstance(answer, str):
                self._addresses[formation] = answer
                self._post(book.opened, formation, answer)
            else:
                self._post(book.refused, formation, str(answer))

        try:
            self._coordination.open(formation, processes, done)
        except (CoordinationLost, ChildDied) as error:
            # It could not even be started: no memory, no process left.
            self._post(book.refused, formation, str(error))

    def bring(self, formation: object, sealed: ssl.SSLSocket) -> None:
        """Carry a stream of a host on another machine to a service."""
        try:
            service = to_service(self._addresses[formation])  # type: ignore[index]
        except (LookupError, TypeError, OSError):  # it has ended meanwhile
            sealed.close()
        else:
            carry(service, sealed)

    def close(self, formation: int) -> None:
        """Nobody needs introductions there any more."""
        self._books.pop(formation, None)
        self._addresses.pop(formation, None)
        self._coordination.close(formation)

    def end(self) -> None:
        """End the process.  Again is fine."""
        self._coordination.end()

    def _lost(self, formations: list[int], why: str) -> None:
        for number in formations:
            if (book := self._books.get(number)) is not None:
                self._post(book.orphaned, [number])
