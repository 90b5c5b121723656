"""The traces of all ranks: one file, a table of differences, and missing traces."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import readable
from typed import RUNS, Run, Typed

from nbddp.extensions.trace import TraceSteps
from nbddp.extensions.trace import merge as record
from nbddp.extensions.trace.merge import Trace, write_merged
from nbddp.extensions.trace.messages import TraceSent
from nbddp.extensions.trace.view import trace_report
from nbddp.ui.report.render import render_html, render_text

ASKED = TraceSteps(first=10, last=15)


def of_rank(**more: Any) -> TraceSent:
    facts: dict[str, Any] = {"steps": [10, 15], "seconds": 0.4, "events": 50}
    return TraceSent(**(facts | more))


SLOW = of_rank(idle_ms=300.0, operator_times={"aten::mm": [50.0, 12], "gloo:all_reduce": [1.0, 6]})
QUICK = of_rank(
    idle_ms=20.0, operator_times={"aten::mm": [51.0, 12], "gloo:all_reduce": [280.0, 6]}
)
UNEQUAL = of_rank(operator_times={"aten::mm": [90.0, 24]})


def trace(tmp_path: Path, ranks: dict[int, TraceSent] | None = None, **more: Any) -> Trace:
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


@pytest.mark.parametrize("big", [10**6, 1])
def test_the_merged_trace_file_is_one_document_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, big: int
) -> None:
    monkeypatch.setattr(record, "COMPRESS_ABOVE", big)
    parts = {rank: tmp_path / f"rank{rank}.part" for rank in (0, 1, 2)}
    for rank, part in parts.items():
        part.write_text(f'{{"ph":"X","pid":{rank}}}' if rank else "")
    path = write_merged(parts, tmp_path, "cell3", {"baseTimeNanoseconds": 7})
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert path.name == ("cell3.json" if big > 1 else "cell3.json.gz")
    assert [each["pid"] for each in document["traceEvents"]] == [1, 2]
    assert document["baseTimeNanoseconds"] == 7
    assert path.stat().st_mode & 0o77 == 0


NOTHING = Trace(cell=3, asked=ASKED, ranks={}, missing={0: "no steps", 1: "no steps"})


def test_trace_reports_as_text(tmp_path: Path, snapshot: Any) -> None:
    cut = of_rank(steps=[10, 12], left_out=5)
    missing = {1: "it died", 2: "it died"}
    traces = {
        "ranks that differ": trace(tmp_path),
        "equal ranks": trace(tmp_path, {0: QUICK, 1: QUICK}),
        "one rank": trace(tmp_path, {0: QUICK}),
        "unequal calls": trace(tmp_path, {0: SLOW, 1: UNEQUAL}),
        "many ranks": trace(tmp_path, {rank: of_rank(idle_ms=10.0 * rank) for rank in range(12)}),
        "much is missing": trace(tmp_path, {0: cut}, missing=missing, error=0.0015),
        "it begins later": trace(tmp_path, {0: of_rank(steps=[11, 15])}),
        "nothing": NOTHING,
        "nothing, for two reasons": replace(NOTHING, missing={0: "no steps", 1: "it died"}),
    }
    texts = {name: render_text(trace_report(each)) for name, each in traces.items()}
    assert str(tmp_path / "cell3.json") in texts["ranks that differ"]
    assert {name: text.replace(str(tmp_path), "RUN") for name, text in texts.items()} == snapshot


def on_page(told: Trace) -> str:
    return render_html(trace_report(told))


def test_only_a_small_trace_file_gets_a_download_link(tmp_path: Path, snapshot: Any) -> None:
    told = trace(tmp_path)
    html = on_page(told)
    assert readable(html.replace(str(tmp_path), "RUN")) == snapshot(name="whole")
    assert 'download="cell3.json" href="data:application/json;base64,e30="' in html
    assert readable(on_page(NOTHING)) == snapshot(name="nothing")
    assert "<a download" not in on_page(replace(told, size=10**8))
    assert told.path is not None
    told.path.unlink()
    assert "<a download" not in on_page(told)
    assert str(told.path) in on_page(told)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_ranks_of_a_cell_or_a_script_get_the_steps_to_trace(typed: Typed, run: Run) -> None:
    run(typed, "--trace 2:4")
    steps = {"first": 2, "last": 4, "with_memory": False}
    assert typed.asked()[0].options == {"trace": {"trace": steps}}
