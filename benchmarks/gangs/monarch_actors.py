"""Monarch: an actor mesh with one process per host; endpoints are called or broadcast to.

There is no Chained case: endpoints take no futures.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gangs.work import FUSED, WAIT, Gang, Member, free_port
from benchmarks.harness.child import serve


class Monarch(Gang):
    """Actors of this machine.  broadcast: calls expect no answer, a last one waits."""

    def __init__(self, hosts: int, broadcast: bool) -> None:
        super().__init__(hosts)
        self._broadcast = broadcast

    def start(self) -> None:
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class MemberActor(Actor):
            """A member behind endpoints."""

            def __init__(self, of: int, address: str) -> None:
                self.what = (current_rank().rank, of, address)

            @endpoint
            async def begin(self) -> int:
                self.member = Member(*self.what)
                return 0

            @endpoint
            async def step(self, work: str, fused: bool, wait: bool) -> int:
                return self.member.step(work, fused, wait)

            @endpoint
            async def reset(self) -> int:
                return self.member.reset()

            @endpoint
            async def value(self) -> float:
                return self.member.value()

        self._mesh = this_host().spawn_procs(per_host={"hosts": self.hosts})
        address = f"127.0.0.1:{free_port()}"
        self._actors: Any = self._mesh.spawn("member", MemberActor, self.hosts, address)
        self._actors.begin.call().get()

    def reset(self) -> None:
        self._actors.reset.call().get()

    def calls(self, work: str, mode: str, count: int) -> None:
        step, fused = self._actors.step, mode == FUSED
        if mode == WAIT:
            for _ in range(count):
                step.call(work, False, True).get()
            return
        if self._broadcast:
            for _ in range(count):
                step.broadcast(work, fused, False)
        else:
            flying = [step.call(work, fused, False) for _ in range(count)]
            flying[-1].get()
        self._actors.value.call().get()

    def value(self) -> float:
        return float(next(iter(self._actors.value.call().get().values())))

    def stop(self) -> None:
        self._mesh.stop().get()


if __name__ == "__main__":
    serve(Monarch)
