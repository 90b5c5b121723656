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
from nbddp.worker.tracing import LONGEST, NO_STEPS, OWN_PROFILER, Tracer


class FakeProfile:
    """Writes down when it was started and stopped."""

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.document: Any = {"baseTimeNanoseconds": 0, "traceEvents": []}
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
        text = self.document if isinstance(self.document, str) else json.dumps(self.document)
        Path(path).write_text(text)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened; the annotations of steps, too."""
    told: list[str] = []

    class Annotation:
        def __init__(self, name: str) -> None:
            self._number = name.removeprefix("ProfilerStep#")

        def __enter__(self) -> None:
            told.append(f"({self._number}")

        def __exit__(self, *_: object) -> None:
            told.append(f"{self._number})")

    monkeypatch.setattr(tracing, "record_function", Annotation)
    monkeypatch.setattr(tracing, "recorded", list)
    return told


@pytest.fixture
def traced(story: list[str]) -> Iterator[Callable[..., Tracer]]:
    """Makes a tracer whose cell has begun."""
    forget: list[Callable[[], None]] = []

    def make(first: int, last: int, profile: FakeProfile | None = None) -> Tracer:
        tracer = Tracer(
            Steps(first=first, last=last), 3, lambda _memory: profile or FakeProfile(story)
        )
        forget.append(tracer.begin())
        return tracer

    yield make
    for each in forget:
        each()


def given(tracer: Tracer, folder: Path) -> Traced:
    command = GiveTrace(request=1, cell=3, rank=0, folder=str(folder), zero=0, most=100)
    return tracer.give(command)[0]


def log(*steps: int) -> None:
    for step in steps:
        report.reached(step, source="log")


def load(*steps: int) -> None:
    for step in steps:
        report.reached(step, source="loader")


def test_a_step_that_is_logged_ends_there(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(10, 12)
    log(*range(20))
    tracer.end(is_ok=True)
    assert story == ["start", "(10", "10)", "(11", "11)", "(12", "12)", "stop"]
    assert given(tracer, tmp_path).steps == [10, 12]


def test_a_step_that_a_loader_hands_over_begins_there(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(10, 12)
    load(*range(20))
    assert story == ["start", "(10", "10)", "(11", "11)", "(12", "12)", "stop"]
    assert given(tracer, tmp_path).steps == [10, 12]


def test_where_a_cell_logs_the_loader_is_not_listened_to(
    traced: Callable[..., Tracer], story: list[str]
) -> None:
    traced(3, 4)
    for step in range(9):
        load(step)
        log(step)
    assert story == ["start", "(3", "3)", "(4", "4)", "stop"]


@pytest.mark.parametrize(
    ("first", "steps", "told"),
    [
        (0, range(5), [0, 2]),  # from the cell's begin
        (1, range(5), [1, 2]),  # what was traced of step 0 is thrown away
        (1, range(1, 5), [1, 2]),  # who counts from 1
    ],
)
def test_the_first_steps_of_a_cell_can_be_had(
    traced: Callable[..., Tracer], tmp_path: Path, first: int, steps: range, told: list[int]
) -> None:
    tracer = traced(first, 2)
    log(*steps)
    assert given(tracer, tmp_path).steps == told


def test_the_first_steps_of_a_loader_can_be_had(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(0, 1)
    load(0, 1, 2)
    assert story[-6:] == ["start", "(0", "0)", "(1", "1)", "stop"]
    assert given(tracer, tmp_path).steps == [0, 1]


def test_a_loop_that_ends_early_has_what_it_had(
    traced: Callable[..., Tracer], tmp_path: Path
) -> None:
    logged = traced(3, 100)
    log(*range(6))
    logged.end(is_ok=True)
    told = given(logged, tmp_path)
    assert (told.steps, told.is_cut) == ([3, 5], False)
    report._on_step.clear()
    loaded = traced(3, 100)
    load(*range(6))
    loaded.end(is_ok=True)
    told = given(loaded, tmp_path)
    assert (told.steps, told.is_cut) == ([3, 5], False)
    report._on_step.append(loaded.reached)
    report._on_step.append(logged.reached)


def test_what_an_interrupt_leaves_ends_in_a_part_of_a_step(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(3, 100)
    log(*range(6))
    tracer.end(is_ok=False)
    told = given(tracer, tmp_path)
    assert (told.steps, told.is_cut, story[-1]) == ([3, 6], True, "stop")


def test_no_steps_and_other_steps_are_said(traced: Callable[..., Tracer], tmp_path: Path) -> None:
    tracer = traced(0, 5)
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).why == NO_STEPS
    tracer = traced(10, 15)
    log(*range(4))
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).why == "steps 0 to 3 were reported, none of steps 10 to 15"
    tracer = traced(0, 5)
    log(100)  # of a training that goes on from a checkpoint
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).why == "step 100 was reported, none of steps 0 to 5"
    assert list(tmp_path.iterdir()) == []


def test_steps_that_begin_anew_end_the_trace(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(3, 9)
    log(0, 1, 2, 3, 4, 0, 1, 2, 3, 4)  # two epochs, each counts from 0
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).steps == [3, 4]
    assert story.count("start") == 1


def test_reports_in_leaps_are_told_as_what_they_are(
    traced: Callable[..., Tracer], tmp_path: Path
) -> None:
    tracer = traced(10, 30)
    log(0, 10, 20, 30)
    assert given(tracer, tmp_path).steps == [11, 30]


def test_a_trace_ends_with_the_step_in_which_it_became_too_long(
    traced: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr(tracing.time, "monotonic", lambda: now[0])
    tracer = traced(1, 10**6)
    log(0, 1, 2)
    now[0] = LONGEST + 1
    log(3, 4, 5)
    assert given(tracer, tmp_path).steps == [1, 3]


def test_beside_a_profiler_of_the_cells_own_there_is_none(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(3, 4)
    with torch.autograd.profiler.profile():
        log(*range(9))
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).why == OWN_PROFILER
    assert story == []


def test_what_torchs_profiler_refuses_is_said(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    profile = FakeProfile(story)
    profile.error = RuntimeError("no CUPTI\nand a stack")
    tracer = traced(3, 4, profile)
    log(*range(9))
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).why == "torch's profiler says: no CUPTI"


def test_a_file_that_a_full_disk_cut_off_is_said_and_taken_away(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    profile = FakeProfile(story)
    profile.document = '{"traceEvents": ['
    tracer = traced(0, 1, profile)
    log(0, 1)
    why = f"its trace could not be written to {tmp_path}: there may be no room"
    assert given(tracer, tmp_path).why == why
    assert given(tracer, tmp_path).why == why, "and so it is when it is asked again"
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_the_files_are_handed_over(
    traced: Callable[..., Tracer], tmp_path: Path
) -> None:
    tracer = traced(0, 1)
    log(0, 1)
    told, files = tracer.give(GiveTrace(request=1, cell=3, rank=0, folder="", zero=0, most=100))
    assert not told.why
    assert len(files) == 2
    assert given(tracer, tmp_path).steps == [0, 1], "it can be asked for again"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank0.json.gz", "rank0.part"]
    assert all(each.stat().st_mode & 0o77 == 0 for each in tmp_path.iterdir()), "the owner's only"


def test_other_threads_do_not_count(traced: Callable[..., Tracer], story: list[str]) -> None:
    traced(3, 4)
    thread = threading.Thread(target=log, args=range(9))
    thread.start()
    thread.join()
    assert story == []


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
