"""What all ranks have traced: one file with arrows, a table of what differs, what is missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nbddp.record import trace as record
from nbddp.record.trace import REST, Trace, is_different, join, rows, write
from nbddp.ui.panel.trace import trace_bundle, trace_html
from nbddp.ui.text.trace import trace_text
from nbddp.wire.trace_messages import Steps, Traced

ASKED = Steps(first=10, last=15)


def met(number: int, began: float, end: float, group: str = "") -> list[Any]:
    return [group, number, "gloo:all_reduce", 900_000_000, began, end]


def of_rank(**more: Any) -> Traced:
    facts: dict[str, Any] = {"steps": [10, 15], "seconds": 0.4, "events": 50}
    return Traced(**(facts | more))


SLOW = of_rank(rest=300.0, spent={"aten::mm": [50.0, 12], "gloo:all_reduce": [1.0, 6]})
QUICK = of_rank(rest=20.0, spent={"aten::mm": [51.0, 12], "gloo:all_reduce": [280.0, 6]})


def trace(tmp_path: Path, ranks: dict[int, Traced] | None = None, **more: Any) -> Trace:
    path = tmp_path / "cell3.json"
    path.write_text("{}")
    return Trace(
        cell=3,
        asked=ASKED,
        ranks=ranks or {0: SLOW, 1: QUICK},
        missing=more.pop("missing", {}),
        path=path,
        folder=tmp_path / "cell3",
        size=path.stat().st_size,
        **more,
    )


# ---- one file


def test_an_arrow_leads_from_the_last_one_to_the_end_of_each_that_waited() -> None:
    arrows, left = join(
        {
            0: of_rank(met=[met(7, 10.0, 40.0)]),
            1: of_rank(met=[met(7, 30.0, 41.0)]),
            2: of_rank(met=[met(7, 20.0, 42.0), met(8, 50.0, 60.0)]),
        }
    )
    begins = [each for each in arrows if each["ph"] == "s"]
    ends = [each for each in arrows if each["ph"] == "f"]
    assert [(each["pid"], each["ts"]) for each in begins] == [(1001, 30.5)] * 2
    assert [(each["pid"], each["ts"]) for each in ends] == [(1, 39.5), (2001, 41.5)]
    assert {each["name"] for each in arrows} == {"the last one comes"}, "no span's name"
    assert [each["id"] for each in begins] == [each["id"] for each in ends] == [1, 2]
    assert left == 0


def test_collectives_of_other_groups_do_not_meet() -> None:
    of_first = {0: of_rank(met=[met(1, 0.0, 5.0, "[0, 1]")])}
    assert join({**of_first, 1: of_rank(met=[met(1, 0.0, 5.0, "[1, 2]")])}) == ([], 0)


def test_too_many_arrows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_ARROWS", 2)
    first = of_rank(met=[met(number, 100.0 * number, 5000.0) for number in range(5)])
    second = of_rank(met=[met(number, 101.0 * number, 5000.0) for number in range(5)])
    arrows, left = join({0: first, 1: second})
    assert (len(arrows), left) == (4, 3)


@pytest.mark.parametrize("big", [10**6, 1])
def test_the_file_is_one_document_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: int
) -> None:
    monkeypatch.setattr(record, "BIG", big)
    parts = {rank: tmp_path / f"rank{rank}.part" for rank in (0, 1, 2)}
    for rank, part in parts.items():
        part.write_text(f'{{"ph":"X","pid":{rank}}}' if rank else "")
    ranks = {rank: of_rank(met=[met(1, 10.0 * rank, 50.0)]) for rank in (1, 2)}
    path, _ = write(ranks, parts, tmp_path, "cell3", {"baseTimeNanoseconds": 7})
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert path.name == ("cell3.json" if big > 1 else "cell3.json.gz")
    assert [each["pid"] for each in document["traceEvents"][:2]] == [1, 2]
    assert [each["ph"] for each in document["traceEvents"][2:]] == ["s", "f"]
    assert document["baseTimeNanoseconds"] == 7
    assert path.stat().st_mode & 0o77 == 0


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "_write_events", full)
    with pytest.raises(OSError, match="No space left"):
        write({}, {}, tmp_path, "cell3", {})
    assert list(tmp_path.iterdir()) == []


# ---- where ranks differ


def test_what_differs_comes_first_and_what_does_not_is_not_said_to() -> None:
    ranks = {0: SLOW, 1: QUICK}
    found = rows(ranks)
    assert [row.name for row in found] == [REST, "gloo:all_reduce", "aten::mm"]
    assert [is_different(row, ranks) for row in found] == [True, True, False]


def test_the_table_shows_what_differs(tmp_path: Path) -> None:
    text = trace_text(trace(tmp_path))
    assert text.splitlines()[0] == "trace of cell 3 · steps 10 to 15 · 2 ranks · 100 events · 1 KiB"
    assert f"{tmp_path / 'cell3.json'}" in text
    assert "operators that cost some ranks more than others" in text
    assert "in no operator: Python, or asleep  300.0   20.0" in text
    assert "gloo:all_reduce, with the waiting  1.0     280.0" in text
    assert "aten::mm" not in text


def test_equal_ranks_are_called_so(tmp_path: Path) -> None:
    text = trace_text(trace(tmp_path, {0: QUICK, 1: QUICK}))
    assert "no operator costs one rank much more than another" in text
    assert "gloo:all_reduce, with the waiting  280.0   280.0" in text
    assert "the costliest operators" in trace_text(trace(tmp_path, {0: QUICK}))


def test_unequal_calls_are_named(tmp_path: Path) -> None:
    more = of_rank(spent={"aten::mm": [90.0, 24]})
    text = trace_text(trace(tmp_path, {0: SLOW, 1: more}))
    assert "50.0 (12 calls)  90.0 (24 calls)" in text


def test_of_many_ranks_the_extremes_are_shown(tmp_path: Path) -> None:
    ranks = {rank: of_rank(rest=float(10 * rank)) for rank in range(12)}
    assert "0.0 (rank 0)  110.0 (rank 11)" in trace_text(trace(tmp_path, ranks))


def test_what_is_not_in_it_is_said(tmp_path: Path) -> None:
    cut = of_rank(steps=[10, 12], is_cut=True, left_out=5, under=2.5, lost=1, peak={"CPU": 2**21})
    told = trace(
        tmp_path, {0: cut}, missing={1: "it died", 2: "it died"}, error=0.0015, arrows_left=7
    )
    text = trace_text(told)
    for line in (
        "nothing of ranks 1-2: it died",
        "step 12 was not traced to its end: the cell ended there",
        "steps 10 to 15 were asked for: after step 12 the cell ended, or it took too long",
        "tensors held at most: rank 0 2.0 MiB",
        "5 events left out of the merged file, the shortest: none took 2.5 µs; "
        "the ranks' own files have all",
        "7 arrows left out: those of the shortest waits",
        "1 collective without arrows: which one it was is not known",
        "clocks of the nodes: ± 1.5 ms",
    ):
        assert line in text


def test_reports_in_leaps_that_begin_later_are_said(tmp_path: Path) -> None:
    text = trace_text(trace(tmp_path, {0: of_rank(steps=[11, 15])}))
    assert "steps 10 to 15 were asked for: step 11 was the first that was reported" in text


def test_nothing_at_all_is_one_line_for_each_reason() -> None:
    nothing = Trace(cell=3, asked=ASKED, ranks={}, missing={0: "no steps", 1: "no steps"})
    assert trace_text(nothing) == "no trace of cell 3: no steps"
    uneven = Trace(cell=3, asked=ASKED, ranks={}, missing={0: "no steps", 1: "it died"})
    assert trace_text(uneven).splitlines() == [
        "no trace of cell 3: rank 0: no steps",
        "no trace of cell 3: rank 1: it died",
    ]
    assert "no trace of cell 3: no steps" in trace_html(nothing)


# ---- on a page


def test_a_page_has_the_file_with_it_if_it_is_small(tmp_path: Path) -> None:
    told = trace(tmp_path)
    html = trace_html(told)
    assert '<a download="cell3.json" href="data:application/json;base64,e30=">' in html
    assert str(told.path) in html
    assert '<th scope="row">in no operator: Python, or asleep</th><td>300.0</td>' in html
    assert set(trace_bundle(told)) == {"text/html", "text/plain"}


def test_a_large_file_and_one_that_is_gone_are_only_named(tmp_path: Path) -> None:
    told = trace(tmp_path)
    big = Trace(**{name: getattr(told, name) for name in told.__slots__} | {"size": 10**8})
    assert "<a download" not in trace_html(big)
    assert told.path is not None
    told.path.unlink()
    assert "<a download" not in trace_html(told)
    assert str(told.path) in trace_html(told)


def test_names_of_operators_are_text(tmp_path: Path) -> None:
    odd = of_rank(spent={"<b>": [300.0, 1]})
    assert "<b>" not in trace_html(trace(tmp_path, {0: odd, 1: QUICK}))
