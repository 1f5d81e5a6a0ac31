"""The map of the code, kept true: imports, lengths of files, use of private interfaces.

Law: imports point down only, and *all* imports count: at the top of a module,
inside functions, for types only, by name through importlib.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = "pathways_lab"

LEVELS = (
    ("core",),
    ("executor",),
    ("timeline",),
    ("transport",),
    ("sim", "runtime"),
    ("client", "testing"),
    ("pipeline", "door"),
    ("notebook", "workloads", "course"),
    ("cli",),
)
"""Bottom to top.  Layers on one level are siblings and do not know each other."""

RANK = {layer: rank for rank, level in enumerate(LEVELS) for layer in level}
SURFACE = ("__init__",)
"""The public surface re-exports from everywhere; nobody inside imports it."""

OUTSIDE = ("notebooks", "extensions", "benchmarks", "tests", "tools", "pathways_lab_server")
"""Nobody imports these."""

IMPURE = {
    *("time", "datetime", "random", "secrets", "uuid", "logging", "asyncio", "threading"),
    *("socket", "selectors", "subprocess", "multiprocessing", "os", "io", "pathlib", "tempfile"),
}
"""Standard, but not for the core: clocks, chance, logs, tasks, and the machine."""

FRONT_END = {"bokeh", "anywidget", "ipywidgets", "IPython", "ipykernel", "traitlets", "PIL"}
JAX_PRIVATE = {
    "runtime/jax_private.py": "the one door for everything that runs beside JAX",
    "runtime/jax_callbacks.py": "the same for callbacks, which are an idea of their own",
    "runtime/jax_modules.py": "the same for modules that other processes lowered",
    "runtime/jax_ifrt.py": "the same for programs over several meshes",
    "runtime/jax_backends.py": "the same for a backend that comes after JAX's first use",
    "runtime/islands/jax_coordination.py": "a process that loads no more of JAX, to start quickly",
}
"""Who may touch private JAX, and why it is not one file less."""

MOST = 20
"""Modules of one folder, without its ``__init__``: more cannot be seen at once."""

LONGEST = 600
LONGER_BY_REVIEW: dict[str, tuple[int, str]] = {}
"""File: (its own limit, the reason why it is not split)."""


@dataclass
class Module:
    """One file of the package and everything that it imports, as dotted names."""

    path: str
    name: str
    lines: int
    imports: set[str] = field(default_factory=set)
    dotted: set[str] = field(default_factory=set)
    """Attribute chains rooted in an imported name, with the name resolved."""

    @property
    def layer(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that a ``from`` import names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as a list; empty when it does not start at a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*reversed([*parts, node.id])] if isinstance(node, ast.Name) else []


def read(path: Path, package_root: Path) -> Module:
    """Parse one file of the package below *package_root*."""
    relative = path.relative_to(package_root).as_posix()
    dotted = [TOP, *relative.removesuffix(".py").split("/")]
    if dotted[-1] == "__init__":
        dotted.pop()
        package = ".".join(dotted)
    else:
        package = ".".join(dotted[:-1])
    text = path.read_text()
    module = Module(relative, ".".join(dotted), len(text.splitlines()))
    bound: dict[str, str] = {}
    tree = ast.parse(text, filename=relative)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.imports.add(alias.name)
                local = alias.asname or alias.name.split(".")[0]
                bound[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, package)
            for alias in node.names:
                module.imports.add(f"{source}.{alias.name}")
                bound[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = chain(node.func)
            if called and called[-1] in ("import_module", "__import__"):
                module.imports.add(str(node.args[0].value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := chain(node)) and parts[0] in bound:
            module.dotted.add(".".join([bound[parts[0]], *parts[1:]]))
    return module


def package(root: Path) -> list[Module]:
    return [read(path, root) for path in sorted(root.rglob("*.py"))]


def inside(module: Module) -> Iterator[str]:
    """The imports of *module* that stay in the package, without the leading name."""
    for name in sorted(module.imports):
        if name == TOP or name.startswith(TOP + "."):
            yield name.removeprefix(TOP).removeprefix(".")


def misdirected(modules: list[Module]) -> list[str]:
    """Imports that point up, sideways, to the public surface, or out of the package."""
    problems = []
    for module in modules:
        if module.layer in SURFACE:
            continue
        mine = "cli" if module.layer == "__main__" else module.layer
        if mine not in RANK:
            problems.append(f"{module.path}: {mine!r} is in no layer")
            continue
        for name in inside(module):
            theirs = name.split(".")[0]
            if theirs not in RANK:
                problems.append(f"{module.path}: imports the public surface ({TOP}.{name})")
            elif theirs != mine and RANK[theirs] >= RANK[mine]:
                problems.append(
                    f"{module.path}: {mine} imports {TOP}.{name}, which is not below it"
                )
        problems += [
            f"{module.path}: imports {name}, which nobody imports"
            for name in sorted(module.imports)
            if name.split(".")[0] in OUTSIDE
        ]
    return problems


OPTIONAL = {"timeline/export/frame.py": {"pandas"}, "timeline/export/sql.py": {"duckdb"}}
"""Packages that one module imports when it is asked to."""


def misplaced(modules: list[Module]) -> list[str]:
    """Third-party imports in layers that must do without them."""
    problems = []
    for module in modules:
        packages = {name.split(".")[0] for name in module.imports} - {TOP}
        foreign = packages - sys.stdlib_module_names
        if module.layer in ("core", "executor"):
            bad = foreign | (packages & IMPURE)
        elif module.layer == "timeline":
            bad = foreign - {"numpy"} - OPTIONAL.get(module.path, set())
        elif module.layer in ("notebook", "cli"):
            bad = set()
        else:
            bad = foreign & FRONT_END
        problems += [f"{module.path}: {module.layer} imports {name}" for name in sorted(bad)]
    return problems


def private(modules: list[Module], owners: tuple[str, ...]) -> dict[str, list[str]]:
    """By file: names below the packages *owners* that are private by their spelling."""
    found: dict[str, list[str]] = {}
    for module in modules:
        names = sorted(
            name
            for name in module.imports | module.dotted
            if name.split(".")[0] in owners
            and any(
                part == "xla_client" or (part.startswith("_") and not part.endswith("__"))
                for part in name.split(".")[1:]
            )
        )
        if names:
            found[module.path] = names
    return found


def knots(modules: list[Module]) -> list[list[str]]:
    """Groups of modules that import each other in a circle, lazily or not."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {}
    for module in modules:
        edges[module.name] = set()
        for name in module.imports:
            while name and name not in names:
                name = name.rpartition(".")[0]
            if name and name not in (module.name, TOP):
                edges[module.name].add(name)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        front = [start]
        while front:
            for target in edges[front.pop()] - seen:
                seen.add(target)
                front.append(target)
        return seen

    reached = {name: reach(name) for name in names if name != TOP}
    circles = {
        tuple(sorted(b for b in reached if b in reached[a] and a in reached[b]))
        for a in reached
        if a in reached[a]
    }
    return [list(circle) for circle in sorted(circles)]


