"""Write the reference of everything public into docs/api.md, from docstrings.

Problem: a reference that is written by hand is right on the day it is written.  This one
is made from what ``help()`` says, and its examples are run by tests.

Public are the names of ``pw.__all__``, of ``pw.pipeline.__all__`` and of ``pw.mpmd.__all__``, what
these return, and what those have, down to the last class.  :data:`OURS` names what is not for
users.

Usage: ``python -m tools.reference`` writes the page.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pathways_lab as pw
import pathways_lab.pipeline as pipeline
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.program.program import CapturedProgram, ProgramFunction
from pathways_lab.timeline.log import Timeline
from tools import examples

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
OURS = {
    "Account.add", "Account.settle", "Accounts.of", "CapturedProgram.ready", "Chaos.ask",
    "Chaos.close", "Chaos.host", "Checking.before", "Checking.session", "Comparison.bundle",
    "CompiledFunction.as_jit", "CompiledFunction.bind", "CompiledFunction.elsewhere",
    "CompiledFunction.on_slice", "Slice.holding",
    "CompiledFunction.ready", "Dcn.of", "Handle.alone", "Handle.buffer", "Handle.buffer_id",
    "Handle.pending", "Handle.session", "Lab.rebind_slice", "Lab.release_slice", "Lab.slice_state",
    "Machine.rebind_slice", "Machine.release_slice", "Machine.session", "Machine.slice_state",
    "Memory.of", "OnStuck.wrong", "Planned.seen", "ProgramFunction.ready", "Recording.settle",
    "Simulation.world", "Slice.check", "Slice.end", "Slice.mesh_of", "Slice.placed", "Step.nodes",
    "Step.otherwise", "Step.partition", "Step.ready", "Step.types", "Timeline.end",
    "Timeline.evicted", "Timeline.extend", "Timeline.extend_later", "Timeline.grows",
    "Timeline.items", "Timeline.kept", "Timeline.plans", "Timeline.since", "Timeline.version",
    "Timeline.with_kept",
}  # fmt: skip
"""Attributes without an underscore that are there for other modules, and not for users."""
_GIVEN = (Timeline, CompiledFunction, ProgramFunction, CapturedProgram)
"""Classes of what users get from names whose annotations do not say so."""
_LIKE_ARRAYS = "As ``jax.Array."
"""How docstrings of what arrays have too begin."""
_TITLES = {
    "client": "Labs, slices, programs, values",
    "core": "Policies and failures",
    "pipeline": "Pipelines and data-parallel training",
    "sim": "Simulated machines",
    "timeline": "The timeline",
    "notebook": "Comparisons",
    "runtime": "Emulation and what hosts do",
}
_HEAD = """# Reference

Everything public, from the docstrings; `python -m tools.reference` writes this page. A test runs
all examples ([tools/examples.py](../tools/examples.py)), in one lab; before them was said

```python
{preface}
```

[All that a lab can do](all_that_a_lab_can_do.md) is the same by task.
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something public.  name: as users write it.  value: what it is.  members: of a class."""

    name: str
    value: Any
    members: tuple[tuple[str, Any], ...] = ()


def anchor(heading: str) -> str:
    """The end of a link to a heading."""
    return re.sub(r"[^a-z0-9_-]", "", heading.lower().replace(" ", "-"))


# --- what is public ----------------------------------------------------------------------


@functools.cache
def entries() -> list[Entry]:
    """All public names, and the classes behind them, in the order of the page."""
    found: dict[Any, str] = {}
    todo = [(f"pw.{name}", getattr(pw, name)) for name in pw.__all__ if name != "mpmd"]
    todo += [(f"pw.mpmd.{name}", getattr(pw.mpmd, name)) for name in pw.mpmd.__all__]
    todo += [(f"pw.pipeline.{name}", getattr(pipeline, name)) for name in pipeline.__all__]
    todo += [(given.__name__, given) for given in _GIVEN]
    while todo:
        name, value = todo.pop(0)
        if inspect.ismodule(value):  # a package that is called like its main function
            value = getattr(value, name.rpartition(".")[2])
        if value not in found:
            found[value] = name
            todo += [(each.__name__, each) for each in _returned(value)]
    bases = {base for value in found if inspect.isclass(value) for base in value.__mro__[1:]}
    bases -= set(_GIVEN)
    found = {value: name for value, name in found.items() if value not in bases}
    made = [Entry(name, value, tuple(_members(value))) for value, name in found.items()]
    return sorted(made, key=lambda e: (_section(e.value), not e.name.startswith("pw."), e.name))


def public() -> list[str]:
    """The names that must have an example: public ones, and those of their members."""
    classes = {getattr(pw, name) for name in pw.__all__} | set(_GIVEN)
    found = []
    for entry in entries():
        if entry.name.startswith("pw.") and not _is_plain(entry.value):
            found.append(entry.name)
        if inspect.isclass(entry.value) and entry.value in classes:
            named = [name for name, member in entry.members if _documented(member)]
            found += [f"{entry.value.__name__}.{name}" for name in named]
    return found


def _is_plain(value: Any) -> bool:
    """Whether it is data that comes out of something else."""
    return inspect.isclass(value) and issubclass(value, Warning)


def _section(value: Any) -> str:
    home = inspect.unwrap(value).__module__.split(".")[1:]
    return home[0] if home else ""


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, in alphabetical order."""
    if not inspect.isclass(value):
        return
    fields = {name for name, _ in _fields(value)}
    for name, _, home, member in sorted(inspect.classify_class_attrs(value)):
        if name.startswith("_") or not home.__module__.startswith("pathways_lab"):
            continue
        if name not in fields and f"{value.__name__}.{name}" not in OURS:
            yield name, member


