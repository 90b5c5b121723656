"""A cell in text says now and then how far it is, floods no file, and leaves its curves behind."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread

from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.curves import Curves
from nbddp.record.snapshot import RankSnapshot
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.text import progress as room
from nbddp.ui.text.progress import Progress


class FakeSession:
    """Ranks and numbers, as a session gives them."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.whereabouts = SimpleNamespace(curves=self.curves)
        self.metrics = self.curves.snapshot
        self.ranks: tuple[RankSnapshot, ...] = ()

    def snapshot(self, _cell: object) -> Any:
        return SimpleNamespace(ranks=self.ranks, awaited=None)

    def log(self, step: int, **values: float) -> None:
        self.curves.add(0, float(step), step, values)


class Told:
    """A screen."""

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[dict[str, Any]] = []
        self.sizes: list[dict[str, Any]] = []

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is held back."""

    def display(self, data: Any, metadata: Any, *, display_id: str, is_update: bool) -> None:
        assert not display_id
        assert not is_update
        self.shown.append(data)
        self.sizes.append(metadata)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def screen() -> Told:
    return Told()


@pytest.fixture
def handle() -> CellHandle:
    return CellHandle(1, CellRequest(source=""), range(2), lambda parcel: parcel)


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch, handle: CellHandle) -> Any:
    """Sets the clock to so many seconds after the cell began."""

    def go(seconds: float) -> None:
        monkeypatch.setattr(room.time, "time", lambda: handle.began_at + seconds)

    return go


def progress(session: FakeSession, *, terminal: bool = False, pictures: bool = False) -> Progress:
    return Progress(session, is_terminal=terminal, has_pictures=pictures)  # type: ignore[arg-type]


def test_an_hour_is_told_in_sixty_one_lines(
    session: FakeSession, screen: Told, handle: CellHandle, after: Any
) -> None:
    told = progress(session)
    times = []
    for second in range(3601):
        after(second)
        session.log(second, loss=float(second))
        before = screen.text
        told.tell(screen, handle)
        if screen.text != before:
            times.append(second)
    assert times == [10, 30, *range(60, 3601, 60)]
    assert screen.text.startswith("nbddp: 10.0 s · loss 10\nnbddp: 30.0 s · loss 30\nnbddp: 1:00 ")


def test_where_there_is_nothing_to_say_or_nothing_new_nothing_is_said(
    session: FakeSession, screen: Told, handle: CellHandle, after: Any
) -> None:
    told = progress(session)
    for second in range(100):
        after(second)
        told.tell(screen, handle)
    assert screen.text == ""
    session.log(1, loss=0.5)
    for second in range(100, 1000):
        after(second)
        told.tell(screen, handle)
    assert screen.text == "nbddp: 2:00 · loss 0.5\n"


def test_the_rank_that_is_furthest_behind_is_told_of_and_the_mean_of_values(
    session: FakeSession, screen: Told, handle: CellHandle, after: Any
) -> None:
    ahead, behind = (LoopProgress("epoch 1", done, 80, 4.0) for done in (30, 20))
    session.ranks = (
        RankSnapshot(rank=0, state="running", step=30, bars=(ahead,)),
        RankSnapshot(rank=1, state="running", step=20, bars=(behind,)),
    )
    session.curves.add(0, 0.0, 1, {"loss": 1.0})
    session.curves.add(1, 0.0, 1, {"loss": 2.0})
    after(10)
    progress(session).tell(screen, handle)
    assert screen.text == "nbddp: 10.0 s · epoch 1 20/80 · 5.0/s · 12.0 s left · loss 1.5\n"


def test_without_a_loop_the_step_is_told(
    session: FakeSession, screen: Told, handle: CellHandle, after: Any
) -> None:
    session.ranks = (RankSnapshot(rank=0, state="running", step=7, steps_per_second=2.0),)
    after(10)
    progress(session).tell(screen, handle)
    assert screen.text == "nbddp: 10.0 s · step 7 · 2.0/s\n"


def test_in_a_terminal_a_line_takes_the_place_of_the_one_before(
    session: FakeSession, screen: Told, handle: CellHandle, after: Any
) -> None:
    told = progress(session, terminal=True)
    for second in (0.5, 1.0, 1.5, 2.0):
        after(second)
        session.log(int(second * 2), loss=second)
        told.tell(screen, handle)
    one, other = "nbddp: 1.0 s · loss 1", "nbddp: 2.0 s · loss 2"
    assert screen.text == f"\r\x1b[K{one}\r\x1b[K{other}"
    told.make_room(screen)
    told.make_room(screen)
    assert screen.text == f"\r\x1b[K{one}\r\x1b[K{other}\r\x1b[K"


# ---- the charts


def test_the_curves_of_a_cell_are_one_picture_with_the_values_as_its_text(
    session: FakeSession, screen: Told
) -> None:
    for step in range(20):
        session.log(step, loss=2.0 / (step + 1), accuracy=step / 20)
    progress(session, pictures=True).finish(screen)
    [data] = screen.shown
    assert data["text/plain"] == "loss 0.1 · accuracy 0.95"
    picture = imread(io.BytesIO(base64.b64decode(data["image/png"])))
    [sizes] = screen.sizes
    assert picture.shape[1] == 2 * sizes["image/png"]["width"] == 2 * 740
    assert picture[..., 3].any()
    assert screen.text == ""


def test_numbers_that_make_no_curve_and_screens_without_pictures_show_none(
    session: FakeSession, screen: Told
) -> None:
    session.log(0, loss=1.0)
    progress(session, pictures=True).finish(screen)
    session.log(1, loss=1.0)
    progress(session, pictures=False).finish(screen)
    assert (screen.shown, screen.text) == ([], "")


def test_metrics_that_are_too_many_are_counted(session: FakeSession, screen: Told) -> None:
    for step in range(2):
        session.log(step, **{f"m{number}": 1.0 for number in range(14)})
    progress(session, pictures=True).finish(screen)
    assert screen.text == "nbddp: 2 more metrics are in metrics.jsonl\n"


def test_a_picture_that_cannot_be_drawn_costs_no_cell(
    session: FakeSession, screen: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_curves: object) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr("nbddp.ui.charts.paper.draw_sheet", fail)
    for step in range(2):
        session.log(step, loss=1.0)
    progress(session, pictures=True).finish(screen)
    assert screen.text == "nbddp: the charts could not be drawn: OverflowError: too large\n"
