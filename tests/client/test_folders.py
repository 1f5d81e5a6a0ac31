"""Law: whoever dies while a folder is written, its name has the old one or the new one."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.saving import atomic_folder
from pathways_lab.client.saving.atomic_folder import Part, tidy


class Dead(BaseException):
    """Where a writer dies."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "step [1]"


def written(folder: Path, text: str) -> Part:
    part = Part(folder)
    part.begin()
    (part.path / "text").write_text(text)
    return part


def there(folder: Path) -> dict[str, str]:
    """By name, what a folder and those beside it say."""
    found = folder.parent.iterdir()
    return {path.name: (path / "text").read_text() for path in found}


def dies(*_: Path) -> None:
    raise Dead


def dies_between(folder: Path, patch: pytest.MonkeyPatch) -> Part:
    """The writer of a second folder sets the first one aside, and ends."""
    written(folder, "old").finish()
    part = written(folder, "new")
    with patch.context() as context:
        context.setattr(atomic_folder, "_name", dies)
        with pytest.raises(Dead):
            part.finish()
    return part


def test_it_takes_its_name_as_a_whole(folder: Path) -> None:
    for text in ("old", "new"):
        part = written(folder, text)
        assert there(folder).get(folder.name) != text
        part.finish()
        assert there(folder) == {folder.name: text}
    assert [path.name for path in folder.iterdir()] == ["text"]


def test_what_the_dead_left_goes_and_what_the_living_write_stays(folder: Path) -> None:
    written(folder, "old").finish()
    written(folder, "nobody's")
    living = written(folder, "new")
    other = written(folder.with_name("step 1"), "another's")
    tidy(folder)
    assert sorted(there(folder).values()) == ["another's", "new", "old"]
    living.finish()
    assert there(folder) == {folder.name: "new", other.path.name: "another's"}


def test_who_dies_before_the_last_step_has_it_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = dies_between(folder, monkeypatch)
    tidy(folder)
    assert not folder.exists(), "while it lives it may make it itself"
    del part
    tidy(folder)
    assert there(folder)[folder.name] == "new"
    tidy(folder)
    assert there(folder) == {folder.name: "new"}
    assert [path.name for path in folder.iterdir()] == ["text"]


def test_who_is_interrupted_puts_the_old_one_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = dies_between(folder, monkeypatch)
    part.give_up()
    assert there(folder) == {folder.name: "old"}


def test_checkpoints_are_such_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = np.arange(3), np.arange(4)
    pw.save(folder, old)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder, "_name", dies)
        patch.setattr(Part, "give_up", lambda part: part._unlock())
        with pytest.raises(Dead):
            pw.save(folder, new)
    np.testing.assert_array_equal(pw.restore(folder), new)
    written(folder, "nobody's")
    pw.save(folder, old)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_nobody_takes_a_writer_for_dead_that_has_not_its_lock_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(file: BinaryIO, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            tidy(folder)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    written(folder, "new").finish()
    assert there(folder) == {folder.name: "new"}
