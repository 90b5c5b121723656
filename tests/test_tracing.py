"""Which steps a rank traces: begun, ended, thrown away, and what is said where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers.inside import imported

from nbddp.train import report
from nbddp.wire.trace_messages import GiveTrace, Steps, Traced
from nbddp.worker import tracing
from nbddp.worker.tracing import LONGEST, OWN_PROFILER, Tracer


class FakeProfile:
    """Writes down when it was started and stopped."""

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.document = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": []})
        self.is_saved = False
        self.error: Exception | None = None

    def start(self) -> None:
        if self.error:
            raise self.error
        self._story.append("start")

    def stop(self) -> None:
        self._story.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        if self.is_saved:
            raise RuntimeError("Trace is already saved.")  # as torch says
        self.is_saved = True
        Path(path).write_text(self.document)


class Rank:
    """A rank whose cell is traced; ``story`` is what the profiler saw, ``folder`` for its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.story = folder, list[str]()
        self.profile = FakeProfile(self.story)
        self.forget: list[Callable[[], None]] = []
        self.tracer: Tracer

    def begin(self, first: int, last: int) -> None:
        """Begin a cell of which these steps are asked for."""
        self.tracer = Tracer(Steps(first=first, last=last), 3, lambda _memory: self.profile)
        self.forget.append(self.tracer.begin())

    def end(self, *, is_ok: bool = True) -> Traced:
        self.tracer.end(is_ok=is_ok)
        return self.give()

    def give(self) -> Traced:
        return self.tracer.give(command_to_give(self.folder))[0]


def command_to_give(folder: Path | str) -> GiveTrace:
    return GiveTrace(request=1, cell=3, rank=0, folder=str(folder), zero=0, most=100)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(tmp_path)

    class Annotation:
        def __init__(self, name: str) -> None:
            self._number = name.removeprefix("ProfilerStep#")

        def __enter__(self) -> None:
            rank.story.append(f"({self._number}")

        def __exit__(self, *_: object) -> None:
            rank.story.append(f"{self._number})")

    monkeypatch.setattr(tracing, "record_function", Annotation)
    monkeypatch.setattr(tracing, "recorded", list)
    yield rank
    for each in rank.forget:
        each()


def log(*steps: int) -> None:
    for step in steps:
        report.reached(step, source="log")


def load(*steps: int) -> None:
    for step in steps:
        report.reached(step, source="loader")


def load_and_log(*steps: int) -> None:
    for step in steps:
        load(step)
        log(step)


@pytest.mark.parametrize(
    ("first", "last", "loop", "steps"),
    [
        (10, 12, log, range(20)),
        (10, 12, load, range(20)),
        (3, 4, load_and_log, range(9)),
        (0, 2, log, range(5)),
        (1, 2, log, range(5)),
        (1, 2, log, range(1, 5)),
        (0, 1, load, range(3)),
    ],
    ids=[
        "a step that is logged ends there",
        "a step that a loader hands over begins there",
        "where a cell logs the loader is not listened to",
        "from the beginning of the cell",
        "what was traced of step 0 is thrown away",
        "a loop that counts from 1",
        "from the first batch of a loader",
    ],
)
def test_the_steps_that_were_asked_for_are_traced(
    first: int, last: int, loop: Callable[..., None], steps: range, rank: Rank
) -> None:
    rank.begin(first, last)
    loop(*steps)
    assert rank.end().steps == [first, last]
    began = len(rank.story) - rank.story[::-1].index("start")
    each = [word for step in range(first, last + 1) for word in (f"({step}", f"{step})")]
    assert rank.story[began:] == [*each, "stop"]


@pytest.mark.parametrize(
    ("loop", "is_ok", "told"),
    [(log, True, [3, 5]), (load, True, [3, 5]), (log, False, [3, 6])],
    ids=["logged", "loaded", "interrupted in a part of a step"],
)
def test_a_loop_that_ends_early_has_what_it_had(
    loop: Callable[..., None], is_ok: bool, told: list[int], rank: Rank
) -> None:
    rank.begin(3, 100)
    loop(*range(6))
    found = rank.end(is_ok=is_ok)
    assert (found.steps, found.is_cut, rank.story[-1]) == (told, not is_ok, "stop")


