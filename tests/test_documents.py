"""What the documents say is there is there: files, commands, names, diagrams."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_layers import JAX_PRIVATE, RANK
from tools import diagrams

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pathways_lab"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "extensions/*.md", "notebooks/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
LONGEST = {"README.md": 200, "ARCHITECTURE.md": 150}
"""Lines of the two pages that everybody is asked to read; the rest goes to docs/."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
REFERENCE = re.compile(
    r":(?:mod|func|class|meth|data|attr|exc):`(?:[^`<]*<)?~?(\.[.\w]+|pathways_lab[.\w]+)>?`"
)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def outside_code(document: str) -> str:
    """*document* without its blocks of code, in which brackets are no links."""
    return re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)


def ticked_files(document: str) -> set[str]:
    """Paths in backticks that end like a file of ours or like a folder."""
    return set(re.findall(r"`([\w./-]+\.(?:py|ipynb|md|js)|[\w/-]+/)`", document))


def links(document: str) -> set[str]:
    """Targets of links that are no addresses, with their anchors."""
    return {link for link in LINK.findall(outside_code(document)) if "://" not in link}


def missing(document: str, folder: Path) -> list[str]:
    """Mentioned files that are not there.

    A path in backticks is below the repository, its package, or *folder*; a link is read from
    *folder*, as a browser does.
    """
    made_later = {"build/demo/"}
    ticked = {
        name
        for name in ticked_files(document) - made_later
        if not any((base / name).exists() for base in (ROOT, PACKAGE, folder))
    }
    files = {link.partition("#")[0] for link in links(document)} - {""}
    return sorted(ticked | {name for name in files if not (folder / name).exists()})


def anchors(document: str) -> set[str]:
    """The anchors that a front end gives to the headings of *document*."""
    headings = re.findall(r"^#+ (.*)$", outside_code(document), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def lost_anchors(document: str, path: Path) -> list[str]:
    """Links from *document*, which lies at *path*, to headings of pages that have none such."""
    lost = []
    for link in sorted(links(document)):
        name, _, anchor = link.partition("#")
        page = (path.parent / name) if name else path
        if anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
            lost.append(link)
    return lost


def lost_modules(document: str) -> list[str]:
    """Modules of ours behind ``python -m`` that are not there."""
    lost = []
    for module in sorted(set(re.findall(r"python -m ([\w.]+)", document))):
        path = ROOT / module.rstrip(".").replace(".", "/")
        ours = (ROOT / module.split(".")[0]).is_dir()
        if ours and not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            lost.append(module)
    return lost


def lost_references(package: Path) -> list[str]:
    """References in docstrings below *package* to modules, or names in them, that are not there.

    A name with a dot in front is one of the same layer; plain names are left alone.
    """
    texts: dict[str, str] = {}
    for path in package.rglob("*.py"):
        name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        texts[name.removesuffix(".__init__")] = path.read_text()

    def found(name: str, layer: str) -> bool:
        """Whether a module *name* is there, or one that has the next word of it."""
        parts = name.split(".")
        for end in range(len(parts), 0 if parts[0] else 1, -1):
            module = ".".join(parts[:end])
            inside = (known for known in texts if known.startswith(layer)) if not parts[0] else ()
            known = [module] if module in texts else [n for n in inside if n.endswith(module)]
            if known:
                word = "".join(parts[end : end + 1])
                return any(re.search(rf"\b{word}\b", texts[each]) for each in known)
        return False

    return [
        f"{module}: {name}"
        for module, text in sorted(texts.items())
        for name in REFERENCE.findall(text)
        if not found(name, ".".join(module.split(".")[:2]))
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mentioned_files_exist(name):
    assert missing(text(name), (ROOT / name).parent) == []


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "docs/api.md"])
def test_linked_headings_and_commands_exist(name):
    """The reference has checks of its own, and anchors that are no headings."""
    assert lost_modules(text(name)) == []
    api = re.sub(r"\]\(api\.md#", "](https://api#", text(name))
    assert lost_anchors(api, ROOT / name) == []


def test_a_mentioned_file_that_is_gone_is_found():
    document = (
        "see `core/nothing.py`, [that](docs/no.md), `core/slices/slices.py`, [x](https://a/b.md)"
    )
    assert missing(document, ROOT) == ["core/nothing.py", "docs/no.md"]


def test_a_link_is_read_from_its_page():
    assert missing("[here](where.md), [there](docs/where.md)", ROOT / "docs") == ["docs/where.md"]


def test_a_lost_heading_and_a_lost_module_are_found(tmp_path):
    page, document = tmp_path / "a.md", "# One: two\n[a](#one-two) [b](#three) [c](a.md#four)"
    page.write_text(document)
    assert lost_anchors(document, page) == ["#three", "a.md#four"]
    commands = "`python -m pathways_lab.nothing`, `python -m pathways_lab lab`, `python -m pip`"
    assert lost_modules(commands) == ["pathways_lab.nothing"]


def test_references_in_docstrings_lead_somewhere():
    assert lost_references(PACKAGE) == []


