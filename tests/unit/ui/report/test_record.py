"""The record of a cell: it needs no kernel, is safe in any page, and has the cause on top."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from pages import Page, readable

from nbddp.lifecycle.group_state import GroupState
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.record.metrics import MetricStore
from nbddp.record.run_events import RankFailed
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.log_lines import LogLine
from nbddp.ui.report.finished_cell import CellReport, record_html, record_text
from nbddp.wire.messages import CellEnded, Failure

SNAPSHOT = Snapshot(
    state=GroupState.IDLE,
    began=100.0,
    seconds=10.0,
    attempt=1,
    backend="gloo",
    devices=("cpu", "cpu"),
    run="2025-first",
    ranks=(RankSnapshot(rank=0, state="done"), RankSnapshot(rank=1, state="done")),
)


def well() -> CellEnded:
    return CellEnded(cell=7, in_group=True)


def badly(*, is_interrupted: bool = False, **more: str) -> CellEnded:
    usual = {"name": "ValueError", "text": "no", "traceback": "Traceback\nCell In[3], line 9"}
    failure = asdict(Failure(line=9, **usual | more))
    return replace(well(), failure=failure, is_interrupted=is_interrupted)


def result_of(*reports: CellEnded | None, ended_by: str = "") -> CellResult:
    """The result of a cell: the report of each rank, None for a killed rank."""
    handle = CellHandle(7, CellRequest(source=""), tuple(range(len(reports))), lambda _: None)
    if ended_by:
        handle.set_ended_by(ended_by)
    for rank, report in enumerate(reports):
        if report is None:
            handle.add_exit(rank, -9)
        else:
            handle.add_report(rank, report)
    return replace(handle.finish(), seconds=12.0)


NOTE = "metrics.jsonl \x1b[1mhas\x1b[m more"
EARLIER = "12 earlier lines in rank0.log"


def failed() -> CellReport:
    """Rank 0 waits in a collective in which rank 1 fails; a hang was seen before."""
    stop = {"name": "KeyboardInterrupt", "text": "", "collective": "all_reduce #7"}
    snapshot = replace(
        SNAPSHOT,
        ranks=(RankSnapshot(rank=0, state="the state"),),
        events=(RankFailed(time=105.0, rank=1, what="the event"),),
        alarm="no progress for 10 s:\n  ranks 0-1 waiting",
    )
    lines = [LogLine((0,), "\x1b[32mthe output\x1b[m")]
    result = result_of(
        badly(is_interrupted=True, **stop),
        badly(traceback="\x1b[31mTraceback\x1b[m\nCell In[3], line 9"),
    )
    return CellReport(snapshot=snapshot, result=result, lines=lines, earlier=EARLIER, notes=[NOTE])


def went_well() -> CellReport:
    """Two charts and some output, of which rank 1 has more."""
    metrics = MetricStore()
    for step in range(2):
        metrics.add(0, float(step), step, {"loss": 2.0 - step, "accuracy": 2.0 - step})
    return CellReport(
        snapshot=SNAPSHOT,
        result=result_of(well(), well()),
        lines=[LogLine((0,), "a"), LogLine((1,), "b")],
        earlier=EARLIER,
        rank_lines=[(1, [LogLine((1,), "b")], "9 earlier")],
        metrics=metrics.snapshot(most=2),
        notes=[NOTE],
    )


def test_a_cell_record_as_html_and_as_text(snapshot: Any) -> None:
    records = {
        "well": went_well(),
        "failed": failed(),
        "silent": CellReport(snapshot=SNAPSHOT, result=result_of(well())),
        "only looked at": CellReport(snapshot=SNAPSHOT),
    }
    for name, record in records.items():
        assert readable(record_html(record)) == snapshot(name=f"{name}: page")
        assert record_text(record) == snapshot(name=f"{name}: text")


@pytest.mark.parametrize(("ranks", "in_last_section"), [(8, 1), (9, 9)])
def test_the_lines_of_more_than_eight_ranks_share_one_collapsible_section(
    ranks: int, in_last_section: int
) -> None:
    rank_lines = [(rank, [LogLine((rank,), "b")], "") for rank in range(ranks)]
    page = Page(record_html(CellReport(snapshot=SNAPSHOT, rank_lines=rank_lines)))
    assert page.text.count("only rank ") == ranks
    assert page.by_tag["details"][-1].count("only rank ") == in_last_section


@pytest.mark.parametrize(
    ("result", "text", "is_failure"),
    [
        (result_of(well()), "done on rank 0", False),
        (result_of(badly(), well()), "failed on rank 0", True),
        (result_of(well(), None), "failed on rank 1", True),
        (result_of(badly(), badly()), "failed on ranks 0-1", True),
        (result_of(badly(is_interrupted=True)), "interrupted", False),
        (result_of(None, None, ended_by="restart"), "ended by a restart", None),
        (result_of(None, None, ended_by="stop"), "ended by a stop", None),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_the_first_line_of_a_record_has_the_outcome(
    result: CellResult, text: str, is_failure: bool | None
) -> None:
    page = Page(record_html(CellReport(snapshot=SNAPSHOT, result=result)))
    assert page.by_tag["summary"][0].startswith(f"{text} ")
    outermost = next(known for tag, known in page.tags if tag == "details")
    assert ("open" in outermost) == (not result.is_ok)
    if is_failure is not None:
        assert any("nbddp-error" in name for name in page.values("class")) == is_failure
