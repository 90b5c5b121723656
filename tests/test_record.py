"""The record of a cell: it needs no kernel, is safe in any page, and has the cause on top."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import BIG, SNAPSHOTS, TEXT, Page

from nbddp.lifecycle.states import GroupState
from nbddp.record.cell import CellResult
from nbddp.record.series import Curve
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.timeline import Happening
from nbddp.record.verdict import Ending, judge
from nbddp.ui.ansi import strip
from nbddp.ui.panel.charthtml import Drawn, charts_html, kept_chart
from nbddp.ui.panel.record import Record, record_html, record_text
from nbddp.ui.panel.style import SHEET
from nbddp.ui.tails import Line
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
    return CellEnded(cell=7, seconds=0.1, in_group=True)


def badly(
    name: str = "ValueError",
    text: str = "no",
    traceback: str = "Traceback\nCell In[3], line 9",
    collective: str = "",
    *,
    is_interrupted: bool = False,
) -> CellEnded:
    failure = Failure(name=name, text=text, traceback=traceback, line=9, collective=collective)
    return replace(well(), failure=asdict(failure), is_interrupted=is_interrupted)


def result_of(*reports: CellEnded | None, ended_by: str = "") -> CellResult:
    """What came of a cell: what each rank reported, None for one that was killed."""
    known = {rank: each for rank, each in enumerate(reports) if each is not None}
    exits = {rank: Ending(-9, 5.0) for rank, each in enumerate(reports) if each is None}
    ranks = range(len(reports))
    return CellResult(
        number=7,
        ranks=tuple(ranks),
        reports=known,
        exits=dict.fromkeys(exits, -9),
        seconds=12.0,
        verdict=judge(ranks, known, exits, ended_by=ended_by),
        fetch=lambda _: None,
    )


def page_of(result: CellResult | None, **more: object) -> Page:
    return Page(record_html(Record(snapshot=SNAPSHOT, result=result, **more)))  # type: ignore[arg-type]


def is_open(page: Page) -> bool:
    """Whether the first of what folds is unfolded."""
    return "open" in next(known for tag, known in page.tags if tag == "details")


# ---- safe, whatever it is

LINES = st.lists(st.builds(Line, st.sampled_from([(), (0,), (0, 1)]), TEXT, st.just("")))
RESULTS = st.builds(
    lambda *texts, ended_by: result_of(
        badly(*texts[:4]), badly(*texts[4:], is_interrupted=True), None, well(), ended_by=ended_by
    ),
    *[TEXT] * 8,
    ended_by=st.sampled_from(["", "restart"]),
)
CURVES = {0: Curve((0.0, 1.0), (2.0, 1.0), (2.0, 1.0), (2.0, 1.0), (0, 0), 1.0)}


def chart(name: str) -> Drawn:
    return kept_chart(name, CURVES)


RECORDS = st.builds(
    Record,
    snapshot=SNAPSHOTS,
    result=st.none() | st.just(result_of(well())) | RESULTS,
    lines=LINES,
    earlier=TEXT,
    rank_lines=st.lists(st.tuples(st.integers(0, 9), LINES, TEXT), max_size=2),
    charts=st.lists(TEXT.map(chart), max_size=2),
    notes=st.lists(TEXT, max_size=2),
)


@BIG
@given(RECORDS)
def test_a_record_is_ours_and_says_all_that_it_was_given(record: Record) -> None:
    page = Page(record_html(record))
    texts = [line.text for line in record.lines]
    texts += [line.text for _, lines, _ in record.rank_lines for line in lines]
    texts += [each.name for each in record.charts]
    texts += [*record.notes, record.snapshot.alarm, record.snapshot.run]
    if record.result is not None and record.result.verdict is not None:
        texts += record.result.verdict.report().split("\n")
    for text in texts:
        for line in text.split("\n"):
            assert page.holds(line)
    assert page.sheet.startswith(SHEET.removeprefix("<style>").removesuffix("</style>"))


@BIG
@given(RECORDS)
def test_its_plain_text_can_be_sent_too_and_has_no_sequences(record: Record) -> None:
    text = record_text(record)
    text.encode()
    assert "\x1b" not in text
    for line in record.lines:
        assert strip(line.text.split("\n")[0]) in text


@given(TEXT)
def test_a_chart_is_part_of_the_page_under_its_name(name: str) -> None:
    page = Page(charts_html([chart(name)]))
    assert page.values("alt") == [strip(name)]
    [source] = page.values("src")
    picture = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


# ---- a cell that went well


def test_a_cell_that_went_well_is_one_line_that_unfolds() -> None:
    page = page_of(result_of(well(), well()))
    assert not is_open(page)
    summary = page.by_tag["summary"][0]
    for text in ("done on ranks 0-1", "12.0 s", "gloo", "2025-first"):
        assert text in summary


def test_charts_and_output_are_seen_without_unfolding() -> None:
    page = page_of(result_of(well()), charts=[chart("loss")], lines=[Line((0,), "epoch 1")])
    assert "epoch 1" not in page.by_tag["details"][0]
    assert "epoch 1" in page.text
    tags = [tag for tag, _ in page.tags]
    assert tags.index("img") > tags.index("details")


def test_no_charts_and_no_output_leave_nothing_behind() -> None:
    page = page_of(result_of(well()))
    assert page.by_tag.get("pre", []) == []
    assert charts_html([]) == ""


def test_its_plain_text_says_what_the_charts_show() -> None:
    record = Record(snapshot=SNAPSHOT, result=result_of(well()), charts=[chart("loss")])
    assert record_text(record) == "loss: 1 at step 1, rank 0"


def test_charts_keep_their_order() -> None:
    page = page_of(result_of(well()), charts=[chart("b"), chart("a")])
    assert page.values("alt") == ["b", "a"]


def test_lines_have_their_ranks_and_tell_of_those_before() -> None:
    lines = [Line((0,), "a"), Line((1,), "b")]
    page = page_of(result_of(well()), lines=lines, earlier="12 earlier lines in rank0.log")
    assert "12 earlier lines in rank0.log\n[rank 0] a\n[rank 1] b" in page.text


def test_a_rank_with_more_to_say_has_its_own_lines_folded() -> None:
    rank_lines: list[tuple[int, Sequence[Line], str]] = [(1, [Line((1,), "b")], "9 earlier")]
    page = page_of(result_of(well()), rank_lines=rank_lines)
    assert page.by_tag["summary"][1] == "only rank 1"
    assert page.by_tag["details"][1].endswith("9 earlier\n[rank 1] b")
    assert [("open" in known) for tag, known in page.tags if tag == "details"] == [False, False]


def test_the_lines_of_many_ranks_are_in_one_fold() -> None:
    assert folds_of(8) == [f"only rank {rank}" for rank in range(8)]
    assert folds_of(9) == ["each rank's lines"]


def folds_of(ranks: int) -> list[str]:
    """What is written on the folds below the log that are in no other."""
    rank_lines = [(rank, [Line((rank,), "b")], "") for rank in range(ranks)]
    html = record_html(Record(snapshot=SNAPSHOT, result=result_of(well()), rank_lines=rank_lines))
    depth, said = 0, []
    for end, summary in re.findall(r"<(/)?details(?:[^>]*><summary>([^<]*))?", html):
        depth += -1 if end else 1
        said += [summary] if summary and depth == 1 else []
    return said


def test_notes_are_said() -> None:
    page = page_of(result_of(well()), notes=["3 more metrics are in metrics.jsonl"])
    assert "3 more metrics are in metrics.jsonl" in page.text


# ---- a cell that did not


def test_a_cell_that_failed_is_unfolded_with_the_first_cause_on_top() -> None:
    interrupted = badly("KeyboardInterrupt", "", collective="all_reduce #7", is_interrupted=True)
    result = result_of(interrupted, badly())
    failure = Happening(105.0, "failure", {"rank": 1, "what": "the event"})
    ranks = (RankSnapshot(rank=0, state="the state"),)
    snapshot = replace(SNAPSHOT, ranks=ranks, events=(failure,))
    page = Page(
        record_html(
            Record(
                snapshot=snapshot,
                result=result,
                lines=[Line((0,), "the output")],
                notes=["the note"],
            )
        )
    )
    assert is_open(page)
    assert "failed on rank 1" in page.by_tag["summary"][0]
    cause = page.text.index("first cause: rank 1: ValueError: no, line 9")
    for text in ("the state", "the event", "the output", "the note"):
        assert page.text.index(text) > cause
    assert result.verdict is not None
    assert result.verdict.report() in page.text


def test_a_hang_is_told_above_the_ranks() -> None:
    snapshot = replace(SNAPSHOT, alarm="no progress for 10 s:\n  ranks 0-1 waiting")
    text = Page(record_html(Record(snapshot=snapshot, result=result_of(badly())))).text
    assert text.index("ValueError: no") < text.index(snapshot.alarm) < text.index("done")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (result_of(well()), "done on rank 0"),
        (result_of(badly(), well()), "failed on rank 0"),
        (result_of(well(), None), "failed on rank 1"),
        (result_of(badly(), badly()), "failed on ranks 0-1"),
        (result_of(badly(is_interrupted=True)), "interrupted"),
        (result_of(None, None, ended_by="restart"), "ended by a restart"),
        (result_of(None, None, ended_by="stop"), "ended by a stop"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_its_first_line_says_how_it_ended(result: CellResult, said: str) -> None:
    page = page_of(result)
    assert page.by_tag["summary"][0].startswith(f"{said} ")
    assert is_open(page) == (not result.is_ok)


def test_only_a_failure_looks_like_one() -> None:
    assert any("nbddp-error" in name for name in page_of(result_of(badly())).values("class"))
    interrupted = page_of(result_of(badly(is_interrupted=True)))
    assert not any("nbddp-error" in name for name in interrupted.values("class"))


def test_colours_of_a_traceback_are_kept() -> None:
    page = page_of(result_of(badly(traceback="\x1b[31mTraceback\x1b[m")))
    assert "ansi-red-fg" in page.values("class")


# ---- a group that is only looked at


def test_a_group_that_is_looked_at_is_unfolded_with_its_state() -> None:
    page = page_of(None)
    assert is_open(page)
    summary = page.by_tag["summary"][0]
    for text in ("ready", "2 ranks", "gloo", "2025-first"):
        assert text in summary


# ---- as text


def test_as_text_a_cell_that_went_well_is_its_output() -> None:
    record = Record(snapshot=SNAPSHOT, result=result_of(well()), lines=[Line((0,), "a")])
    assert record_text(record) == "[rank 0] a"


def test_as_text_a_cell_that_failed_is_its_output_and_the_first_cause() -> None:
    record = Record(
        snapshot=SNAPSHOT,
        result=result_of(well(), badly()),
        lines=[Line((0,), "\x1b[32ma\x1b[m")],
        earlier="9 earlier lines in rank0.log",
        notes=["3 more metrics are in metrics.jsonl"],
    )
    assert record_text(record).split("\n") == [
        "9 earlier lines in rank0.log",
        "[rank 0] a",
        "rank 1: ValueError: no, line 9",
        "3 more metrics are in metrics.jsonl",
    ]


def test_as_text_a_cell_that_said_nothing_is_nothing() -> None:
    assert record_text(Record(snapshot=SNAPSHOT, result=result_of(well()))) == ""
    assert record_text(Record(snapshot=SNAPSHOT)) == ""
