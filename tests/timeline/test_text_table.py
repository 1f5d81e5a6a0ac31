"""Tables: columns stand below their heads, and no cell is anything but text."""

from __future__ import annotations

from pathways_lab.timeline.text_table import TextTable

HOSTILE = "<img src=x onerror=\"alert('&')\">"
SAFE = "&lt;img src=x onerror=&quot;alert(&#x27;&amp;&#x27;)&quot;&gt;"


def test_columns_are_aligned() -> None:
    table = TextTable([("a", "1", "x"), ("long", "1,000", "")], ("name", "bytes", ""), "<><")
    assert table.lines() == [
        "name  bytes",
        "a         1  x",
        "long  1,000",
    ]
    assert repr(TextTable([("a",)], caption="one")) == "one\na"


def test_the_last_alignment_holds_for_all_that_follow() -> None:
    assert TextTable([("a", "1", "2"), ("bb", "33", "44")], align="<>").lines() == [
        "a    1   2",
        "bb  33  44",
    ]
    assert repr(TextTable([], ("name", "bytes"))) == "name  bytes"


def test_the_last_cell_of_a_short_row_takes_the_rest() -> None:
    table = TextTable([("h0", "1", "2"), ("h1", "down since a while")], ("host", "a", "b"), "<>")
    assert table.lines() == ["host  a  b", "h0    1  2", "h1    down since a while"]
    assert 'colspan="2">down since a while</td>' in table._repr_html_()
    assert table._repr_html_().count("colspan") == 1


def test_everything_is_escaped_on_a_page() -> None:
    row = (HOSTILE, HOSTILE)
    table = TextTable([row, (HOSTILE,)], row, caption=HOSTILE, notes=(HOSTILE, ""))
    page = table._repr_html_()
    assert "<img" not in page
    assert page.count(SAFE.replace("/", "/<wbr>")) == 7
    assert f'title="{SAFE}"' in page


def test_a_page_says_how_columns_are_aligned_and_nothing_of_colours() -> None:
    page = TextTable([("a", "1")], ("name", "b/s"), "<>", "all")._repr_html_()
    assert page == (
        '<table><caption style="text-align:left">all</caption><tr>'
        '<th style="text-align:left;white-space:nowrap">name</th>'
        '<th style="text-align:right">b/<wbr>s</th></tr><tr>'
        '<td style="text-align:left;white-space:nowrap">a</td>'
        '<td style="text-align:right">1</td></tr></table>'
    )


def test_a_large_table_takes_time_like_its_rows() -> None:
    """A cell is looked at a few times, whatever the number of rows."""
    looked = 0

    class Cell(str):
        __slots__ = ()

        def __len__(self) -> int:
            nonlocal looked
            looked += 1
            return super().__len__()

    class Counted(list[str]):
        def __len__(self) -> int:
            nonlocal looked
            looked += 1
            return super().__len__()

    def effort(rows: int) -> int:
        nonlocal looked
        looked = 0
        table = TextTable([Counted((Cell("a"), Cell("b"))) for _ in range(rows)])
        table.lines()
        table._repr_html_()
        return looked

    assert effort(400) < 5 * effort(100)
