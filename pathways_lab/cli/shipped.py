"""Where the shipped notebooks are, and copies of them to work in.

Problem: notebooks are documents, not package data: in a checkout they lie
beside the package, in an installation under ``share/pathways-lab/notebooks``.
Running a notebook changes it, so people get copies, in both cases: a checkout
stays clean, an installation stays whole.

Rule for maintainers: never overwrite and never delete a file of the user's.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

QUICKSTART = "00_quickstart.ipynb"


def notebooks() -> Path:
    """The folder of the shipped notebooks.  Raises FileNotFoundError that says where it looked."""
    checkout = Path(__file__).resolve().parents[2] / "notebooks"
    if (checkout / QUICKSTART).is_file() and (checkout.parent / "pyproject.toml").is_file():
        return checkout
    try:
        recorded = metadata.files("pathways-lab") or []
    except metadata.PackageNotFoundError:
        recorded = []
    for entry in recorded:
        if entry.name == QUICKSTART:
            return Path(str(entry.locate())).resolve().parent
    raise FileNotFoundError(
        f"{QUICKSTART} is neither in {checkout} nor among the files of an installed pathways-lab. "
        "Remedy: pip install --force-reinstall --no-deps pathways-lab"
    )


def copy(source: Path, folder: Path, fresh: bool = False) -> list[str]:
    """Copy the notebooks, their map and glossary from *source* into *folder*.

    Returns lines for the user.  A file that is there already is kept.  With *fresh* the
    shipped one takes its place, and one that differs is kept as ``<name>.old<n>.ipynb``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for shipped in sorted([*source.glob("*.ipynb"), *source.glob("*.md")]):
        mine = folder / shipped.name
        if mine.exists() and not fresh:
            continue
        if mine.exists() and mine.read_bytes() != shipped.read_bytes():
            number = 1
            while (kept := folder / f"{mine.stem}.old{number}{mine.suffix}").exists():
                number += 1
            mine.rename(kept)
            said.append(f"{mine.name}: yours is kept as {kept.name}")
        shutil.copyfile(shipped, mine)
    return said