def test_a_lost_reference_is_found(tmp_path):
    package = tmp_path / "pathways_lab"
    (package / "core").mkdir(parents=True)
    (package / "core" / "a.py").write_text("class B:\n    def c(self): ...\n")
    (package / "core" / "d.py").write_text(
        '""":mod:`.a` :class:`~.a.B` :meth:`.a.B.c` :mod:`signal` :meth:`c`\n'
        ":mod:`pathways_lab.core.a` :mod:`.e`\n"
        ':class:`pathways_lab.core.a.E` :meth:`e <pathways_lab.core.e.B.c>`"""'
    )
    lost = lost_references(package)
    assert lost == [
        f"pathways_lab.core.d: {each}"
        for each in (".e", "pathways_lab.core.a.E", "pathways_lab.core.e.B.c")
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mentioned_make_targets_exist(name):
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    mentioned = set(re.findall(r"(?:`|^)make ([a-z]+)", text(name), re.MULTILINE))
    assert mentioned <= targets


@pytest.mark.parametrize(("name", "most"), LONGEST.items())
def test_the_first_pages_are_short(name, most):
    """Remedy: move the details to a page of docs/ and link it."""
    assert len(text(name).splitlines()) <= most


def test_every_page_is_linked_from_another():
    """A page that no other page links is read by nobody."""
    linked = {
        ((ROOT / name).parent / link.partition("#")[0]).resolve()
        for name in DOCUMENTS
        for link in links(text(name))
        if not link.startswith("#")
    }
    folders = {path / "README.md" for path in linked if path.is_dir()}
    pages = {(ROOT / name).resolve() for name in DOCUMENTS} - {ROOT / "README.md"}
    assert sorted(pages - linked - folders) == []


def test_life_cycles_are_drawn_from_the_tables():
    """Remedy: python tools/diagrams.py"""
    page = diagrams.PAGE.read_text()
    assert diagrams.drawn(page) == page
    assert len(diagrams.cycles()) >= 4


def mapped(drawn: str) -> set[str]:
    """The folders and modules that a map names: two spaces deeper is inside of the line above."""
    found: set[str] = set()
    outer = ""
    for line in drawn.splitlines():
        names = re.findall(r"^ *((?:\w+(?:/|\.py)\s+)+)", line + " ")
        for name in " ".join(names).split():
            if line.startswith("  "):
                name = outer + name
            elif name.endswith("/"):
                outer = name
            found.add(name)
    return found


def differences(drawn: str, package: Path) -> list[str]:
    """Folders that a map lacks, and names on it that are not there."""
    there = {
        path.parent.relative_to(package).as_posix() + "/"
        for path in package.rglob("*.py")
        if path.parent != package
    }
    names = mapped(drawn)
    gone = {name for name in names if not (package / name).exists()}
    return sorted((there - names) | gone)


def drawn_map() -> str:
    return text("ARCHITECTURE.md").split("## The map")[1].split("```")[1]


def test_the_map_of_the_page_is_the_map_of_the_layer_test():
    layers = {name.split("/")[0].removesuffix(".py") for name in mapped(drawn_map())}
    assert layers == set(RANK)


def test_the_page_names_every_door_to_private_jax():
    assert [door for door in JAX_PRIVATE if f"`{door}`" not in text("ARCHITECTURE.md")] == []


def test_the_map_names_every_folder():
    """Remedy: one line in ARCHITECTURE.md for each folder of the package, and none besides."""
    assert differences(drawn_map(), PACKAGE) == []


def test_a_folder_that_the_map_lacks_is_found(tmp_path):
    for name in ("core/slices/a.py", "core/memory/a.py", "cli/a.py", "one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    drawn = "core/   x\n  slices/   devices\ncli/  one.py  text\ngone/   no more\n"
    assert mapped(drawn) == {"core/", "core/slices/", "cli/", "one.py", "gone/"}
    assert differences(drawn, tmp_path) == ["core/memory/", "gone/"]


ANSWER = re.compile(
    r"\| (?P<question>[^|]+\?) \| \[`(?P<shown>[^`]+)`\]\((?P<link>[^)]+)\) \|(?P<words>[^|]*)\|"
)


def answers(page: str) -> list[re.Match[str]]:
    """The rows of the page of questions; a row of another form ends the test."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    rows = [line for line in rows if not line.startswith(("| Where is |", "|---"))]
    found = [ANSWER.fullmatch(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if not match]
    return [match for match in found if match]


def test_forty_questions_have_one_file_and_one_sentence_each():
    rows = answers(text("docs/where.md"))
    assert len({row["question"] for row in rows}) == len(rows) == 40
    for row in rows:
        file = (ROOT / "docs" / row["link"]).resolve()
        assert file.is_file(), row["link"]
        assert file in ((ROOT / row["shown"]).resolve(), (PACKAGE / row["shown"]).resolve())
        assert len(re.findall(r"\.(?:\s|$)", row["words"])) <= 1, row["words"]


def test_an_answer_with_two_files_is_found():
    with pytest.raises(AssertionError, match="Both"):
        answers("| this decided? | [`a.py`](a.py), [`b.py`](b.py) | Both. |")
