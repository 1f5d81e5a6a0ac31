"""``%load_ext pathways_lab``: what it switches on, and how it is switched off.

Rule for maintainers: loading twice is loading once; unloading restores
everything that loading changed.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from pathways_lab.client.functions import jax_patch
from pathways_lab.client.lab import hooks
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.program import program
from pathways_lab.notebook.kernel import completion, line_index
from pathways_lab.notebook.kernel.errors import Renderer, cell_name
from pathways_lab.notebook.kernel.host_output import Printed, notes_below_cell
from pathways_lab.notebook.kernel.magics import PathwaysMagics
from pathways_lab.notebook.kernel.progress import line_below_cell, notebook_line
from pathways_lab.notebook.reports import stall_figure

MAGICS: dict[str, Any] = {
    "%%pw_program": PathwaysMagics.pw_program,
    "%pw_attach": PathwaysMagics.pw_attach,
    "%pw_cluster": PathwaysMagics.pw_cluster,
}
"""Magics with options, for their completion."""


class Extension:
    """The extension in one IPython shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        in_notebook = getattr(shell, "kernel", None) is not None
        self.renderer = Renderer(shell)
        self.magics = PathwaysMagics(shell, self.renderer, Printed(in_notebook))
        self.matcher = completion.matcher({n: magic.parser for n, magic in MAGICS.items()})
        self._progress, self._notes = hooks.show_progress, hooks.open_notes
        self._line = hooks.show_line
        shell.register_magics(self.magics)
        shell.Completer.custom_matchers.append(self.matcher)
        self.renderer.install()
        formatters = shell.display_formatter.formatters
        formatters["text/plain"].for_type(Stuck, lambda story, p, cycle: p.text(str(story)))
        formatters["text/html"].for_type(Stuck, stall_figure.as_html)
        self._called, program.called = program.called, cell_name(shell)
        jax_patch.load()
        if in_notebook:
            self._note_cell()
            shell.events.register("pre_run_cell", self._note_cell)
            hooks.show_progress, hooks.show_line = notebook_line, line_below_cell
            hooks.open_notes = lambda: notes_below_cell(cell_name(shell))
            # The first picture must not wait for Bokeh's modules, nor for who draws it.
            threading.Thread(target=_import_views, name="pathways imports", daemon=True).start()

    def _note_cell(self, info: Any = None) -> None:
        """The cell that runs now may have lines that views show."""
        line_index.note(self.shell)

    def unload(self) -> None:
        """Take everything back."""
        jax_patch.unload()
        if self._note_cell in self.shell.events.callbacks["pre_run_cell"]:
            self.shell.events.unregister("pre_run_cell", self._note_cell)
        self.renderer.remove()
        for kind in ("text/plain", "text/html"):
            self.shell.display_formatter.formatters[kind].pop(Stuck, None)
        hooks.show_progress, hooks.open_notes = self._progress, self._notes
        hooks.show_line, program.called = self._line, self._called
        matchers = self.shell.Completer.custom_matchers
        if self.matcher in matchers:
            matchers.remove(self.matcher)
        manager = self.shell.magics_manager
        for kind, table in self.magics.magics.items():
            for name in table:
                manager.magics[kind].pop(name, None)


def _import_views() -> None:
    import pathways_lab.notebook.view.view  # noqa: F401
    from pathways_lab.notebook.view import renderers

    renderers.prepare()


_loaded: WeakKeyDictionary[Any, Extension] = WeakKeyDictionary()


def load(shell: Any) -> None:
    """Switch the extension on in a shell."""
    if shell not in _loaded:
        _loaded[shell] = Extension(shell)


def unload(shell: Any) -> None:
    """Switch it off."""
    extension = _loaded.pop(shell, None)
    if extension is not None:
        extension.unload()
