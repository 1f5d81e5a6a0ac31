"""The magics: thin words for what the client and the views do.

Problem: a cell is captured, run and shown by one line at its top; the cluster,
its devices and the stages of a program are one word away.

Rule for maintainers: no logic here beyond reading options and putting things
together; only options that work.
"""

from __future__ import annotations

import argparse
import linecache
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from IPython.core import magic, magic_arguments
from IPython.core.error import UsageError

from pathways_lab.client.lab import opening as labs
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.program.program import DISPATCH, How
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.notebook import dashboard
from pathways_lab.notebook.kernel import detached, line_index
from pathways_lab.notebook.kernel.cell_runner import Done, NotebookProgram
from pathways_lab.notebook.kernel.cell_text import Cell, CellRefused, parse
from pathways_lab.notebook.kernel.errors import Renderer, running_cell
from pathways_lab.notebook.kernel.host_output import Printed, pane_below_cell
from pathways_lab.notebook.panels import PANELS, chosen
from pathways_lab.notebook.reports.device_table import device_table
from pathways_lab.transport.codec import unpack

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """The type of IPython's decorators, which have none of their own."""

    def __call__(self, function: F, /) -> F: ...


argument: Callable[..., Decorator] = magic_arguments.argument
with_arguments: Callable[..., Decorator] = magic_arguments.magic_arguments
_parsed: Callable[[Any, str], Any] = magic_arguments.parse_argstring
cell_magic = cast(Decorator, magic.cell_magic)
line_magic = cast(Decorator, magic.line_magic)
no_var_expand: Decorator = magic.no_var_expand
output_can_be_silenced: Decorator = magic.output_can_be_silenced


def options_of(magic: Any, line: str) -> Any:
    """The words behind a magic's name.  Raises UsageError, with the words that could be there."""
    try:
        return _parsed(magic, line)
    except UsageError as error:
        usage = " ".join(magic.parser.format_usage().split()).removeprefix(":: ")
        raise UsageError(f"{error}; usage: {usage}") from None


PRIORITIES = {"low": -1, "normal": 0, "high": 1}


class Panels(argparse.Action):
    """``--show islands,queues``: checked names of panels."""

    values = tuple(PANELS)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        try:
            setattr(namespace, self.dest, chosen(tuple(filter(None, values.split(",")))))
        except ValueError as error:
            raise UsageError(f"argument --show: {error}") from None


