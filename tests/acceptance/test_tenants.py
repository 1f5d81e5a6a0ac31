"""Several clients on one lab: roles, quotas, the line for devices, and accounts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import hooks
from pathways_lab.runtime.cluster.attach import read_lab_file
from pathways_lab.timeline.records import Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

X = np.ones((256, 256), np.float32)


@pytest.fixture
def guest(lab: pw.Lab, tmp_path: Path) -> Iterator[pw.Lab]:
    """Somebody who was invited."""
    lab.invite(tmp_path / "lab.json")
    with pw.Lab(read_lab_file(tmp_path / "lab.json"), name="guest") as made:
        yield made


def test_who_was_invited_computes_and_decides_for_nobody_else(
    lab: pw.Lab, guest: pw.Lab, tmp_path: Path
) -> None:
    assert (lab.owner, guest.owner) == (True, False)
    double = pw.jit(lambda x: 2 * x, on=guest.slice(2))
    assert np.array_equal(double(X).result(timeout=60), 2 * X)
    with pytest.raises(pw.PathwaysError, match="only its owners set policies"):
        guest.policy = pw.Priority()
    with pytest.raises(pw.PathwaysError, match="only its owners set quotas"):
        guest.quota("guest", devices=100)
    with pytest.raises(pw.PathwaysError, match="only its owners switch the order off"):
        guest.lease("island0", order=False)
    with pytest.raises(pw.PathwaysError, match="only its owners make owners"):
        guest.invite(tmp_path / "more.json", owner=True)
    assert lab.policy == pw.ProportionalShare()
    # What an owner's file holds and an invitation does not.
    lab.invite(tmp_path / "owner.json", owner=True)
    key = json.loads((tmp_path / "owner.json").read_text())["control"]["key"]
    assert key not in (tmp_path / "lab.json").read_text()


def test_a_quota_refuses_what_never_can_be_and_makes_the_rest_wait(
    lab: pw.Lab, guest: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    held: list[pw.Slice] = []

    def show(line: str) -> None:
        shown.append(line)
        if held and "place 1 of 1" in line:
            held.pop().release()

    monkeypatch.setattr(hooks, "show_line", lambda: show)
    lab.quota("guest", devices=4, bytes="4 MB")
    with pytest.raises(pw.PathwaysError, match="5 devices are more than the quota of guest"):
        guest.slice(5)
    first = guest.slice(3)
    with pytest.raises(pw.PathwaysError, match="waiting for devices, place 1 of 1"):
        guest.slice(2, wait=1.0)
    held.append(first)
    second = guest.slice(2)
    assert any("place 1 of 1 in line: the quota of guest is 4 devices" in line for line in shown)
    assert "got devices after" in shown[-1]
    add = pw.jit(lambda x: x + 1, on=second)
    with pytest.raises(pw.PathwaysError, match="the quota of guest is 4,000,000"):
        add(np.ones((1024, 1024), np.float32)).result(timeout=60)
    kept = [add(X).block_until_ready() for _ in range(3)]  # 512 kB each, on two devices
    value = kept[0]
    for _ in range(20):  # more than the quota, but never at a time
        value = add(value)
    assert np.array_equal(value.result(timeout=60), X + 21)
    row = lab.accounts().clients["guest"]
    assert 4 * 2 * X.nbytes <= row.nbytes <= 4_000_000
    lab.quota("guest")
    del kept, value


def test_accounts_add_up_and_do_not_forget(lab: pw.Lab, guest: pw.Lab) -> None:
    before = lab.accounts()
    begun = lab.timeline.clock()
    left, right = guest.slice(4, island="island0"), guest.slice(4, island="island1")
    step = pw.jit(lambda x: x @ x / 256, on=left)
    move = pw.jit(lambda x: x + 1, on=right)
    values = [move(step(X)) for _ in range(5)]
    for value in values:
        value.block_until_ready()
    until(lambda: lab.accounts().clients["guest"].gangs >= before.clients["guest"].gangs + 10)
    after = lab.accounts()
    mine, was = after.clients["guest"], before.clients["guest"]
    assert mine.dcn_bytes - was.dcn_bytes == 5 * X.nbytes
    assert mine.byte_seconds > was.byte_seconds
    assert after.total.gangs == sum(row.gangs for row in after.clients.values())

    def held() -> float:
        spans = [r for r in lab.timeline.records if isinstance(r, Span)]
        gangs = [s for s in spans if s.kind == "gang" and s.client == "guest" and s.start >= begun]
        return sum((s.end - s.start) * len(s.devices) for s in gangs) if len(gangs) == 10 else 0.0

    until(lambda: held() > 0)
    assert mine.device_seconds - was.device_seconds == pytest.approx(held(), rel=0.05, abs=1e-3)
    # They do not reach only as far back as the timeline.
    assert lab.accounts().clients["guest"].gangs >= mine.gangs
    assert "guest" in str(after)
    assert ">guest</td>" in after._repr_html_()


def test_no_secret_is_in_what_people_keep_or_see(
    lab: pw.Lab, guest: pw.Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Timelines, representations, logs; the guest's own key too."""
    assert lab.embedded is not None
    double = pw.jit(lambda x: 2 * x, on=guest.slice(2))
    double(X).block_until_ready()
    lab.publish("w", pw.jit(lambda x: 2 * x, on=lab.slice(2))(X))
    taken = guest.take("w")
    secrets = [lab._control.key, guest._control.key, taken.buffer.ticket or b"?" * 32]
    secrets += [one.session.connection.data_key for one in (lab, guest)]
    lab.timeline.save(tmp_path / "timeline")
    (file,) = tmp_path.glob("timeline*")
    with zipfile.ZipFile(file) as columns:
        kept = b"".join(columns.read(name) for name in columns.namelist())
    html = [value._repr_html_() for value in (lab, lab.accounts())]
    seen = "".join([repr(lab), repr(guest._control), repr(taken), str(lab.accounts()), *html])
    seen += "".join(str(record) for record in lab.timeline.records)
    seen += "".join(capfd.readouterr())
    for log in lab.embedded.folder.rglob("*.log"):
        seen += log.read_text(errors="replace")
    for secret in secrets:
        assert secret not in kept
        assert secret.hex() not in seen
        assert repr(secret)[2:-1] not in seen
    assert "PRIVATE KEY" not in seen
    lab.unpublish("w")
