"""Read the steps and saves of the workers in a judged training, and find the mistake.

The undisturbed run is the reference. The first step after a restart shows which part of the state
was not restored: its batch, its weights, its random numbers, its learning rate.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from nbddp.extensions.course.grading import RIGHT, require, require_none, say, stop_if
from nbddp.formatting import plural

RANKS = 2
EPOCHS = 3
N_STEPS = 60  # of each rank
N_SAMPLES = 640
PER_EPOCH = N_STEPS // EPOCHS
MAX_LOST = 10  # steps that may be done again, and between two checkpoints
FINAL_FILE = "weights.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """An optimizer step of a rank.

    Attributes:
        samples: checksums of the samples.
        weights: checksum of the weights before the step.
        random: checksum of the state of the random generator before the forward pass.
        rate: the learning rate.
        has_averages: whether the optimizer had a state before the step.
        dropout: the rates of the layers with dropout.
        optimizer: the kind of the optimizer, and its constants.
    """

    samples: Sequence[int]
    weights: int = 0
    random: int = 0
    rate: float = 0.0
    has_averages: bool = True
    dropout: Sequence[float] = ()
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class Save:
    """A call of ``torch.save``: the path, and the number of steps before it."""

    path: str
    after: int


@dataclass(slots=True)
class RankTrace:
    """The events of one rank in one attempt.

    Attributes:
        steps: the optimizer steps.
        saves: the calls of ``torch.save``.
        events: the names of all events.
    """

    steps: list[TracedStep] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def has_fault(self) -> bool:
        return "fault" in self.events


Attempt = Sequence[RankTrace]


def read_attempt(folder: Path, attempt: int) -> list[RankTrace] | None:
    """Read what all ranks have written, or return None if the attempt has not begun."""
    files = [folder / f"{attempt}-{rank}.jsonl" for rank in range(RANKS)]
    if not any(file.exists() for file in files):
        return None
    return [_read(file) for file in files]


def _read(file: Path) -> RankTrace:
    trace = RankTrace()
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    for line in lines:
        if not line.endswith("\n"):  # it is being written
            break
        facts: dict[str, Any] = json.loads(line)
        trace.events.append(facts.pop("event"))
        if trace.events[-1] == "step":
            trace.steps.append(TracedStep(**facts))
        elif trace.events[-1] == "save":
            trace.saves.append(Save(**facts))
    return trace


def judge_steps(attempt: Attempt) -> None:
    """Judge the steps of the undisturbed run."""
    counts = {len(trace.steps) for trace in attempt}
    has_samples = all(step.samples for trace in attempt for step in trace.steps)
    require(counts != {0} and has_samples, "2.6a no DDP")
    facts = {"epochs": EPOCHS, "ranks": RANKS, "right": N_STEPS}
    require(counts == {N_STEPS}, "2.6a steps", got=min(counts), **facts)
    for epoch in range(EPOCHS):
        part = slice(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        seen = Counter(each for t in attempt for step in t.steps[part] for each in step.samples)
        twice = sum(count > 1 for count in seen.values())
        is_divided = len(seen) == N_SAMPLES and not twice
        facts = {"used": len(seen), "total": N_SAMPLES, "twice": twice}
        require(is_divided, "2.6a samples", epoch=epoch, **facts)
    first, second = (attempt[0].steps[at].samples for at in (0, PER_EPOCH))
    require(list(first) != list(second), "2.6a same order")
    is_different = len({trace.steps[0].random for trace in attempt}) == RANKS
    require(is_different, "2.6a same dropout")
    for rank, trace in enumerate(attempt):
        draws = all(a.random != b.random for a, b in pairwise(trace.steps))
        require(draws, "2.6a no dropout", rank=rank)


def judge_saves(attempt: Attempt, folder: Path) -> None:
    """Judge the saves of the undisturbed run."""
    saves = [save for trace in attempt for save in trace.saves]
    is_here = all(Path(save.path).is_relative_to(folder) for save in saves)
    require(is_here, "2.6a other folder")
    judge_shared_file(attempt)
    times = sorted({save.after for save in saves if save.after} | {0, N_STEPS})
    require(times != [0, N_STEPS], "2.6a no checkpoint", limit=MAX_LOST)
    begin, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
    is_often = end - begin <= MAX_LOST
    require(is_often, "2.6a seldom", begin=begin, end=end, limit=MAX_LOST)


def judge_shared_file(attempt: Attempt) -> None:
    """Require that no file has two writers."""
    shared = set.intersection(*({save.path for save in trace.saves} for trace in attempt))
    require_none([Path(path).name for path in sorted(shared)], "2.6a one file")


@dataclass(frozen=True, slots=True)
class Resume:
    """A restart that is checked.

    Attributes:
        died: the steps that were done when the attempt before it ended.
        fault: the fault in words, such as "the death of rank 1".
        in_save: whether the attempt before it died in the middle of a save.
    """

    died: int
    fault: str
    in_save: bool = False


def _find_start(reference: RankTrace, trace: RankTrace) -> tuple[int | None, int | None]:
    """Return the steps of the reference that have the weights and the batch of the first step."""
    first = trace.steps[0]
    weights = (n for n, step in enumerate(reference.steps, 1) if step.weights == first.weights)
    data = (n for n, step in enumerate(reference.steps, 1) if step.samples == first.samples)
    return next(weights, None), next(data, None)


def first_step_of(reference: Attempt, attempt: Attempt) -> int | None:
    """Return the number of the first step after a restart, as rank 0's batch shows it."""
    return _find_start(reference[0], attempt[0])[1] if attempt[0].steps else None


