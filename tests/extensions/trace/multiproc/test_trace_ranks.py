"""Traces of real ranks: one file on one clock, and the message if there is no trace."""

import gzip
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from drivers.extensions import begin_traced, collect_trace, timeline_of_last
from drivers.ranks import MakeRanks, Ranks
from notebook import Notebook
from processes import wait_until

from nbddp.extensions.trace import TraceSteps
from nbddp.extensions.trace import notebook as tracing
from nbddp.extensions.trace.merge import OUTSIDE_OPERATORS, Trace, trace_rows
from nbddp.extensions.trace.rank import OWN_PROFILER, PID_RANGE
from nbddp.extensions.trace.view import trace_report
from nbddp.record.cell import CellResult
from nbddp.ui.report.render import render_text

SHARES_KERNEL = True

TRAIN = """
import time
x, work = torch.ones(1000), torch.ones(64, 64)
for step in range(12):
    time.sleep({slow} if rank == world_size - 1 else 0.005)
    for _ in range(10):
        with torch.autograd.profiler.record_function(f"mark {{time.time_ns()}}"):
            work @ work
    dist.all_reduce(x)
    nbddp.log(step=step, loss=1.0)
"""
# the last rank is late in every step: it begins where the others are about to wait for it
LATE = TRAIN.replace(
    "    time.sleep({slow} if rank == world_size - 1 else 0.005)\n",
    "    while rank == world_size - 1 and not all(Path(f'{{step}}-{{each}}').exists()"
    " for each in range(rank)):\n        time.sleep(0.01)\n"
    "    time.sleep(0.05 if rank == world_size - 1 else 0.005)\n",
).replace(
    "    dist.all_reduce(x)\n", "    Path(f'{{step}}-{{rank}}').touch()\n    dist.all_reduce(x)\n"
)


def shown(trace: Trace) -> str:
    return render_text(trace_report(trace))


def run(
    group: Ranks, source: str, first: int, last: int, *, with_memory: bool = False
) -> tuple[Trace, CellResult]:
    """Return the trace of some steps of a cell, and the result of the cell."""
    asked = TraceSteps(first=first, last=last, with_memory=with_memory)
    handle = begin_traced(group, source, asked)
    wait_until(lambda: handle.is_finished, timeout=60.0)
    assert handle.result is not None
    return collect_trace(group, handle.result, asked), handle.result


def document(path: Path | None) -> dict[str, Any]:
    assert path is not None
    data = path.read_bytes()
    read: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return read


def marks(events: list[dict[str, Any]], began: int) -> dict[int, list[float]]:
    """Of each rank: microseconds by which the trace puts a mark later than the rank's clock."""
    found: dict[int, list[float]] = {}
    for event in events:
        if event["name"].startswith("mark "):
            at = int(event["name"].partition(" ")[2])
            found.setdefault(event["pid"] // PID_RANGE, []).append(
                event["ts"] - (at - began) / 1000
            )
    return found


