"""The slots that a host holds: their names, their readers, their bytes.

Problem: a buffer lives longer than the run that made it, is read by clients
whenever they like (also before it exists), and must give its memory back in
the moment in which its last name and its last use are gone.

Rule for maintainers: no JAX, no threads, no clock.  Code that looks at a slot
across an event says so with :meth:`Buffers.use` and :meth:`Buffers.release`.

Paper: section 4.2 (reference counts of logical buffers), section 4.6.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from pathways_lab.core.errors import Failure
from pathways_lab.executor.actions import Action, Refuse, Serve
from pathways_lab.executor.device_memory import Memory
from pathways_lab.executor.local_array import FAILED, READY, Reader, Slot

_REMEMBERED = 4096
"""Ids of the past that are remembered, so that late messages about them find them."""

Item = TypeVar("Item", bound=Hashable)


class Past(Generic[Item]):
    """The last few thousand ids of things that are over."""

    def __init__(self) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()

    def add(self, item: Item) -> None:
        self._items[item] = None
        self._items.move_to_end(item)
        if len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)

    def __contains__(self, item: Item) -> bool:
        return item in self._items


class Buffers:
    """Names, users and bytes of a host's slots.

    memory: the account of their bytes.
    actions: where answers to fetches go.
    uploaded: bytes of uploads that lie in the host's own memory, by number of their client.
    """

    def __init__(self, host: str, actions: list[Action], memory: Memory[Any]) -> None:
        self.memory = memory
        self.uploaded: Counter[int] = Counter()
        self._host = host
        self._actions = actions
        self._slots: dict[int, Slot] = {}
        self._freed: Past[int] = Past()
        self._fetches: dict[int, list[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, buffer: int) -> Slot | None:
        return self._slots.get(buffer)

    def on_slice(self, slice_id: int) -> tuple[int, ...]:
        """The buffers that live on a slice."""
        return tuple(b for b, slot in self._slots.items() if slot.value.slice == slice_id)

    # --- names, users, bytes ----------------------------------------------------------

    def bind(self, buffer: int, slot: Slot) -> None:
        """Clients know *slot* as *buffer* from now on, unless they have dropped it already."""
        if buffer in self._freed:
            return
        self._slots[buffer] = slot
        slot.buffers.add(buffer)
        slot.names += 1
        for fetch in self._fetches.pop(buffer, []):
            self.ask(fetch, slot)

    def free(self, buffer: int) -> None:
        """Clients do not know this buffer any more."""
        self._freed.add(buffer)
        for fetch in self._fetches.pop(buffer, []):
            self._actions.append(Refuse(fetch, self._dropped(buffer)))
        slot = self._slots.pop(buffer, None)
        if slot is not None:
            slot.buffers.discard(buffer)
            self.unname(slot)

    def forget(self, buffer: int) -> None:
        """It is elsewhere now, and may come back under the same number."""
        slot = self._slots.pop(buffer, None)
        if slot is not None:
            slot.buffers.discard(buffer)
            self.unname(slot)

    def name(self, slot: Slot) -> None:
        """A run calls the slot by one of its values."""
        slot.names += 1

    def unname(self, slot: Slot) -> None:
        slot.names -= 1
        self._drop_if_idle(slot)

    def use(self, slot: Slot) -> None:
        slot.users += 1

    def release(self, slot: Slot) -> None:
        slot.users -= 1
        self._drop_if_idle(slot)

    def _drop_if_idle(self, slot: Slot) -> None:
        # A failed slot needs only zeros, and only while a gang uses them.
        if slot.users <= 0 and (slot.names <= 0 or slot.state == FAILED):
            slot.payload = None
            self.uncount(slot)
            self._leave_host(slot)

    def upload(self, buffer: int, slot: Slot) -> None:
        """The bytes of an upload lie in the host's own memory until a computation needs them."""
        slot.holder = buffer >> 32
        self.uploaded[slot.holder] += _nbytes(slot)

    def _leave_host(self, slot: Slot) -> None:
        if slot.holder is not None:
            self.uploaded[slot.holder] -= _nbytes(slot)
            if not self.uploaded[slot.holder]:
                del self.uploaded[slot.holder]
            slot.holder = None

    def count(self, slot: Slot) -> None:
        """The slot's memory is taken from now on."""
        self._leave_host(slot)
        if not slot.counted:
            slot.counted = True
            self.memory.take(slot.locals, slot.value.nbytes)

    def uncount(self, slot: Slot) -> None:
        """The slot's memory is free, or belongs to another slot now."""
        if slot.counted:
            slot.counted = False
            self.memory.give(slot.locals, slot.value.nbytes)

    # --- fetches ----------------------------------------------------------------------

    def fetch(self, fetch: Hashable, buffer: int) -> None:
        """Somebody wants the bytes of a buffer: Serve or Refuse will follow, perhaps later."""
        slot = self._slots.get(buffer)
        if slot is not None:
            self.ask(fetch, slot)
        elif buffer in self._freed:
            self._actions.append(Refuse(fetch, self._dropped(buffer)))
        else:
            self._fetches.setdefault(buffer, []).append(fetch)

    def forget_fetches(self, which: Callable[[Hashable], bool]) -> None:
        """Those who asked are gone."""
        for buffer, fetches in list(self._fetches.items()):
            self._fetches[buffer] = [fetch for fetch in fetches if not which(fetch)]
            if not self._fetches[buffer]:
                del self._fetches[buffer]

    def ask(self, fetch: Hashable, slot: Slot) -> None:
        """Serve or Refuse follows, perhaps later."""
        reader = Reader()
        slot.readers.append(reader)
        self.use(slot)

        def answer() -> None:
            if slot.state == READY:
                self._actions.append(Serve(fetch, slot, reader))
                return
            assert slot.failure is not None
            self._actions.append(Refuse(fetch, slot.failure))
            self.end_reading(slot, reader)

        if not slot.when_settled(answer):
            answer()

    def end_reading(self, slot: Slot, reader: Reader) -> None:
        """A reader has what it wanted: donations may go on."""
        slot.readers.remove(reader)
        for call in reader.when_over:
            call()
        self.release(slot)

    def _dropped(self, buffer: int) -> Failure:
        return Failure(
            "lost",
            f"buffer {buffer} was dropped: its last handle is gone",
            remedy="keep a reference to the handle while you need its value",
            host=self._host,
        )


def _nbytes(slot: Slot) -> int:
    """Bytes of its shards on all devices of the host."""
    return slot.value.nbytes * len(slot.locals)
