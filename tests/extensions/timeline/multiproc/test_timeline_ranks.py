"""Timelines of real ranks: which rank the others wait for, how long, and other facts."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import pytest
from drivers.extensions import timeline_of_last
from drivers.ranks import MakeRanks, Ranks, Write
from notebook import Notebook
from processes import wait_until

from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.record.cell import CellHandle
from nbddp.record.collectives.collective_matcher import Straggler

pytestmark = pytest.mark.usefixtures("lasting_group")
SHARES_KERNEL = True

TRAIN = """
import time
x, came = torch.ones(1), []
def train(pause, steps):
    for step in range(steps):
        time.sleep(pause)
        came.append(time.time())
        dist.all_reduce(x)
        nbddp.log(step=step, loss=1.0)
"""
LOAD = """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        time.sleep(0.01 if rank == 1 else 0.0)
        return torch.ones(4)
batches = nbddp.loader(Slow(), batch_size=5, shuffle=False)
for step, batch in enumerate(batches):
    time.sleep(0.02)
    dist.all_reduce(batch)
    nbddp.log(step=step, loss=1.0)
"""


def named(
    group: Ranks, source: str, is_it: Callable[[Straggler], bool] = lambda _awaited: True
) -> tuple[Straggler, int]:
    """Return the first awaited rank, and the last reported step at that time."""
    handle = group.begin(source)

    def is_said() -> bool:
        awaited = group.straggler()
        return handle.is_finished or (awaited is not None and is_it(awaited))

    wait_until(is_said, timeout=60.0)
    step, awaited = group.last_step, group.straggler()
    group.interrupt()
    wait_until(lambda: handle.is_finished, timeout=30.0)
    assert awaited is not None
    return awaited, int(step or 0)


def test_slow_fault_is_named_soon_with_rank_and_line(make_group: MakeRanks) -> None:
    group = make_group(3)
    group.run(TRAIN)
    group.run("nbddp.faults.at(step=20, rank=2, kind='slow', factor=2.0)")
    awaited, step = named(group, "train(0.05, 1000)")
    assert 20 < step < 100  # it takes 30 steps
    assert (awaited.rank, awaited.title) == (2, "all_reduce float [1]")
    assert not awaited.is_loading
    assert awaited.place is not None


# ten seconds: the two-second and the ten-second reports both appear
EQUAL = """
import time
x, work = torch.ones(1000), torch.ones(128, 128)
for step in range(500):
    time.sleep(0.02)
    work @ work
    dist.all_reduce(x)
    nbddp.log(step=step, loss=1.0)
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_equal_ranks_are_marked_as_slow_in_at_most_one_of_100_runs(make_group: MakeRanks) -> None:
    groups = [make_group(2 + number % 3) for number in range(5)]  # at once, on a busy machine
    marked: set[tuple[int, int]] = set()
    for run in range(20):
        handles = [group.begin(EQUAL) for group in groups]

        def look(run: int = run, handles: Sequence[CellHandle] = handles) -> bool:
            slow = [number for number, group in enumerate(groups) if group.straggler()]
            marked.update((run, number) for number in slow)
            return all(handle.is_finished for handle in handles)

        assert wait_until(look, timeout=120.0)
        assert all(handle.result and handle.result.is_ok for handle in handles)
    assert len(marked) <= 1, marked


def test_timeline_waits_match_the_clocks_of_the_ranks(make_group: MakeRanks) -> None:
    group = make_group(3)
    group.run(TRAIN)
    group.run("train(0.09 if rank == 1 else 0.04, 60)", quiet=True)
    line = timeline_of_last(group)
    by_their_clocks: dict[tuple[int, int], float] = defaultdict(float)
    for step in zip(*group.pull("came"), strict=True):
        awaited = step.index(max(step))  # another one, if a busy machine has delayed it
        for rank in {0, 1, 2} - {awaited}:
            by_their_clocks[rank, awaited] += step[awaited] - step[rank]
    assert by_their_clocks[0, 1] > 1
    assert line.waits == pytest.approx(by_their_clocks, rel=0.1, abs=0.1)
    assert (len(line.meetings), line.lost, line.thinned) == (60, 0, 0)
    assert max(line.lines, key=lambda place: line.lines[place]) == "cell [1] line 6"
    last = timeline_of_last(group, last=20)
    assert len(last.steps) == 21
    assert 19 <= len(last.meetings) <= 21
    assert [row["rank"] for row in last.rows()[:3]] == [0, 1, 2]


def test_timeline_separates_loader_time_of_a_slow_rank(group: Ranks) -> None:
    awaited, _ = named(group, LOAD, lambda awaited: awaited.is_loading)
    assert (awaited.rank, awaited.is_loading) == (1, True)
    line = timeline_of_last(group)
    quick, slow = ([end - began for began, end in line.loads.get(rank, ())] for rank in (0, 1))
    assert median(slow) > 5 * median(quick or [0.0])
    shares = [
        meeting.loading / meeting.wait_seconds[0]
        for meeting in line.meetings
        if meeting.wait_seconds.get(0)
    ]
    assert median(shares) > 0.5
    assert line.loading_awaited() == pytest.approx(sum(each.loading for each in line.meetings))