def _function(member: Any) -> Any:
    """The function behind a method or property, or None."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return inspect.unwrap(member) if inspect.isfunction(member) else None


def _documented(member: Any) -> bool:
    return bool(inspect.getdoc(_function(member)))


def _returned(value: Any) -> list[type]:
    """Public classes that a function, or a member of a class, gives."""
    is_class = inspect.isclass(value)
    functions = [_function(member) for _, member in _members(value)] if is_class else [value]
    hints = [_hints(inspect.unwrap(f)).get("return") for f in functions if callable(f)]
    if is_class:
        known = _hints(value)
        hints += [known.get(name) for name, _ in _fields(value)]
    found = {each for hint in hints for each in _classes(hint)}
    return sorted(found, key=lambda each: each.__name__)


def _hints(value: Any) -> dict[str, Any]:
    """Types by name; none where the module does not know them at run time."""
    try:
        return typing.get_type_hints(value)
    except NameError:
        return {}


def _classes(hint: Any) -> Iterator[type]:
    own = inspect.isclass(hint) and hint.__module__.startswith("pathways_lab")
    if own and not hint.__name__.startswith("_"):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


# --- the page ------------------------------------------------------------------------------


def page() -> str:
    """The whole page."""
    all_entries = entries()
    shown = examples.by_name()
    lines = [_HEAD.format(preface=examples.PREFACE.strip())]
    section = ""
    for entry in all_entries:
        if _section(entry.value) != section:
            section = _section(entry.value)
            names = [e for e in all_entries if _section(e.value) == section]
            lines.append(f"## {_TITLES.get(section, section)}\n")
            lines.append(" · ".join(f"[`{e.name}`](#{anchor(e.name)})" for e in names) + "\n")
        lines += _entry(entry, shown)
    return "\n".join(lines).rstrip() + "\n"


def _entry(entry: Entry, shown: dict[str, str]) -> Iterator[str]:
    value = entry.value
    yield f"### {entry.name}\n"
    if inspect.isclass(value) and not _is_made(value):
        fields = "".join(f"\n    {name}: {kind}" for name, kind in _fields(value))
        yield _code(f"class {value.__name__}:{fields}" if fields else f"class {value.__name__}")
    else:
        yield _code(_signature(entry.name, value))
    yield _prose(inspect.getdoc(value) or "", _names(value))
    yield from _example(entry.name, shown)
    alike: list[str] = []
    plain: list[str] = []
    for name, member in entry.members:
        function, full = _function(member), f"{value.__name__}.{name}"
        doc = inspect.getdoc(function) or ""
        if doc.startswith(_LIKE_ARRAYS) or not doc:
            (alike if doc else plain).append(name)
            continue
        is_value = isinstance(member, property | functools.cached_property)
        bound = not isinstance(member, staticmethod)
        yield f"#### {full}\n"
        yield _code(full if is_value else _signature(full, function, method=bound))
        yield _prose(doc, _names(function))
        yield from _example(full, shown)
    if alike:
        names = ", ".join(f"`{name}`" for name in alike)
        yield f"#### {value.__name__} as an array\n"
        yield f"As `jax.Array` has them, on the handle's slice: {names}.\n"
        yield from _example(f"{value.__name__}.{alike[0]}", shown)
    if plain:
        yield f"Also {', '.join(f'`{name}`' for name in plain)}.\n"


def _example(name: str, shown: dict[str, str]) -> Iterator[str]:
    """The example of a name; where several have the same, the first one has it."""
    if name in shown:
        first = next(each for each, text in shown.items() if text == shown[name])
        same = f"Example: at [`{first}`](#{anchor(first)}).\n"
        yield _code(shown[name]) if first == name else same


def _fields(value: type) -> Iterator[tuple[str, str]]:
    """Public fields of a class of plain data, with their types."""
    if dataclasses.is_dataclass(value):
        named = [(field.name, field.type) for field in dataclasses.fields(value)]
    else:
        kinds = inspect.get_annotations(value)
        named = [(name, kinds[name]) for name in getattr(value, "_fields", ())]
    for name, kind in named:
        if not name.startswith("_") and f"{value.__name__}.{name}" not in OURS:
            yield name, _annotation(kind)


def _is_made(value: type) -> bool:
    """Whether users make such objects themselves."""
    return dataclasses.is_dataclass(value) and getattr(pw, value.__name__, None) is value


def _signature(name: str, value: Any, *, method: bool = False) -> str:
    """The call, as one would write it; a row for each parameter when they are many."""
    signature = inspect.signature(value)
    parts = list(_parameters(list(signature.parameters.values())[method:]))
    gives = signature.return_annotation
    nothing = gives in (inspect.Signature.empty, None, "None") or inspect.isclass(value)
    arrow = "" if nothing else f" -> {_annotation(gives)}"
    whole = f"{name}({', '.join(parts)}){arrow}"
    if len(whole) <= 92:
        return whole
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Parameters as they are written, with the marks between kinds."""
    marked = False
    for number, parameter in enumerate(parameters):
        marked = marked or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            marked = True
            yield "*"
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        yield text
        rest = parameters[number + 1 :]
        if parameter.kind is parameter.POSITIONAL_ONLY and not (
            rest and rest[0].kind is parameter.POSITIONAL_ONLY
        ):
            yield "/"