def too_long(root: Path, folders: tuple[str, ...]) -> list[str]:
    """Source files over the limit, or over the limit that a review gave them."""
    problems = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".py", ".js", ".css", ".sh") or "node_modules" in path.parts:
                continue
            name = path.relative_to(root).as_posix()
            limit, _ = LONGER_BY_REVIEW.get(name, (LONGEST, ""))
            lines = len(path.read_text().splitlines())
            if lines > limit:
                problems.append(f"{name}: {lines} lines, the limit is {limit}")
    return problems


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Of the package.  Every process of tests imports this file, and one of them runs it."""
    return package(ROOT / TOP)


def test_imports_point_down_only(modules):
    assert misdirected(modules) == []


def test_layers_do_without_what_they_must_not_know(modules):
    """The core is standard library and pure; only the top layers draw and talk to IPython."""
    assert misplaced(modules) == []


def test_no_module_is_part_of_a_circle(modules):
    assert knots(modules) == []


def test_private_jax_is_touched_behind_its_door_only(modules):
    assert private(modules, ("jax", "jaxlib")).keys() <= JAX_PRIVATE.keys()


def test_the_second_door_loads_nothing_of_jax_itself(modules):
    """That is its only reason to exist."""
    (door,) = (m for m in modules if m.path == "runtime/islands/jax_coordination.py")
    assert {name.split(".")[0] for name in door.imports} <= {"__future__", "typing", "jaxlib"}


def test_at_most_one_module_touches_private_dask(modules):
    assert len(private(modules, ("dask", "distributed"))) <= 1


def test_files_are_short():
    folders = (TOP, "extensions", "tests", "tools", "benchmarks")
    assert too_long(ROOT, folders) == []


def crowded(root: Path) -> list[str]:
    """Folders with more modules than fit into one glance."""
    folders = sorted({path.parent for path in root.rglob("*.py")})
    counts = {folder: len(list(folder.glob("[!_]*.py"))) for folder in folders}
    return [f"{each.relative_to(root)}: {n} modules" for each, n in counts.items() if n > MOST]


def test_folders_are_small():
    assert crowded(ROOT / TOP) == []


def test_a_planted_crowd_is_found(tmp_path):
    planted(tmp_path, {f"core/a{n}.py": "" for n in range(MOST + 1)})
    planted(tmp_path, {f"core/b/a{n}.py": "" for n in range(MOST)})
    assert crowded(tmp_path) == ["core: 21 modules"]


def test_reviewed_exceptions_are_still_needed():
    """A file that became short again loses its exception, and each exception has its reason."""
    for name, (limit, reason) in LONGER_BY_REVIEW.items():
        assert limit > LONGEST
        assert len((ROOT / name).read_text().splitlines()) > LONGEST
        assert len(reason) > 20


def test_everything_was_read(modules):
    """The checks above are worth nothing on an empty list."""
    layers = {module.layer for module in modules}
    assert {*RANK, "__init__"} <= layers


def planted(tmp_path: Path, files: dict[str, str]) -> list[Module]:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package(tmp_path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "from pathways_lab.runtime import wire"),
        ("core/a.py", "def f():\n    from pathways_lab import client"),
        (
            "core/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pathways_lab.sim",
        ),
        ("core/a.py", "from ..timeline import log"),
        (
            "runtime/a.py",
            "import importlib\nimportlib.import_module('pathways_lab.client.lab.lab')",
        ),
        ("runtime/a.py", "import pathways_lab.sim.heap"),
        ("client/a.py", "import pathways_lab as pw"),
        ("client/a.py", "from pathways_lab import start"),
        ("notebook/a.py", "from pathways_lab.workloads import digits"),
        ("client/a.py", "from pathways_lab.cli import main"),
        ("client/a.py", "import benchmarks.dispatch"),
        ("notebook/a.py", "import pathways_lab_server"),
        ("stray/a.py", "import json"),
    ],
)
def test_a_planted_import_is_found(tmp_path, path, source):
    assert len(misdirected(planted(tmp_path, {path: source}))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "import jax"),
        ("core/a.py", "def f():\n    import time"),
        ("core/a.py", "from random import Random"),
        ("timeline/a.py", "import distributed"),
        ("client/a.py", "from bokeh.models import Range1d"),
    ],
)
def test_a_planted_package_is_found(tmp_path, path, source):
    assert len(misplaced(planted(tmp_path, {path: source}))) == 1


def test_legal_imports_are_left_alone(tmp_path):
    modules = planted(
        tmp_path,
        {
            "core/a.py": "import math, hashlib\nfrom pathways_lab.core import b\nfrom .b import c",
            "core/b.py": "c = 1",
            "client/a.py": "import jax\nfrom pathways_lab.core.b import c",
            "__init__.py": "from pathways_lab.client import a",
            "__main__.py": "from pathways_lab.cli import main",
        },
    )
    assert misdirected(modules) == misplaced(modules) == knots(modules) == []


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import core",
        "import jax._src.xla_bridge as xb",
        "import jax\nx = jax._src.core.jaxpr",
        "import jax as j\nj._src",
        "from jaxlib import xla_client",
        "import jaxlib._jax",
    ],
)
def test_planted_private_jax_is_found(tmp_path, source):
    modules = planted(tmp_path, {"client/a.py": source})
    assert private(modules, ("jax", "jaxlib")).keys() == {"client/a.py"}


def test_dunder_names_are_not_private(tmp_path):
    modules = planted(tmp_path, {"client/a.py": "import jax\nprint(jax.__version__)"})
    assert private(modules, ("jax",)) == {}


def test_planted_private_dask_is_found(tmp_path):
    modules = planted(
        tmp_path,
        {"runtime/a.py": "from distributed.utils import _maybe", "runtime/b.py": "import dask._x"},
    )
    assert len(private(modules, ("dask", "distributed"))) == 2


def test_a_planted_circle_is_found(tmp_path):
    modules = planted(
        tmp_path,
        {
            "core/a.py": "from pathways_lab.core import b",
            "core/b.py": "from pathways_lab.core.c import x",
            "core/c.py": "x = 1\ndef f():\n    from pathways_lab.core import a",
            "core/d.py": "from pathways_lab.core import a",
        },
    )
    assert knots(modules) == [[f"pathways_lab.core.{name}" for name in "abc"]]


def test_a_planted_long_file_is_found(tmp_path):
    planted(tmp_path, {"core/a.py": "x = 1\n" * (LONGEST + 1), "core/b.py": "x = 1\n" * LONGEST})
    assert too_long(tmp_path, ("core",)) == ["core/a.py: 601 lines, the limit is 600"]
