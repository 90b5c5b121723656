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

from nbddp.course.grading import RIGHT
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


def hint_to_undisturbed(attempt: Attempt) -> str:
    """Check the training of the undisturbed run."""
    counts = {len(trace.steps) for trace in attempt}
    if counts == {0} or any(not step.samples for trace in attempt for step in trace.steps):
        return "An optimizer step has no forward pass of `DistributedDataParallel`: train with DDP."
    if counts != {N_STEPS}:
        return (
            f"A rank does {min(counts)} optimizer steps. With {EPOCHS} epochs on {RANKS} ranks "
            f"there are {N_STEPS}: do not change the training."
        )
    return _hint_to_data(attempt) or _hint_to_dropout(attempt)


def _hint_to_data(attempt: Attempt) -> str:
    for epoch in range(EPOCHS):
        part = slice(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        seen = Counter(each for t in attempt for step in t.steps[part] for each in step.samples)
        if len(seen) != N_SAMPLES or max(seen.values()) > 1:
            return (
                f"In epoch {epoch}, {len(seen)} of the {N_SAMPLES} samples are used, and "
                f"{sum(count > 1 for count in seen.values())} of them more than once. Let the "
                "`DistributedSampler` divide the data among the ranks."
            )
    first, second = (attempt[0].steps[at].samples for at in (0, PER_EPOCH))
    if list(first) == list(second):
        return (
            "The second epoch has the same batches as the first: call `sampler.set_epoch(epoch)` "
            "before each epoch (notebook 02b, *Who gets which images*)."
        )
    return RIGHT


def _hint_to_dropout(attempt: Attempt) -> str:
    for rank, trace in enumerate(attempt):
        if any(a.random == b.random for a, b in pairwise(trace.steps)):
            return (
                f"On rank {rank} there are steps that draw no random number. Keep the dropout: "
                "its random numbers belong to the state of the training."
            )
    return RIGHT


def hint_to_saves(attempt: Attempt, folder: Path) -> str:
    """Check the saves of the undisturbed run."""
    saves = [save for trace in attempt for save in trace.saves]
    if any(not Path(save.path).is_relative_to(folder) for save in saves):
        return "A file is saved in another folder. Save in the current folder: a relative path."
    hint = hint_to_shared_file(attempt)
    if hint:
        return hint
    times = sorted({save.after for save in saves if save.after} | {0, N_STEPS})
    if times == [0, N_STEPS]:
        return (
            "It trains, but `torch.save` writes no file before the last step: after a death it "
            f"would begin again with step 1. Save a checkpoint every {MAX_LOST} steps, or more "
            "often."
        )
    begin, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
    if end - begin > MAX_LOST:
        return (
            f"From step {begin} to step {end} there is no checkpoint. A death may cost at most "
            f"{MAX_LOST} steps: save at least every {MAX_LOST}."
        )
    return RIGHT


def hint_to_shared_file(attempt: Attempt) -> str:
    """Check that no file has two writers."""
    shared = set.intersection(*({save.path for save in trace.saves} for trace in attempt))
    if not shared:
        return RIGHT
    return (
        f"All ranks write to the file {Path(min(shared)).name}: one overwrites what the other has "
        "written. Let rank 0 write alone (notebook 04, *One writer*)."
    )


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


@dataclass(frozen=True, slots=True)
class _Start:
    """The first step of a rank, found in the undisturbed run: the numbers of its steps, or None.

    Attributes:
        weights: the step that begins with the same weights.
        data: the step with the same batch.
    """

    weights: int | None
    data: int | None


def _find_start(reference: RankTrace, trace: RankTrace) -> _Start:
    first = trace.steps[0]
    weights = (n for n, step in enumerate(reference.steps, 1) if step.weights == first.weights)
    data = (n for n, step in enumerate(reference.steps, 1) if step.samples == first.samples)
    return _Start(next(weights, None), next(data, None))


def first_step_of(reference: Attempt, attempt: Attempt) -> int | None:
    """Return the number of the first step after a restart, as rank 0's batch shows it."""
    return _find_start(reference[0], attempt[0]).data if attempt[0].steps else None


def hint_to_resumed(reference: Attempt, attempt: Attempt, resume: Resume) -> str:
    """Check all steps after a restart, as far as they are done.

    Args:
        reference: the undisturbed run.
        attempt: the attempt after the restart.
        resume: what was before it.
    """
    if any(not trace.steps for trace in attempt):
        return RIGHT  # not yet
    starts = [_find_start(*pair) for pair in zip(reference, attempt, strict=True)]
    places = [start.data for start in starts]
    if len(set(places)) > 1 and None not in places:
        where = ", ".join(f"rank {rank} at step {place}" for rank, place in enumerate(places))
        return (
            f"The ranks continue at different steps ({where}). All of them have to load the file."
        )
    hints = {rank: _hint_to_start(start, resume) for rank, start in enumerate(starts)}
    if not any(hints.values()):
        found = [_hint_to_rank(reference, trace, rank) for rank, trace in enumerate(attempt)]
        first = min(number for number, _ in found)  # later ones can be its consequences
        hints = {rank: hint for rank, (number, hint) in enumerate(found) if number == first}
    wrong = [rank for rank, hint in hints.items() if hint]
    if len(wrong) == 1:
        hint = hints[wrong[0]]
        return f"This concerns only rank {wrong[0]}. {hint} Every rank has to restore its state."
    return hints[wrong[0]] if wrong else RIGHT


def _hint_to_start(start: _Start, resume: Resume) -> str:
    """Check where a rank continues."""
    weights, data = start.weights, start.data
    if weights == data == 1:
        return _hint_to_nothing(resume)
    if data is None:
        return (
            f"The first batch after {resume.fault} is no batch of the undisturbed run. Restore the "
            "epoch, and call `set_epoch` with it, before you skip the batches that are done."
        )
    if weights is None:
        return (
            f"The script continues with the batch of step {data}, but the weights are those of no "
            "step in the undisturbed run. Load them before the first step, and change nothing else."
        )
    if weights == 1:
        return (
            f"The script continues with the batch of step {data}, but with the weights of a new "
            "model: "
            "load the model's state, too."
        )
    updates = weights - 1
    found = (
        f"After {resume.fault}, the weights have {plural(updates, 'update')}, and the script "
        f"continues with the batch of step {data}"
    )
    if weights != data and (weights - data) % PER_EPOCH == 0:
        return (
            f"{found}: the place in the epoch is right, and the epoch is not. Call `set_epoch` "
            "with the number of the epoch, counted from the beginning of the training."
        )
    if weights > data:
        return (
            f"{found}: {_batches_are(weights - data)} trained twice. The checkpoint needs the "
            "number of steps that are done (notebook 04, *The parts of a checkpoint*)."
        )
    if weights < data:
        return (
            f"{found}: {_batches_are(data - weights)} left out. Save after `optimizer.step()`, "
            "with the number of steps that are done."
        )
    lost = resume.died - updates
    if lost > MAX_LOST:
        return (
            f"After {resume.fault} in step {resume.died}, the script continues with step "
            f"{weights}: {lost} steps are done again, and {MAX_LOST} are allowed. Load the newest "
            "complete checkpoint."
        )
    return RIGHT


def _batches_are(number: int) -> str:
    return "1 batch is" if number == 1 else f"{number} batches are"


def _hint_to_nothing(resume: Resume) -> str:
    if resume.in_save:
        return (
            f"After {resume.fault}, the script began again with step 1: the only checkpoint was "
            "half written. Write to another name, then rename (notebook 04, *Whole or "
            "absent*)."
        )
    return (
        f"After {resume.fault}, the script began again with step 1. At each start it has to look "
        "for its checkpoint, and to load it (notebook 04, *Save once, load everywhere*)."
    )


def _hint_to_rank(reference: Attempt, trace: RankTrace, rank: int) -> tuple[int, str]:
    """Return the first step of a rank that differs from the undisturbed run, and a hint."""
    start = _find_start(reference[rank], trace).weights or 1
    mine = reference[rank].steps[start - 1 :]
    if mine[0].has_averages and not trace.steps[0].has_averages:
        return start, (
            f"The script continues with step {start}, but the optimizer is new: its averages begin "
            "at zero. Put `optimizer.state_dict()` into the checkpoint, and load it."
        )
    for number, (expected, step) in enumerate(zip(mine, trace.steps, strict=False), start):
        hint = _hint_to_step(expected, step, number, start)
        if not hint and step.random != expected.random:
            same = [each for each in reference if each.steps[number - 1].random == step.random]
            owner = reference.index(same[0]) if same else None
            hint = _hint_to_random(number, owner, is_restored="random restored" in trace.events)
        if not hint and step.weights != expected.weights:
            hint = (
                f"Step {number - 1} has made another update than in the undisturbed run, from the "
                "same weights and the same batch. Is all of the optimizer's state restored?"
            )
        if hint:
            return number, hint
    return N_STEPS + 1, RIGHT


def _hint_to_step(expected: TracedStep, step: TracedStep, number: int, start: int) -> str:
    """Compare the batch and the learning rate of a step with the undisturbed run."""
    if list(step.samples) != list(expected.samples):
        return (
            f"The script continues with step {start} as it should, but step {number} has another "
            "batch than in the undisturbed run. Call `set_epoch` with the right number in each "
            "epoch."
        )
    if step.rate != expected.rate:
        return (
            f"In step {number} the learning rate is {step.rate:.3g}, and in the undisturbed run "
            f"{expected.rate:.3g}. Put `scheduler.state_dict()` into the checkpoint, and load it."
        )
    return RIGHT


def _hint_to_random(number: int, owner: int | None, *, is_restored: bool) -> str:
    """Say why the random numbers of a step may differ; ``owner`` has them in the reference."""
    begin = f"In step {number} the state of the random generator is not that of the undisturbed run"
    if owner is not None:
        return (
            f"{begin}, but that of rank {owner}. Each rank draws other dropout: collect the states "
            "of all ranks when you save."
        )
    if not is_restored:
        return (
            f"{begin}. Dropout uses it: save `torch.get_rng_state()` of each rank, and restore it "
            "(notebook 04, *Save once, load everywhere*)."
        )
    return (
        f"{begin}, although it was restored. What else draws a number? `iter(loader)` does, once "
        "in each epoch. In the middle of an epoch, restore the state after it; for a checkpoint "
        "at the end of an epoch, before it. Or give the DataLoader a generator of its own "
        "(notebook 04, exercise 1)."
    )
