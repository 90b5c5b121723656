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


def of_both() -> None:
    for step in range(9):
        load(step)
        log(step)


def in_words(first: int, last: int) -> list[str]:
    steps = [word for step in range(first, last + 1) for word in (f"({step}", f"{step})")]
    return ["start", *steps, "stop"]


@pytest.mark.parametrize(
    ("asked", "loop", "told"),
    [
        ((10, 12), lambda: log(*range(20)), (10, 12)),
        ((10, 12), lambda: load(*range(20)), (10, 12)),
        ((3, 4), of_both, (3, 4)),
        ((0, 2), lambda: log(*range(5)), (0, 2)),
        ((1, 2), lambda: log(*range(5)), (1, 2)),
        ((1, 2), lambda: log(*range(1, 5)), (1, 2)),
        ((0, 1), lambda: load(0, 1, 2), (0, 1)),
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
    asked: tuple[int, int],
    loop: Callable[[], None],
    told: tuple[int, int],
    traced: Callable[..., Tracer],
    story: list[str],
    tmp_path: Path,
) -> None:
    tracer = traced(*asked)
    loop()
    tracer.end(is_ok=True)
    last = len(story) - story[::-1].index("start") - 1
    assert story[last:] == in_words(*told)
    assert given(tracer, tmp_path).steps == [*told]


def test_steps_that_begin_anew_end_the_trace(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    tracer = traced(3, 9)
    log(0, 1, 2, 3, 4, 0, 1, 2, 3, 4)  # two epochs, each counts from 0
    tracer.end(is_ok=True)
    assert given(tracer, tmp_path).steps == [3, 4]
    assert story.count("start") == 1


@pytest.mark.parametrize(
    ("loop", "is_ok", "told"),
    [(log, True, [3, 5]), (load, True, [3, 5]), (log, False, [3, 6])],
    ids=["logged", "loaded", "interrupted in a part of a step"],
)
def test_a_loop_that_ends_early_has_what_it_had(
    loop: Callable[..., None],
    is_ok: bool,
    told: list[int],
    traced: Callable[..., Tracer],
    story: list[str],
    tmp_path: Path,
) -> None:
    tracer = traced(3, 100)
    loop(*range(6))
    tracer.end(is_ok=is_ok)
    found = given(tracer, tmp_path)
    assert (found.steps, found.is_cut, story[-1]) == (told, not is_ok, "stop")


def test_no_steps_and_other_steps_are_said(
    traced: Callable[..., Tracer], tmp_path: Path, snapshot: Any
) -> None:
    said = {}
    for name, asked, steps in (
        ("none", (0, 5), ()),
        ("too few", (10, 15), (0, 1, 2, 3)),
        ("a training that goes on from a checkpoint", (0, 5), (100,)),
    ):
        tracer = traced(*asked)
        log(*steps)
        tracer.end(is_ok=True)
        said[name] = given(tracer, tmp_path).why
    assert "nbddp.log(" in said["none"]
    assert said == snapshot
    assert list(tmp_path.iterdir()) == []


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
    assert given(tracer, tmp_path).why.endswith(": no CUPTI")


def test_a_file_that_a_full_disk_cut_off_is_said_and_taken_away(
    traced: Callable[..., Tracer], story: list[str], tmp_path: Path
) -> None:
    profile = FakeProfile(story)
    profile.document = '{"traceEvents": ['
    tracer = traced(0, 1, profile)
    log(0, 1)
    for _ in range(2):  # it may be asked again
        assert str(tmp_path) in given(tracer, tmp_path).why
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