@magic.magics_class
class PathwaysMagics(magic.Magics):
    """All magics of the extension.  printed: where text from hosts goes."""

    def __init__(self, shell: Any, renderer: Renderer, printed: Printed) -> None:
        super().__init__(shell)
        self.shell: Any = shell
        self.renderer, self.printed = renderer, printed
        self.last: NotebookProgram | None = None

    # --- programs ------------------------------------------------------------------

    @no_var_expand
    @output_can_be_silenced
    @with_arguments("%pw_program")  # a second percent sign in its help
    @argument("name", nargs="?", default="", help="what the program is called; bound to it")
    @argument(
        "-p", "--priority", choices=tuple(PRIORITIES), default="normal",
        help="waiting runs of higher priority are admitted first",
    )  # fmt: skip
    @argument("--on", default="", help="name of the slice for operations that nothing else places")
    @argument(
        "--show", action=Panels, default=(), metavar="PANELS",
        help=f"panels of the live view, with commas between them: {', '.join(PANELS)}",
    )  # fmt: skip
    @argument("--no-view", action="store_true", help="show no live view")
    @argument(
        "--fuse", action="store_true", help="calls that follow each other on a slice become one"
    )
    @argument(
        "--dispatch", choices=DISPATCH, default="parallel",
        help="the hosts' work for all nodes at once, or for one after the other",
    )  # fmt: skip
    @argument(
        "--detach", action="store_true",
        help="it goes on when the kernel restarts; %%pw_attach name finds it again",
    )  # fmt: skip
    @argument("--dry-run", action="store_true", help="capture and lower it, and run nothing")
    @cell_magic
    def pw_program(self, line: str, cell: str) -> Any:
        """Capture the cell as one program and run it.

        Arrays and handles that the cell reads are its inputs, the names that it
        assigns become handles at once, and ``name`` is bound to the program:
        ``name()`` runs the cell again with the present values.  The output is a
        live view, which becomes a static picture when the run has ended.  With ``--detach``
        the run goes on when the kernel restarts, and ``%pw_attach name`` finds it again.

            %%pw_program step --show queues,memory
            hidden = embed(weights, batch)
            loss = head(others, hidden)
        """
        options = options_of(self.pw_program, line)
        if options.detach and not options.name:
            raise UsageError("--detach needs a name to find the run by: %%pw_program name --detach")
        name = options.name or "cell"
        if not name.isidentifier():
            raise UsageError(f"{name!r} cannot be bound: a program's name must be a Python name")
        there = self.shell.user_ns.get(options.name)
        if there is not None and not isinstance(there, NotebookProgram):
            raise UsageError(
                f"{name!r} cannot be bound: it is a {type(there).__name__}, and a program takes"
                f" only a name that is free or a program's; choose another, or del {name} first"
            )
        try:
            code = self._parse(line, cell)
            program = NotebookProgram(
                name, code, self.shell.user_ns, self._slice(options.on),
                PRIORITIES[options.priority], How.of(options.fuse, options.dispatch),
            )  # fmt: skip
            if options.dry_run:
                with failures.at(self._line(1)):
                    captured = program.capture()
                print(captured.program.ir())
                self._bind(options.name, program)
                return None
            lab = labs.current_or_new()
            start = lab.timeline.clock()
            # An error without a line is one of the cell, not of the call of this magic.
            with failures.at(self._line(1)):
                if options.detach:
                    lab.detach()  # a client that cannot is refused before anything runs
                done = program.run()
                done.since = start
                if options.detach and done.buffers:
                    detached.detach(lab, name, done)
        except (CellRefused, SyntaxError) as error:
            raise self._refused(error, name) from None
        self._bind(options.name, program)
        if not program.runs:
            print(
                f"{name}: nothing in the cell runs on a device, so the program does nothing there;"
                " call a compiled function in it, or use arrays and handles"
            )
        if done.buffers:
            self._follow(lab, name, done, options)
            if program.may_print and self.printed.in_notebook:
                self.printed.adopt(lab.session, done.runs, pane_below_cell())
        return done.value

    @with_arguments()
    @argument("name", help="of a program that ran with --detach, or of anything that is kept")
    @argument(
        "--show", action=Panels, default=(), metavar="PANELS",
        help=f"panels of the live view, with commas between them: {', '.join(PANELS)}",
    )  # fmt: skip
    @argument("--no-view", action="store_true", help="show no live view")
    @line_magic
    def pw_attach(self, line: str) -> None:
        """Find a run again that went on without its kernel (``%%pw_program name --detach``).

        The names that its cell assigned are bound to handles of this kernel, and its picture
        goes on below this line.  ``lab.cancel(lab.kept[name])`` cancels it.
        """
        options = options_of(self.pw_attach, line)
        lab = labs.current()
        done = detached.attach(lab, options.name)
        self.shell.user_ns.update(done.assigned)
        self._follow(lab, options.name, done, options)

    def _parse(self, line: str, cell: str) -> Cell:
        # The magic's own line stays in the text, so that numbers are the editor's.
        source = f"# %%pw_program {line}\n" + self.shell.transform_cell(cell)
        number = running_cell(self.shell)
        self._file = self.shell.compile.cache(source, number, raw_code=source)
        line_index.note(self.shell, self._file)
        return parse(source, self._file)

    def _refused(self, error: CellRefused | SyntaxError, name: str) -> PathwaysError:
        if isinstance(error, CellRefused):
            message, remedy, number = error.message, error.remedy, error.line
        else:
            message, remedy, number = f"{type(error).__name__}: {error.msg}", "", error.lineno or 1
        return failures.capture_failure(message, remedy, line=self._line(number), program=name)

    def _line(self, number: int) -> Line:
        """A line of the cell that is running."""
        return Line(self._file, number, linecache.getline(self._file, number).strip())

    def _slice(self, name: str) -> Slice | None:
        if not name:
            return None
        found = self.shell.user_ns.get(name)
        if not isinstance(found, Slice):
            raise UsageError(f"argument --on: no slice is called {name!r} in this notebook")
        return found

    def _bind(self, name: str, program: NotebookProgram) -> None:
        self.last = program
        if name:
            self.shell.user_ns[name] = program

    def _follow(self, lab: Lab, name: str, done: Done, options: Any) -> None:
        """Show the run below the cell, live."""
        if not self.printed.in_notebook:
            print(f"{name}: {done.outcome or 'submitted; lab.view() tells how far it is'}")
        elif not options.no_view:
            from pathways_lab.notebook.view.view import View

            connection = lab.session.connection
            View(
                lab.timeline,
                options.show,
                title=name,
                origin=done.since,
                runs=done.runs,
                gangs=done.gangs,
                ended=lambda: done.outcome or ("ended" if lab.closed else ""),
                cancel=lambda: connection.cancel(done.buffers, earlier=True),
            ).show()

    # --- the cluster ------------------------------------------------------------------

    @with_arguments()
    @argument("--islands", type=int, help="start a lab with this many islands")
    @argument("--hosts", type=int, help="... and this many hosts per island")
    @argument("--devices", type=int, help="... and this many devices per host")
    @argument("--memory", help="bytes per device that programs may use, or text like 1GiB")
    @argument(
        "--platform", choices=("auto", "cpu"), help="auto takes accelerators if there are any"
    )
    @argument("--stop", action="store_true", help="end the lab")
    @line_magic
    def pw_cluster(self, line: str) -> Any:
        """The cluster of this notebook; a new one with options, or when the last one is gone."""
        options = options_of(self.pw_cluster, line)
        if options.stop:
            if labs.is_running():
                labs.current().close()
            return None
        wishes = {
            "islands": options.islands,
            "hosts_per_island": options.hosts,
            "devices_per_host": options.devices,
            "memory": options.memory,
            "platform": options.platform,
        }
        given = {key: value for key, value in wishes.items() if value is not None}
        return labs.start(**given) if given or not labs.is_running() else labs.current()

    @with_arguments()
    @line_magic
    def pw_devices(self, line: str) -> Any:
        """Every device of the cluster, and which slice of which client holds it."""
        options_of(self.pw_devices, line)
        lab = labs.current_or_new()
        packed = lab.session.connection.topology.get("slices", ())
        return device_table(lab.islands, [unpack(SliceBinding, entry) for entry in packed])

    @with_arguments()
    @argument(
        "page", nargs="?", default="", choices=("", *dashboard.PANELS),
        help="one panel; the usual ones together when none is named",
    )  # fmt: skip
    @argument("--height", type=int, default=dashboard.HEIGHT, help="of the frame, in pixels")
    @line_magic
    def pw_dashboard(self, line: str) -> Any:
        """The lab's pages, below the cell: all clients, also while this kernel is busy."""
        options = options_of(self.pw_dashboard, line)
        return labs.current_or_new().dashboard(options.page, height=options.height)

    # --- looking closer -------------------------------------------------------------------

    @line_magic
    def pw_ir(self, line: str) -> None:
        """Every stage of a program as text: ``%pw_ir name``, or of the last one."""
        name = line.strip()
        program = self.shell.user_ns.get(name) if name else self.last
        if program is None or not hasattr(program, "ir"):
            what = f"{name!r} is not a program" if name else "no program was captured yet"
            raise UsageError(f"{what}: %pw_ir takes the name of a program")
        try:
            print(program.ir())
        except PathwaysError:
            raise
        except TypeError as error:
            raise UsageError(f"call {name} once, or capture it: {error}") from None

    @with_arguments()
    @line_magic
    def pw_traceback(self, line: str) -> None:
        """Everything about the last error: all frames, and what its host said."""
        options_of(self.pw_traceback, line)
        print(self.renderer.everything())