def test_timeline_shows_the_last_cell_even_if_running_or_without_collectives(group: Ranks) -> None:
    group.run("import time\ndist.all_reduce(torch.ones(1))")
    before = timeline_of_last(group)
    group.run("1 + 1")
    line = timeline_of_last(group)
    assert (line.cell, line.meetings, line.is_over) == (before.cell + 1, (), True)
    source = "while True:\n    dist.all_reduce(torch.ones(1))\n    time.sleep(0.05)"
    handle = group.begin(source)
    line = timeline_of_last(group)
    assert (line.cell, line.is_over) == (handle.prompt, False)
    assert wait_until(lambda: len(timeline_of_last(group).meetings) > 5, timeout=30.0)
    assert timeline_of_last(group).cell == handle.prompt
    group.interrupt()
    assert wait_until(lambda: handle.is_finished, timeout=30.0)
    assert timeline_of_last(group).is_over


def test_timeline_starts_again_after_a_restart_or_heal(make_group: MakeRanks) -> None:
    def line() -> Timeline:
        group.run("for _ in range(9): dist.all_reduce(torch.ones(1))", quiet=True)
        return timeline_of_last(group)

    group = make_group(2)
    assert len(line().meetings) == 9
    group.kill(1)
    group.heal()
    assert len(line().meetings) == 9
    group.restart()
    assert [each.call.number for each in line().meetings] == list(range(1, 10))


MODEL = """
parts = [torch.nn.Linear(64, 64) for _ in range(6)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*parts), bucket_cap_mb=0.04)
for _ in range(12):
    model(torch.ones(4, 64)).sum().backward()
"""


def test_timeline_includes_the_overlap_measured_by_ddp(make_group: MakeRanks) -> None:
    group = make_group(2)
    group.run(MODEL, quiet=True)
    overlaps = timeline_of_last(group).overlaps
    assert [(each.rank, each.name) for each in overlaps] == [(0, "model"), (1, "model")]
    for overlap in overlaps:
        assert len(overlap.buckets) == 2
        assert sum(overlap.buckets) == 6 * (64 * 64 + 64) * 4
        assert 0 < overlap.overlapped <= overlap.communication
        assert overlap.forward > 0
        assert overlap.backward > 0
    group.run("dist.barrier()", quiet=True)
    assert timeline_of_last(group).overlaps == (), "in another cell nothing was measured"
    group.run(MODEL, quiet=True)
    group.kill(1)
    assert [each.rank for each in timeline_of_last(group).overlaps] == [0], "who lives is asked"


def test_timeline_of_a_script_has_its_waits_and_lines(group: Ranks, write: Write) -> None:
    script = write(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(30):\n"
        "    time.sleep(0.06 if dist.get_rank() else 0.02)\n"
        "    dist.all_reduce(torch.ones(1))\n",
        "train.py",
    )
    group.run_script(script, quiet=True)
    line = timeline_of_last(group)
    assert line.waits[0, 1] > line.waits.get((1, 0), 0.0)
    assert max(line.lines, key=lambda place: line.lines[place]) == "train.py line 4"
    assert (len(line.meetings), line.lost, line.thinned) == (30, 0, 0)


SLOW = "import time\nfor step in range(30):\n    time.sleep(0.05 if rank else 0.01)\n"
SLOW += "    dist.all_reduce(torch.ones(1))\n    nbddp.log(step=step, loss=1.0)\n"


def test_timeline_command_and_option_show_a_picture(notebook: Notebook) -> None:
    reply = notebook.run(f"%%ddp --nproc 2 --quiet --timeline\n{SLOW}")
    assert [set(each) for each in reply.displays] == [{"image/png", "text/plain"}]
    [shown] = notebook.run("%ddp timeline --last 10").displays
    assert set(shown) == {"image/png", "text/plain"}
    assert " · 10 steps · " in shown["text/plain"]
    [number] = reply.counts
    assert f"collectives of cell {number} · " in shown["text/plain"], "as its prompt has it"
    reply = notebook.run("import nbddp\nline = nbddp.timeline()\nprint(len(line.meetings))")
    assert reply.text == "30\n"
    assert notebook.run("len(line.frame())").status == "ok"
    assert "--no-wait" in notebook.run("%%ddp --timeline --no-wait\npass").text
    assert "timeline()" in notebook.run("%%ddp\nnbddp.timeline()").error


FAILS = """
import time
for _ in range(3): dist.all_reduce(torch.ones(1))
if rank == 1:
    time.sleep(2)
    raise ValueError("it goes another way")
dist.barrier()
"""


def test_failed_cell_with_the_timeline_option_shows_a_timeline(notebook: Notebook) -> None:
    reply = notebook.run(f"%%ddp --nproc 2 --quiet --timeline\n{FAILS}")
    [shown] = reply.displays
    for rank, words in ((0, "barrier #"), (1, "line 6")):
        assert re.search(rf"\brank {rank}\b.*\b{words}", shown["text/plain"])
    assert "it goes another way" in reply.error