def judge_resumed(reference: Attempt, attempt: Attempt, resume: Resume) -> None:
    """Judge all steps after a restart, as far as they are done.

    Args:
        reference: the undisturbed run.
        attempt: the attempt after the restart.
        resume: what was before it.
    """
    if any(not trace.steps for trace in attempt):
        return  # not yet
    starts = [_find_start(*pair) for pair in zip(reference, attempt, strict=True)]
    places = [data for _, data in starts]
    where = ", ".join(f"rank {rank} at step {place}" for rank, place in enumerate(places))
    is_one_place = len(set(places)) == 1 or None in places
    require(is_one_place, "2.6a different steps", where=where)
    hints = {rank: _hint_to_start(*start, resume) for rank, start in enumerate(starts)}
    if not any(hints.values()):
        found = [_hint_to_rank(reference, trace, rank) for rank, trace in enumerate(attempt)]
        first = min(number for number, _ in found)  # later ones can be its consequences
        hints = {rank: hint for rank, (number, hint) in enumerate(found) if number == first}
    wrong = {rank: hint for rank, hint in hints.items() if hint}
    rank, hint = min(wrong.items(), default=(0, RIGHT))
    stop_if(say("2.6a one rank", rank=rank, hint=hint) if len(wrong) == 1 else hint)


def _hint_to_start(weights: int | None, data: int | None, resume: Resume) -> str:
    """Check where a rank continues."""
    fault = resume.fault
    if weights == data == 1:
        return say("2.6a half checkpoint" if resume.in_save else "2.6a from step 1", fault=fault)
    if data is None:
        return say("2.6a no such batch", fault=fault)
    if weights is None or weights == 1:
        return say("2.6a new model" if weights else "2.6a no such weights", step=data)
    found = say("2.6a found", fault=fault, updates=plural(weights - 1, "update"), step=data)
    if weights != data and (weights - data) % PER_EPOCH == 0:
        return say("2.6a other epoch", found=found)
    if weights > data:
        return say("2.6a trained twice", found=found, batches=_batches_are(weights - data))
    if weights < data:
        return say("2.6a left out", found=found, batches=_batches_are(data - weights))
    lost = resume.died - weights + 1
    if lost > MAX_LOST:
        facts = {"died": resume.died, "step": weights, "lost": lost, "limit": MAX_LOST}
        return say("2.6a old checkpoint", fault=fault, **facts)
    return RIGHT


def _batches_are(number: int) -> str:
    return "1 batch is" if number == 1 else f"{number} batches are"


def _hint_to_rank(reference: Attempt, trace: RankTrace, rank: int) -> tuple[int, str]:
    """Return the first step of a rank that differs from the undisturbed run, and a hint."""
    start = _find_start(reference[rank], trace)[0] or 1
    has_averages = reference[rank].steps[start - 1].has_averages
    if has_averages and not trace.steps[0].has_averages:
        return start, say("2.6a new optimizer", step=start)
    random = "2.6a random drawn" if "random restored" in trace.events else "2.6a random"
    for number, step in enumerate(trace.steps[: N_STEPS + 1 - start], start):
        expected = [each.steps[number - 1] for each in reference]
        hint = _hint_to_step(step, expected, rank, {"start": start, "step": number}, random)
        if hint:
            return number, hint
    return N_STEPS + 1, RIGHT


def _hint_to_step(
    step: TracedStep, of_ranks: Sequence[TracedStep], rank: int, at: dict[str, int], random: str
) -> str:
    """Compare a step of a rank with that of all ranks in the undisturbed run.

    Args:
        step: the step.
        of_ranks: the step with this number of each rank.
        rank: the rank.
        at: the ``step`` with this number, and the ``start`` of the attempt.
        random: the mistake if the random numbers are those of no rank.
    """
    expected = of_ranks[rank]
    if list(step.samples) != list(expected.samples):
        return say("2.6a later batch", **at)
    if step.rate != expected.rate:
        return say("2.6a scheduler", got=step.rate, right=expected.rate, **at)
    if step.random != expected.random:
        owners = [each for each, other in enumerate(of_ranks) if other.random == step.random]
        return say("2.6a random of rank" if owners else random, rank=[*owners, rank][0], **at)
    if step.weights != expected.weights:
        return say("2.6a other update", step=at["step"] - 1)
    return RIGHT
