"""Still pictures of a live view: when they are made, what they show, and where they go."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, cast

import pytest

from pathways_lab.notebook.view import frozen, live, view
from pathways_lab.notebook.view import picture as picture_of
from pathways_lab.notebook.view.frozen import WHOLE, Bundle
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.notebook.view.saved import MIME
from pathways_lab.notebook.view.stills import SHARE, Stills
from pathways_lab.timeline.log import Timeline
from tests.notebook.synthetic import Cluster, arrival, training

WIDGET = "application/vnd.jupyter.widget-view+json"


class Moving:
    """What is new of a picture that moves until *end*, looked at ten times a second."""

    def __init__(self, end: float, cost: float = 0.0) -> None:
        self.end, self.cost = end, cost
        self.now = self.used = 0.0
        self.stills = Stills(cast(Picture, self), lambda: self.used)

    @property
    def stands(self) -> bool:
        return self.now > self.end

    @property
    def content(self) -> tuple[float, ...]:
        return (min(self.now, self.end),)

    def still(self) -> Bundle:
        self.used += self.cost
        return {}, {}

    def look(self, until: float) -> list[tuple[float, bool]]:
        """When still pictures were made, and whether nothing moved."""
        made = []
        while self.now < until:
            self.now = round(self.now + 0.1, 1)
            still = self.stills.take(self.now)
            if still is not None:
                made.append((self.now, still.stands))
        return made


def test_the_first_one_comes_at_once_then_one_in_ten_seconds_and_one_when_nothing_moves() -> None:
    moving = Moving(26.0)
    assert moving.look(60.0) == [(0.1, False), (10.1, False), (20.1, False), (26.1, True)]
    assert moving.look(90.0) == [], "it would be the same again"


def test_dear_pictures_come_so_seldom_that_they_take_a_hundredth_of_a_processor() -> None:
    made = Moving(1000.0, cost=0.5).look(1050.0)
    rests = [after - before for (before, _), (after, _) in pairwise(made)]
    assert min(rests) >= 0.5 / SHARE
    assert max(rests) < 0.5 / SHARE + 0.2
    assert made[-1][1]


def test_it_shows_what_is_shown_live() -> None:
    now = 24.0
    log = Timeline(clock=lambda: now)
    log.extend(record for record in training(40) if arrival(record) <= now)
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    picture.look(now)
    assert not picture.stands
    made = picture.still()
    assert made is not None
    data, metadata = made
    facts = metadata["pathways_lab"]
    assert facts["seconds"] == now
    shown = sum(picture.scene.bars.columns()["count"])
    assert facts["computations"] + facts["transfers"] == shown
    assert set(data) == {"text/html", "text/plain", MIME}


def test_a_still_picture_of_very_many_bars_is_small_too() -> None:
    cluster = Cluster(islands=2, hosts=16, devices=4)
    for step in range(400):
        cluster.gang(step % 2, 1, step, "train", f"f{step % 7}", "", 0.0, 0.002, 0.0)
    end = max(cluster.free.values())
    log = Timeline(clock=lambda: end)
    log.extend(cluster.records)
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    made = picture.still()
    assert made is not None
    assert sum(len(json.dumps(part)) for part in made) <= WHOLE


def test_a_picture_that_moves_is_not_held_up_by_a_still_one_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To fold 2,048 devices anew until they fit takes ten seconds."""
    now, records = 1.0, training(3)
    log = Timeline(clock=lambda: now)
    log.extend(record for record in records if arrival(record) <= now)
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    stills = Stills(picture)
    picture.look(now)
    monkeypatch.setattr(frozen, "LIMIT", 10_000)
    monkeypatch.setattr(picture_of, "AGAIN", 100)
    assert stills.take(now) is None
    log.extend(record for record in records if arrival(record) > now)
    now = 60.0
    picture.look(now)
    still = stills.take(now)
    assert still is not None
    assert still.stands, "when nothing moves there is time for it"


class Handle:
    def __init__(self, put: list[Any]) -> None:
        self.put = put

    def update(self, data: dict[str, Any], metadata: Any, raw: bool) -> None:
        self.put.append((data, metadata))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[view.View, list[Any], list[Any]]:
    """A live view, what was put into its output, and what was sent to pages."""
    put: list[Any] = []
    sent: list[Any] = []
    monkeypatch.setattr(view, "widgets_work", lambda: True)
    monkeypatch.setattr(view, "_display", lambda *data, **options: Handle(put))
    monkeypatch.setattr(
        live.LiveFigures, "send", lambda self, content, buffers=None: sent.append(content)
    )
    log = Timeline(clock=lambda: 3.0)
    log.extend(training(1))
    made = view.View(log)
    made.show()
    return made, put, sent


def still(made: view.View) -> None:
    taken = Stills(Picture(made.timeline, made.wanted)).take(3.0)
    assert taken is not None
    made.still(taken)


def test_pages_are_given_it_with_the_number_of_the_widget(shown: Any) -> None:
    made, put, sent = shown
    assert made.live is not None
    still(made)
    kept = [content for content in sent if content["type"] == "kept"][-1]
    assert kept["id"] == made.live.model_id
    assert kept["metadata"]["pathways_lab"]["view"] == made.live.model_id
    assert set(kept["data"]) == {"text/html", "text/plain", MIME}
    sent.clear()
    made.live._received(None, {"type": "ready", "keeps": True}, None)
    assert [content["type"] for content in sent] == ["kept"], "also those that come late"
    still(made)
    assert put == [], "a page keeps it: the live view is not drawn anew"
    made.freeze()


def test_where_no_page_keeps_it_the_output_has_it_beside_the_widget(shown: Any) -> None:
    made, put, _ = shown
    assert made.live is not None
    made.live._received(None, {"type": "ready", "keeps": False}, None)
    still(made)
    data, _ = put[-1]
    assert set(data) == {"text/html", "text/plain", MIME, WIDGET}
    made.freeze()
    assert set(put[-1][0]) == {"text/html", "text/plain", MIME}


def test_where_there_is_no_page_the_notebook_has_the_picture(shown: Any) -> None:
    made, put, _ = shown
    import nbformat  # here: it takes seconds, of every process that looks for tests
    from nbconvert import HTMLExporter

    assert made.live is not None
    still(made)
    assert put == [], "a page may be on its way"
    made.live._shown_at -= live.PATIENCE + 1
    still(made)
    data, metadata = put[-1]
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    cell = nbformat.v4.new_code_cell("lab.view", outputs=[output])
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert "data:image/svg+xml;base64," in page
    made.freeze()