def test_trace_file_has_all_ranks_on_one_clock(make_group: MakeRanks) -> None:
    trace, result = run(make_group(3), f"from pathlib import Path{LATE.format()}", 5, 8)
    assert result.is_ok
    assert (trace.steps, trace.missing) == ([5, 8], {})
    told = document(trace.path)
    events = told["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    late = marks(events, told["baseTimeNanoseconds"])
    assert {rank: len(each) for rank, each in late.items()} == {0: 40, 1: 40, 2: 40}
    least = [min(each) for each in late.values()]
    assert max(least) - min(least) < 100.0  # microseconds between two clocks; 3 were seen
    steps = {each["name"] for each in events if each["name"].startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in range(5, 9)}
    first, second = trace_rows(trace.ranks)[:2]
    assert {first.name, second.name} == {OUTSIDE_OPERATORS, "gloo:all_reduce"}
    assert "aten::mm" in trace.ranks[1].operator_times
    assert trace.folder is not None
    assert sorted(each.name for each in trace.folder.iterdir()) == [
        f"rank{rank}.json.gz" for rank in range(3)
    ]
    trace_of_rank = json.loads(gzip.decompress((trace.folder / "rank1.json.gz").read_bytes()))
    assert trace_of_rank["distributedInfo"]["rank"] == 1


def test_trace_has_memory_events_only_with_the_memory_option(shared_group: Ranks) -> None:
    trace, _ = run(shared_group, TRAIN.format(slow=0.005), 2, 3, with_memory=True)
    names = [each["name"] for each in document(trace.path)["traceEvents"]]
    assert "[memory]" in names
    trace, _ = run(shared_group, TRAIN.format(slow=0.005), 2, 3)
    assert "[memory]" not in [each["name"] for each in document(trace.path)["traceEvents"]]


def test_trace_ends_when_the_cell_starts_its_own_profiler(group: Ranks) -> None:
    source = (
        "for step in range(8):\n    if step == 3:\n"
        "        with torch.autograd.profiler.profile() as own: torch.ones(3) + 1\n"
        "    torch.ones(3) + 1\n    nbddp.log(step=step)\n"
    )
    trace, result = run(group, source, 2, 5)
    assert result.is_ok
    assert OWN_PROFILER in shown(trace)
    assert group.evaluate("len(own.key_averages()) > 0") == [True, True]
    trace, _ = run(group, TRAIN.format(slow=0.005), 2, 5)
    assert trace.path is not None


def test_trace_names_a_dead_rank_and_has_the_other_ranks(group: Ranks) -> None:
    source = TRAIN.format(slow=0.005).replace(
        "    dist",
        "    if step == 8 and rank == 1:\n        import os; os.kill(os.getpid(), 9)\n    dist",
    )
    trace, result = run(group, source, 2, 5)
    assert not result.is_ok
    assert trace.missing == {1: tracing.RANK_DIED}
    assert list(trace.ranks) == [0]
    assert trace.path is not None
    assert "rank 1" in shown(trace)


def test_trace_of_stopped_ranks_is_empty(group: Ranks) -> None:
    asked = TraceSteps(first=2, last=3)
    _, result = run(group, TRAIN.format(slow=0.005), 2, 3)
    group.restart()
    trace = collect_trace(group, result, asked)
    assert (trace.path, {*trace.missing}) == (None, {0, 1})
    group.stop()
    assert tracing.RANKS_STOPPED in shown(collect_trace(group, result, asked))


@pytest.mark.full
def test_trace_collects_files_from_nodes_and_corrects_clocks(on_nodes: Ranks) -> None:
    assert on_nodes.nodes is not None
    clocks = [each.clock for each in on_nodes.nodes.listener.nodes]
    assert wait_until(lambda: all(each.error < 1 for each in clocks), timeout=20.0)
    trace, _ = run(on_nodes, TRAIN.format(slow=0.05), 3, 6)
    assert trace.missing == {}
    told = document(trace.path)
    names = {each["args"]["name"] for each in told["traceEvents"] if each["name"] == "process_name"}
    assert all(" (node " in name for name in names)
    assert len(names) == 2
    late = marks(told["traceEvents"], told["baseTimeNanoseconds"])
    medians = [median(each) for each in late.values()]
    assert max(medians) - min(medians) < 2e6 * trace.error + 1000
    assert 0 < trace.error < 1
    assert 0 < timeline_of_last(on_nodes).error < 1
    assert trace.folder is not None
    assert len([*trace.folder.glob("rank*.json.gz")]) == 2


# ---- in a notebook


def test_trace_command_traces_only_the_next_cell(notebook: Notebook) -> None:
    output = notebook.run("%ddp trace --steps 5:8 --memory").text
    assert re.match("nbddp: .*5 to 8.*memory", output)
    reply = notebook.run(f"%%ddp --nproc 2 --quiet\n{TRAIN.format(slow=0.03)}")
    assert " · steps 5 to 8 · 2 ranks · " in reply.text
    assert OUTSIDE_OPERATORS in reply.text
    assert "USDT" not in reply.text, "the profiler's own log is not the user's"
    assert notebook.run("%%ddp --quiet\nnbddp.log(step=5, a=1)").text == ""


def test_trace_option_traces_a_cell_or_a_script(notebook: Notebook) -> None:
    reply = notebook.run(f"%%ddp --nproc 2 --trace 3\n{TRAIN.format(slow=0.0)}")
    assert " · step 3 · 2 ranks · " in reply.text
    notebook.run(
        "from pathlib import Path\n"
        "_ = Path('traced.py').write_text('import nbddp, os\\nfor step in range(9):\\n"
        "    nbddp.log(step=step, loss=1.0)\\n')"
    )
    reply = notebook.run("%ddp run --trace 2:4 traced.py")
    assert " · steps 2 to 4 · 2 ranks · " in reply.text
    broken = TRAIN.format(slow=0.0) + "    assert step < 7\n"
    reply = notebook.run(f"%%ddp --trace 3:100\n{broken}")
    assert reply.status == "error"
    assert " · steps 3 to " in reply.text


def test_background_cell_is_traced(notebook: Notebook) -> None:
    notebook.run(f"%%ddp --nproc 2 --no-wait --trace 3:5\n{TRAIN.format(slow=0.0)}")
    waited = notebook.run("%ddp wait")
    assert waited.status == "ok"
    assert " · steps 3 to 5 · 2 ranks · " in waited.text
    notebook.run("%%ddp --no-wait\npass")
    assert "trace" not in notebook.run("%ddp wait").text


def test_trace_request_is_shown_and_can_be_cancelled(notebook: Notebook) -> None:
    for nothing in ("%ddp trace", "%ddp trace --off"):
        assert "`%ddp trace --steps 10:15`" in notebook.run(nothing).text
    notebook.run("%ddp trace --steps 0:2 --memory")
    output = notebook.run("%ddp trace").text
    for words in ("0 to 2", "memory", "`%ddp trace --off`"):
        assert words in output
    assert notebook.run("%ddp trace --off").status == "ok"
    reply = notebook.run("%%ddp --nproc 2\nfor step in range(3): nbddp.log(step=step, loss=1.0)")
    assert "trace" not in reply.text
    for refused in ("--off --steps 3:6", "--memory"):
        assert notebook.run(f"%ddp trace {refused}").text.startswith("UsageError: ")
