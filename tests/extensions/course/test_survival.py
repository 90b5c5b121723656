"""The judge of notebook 2.6: it compares traces, and refuses what it cannot run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lessons import written_file
from runs_on_disk import lines
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.course.exercises import check_answer
from nbddp.extensions.course.grading import RIGHT, WrongError
from nbddp.extensions.course.survival import project
from nbddp.extensions.course.survival.reference import (
    BATCH_SIZE,
    given_training,
    judge_changes,
    make_dataset,
    make_net,
)
from nbddp.extensions.course.survival.trace import (
    EPOCHS,
    N_STEPS,
    PER_EPOCH,
    RANKS,
    RankTrace,
    Resume,
    Save,
    TracedStep,
    first_step_of,
    judge_resumed,
    judge_saves,
    judge_steps,
    read_attempt,
)

HERE = Path("/folder")


def hint_of(judge: Callable[..., object], *given: object) -> str:
    try:
        judge(*given)
    except WrongError as wrong:
        return str(wrong)
    return RIGHT


def step_of(rank: int, number: int) -> TracedStep:
    """A step with the samples, weights and random numbers that it alone has."""
    epoch, place = divmod(number - 1, PER_EPOCH)
    first = (place * RANKS + rank) * 16
    return TracedStep(
        samples=[(each + 5 * epoch) % 640 for each in range(first, first + 16)],
        weights=number,
        random=100 * number + rank,
        rate=1 / number,
        has_averages=number > 1,
    )


def saves_after(*steps: int) -> list[Save]:
    return [Save(str(HERE / "checkpoint.pt"), step) for step in steps]


SAVES = [*saves_after(10, 20, 30, 40, 50, 60), Save(str(HERE / "weights.pt"), 60)]


def undisturbed(saves: list[Save] = SAVES, *, savers: int = 1) -> list[RankTrace]:
    return [
        RankTrace(
            steps=[step_of(rank, number) for number in range(1, N_STEPS + 1)],
            saves=[*saves] if rank < savers else [],
        )
        for rank in range(RANKS)
    ]


REFERENCE = undisturbed()
DEATH = Resume(37, "the death of rank 1")
IN_SAVE = Resume(50, "the death of rank 0 in the middle of a save", in_save=True)


def resumed(begin: int, end: int = 45) -> list[RankTrace]:
    return [
        RankTrace(steps=trace.steps[begin - 1 : end], events=["random restored"])
        for trace in undisturbed()
    ]


def altered(attempt: list[RankTrace], *ranks: int, since: int = 1, **facts: Any) -> list[RankTrace]:
    for rank in ranks or range(RANKS):
        steps = attempt[rank].steps
        attempt[rank].steps = [
            replace(step, **facts) if step.rate <= 1 / since else step for step in steps
        ]
    return attempt


def with_samples(
    attempt: list[RankTrace], others: Sequence[Sequence[TracedStep]]
) -> list[RankTrace]:
    for trace, steps in zip(attempt, others, strict=True):
        pairs = zip(trace.steps, steps, strict=True)
        trace.steps = [replace(step, samples=other.samples) for step, other in pairs]
    return attempt


def with_data_of(begin: int) -> list[RankTrace]:
    """The weights of step 31, and the batches from another step on."""
    return with_samples(resumed(31), [trace.steps for trace in resumed(begin, begin + 14)])


def with_random_of_rank_0() -> list[RankTrace]:
    attempt = altered(resumed(31), since=32, weights=-1)  # their consequence, on both ranks
    attempt[1].steps = [replace(step, random=step.random - 1) for step in attempt[1].steps]
    return attempt


RESUMED = {
    "begins again": resumed(1),
    "begins again after a torn file": resumed(1),
    "an old checkpoint": resumed(21),
    "a batch twice": with_data_of(30),
    "the epoch once more": with_data_of(21),
    "a batch left out": with_data_of(32),
    "the wrong epoch": with_data_of(11),
    "unknown batches": altered(resumed(31), samples=[1]),
    "unknown weights": altered(resumed(31), weights=-1),
    "new weights": altered(resumed(31), weights=1),
    "one rank only": [resumed(31)[0], resumed(1)[1]],
    "new optimizer": altered(resumed(31), has_averages=False),
    "new optimizer on a rank": altered(resumed(31), 1, has_averages=False),
    "another rate": altered(resumed(31), since=32, rate=0.01),
    "another update": altered(resumed(31), since=33, weights=-1),
    "another batch later": altered(resumed(31), since=41, samples=[1]),
    "other random numbers": [
        replace(trace, events=[]) for trace in altered(resumed(31), random=-1)
    ],
    "drawn after it was restored": altered(resumed(31), random=-1),
    "random numbers of rank 0": with_random_of_rank_0(),
}


@pytest.mark.parametrize("mistake", RESUMED)
def test_each_mistake_in_a_resumed_run_has_its_hint(
    mistake: str, snapshot: SnapshotAssertion
) -> None:
    resume = IN_SAVE if "torn file" in mistake else DEATH
    assert hint_of(judge_resumed, REFERENCE, RESUMED[mistake], resume) == snapshot


@pytest.mark.parametrize(
    ("begin", "resume"), [(31, DEATH), (28, DEATH), (38, DEATH), (41, IN_SAVE)]
)
def test_a_run_that_continues_with_all_its_state_has_no_hint(begin: int, resume: Resume) -> None:
    attempt = resumed(begin)
    assert first_step_of(REFERENCE, attempt) == begin
    assert hint_of(judge_resumed, REFERENCE, attempt, resume) == RIGHT


def test_an_attempt_without_a_step_of_each_rank_is_not_judged_yet() -> None:
    attempt = [resumed(1)[0], RankTrace()]
    assert hint_of(judge_resumed, REFERENCE, attempt, DEATH) == RIGHT
    assert first_step_of(REFERENCE, [RankTrace(), RankTrace()]) is None


IN_ONE_ORDER = with_samples(undisturbed(), [trace.steps[:PER_EPOCH] * 3 for trace in REFERENCE])
UNDISTURBED = {
    "no step": [RankTrace(), RankTrace()],
    "without DDP": altered(undisturbed(), samples=[]),
    "fewer steps": [RankTrace(steps=trace.steps[:40]) for trace in undisturbed()],
    "the same data on both ranks": [undisturbed()[0], undisturbed()[0]],
    "one order": IN_ONE_ORDER,
    "without dropout": altered(undisturbed(), 1, random=5),
    "the dropout of rank 0": altered(undisturbed(), 1, random=100),
    "another folder": undisturbed([*SAVES, Save("/elsewhere/checkpoint.pt", 20)]),
    "one file of both": undisturbed(savers=2),
    "saved at the end": undisturbed(saves_after(60)),
    "seldom saved": undisturbed(saves_after(10, 20, 40, 50, 60)),
}


@pytest.mark.parametrize("mistake", UNDISTURBED)
def test_each_mistake_in_the_undisturbed_run_has_its_hint(
    mistake: str, snapshot: SnapshotAssertion
) -> None:
    attempt = UNDISTURBED[mistake]
    hint = hint_of(judge_steps, attempt) or hint_of(judge_saves, attempt, HERE)
    assert hint != RIGHT
    assert hint == snapshot


def test_the_undisturbed_run_has_no_hint_if_it_saves_often_enough() -> None:
    judge_steps(REFERENCE)
    for saves in (SAVES, saves_after(*range(1, 61)), saves_after(10, 20, 30, 40, 50)):
        judge_saves(undisturbed(saves), HERE)


CHANGED: dict[str, dict[str, Any]] = {
    "other weights": {"weights": 5},
    "other dropout": {"dropout": [0.5]},
    "another optimizer": {"optimizer": "SGD(momentum=0)"},
    "another rate": {"rate": 0.5},
    "other data": {"samples": [1]},
}


@pytest.mark.parametrize("mistake", CHANGED)
def test_a_training_that_is_not_the_given_one_gets_a_hint(
    mistake: str, snapshot: SnapshotAssertion
) -> None:
    attempt = given_training()
    attempt[1].steps[0] = replace(attempt[1].steps[0], **CHANGED[mistake])
    hint = hint_of(judge_changes, attempt, given_training())
    assert hint != RIGHT
    assert hint == snapshot


def test_the_given_training_is_that_of_the_notebook() -> None:
    names: dict[str, Any] = {"__name__": "train"}
    exec(written_file("2.6", "train.py"), names)
    pairs = zip(make_dataset().tensors, names["make_dataset"]().tensors, strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    ours, theirs = make_net(), names["make_net"]()
    assert repr(ours) == repr(theirs)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(each, other) for each, other in pairs)
    assert (names["EPOCHS"], names["BATCH_SIZE"]) == (EPOCHS, BATCH_SIZE)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    assert read_attempt(tmp_path, 0) is None
    rows = [{"event": "began"}, {"event": "step", "samples": [1, 2]}]
    rows += [{"event": "save", "path": "a.pt", "after": 1}, {"event": "fault"}]
    (tmp_path / "0-1.jsonl").write_text(lines(rows) + '{"event": "st')
    events = ["began", "step", "save", "fault"]
    trace = RankTrace([TracedStep(samples=[1, 2])], [Save("a.pt", 1)], events)
    assert read_attempt(tmp_path, 0) == [RankTrace(), trace]


LOST = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:550] Connection closed by peer\n"
CAUSE = '[rank1]:   File "/place/train.py", line 30, in main\n[rank1]: KeyError: 7\n'
ABORTED = "terminate called without an active exception\n"
TAKEN = "torch.distributed.DistNetworkError: port: 4711, name: EADDRINUSE\n"


def failed_job(notes: Path, *logs: str, number: int = 0) -> project._Job:
    """A job with an attempt that has begun and failed, and the next one, which has begun."""
    for attempt in range(number + 2):
        for rank in range(RANKS):
            (notes / f"{attempt}-{rank}.jsonl").write_text('{"event": "began"}\n')
    for rank, text in enumerate(logs):
        folder = notes / "logs" / "job" / f"attempt_{number}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    job = project._Job(notes, notes, Mock())
    job.look()
    return job


FAULTS = project._plan_for(0)


def judge_events(job: project._Job, faults: Sequence[project._PlannedFault] = FAULTS) -> list[str]:
    return [*project._events(job, REFERENCE, faults, has_failed=False)]


@pytest.mark.parametrize(
    ("logs", "rank"),
    [((LOST, CAUSE), 1), ((f"Traceback\n{CAUSE}{ABORTED}", LOST), 0)],
    ids=["lost connection", "aborted"],
)
def test_an_attempt_that_fails_by_itself_is_told_with_the_error_of_the_script(
    logs: Sequence[str], rank: int, tmp_path: Path
) -> None:
    hint = hint_of(judge_events, failed_job(tmp_path, *logs))
    assert "In attempt 1" in hint
    assert f"`KeyError: 7`, line 30, on rank {rank}" in hint
    assert "Connection" not in hint


@pytest.mark.parametrize(
    ("error", "is_half"),
    [("EOFError: Ran out of input", True), ("StopIteration", False), ("KeyError: 'step'", False)],
)
def test_a_failed_start_after_a_death_in_a_save_is_blamed_on_the_file_if_it_cannot_be_read(
    error: str, is_half: bool, tmp_path: Path
) -> None:
    job = failed_job(tmp_path, f"[rank0]: {error}\n", number=1)
    died = {"event": "save", "path": "a.pt", "after": 2}, {"event": "fault"}
    (tmp_path / "0-0.jsonl").write_text(lines(died))
    job.look()
    hint = hint_of(judge_events, job, [project._PlannedFault("save", 0, 2)])
    assert f"`{error}`" in hint
    assert "in the middle of a save" in hint
    assert ("half written" in hint) == is_half


@pytest.mark.parametrize("logs", [(TAKEN, LOST), ("", ABORTED)], ids=["taken", "aborted"])
def test_an_attempt_whose_port_was_taken_or_that_aborts_at_its_end_is_no_fault_of_the_script(
    logs: Sequence[str], tmp_path: Path
) -> None:
    job = failed_job(tmp_path, *logs)
    assert judge_events(job) == []
    assert job.n_fired == 0


def test_the_undisturbed_run_is_the_attempt_that_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = failed_job(tmp_path, "", ABORTED)
    job.process.poll.return_value = job.process.returncode = 0  # type: ignore[attr-defined]
    trained, nothing_left = given_training(), [RankTrace(events=["load"]) for _ in range(RANKS)]
    for rank, trace in enumerate(trained):
        trace.steps = [replace(each, random=at) for at, each in enumerate(trace.steps, rank)]
    trained[0].saves = [Save(str(tmp_path / "a.pt"), after) for after in range(10, 61, 10)]
    job.attempts = [trained, nothing_left]
    monkeypatch.setattr(job, "look", lambda: None)
    assert "no file weights.pt" in hint_of(project._judge_undisturbed, job)


def test_what_cannot_be_run_gets_a_hint(folder: Path, snapshot: SnapshotAssertion) -> None:
    Path("broken.py").write_text("def main(:\n")
    given = {
        "a number": 3,
        "an error of syntax": "import torch\nif True\n",
        "the same in a file": Path("broken.py"),
        "nbddp": "import torch\nfrom nbddp import Checkpoint\n",
    }
    assert {name: check_answer("2.6a", each).text for name, each in given.items()} == snapshot
    assert f"'missing.py' in the folder {folder}" in check_answer("2.6a", "missing.py").text