def _annotation(value: Any) -> str:
    text = getattr(value, "__forward_arg__", value)
    return text if isinstance(text, str) else getattr(value, "__name__", str(value))


def _default(value: Any) -> str:
    return "..." if "<" in repr(value) else repr(value)


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```\n"


_ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")
_NAMES = r"\*{0,2}\w+(?:, \*{0,2}\w+)*"
_DESCRIBED = re.compile(rf"^({_NAMES})( \([^)]*\))?: ")
_NOT_FOR_USERS = ("Problem:", "Rule for maintainers:", "How:", "Paper:", ">>>")


def _prose(doc: str, names: Collection[str] | None) -> str:
    """A docstring as Markdown: what it says of *names* (None: of any) is a list, code is code."""
    doc = _ROLE.sub(lambda m: f"`{m[1].removeprefix('pathways_lab.')}`", doc).replace("``", "`")
    paragraphs = [p for p in re.split(r"\n\s*\n", doc) if not p.startswith(_NOT_FOR_USERS)]
    return "\n\n".join(_paragraph(p, names) for p in paragraphs) + "\n"


def _paragraph(text: str, names: Collection[str] | None) -> str:
    if text.startswith("    "):
        return _code(textwrap.dedent(text)).rstrip()
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        # Several descriptions may stand on one line, two spaces apart.
        for number, part in enumerate(re.split(rf"(?<=[.;])  (?={_NAMES}: )", line)):
            described = _DESCRIBED.match(part)
            if described and (names is None or _all_named(described[1], names)):
                blocks.append([_DESCRIBED.sub(r"- **\1**\2: ", part)])
            elif not blocks or (part[:1].isupper() and _ended(blocks[-1])):
                blocks.append([part])
            elif number:
                blocks[-1][-1] += f"  {part}"
            else:
                blocks[-1].append(part.strip())
    kinds = [block[0].startswith("- ") for block in blocks]
    out = ""
    for number, block in enumerate(blocks):
        if number:
            out += "\n" if kinds[number - 1] and kinds[number] else "\n\n"
        out += ("\n  " if kinds[number] else "\n").join(block)
    return out


def _all_named(text: str, names: Collection[str]) -> bool:
    return all(name.lstrip("*") in names for name in text.split(", "))


def _ended(block: list[str]) -> bool:
    """Whether a description is over: what follows is about all of it."""
    return block[0].startswith("- ") and block[-1].rstrip().endswith((".", ")"))


def _names(value: Any) -> Collection[str] | None:
    """The names that a docstring may describe: parameters; None: any, for a class."""
    return None if inspect.isclass(value) else set(inspect.signature(value).parameters)


if __name__ == "__main__":
    PAGE.write_text(page())
