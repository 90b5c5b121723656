"""A cell in text mode prints bounded progress lines, and its curves at the end."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from screens import RecordingScreen
from syrupy.assertion import SnapshotAssertion

from nbddp.charts import figure
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.metrics import MetricStore
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.text_view import ProgressLine


class Cell:
    """A cell with made-up ranks and metrics, and a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MetricStore()
        self.rank_monitor = SimpleNamespace(metrics=self.store)
        self.ranks: tuple[RankSnapshot, ...] = ()
        self.screen = RecordingScreen()
        self.handle = CellHandle(1, CellRequest(source=""), (0, 1), lambda payload: payload)
        self.seconds = 0.0
        monkeypatch.setattr(time, "time", lambda: self.handle.began_at + self.seconds)

    def snapshot(self, _cell: object) -> Any:
        return SimpleNamespace(ranks=self.ranks, straggler=None)

    def progress(self, **options: bool) -> ProgressLine:
        arguments = {"is_terminal": False, "has_pictures": False} | options
        return ProgressLine(self, **arguments)

    def log(self, step: int, rank: int = 0, **values: float) -> None:
        self.store.add(rank, float(step), step, values)

    def told(self, progress: ProgressLine, seconds: float) -> str:
        """The line printed after so many seconds."""
        before, self.seconds = self.screen.text, seconds
        progress.update(self.screen, self.handle, lambda: None)
        return self.screen.text.removeprefix(before)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    return Cell(monkeypatch)


def test_a_progress_line_is_printed_every_30_seconds(cell: Cell) -> None:
    progress, told = cell.progress(), {}
    for second in range(301):
        cell.log(second, loss=float(second))
        told[second] = cell.told(progress, second)
    assert [second for second, line in told.items() if line] == [*range(30, 301, 30)]
    assert told[30] == "nbddp: 30.0 s · loss 30\n"


def test_no_progress_line_is_printed_without_news(cell: Cell) -> None:
    progress = cell.progress()
    assert not any(cell.told(progress, second) for second in range(100))
    cell.log(1, loss=0.5)
    told = [cell.told(progress, second) for second in range(100, 1000)]
    assert [line for line in told if line] == ["nbddp: 2:00 · loss 0.5\n"]


def looping(rank: int, done: int) -> RankSnapshot:
    bar = LoopProgress("epoch 1", done, 80, 4.0)
    return RankSnapshot(rank=rank, state="running", step=done, progress_bars=(bar,))


@pytest.mark.parametrize(
    ("ranks", "losses"),
    [
        ((looping(0, 30), looping(1, 20)), [1.0, 2.0]),
        ((RankSnapshot(rank=0, state="running", step=7, steps_per_second=2.0),), []),
    ],
    ids=["the rank that is furthest behind and the mean of values", "the step without a loop"],
)
def test_a_progress_line_shows_the_slowest_rank_and_mean_values(
    cell: Cell, ranks: tuple[RankSnapshot, ...], losses: list[float], snapshot: SnapshotAssertion
) -> None:
    cell.ranks = ranks
    for rank, loss in enumerate(losses):
        cell.log(1, rank, loss=loss)
    assert cell.told(cell.progress(), 30) == snapshot


def test_in_a_terminal_a_progress_line_overwrites_the_previous_one(cell: Cell) -> None:
    progress = cell.progress(is_terminal=True)
    for second in (0.5, 1.0, 1.5, 2.0):
        cell.log(int(second * 2), loss=second)
        cell.told(progress, second)
    lines = "\r\x1b[Knbddp: 1.0 s · loss 1\r\x1b[Knbddp: 2.0 s · loss 2"
    assert cell.screen.text == lines
    progress.clear(cell.screen)
    progress.clear(cell.screen)
    assert cell.screen.text == f"{lines}\r\x1b[K"


def test_in_a_terminal_imports_are_shown_until_they_end(cell: Cell) -> None:
    progress = cell.progress(is_terminal=True)
    ranks = tuple(RankSnapshot(rank=rank, state="", importing="torch._dynamo") for rank in range(4))
    shown = []
    for second, cell.ranks in enumerate((ranks, (*ranks[:3], looping(3, 0)), ()), start=1):
        shown.append(cell.told(progress, second))
    assert shown == [
        "\r\x1b[Knbddp: 1.0 s · ranks 0-3: importing torch._dynamo",
        "\r\x1b[Knbddp: 2.0 s · epoch 1 0/80 · ranks 0-2: importing torch._dynamo",
        "\r\x1b[K",
    ]


def test_the_curves_of_a_cell_are_one_picture_with_the_last_values_as_text(cell: Cell) -> None:
    for step in range(20):
        cell.log(step, loss=2.0 / (step + 1), accuracy=step / 20)
    cell.progress(has_pictures=True).show_charts(cell.screen)
    outputs: list[Any] = cell.screen.outputs
    [(data, sizes, display_id, is_update)] = outputs
    assert (display_id, is_update) == ("", False)
    assert data["text/plain"] == "loss 0.1 · accuracy 0.95"
    assert data["image/png"].startswith("iVBORw0K")
    assert sizes == {"image/png": {"width": 740}}


def test_no_picture_without_a_curve_or_on_a_screen_without_pictures(cell: Cell) -> None:
    cell.progress(has_pictures=True).show_charts(cell.screen)
    assert cell.screen.text == ""
    cell.log(0, loss=1.0, accuracy=0.5)
    cell.progress(has_pictures=True).show_charts(cell.screen)
    assert cell.screen.text == "nbddp: loss 1 · accuracy 0.5\n"  # as after an evaluation
    cell.log(1, loss=1.0)
    cell.progress(has_pictures=False).show_charts(cell.screen)
    assert cell.screen.outputs == ["nbddp: loss 1 · accuracy 0.5\n"]


def too_large(_curves: object) -> None:
    raise OverflowError("too large")


@pytest.mark.parametrize(
    ("metrics", "draw"), [(14, figure.draw_charts), (1, too_large)], ids=["too many", "not drawn"]
)
def test_the_text_names_metrics_that_are_not_in_the_picture(
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
    metrics: int,
    draw: Callable[..., Any],
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setattr(figure, "draw_charts", draw)
    for step in range(2):
        cell.log(step, **{f"m{number}": 1.0 for number in range(metrics)})
    cell.progress(has_pictures=True).show_charts(cell.screen)
    assert cell.screen.text == snapshot
