"""Functions of the user's own modules travel by value; everything else by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import pytest

import pathways_lab as pw
from pathways_lab.client.code import pickling, source_lines
from pathways_lab.client.functions.flat import FlatFunction
from tests.client.kit import a_slice

SOURCE = """
import math
SCALE = 3

def helper(x):
    return x * SCALE + math.floor(1.5)
"""


@pytest.mark.parametrize("text", ["module.helper", "lambda x: module.helper(x)"])
def test_a_host_needs_no_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("beside_the_notebook")
    before = cloudpickle.list_registry_pickle_by_value()
    data = pickling.dumps(eval(text, {"module": module}))
    assert cloudpickle.list_registry_pickle_by_value() == before
    code = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())(2))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False
    )
    assert done.stdout.split() == [b"7"], done.stderr
    # By name it would not work: that is what this is for.
    by_name = cloudpickle.dumps(module.helper)
    failed = subprocess.run(
        [sys.executable, "-c", code], input=by_name, capture_output=True, timeout=60, check=False
    )
    assert b"No module named 'beside_the_notebook'" in failed.stderr


def installed(folder: Path, name: str, source: str = SOURCE) -> None:
    """As ``pip install --target`` leaves a package."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text(f"{name}/__init__.py,sha256=x,9\n{name}-1.0.dist-info/RECORD,,\n")


@pytest.mark.parametrize("place", ["libs", "site-packages", "a/dist-packages"])
def test_a_library_is_known_wherever_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, name = tmp_path / place, f"library_in_{place.replace('/', '_').replace('-', '_')}"
    installed(folder, name)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    assert not source_lines.is_own(module.__file__ or "")
    assert name.encode() in pickling.dumps(module.helper)
    assert b"floor" not in pickling.dumps(module.helper), "by name: hosts have it too"


def test_own_modules_beside_libraries_stay_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "installed_beside")
    (tmp_path / "notes_beside.py").write_text(SOURCE)
    # What a build leaves beside the user's own sources does not make them a library.
    (tmp_path / "notes_beside.egg-info").mkdir()
    (tmp_path / "notes_beside.egg-info" / "SOURCES.txt").write_text("notes_beside.py\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert b"floor" in pickling.dumps(importlib.import_module("notes_beside").helper)
    assert b"floor" not in pickling.dumps(importlib.import_module("installed_beside").helper)


def test_records_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    installed(tmp_path, "odd")
    (tmp_path / "odd-1.0.dist-info" / "RECORD").write_bytes(b"\xff\xfe")
    (tmp_path / "gone-1.0.dist-info").mkdir()
    assert source_lines.is_own(str(tmp_path / "odd" / "__init__.py"))


def test_a_function_that_compiles_others_inside_does_so_on_hosts_too() -> None:
    """For a slice of which the host has no device, and for none: they are part of it there."""
    here, away = a_slice(2), a_slice(4)
    doubled = pw.jit(lambda x: x * 2, on=away)

    def outer(x: Any) -> Any:
        tripled = pw.jit(lambda x: x * 3, on=away)
        again = pw.jit(lambda x: x + 1)
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), "int32"), again(
            tripled(doubled(x))
        )) + len(here.axes)  # fmt: skip

    flat = FlatFunction(outer, jax.tree.structure(((0,), {})), name="outer")
    code = "import jax, sys, pickle; print(*jax.jit(pickle.loads(sys.stdin.buffer.read()))(2))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickling.dumps(flat), capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == [b"14"], done.stderr


def test_a_module_may_be_loaded_under_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "known_twice.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("known_twice")
    monkeypatch.setitem(sys.modules, "known_twice_again", module)
    before = cloudpickle.list_registry_pickle_by_value()
    assert b"helper" in pickling.dumps(module.helper)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_what_has_derivatives_of_its_own_arrives_with_them() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, given: (given * 7,))

    @jax.custom_jvp
    def g(x: Any) -> Any:
        return f(x)

    g.defjvp(lambda primals, tangents: (g(*primals), 5 * tangents[0]))
    sent_f, sent_g = cloudpickle.loads(pickling.dumps((f, jax.jit(g))))
    assert (jax.value_and_grad(sent_f)(3.0), jax.grad(sent_g)(3.0)) == ((6, 7), 5)