def test_no_steps_and_other_steps_are_said(rank: Rank, snapshot: Any) -> None:
    said = {}
    for name, asked, steps in (
        ("none", (0, 5), ()),
        ("too few", (10, 15), (0, 1, 2, 3)),
        ("a training that goes on from a checkpoint", (0, 5), (100,)),
    ):
        rank.begin(*asked)
        log(*steps)
        said[name] = rank.end().why
    assert "nbddp.log(" in said["none"]
    assert said == snapshot
    assert list(rank.folder.iterdir()) == []


def test_steps_that_begin_anew_end_the_trace_and_leaps_are_told_as_what_they_are(
    rank: Rank,
) -> None:
    rank.begin(3, 9)
    log(0, 1, 2, 3, 4, 0, 1, 2, 3, 4)  # two epochs, each counts from 0
    assert rank.end().steps == [3, 4]
    assert rank.story.count("start") == 1
    rank.profile = FakeProfile(rank.story)
    rank.begin(10, 30)
    log(0, 10, 20, 30)
    assert rank.give().steps == [11, 30]


def test_a_trace_ends_with_the_step_in_which_it_became_too_long(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(tracing.time, "monotonic", lambda: now[0])
    rank.begin(1, 10**6)
    log(0, 1, 2)
    now[0] = LONGEST + 1
    log(3, 4, 5)
    assert rank.give().steps == [1, 3]


def test_beside_a_profiler_of_the_cells_own_and_on_other_threads_there_is_none(rank: Rank) -> None:
    rank.begin(3, 4)
    thread = threading.Thread(target=log, args=range(9))
    thread.start()
    thread.join()
    with torch.autograd.profiler.profile():
        log(*range(9))
    assert rank.end().why == OWN_PROFILER
    assert rank.story == []


def test_what_torchs_profiler_refuses_and_a_full_disk_cuts_off_is_said(rank: Rank) -> None:
    rank.profile.error = RuntimeError("no CUPTI\nand a stack")
    rank.begin(3, 4)
    log(*range(9))
    assert rank.end().why.endswith(": no CUPTI")
    rank.profile = FakeProfile(rank.story)
    rank.profile.document = '{"traceEvents": ['
    rank.begin(0, 1)
    log(0, 1)
    for _ in range(2):  # it may be asked again
        assert str(rank.folder) in rank.give().why
    assert list(rank.folder.iterdir()) == []


def test_without_a_folder_the_files_are_handed_over(rank: Rank) -> None:
    rank.begin(0, 1)
    log(0, 1)
    told, files = rank.tracer.give(command_to_give(""))
    assert not told.why
    assert len(files) == 2
    assert rank.give().steps == [0, 1], "it can be asked for again"
    assert sorted(each.name for each in rank.folder.iterdir()) == ["rank0.json.gz", "rank0.part"]
    assert all(each.stat().st_mode & 0o77 == 0 for each in rank.folder.iterdir()), "the owner's"


@pytest.mark.process
def test_the_profiler_itself_loads_no_compiler_and_its_file_says_whose_it_is(
    tmp_path: Path,
) -> None:
    script = (
        imported(report, GiveTrace, Steps, Tracer)
        + """
import gzip, json, sys, torch
from pathlib import Path
tracer = Tracer(Steps(first=0, last=0), 3)
tracer.begin()
torch.ones(9).sum()
report.reached(0, source="log")
told, _ = tracer.give(GiveTrace(request=1, cell=3, rank=2, folder=".", zero=0, most=100))
assert not told.why, told.why
assert "aten::sum" in told.spent
own = json.loads(gzip.decompress(Path("rank2.json.gz").read_bytes()))
assert own["distributedInfo"]["rank"] == 2
assert "torch._inductor" not in sys.modules
"""
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=150)
