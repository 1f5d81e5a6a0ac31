"""The part of a lab that looks after it: ``lab.stuck()``, ``lab.on_stuck(...)``,
``lab.stacks(host)``, ``lab.memory()``, ``lab.check_nans()``, ``lab.verify()``,
``lab.operations()``, ``lab.chaos``.

Problem: a lab that stands still, or is full, must say why, do as it was told, find the
device that computes wrong, and let itself be tried.

Rule for maintainers: a part of :class:`pathways_lab.Lab`; thin, like it.

Paper: section 4.4, section 4.6.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pathways_lab.client.chaos.chaos import Chaos
from pathways_lab.client.code import variables
from pathways_lab.client.functions import scopes
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.memory_table import Memory
from pathways_lab.client.lab.topology_view import Device
from pathways_lab.client.parts import Parts
from pathways_lab.client.program.operations import Operations, brief, profiled
from pathways_lab.client.session import failures
from pathways_lab.client.session.session import Session
from pathways_lab.client.verify import device_check, step_check
from pathways_lab.client.verify.device_check import Verification
from pathways_lab.core.diagnosis.stacks import Stacks
from pathways_lab.core.diagnosis.stall_actions import Action, OnStuck
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.memory.holdings import MOST, Holdings
from pathways_lab.runtime import nan_checks
from pathways_lab.runtime.cluster import attach
from pathways_lab.runtime.cluster.device_supervisor import stacks_of
from pathways_lab.transport.codec import pack, unpack

if TYPE_CHECKING:
    import distributed


@dataclasses.dataclass(frozen=True, slots=True)
class Checking:
    """Tests that ``lab.check_nans(...)`` has begun; they end with the block."""

    session: Session
    before: frozenset[str]

    def __enter__(self) -> Checking:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.checks = self.before

    def __repr__(self) -> str:
        found = " and ".join(name.removeprefix("debug_") for name in sorted(self.session.checks))
        return f"<gangs are tested for {found or 'nothing'}>"


class Care(Parts):
    """The part of a lab that has to do with faults."""

    _target: Any = None
    """The Dask client or cluster that ``pw.connect`` was given, if it was one."""

    def slice_at(
        self,
        devices: Sequence[Device | tuple[str, int]],
        shape: int | tuple[int, ...] | None = None,
        axes: str | tuple[str, ...] | None = None,
        *,
        wait: bool | float = True,
    ) -> Slice:
        """A slice of these physical devices and no others: for who looks into devices.

        devices: in the order of the mesh: entries of :meth:`devices`, or host and number of
            each, as in ``slice.binding``.
        shape, axes, wait: as of :meth:`slice`.
        """
        pairs = [(d.host, d.number) if isinstance(d, Device) else d for d in devices]
        at = [
            (slice_request.name("host", h), slice_request.count("device", n, 0)) for h, n in pairs
        ]
        request = slice_request.slice_request(len(at) if shape is None else shape, axes)
        return self._bound(dataclasses.replace(request, at=tuple(at)), wait)

    def stuck(self, seconds: float = 1.0) -> Stuck:
        """The gangs that were launched so long ago and have not ended, and who waits for whom.

        seconds: how long ago.
        Hosts are asked, and nothing is disturbed: long work is legal.  The answer
        prints as a story, and shows as a figure in a notebook; it is false when nothing
        is late, and all hosts answer.
        """
        asked = {"seconds": slice_request.seconds("seconds", seconds)}
        packed = self.session.connection.questions.ask("stuck", asked).fields["story"]
        return Stuck() if packed is None else unpack(Stuck, packed)

    def stacks(self, host: str, *, native: bool = False) -> Stacks:
        """The lines at which the threads of a host's device process stand, lines of yours first.

        native: with the frames of native code, read by py-spy, which the host's worker has to
            have (``pip install py-spy``) and be allowed to use.

        The process need not answer anything for it: a callback that never returns, or a
        deadlock, is seen all the same.  Only owners of the lab can ask: who holds the
        credentials of its Dask cluster.

        >>> lab.stacks("island0/host1").lines                # doctest: +SKIP
        (wait_for_data at train.py:12,)
        """
        told = self.chaos.ask(stacks_of, self.chaos.host(host).name, native)
        if told["wrong"]:
            raise failures.refused(
                f"{host} shows no stacks: {told['wrong']}", "lab.stuck() asks the hosts"
            )
        return Stacks(host, told["pid"], told["state"], told["text"])

    def memory(self, most: int = 1000) -> Memory:
        """The values on devices: who has each, where, how many bytes, and why it is kept.

        The answer prints as a table, the largest value first, with sums by device and by
        owner; ``.values``, ``.runs``, ``.devices``, ``.owners`` have it as data.  Bytes are
        those that the lab counts: values, and what runs under way have reserved.

        most: so many values are described, those with most bytes, from 1 to 5,000; ``.others``
            is how many more there are.  All sums are of all of them.

        An owner of the lab sees everything.  Others see their own values, values that they
        have taken, and sums of the rest.  It is asked for now and costs nothing before.

        >>> lab.memory().values[0].why                       # doctest: +SKIP
        ('a handle is held', "published as 'weights'")
        """
        told = {"most": slice_request.count("most", most, 1, MOST)}
        answer = self.session.connection.questions.ask("memory", told).fields["holdings"]
        return Memory.of(unpack(Holdings, answer), variables.of_caller())

    def check_nans(self, on: bool = True, *, infs: bool = False) -> Checking:
        """Have every gang tested on its devices for NaNs; the first one is said with its line.

        on: for all that this kernel runs from now on; False ends it.  In a ``with`` block
            only for what is called in the block, whenever that runs.
        infs: for infinities too.

        A gang that is given or makes one fails.  Its error names program, node, line, the
        argument or result, the element, shard, host and device, and all that depends on it
        fails of the same.  As with ``jax.debug_nans`` it costs time: functions are compiled
        once more, gangs read their arguments and results once more, and they run one by one.
        Off, it costs nothing.  Loops of :meth:`multi_controller` are not tested.

        >>> with lab.check_nans():                           # doctest: +SKIP
        ...     loss = train(params, batch)
        >>> loss.result()                                    # doctest: +SKIP
        PathwaysError: scale has made a NaN: element [0, 3] of its result 0 (float32[4,8]), ...
        """
        wanted = nan_checks.TESTS if infs else nan_checks.TESTS[:1]
        checking = Checking(self.session, self.session.checks)
        self.session.checks = frozenset(wanted if on else ())
        return checking

    def on_stuck(
        self, action: Action, *, after: float = 30.0, silence: float | None = 60.0
    ) -> OnStuck:
        """Say what the lab does when all wait for one gang, or a host does not answer.

        action: what is done when everybody has waited for one gang for *after* seconds.
            ``"report"``: the story is printed where its run was started.  ``"fail"``:
            that run fails, and its error tells the story; what cannot be interrupted
            still ends on its devices.  ``"restart"``: the device processes that hold
            it up, or do not answer, are restarted; what is on them fails.
        silence: seconds after which a host that does not answer anything is
            restarted, whatever the action (None: never).

        It holds for all clients, and only owners of the lab can say it.  A lab begins
        with ``lab.on_stuck("report", after=30, silence=60)``; long work is legal.

        >>> lab.on_stuck("restart", after=10)                # doctest: +SKIP
        """
        told = OnStuck(action, after, silence)
        wrong = told.wrong()
        if wrong:
            raise failures.refused(wrong, 'lab.on_stuck("restart", after=10)')
        answer = self.session.connection.questions.ask("watchdog", {"told": pack(told)})
        return unpack(OnStuck, answer.fields["told"])

    @property
    def watchdog(self) -> OnStuck:
        """The lab's reaction to what is stuck, and who has said so (:meth:`on_stuck`)."""
        answer = self.session.connection.questions.ask("watchdog", {})
        return unpack(OnStuck, answer.fields["told"])

    def verify(
        self,
        step: Callable[..., Any] | None = None,
        /,
        *args: Any,
        rounds: int = 3,
        wait: bool | float = True,
    ) -> Verification:
        """Find a device that computes wrong and says nothing.

        Without arguments every device runs the same computation, alone: products of
        matrices, sums, functions, sorting, integers, copies.  The answer on which
        most devices of one make agree, to the bit, is right.

        step, args: a compiled function of your own, and what it is called with.  It runs
            again where it is, and then on other devices, until it shows which one spoils it.
        rounds: so many, each on other numbers; of what runs without arguments.
        wait: as of :meth:`slice`.

        The answer prints as what was seen; ``.ok``, ``.suspects``.  Results stay on their
        devices, a few words of each device travel.  Raises PathwaysError where there is
        nobody to compare with, and for what cannot run twice: functions that donate, or
        call back into Python.

        >>> lab.verify().suspects                            # doctest: +SKIP
        >>> lab.verify(step, params, batch)                  # doctest: +SKIP
        """
        scopes.check_outside("lab.verify", "waits for what devices have computed")
        if step is None:
            return device_check.scan(self, slice_request.count("rounds", rounds), wait)
        return step_check.replay(self, step, args, wait)

    def operations(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Operations:
        """The operations of XLA inside of one gang, and their times: ``function(*args)``, run once.

        function: a compiled function that donates nothing; args, kwargs: what it is called with.

        JAX's profiler is on while the gang runs, on the hosts of its slice, and what else they run
        then is slower, too.  The answer prints as a table, the longest operation first, with the
        device that took longest for it.  Views have the longest ones in the card of a gang of that
        function, when somebody clicks one.  Tried with CPU devices and one GPU; never with TPUs.

        Raises PathwaysError for functions that donate, and where a host is profiled already.

        >>> lab.operations(step, params, batch)[0].name      # doctest: +SKIP
        'dot_general.3'
        """
        scopes.check_outside("lab.operations", "waits for what hosts have seen")
        found = profiled(self.session, function, args, kwargs)
        self.timeline.operations[found.function] = brief(found)
        return found

    @functools.cached_property
    def chaos(self) -> Chaos:
        """Faults on purpose, with the outcome said first and looked at afterwards.

        ``kill(host)``, ``hang(host, seconds)``, ``slow(host, factor)``, ``lose(island)``,
        ``delay``, ``drop``, ``duplicate``, ``partition`` of what is said between two
        islands or hosts, ``fill_memory(host)``, ``flip(host, device)``, ``lose_client()``,
        ``lose_scheduler()``.
        Everything about them is real.  Only owners of the lab can do this: who holds
        the credentials of its Dask cluster.

        >>> with lab.chaos.kill("island0/host1") as fault:   # doctest: +SKIP
        ...     out = train(w, x)
        >>> fault                                            # doctest: +SKIP
        """
        return Chaos(self, self._control)

    def dask_client(self) -> distributed.Client:
        """A Dask client of the lab's cluster; the caller closes it."""
        self.session.connection.check()
        if self.embedded is not None:
            return self.embedded.dask_client()
        if self._target is not None:
            return attach.dask_client(self._target)
        raise failures.refused(
            "this lab was not started here, and not connected to through Dask",
            "use the distributed.Client of the cluster",
        )
