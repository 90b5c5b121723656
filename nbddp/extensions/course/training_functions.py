"""The exercises on training on all ranks, and on its data: a function that trains, and a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, islice, pairwise
from multiprocessing import active_children
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import Dataset

from nbddp.extensions.course.grading import (
    is_close,
    judge,
    require,
    require_class,
    require_function,
)
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

SHARE = 32  # training samples of each rank
BATCH_SIZE = 4  # on each rank


class _Samples(Dataset[Any]):
    """Labelled vectors that record which of them are asked for."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randn(number, 6, generator=generator).to(communication_device())
        self.labels = (self.inputs.sum(1) > 0).long()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += torch.arange(len(self))[index].reshape(-1).tolist()
        return self.inputs[index], self.labels[index]


class _Model(torch.nn.Linear):
    """A layer that records the mode of each forward pass, as dropout or batch norm would show."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.is_training: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_training.append(self.training)
        return super().forward(x)


@judge("1.4b", on_ranks=True)
def train_on_all_ranks(train: Any) -> None:
    """Judge a function that trains for two epochs and counts the right test samples."""
    require_function(train)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    train_set, test_set = _Samples(SHARE * world_size), _Samples(4 * world_size + 1)
    torch.manual_seed(rank)  # the models begin unequal
    model = _Model().to(communication_device())
    before = [each.tolist() for each in model.parameters()]
    counts = all_gather(train(model, train_set, test_set))
    weights = all_gather([each.tolist() for each in model.parameters()])
    require(not any(all_gather(weights[rank] == before)), "1.4b not trained")
    require(weights == [weights[0]] * world_size, "1.4b models differ")
    asked = all_gather(train_set.asked)
    _judge_samples(asked)
    _judge_weights(weights[0], all_gather(before), train_set, asked)
    steps = 2 * SHARE // BATCH_SIZE
    modes = model.is_training
    require(all(modes[:steps]) and not any(modes[steps:]), "1.4b mode")
    with torch.no_grad():
        right = int((model(test_set.inputs).argmax(1) == test_set.labels).sum())
    _judge_counts(counts, right, sum(map(len, all_gather(test_set.asked))))


def _judge_samples(asked: list[list[int]]) -> None:
    """Judge which samples each rank has trained on."""
    number = SHARE * len(asked)
    for rank, samples in enumerate(asked):
        require(len(samples) != 2 * number, "1.4b all samples")
        right = 2 * SHARE
        require(len(samples) == right, "1.4b samples", rank=rank, got=len(samples), right=right)
    epochs = [[samples[at : at + SHARE] for samples in asked] for at in (0, SHARE)]
    drawn = [sorted(each for samples in epoch for each in samples) for epoch in epochs]
    require(drawn == [[*range(number)]] * 2, "1.4b shared samples")
    require(epochs[0] != epochs[1], "1.4b same order")


def _judge_weights(
    weights: Sequence[Any], starts: Sequence[Any], train_set: _Samples, asked: list[list[int]]
) -> None:
    """Train again, with the samples that the ranks asked for, and compare the weights."""
    batches = torch.tensor(asked).view(len(asked), -1, BATCH_SIZE).transpose(0, 1).flatten(1)
    trained = []
    for start in starts:  # all ranks have begun with the weights of one of them
        weight, bias = (torch.tensor(each, requires_grad=True) for each in start)
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)
        for indices in batches:
            optimizer.zero_grad()
            outputs = linear(train_set.inputs[indices].cpu(), weight, bias)
            loss = cross_entropy(outputs, train_set.labels[indices].cpu())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained.append((weight, bias))
    theirs = [torch.tensor(each) for each in weights]
    is_right = any(
        is_close(theirs[0], weight) and is_close(theirs[1], bias) for weight, bias in trained
    )
    require(is_right, "1.4b other weights")


def _judge_counts(counts: list[Any], right: int, tested: int) -> None:
    """Judge the counts that the ranks return; together they have tested so many samples."""
    number, world_size = 4 * len(counts) + 1, len(counts)
    try:
        counts = [float(each) for each in counts]
    except (TypeError, ValueError):
        counts = []
    require(counts, "1.4b no number")
    is_share = tested == number and sum(counts) == right
    require(not is_share and counts == [counts[0]] * world_size, "1.4b own count")
    require(not number < tested < number * world_size, "1.4b counted twice")
    require(tested < number * world_size, "1.4b all on each")
    require(counts[0] == right, "1.4b other count", right=right, number=number)


# ---- 3.9: a stream of samples for all ranks, and the packing of documents

NUMBER = 50  # of the samples
SAVED, RESUMED = 13, 9  # steps
STATE_LENGTH = 100  # characters
SIZE, PADDING = 640, 0.02


class _Run(NamedTuple):
    """The samples of all ranks in each step, and the state of each rank at the end."""

    steps: list[tuple[int, ...]]
    states: tuple[Any, ...]


def _run(
    stream_class: Any, ranks: int, steps: int, *, workers: int = 0, state: Any = None, seed: int = 7
) -> _Run:
    """Take samples on so many ranks. A real rank plays several of them, or none."""
    played = {}
    for rank in range(this_rank.rank(), ranks, this_rank.world_size()):
        stream = stream_class(NUMBER, seed, rank, ranks, workers)
        if state is not None:
            stream.load_state_dict(deepcopy(state))  # each rank reads the file
        samples = iter(stream)  # a name, so that its workers still run when the state is asked for
        taken = [int(each) for each in islice(samples, steps)]
        played[rank] = taken, stream.state_dict(), len(active_children())
    everyone = {rank: got for each in all_gather(played) for rank, got in each.items()}
    samples, states, children = zip(*(everyone[rank] for rank in range(ranks)), strict=True)
    count = min(map(len, samples))
    require(count == steps, "3.9a ended", count=count, ranks=ranks, number=NUMBER)
    require(min(children) >= workers, "3.9a no workers", workers=workers)
    return _Run([*zip(*samples, strict=True)], states)


def _require_equal_use(steps: Sequence[Sequence[int]], mistake: str, **facts: Any) -> None:
    """Require after each step that no sample was used twice more often than another."""
    used, found = Counter(dict.fromkeys(range(NUMBER), 0)), None
    for at, samples in enumerate(steps):
        used.update(samples)
        (most, times), *_, (least, fewer) = used.most_common()
        if times - fewer > 1:
            found = {"step": at + 1, "most": most, "times": times, "least": least, "fewer": fewer}
            break
    require(not found, mistake, **(found or {}), **facts)


@judge("3.9a", on_ranks=True)
def stream(stream_class: Any) -> None:
    """Judge ``class Stream``, on the real ranks and on other numbers of ranks."""
    require_class(stream_class, "number", "seed", "rank", "world_size", "workers")
    ranks = this_rank.world_size()
    run = _run(stream_class, ranks, NUMBER)
    whole = [*chain.from_iterable(run.steps)]
    require({*whole} <= {*range(NUMBER)}, "3.9a other numbers", last=NUMBER - 1)
    require(_run(stream_class, ranks, 8).steps == run.steps[:8], "3.9a not repeatable")
    other_seed = _run(stream_class, ranks, 8, seed=8).steps
    require(any(len({*each}) > 1 for each in run.steps), "3.9a not divided")
    shares = [*zip(*run.steps[: NUMBER // ranks], strict=True)]
    require(any(a > b for each in shares for a, b in pairwise(each)), "3.9a not shuffled")
    require(other_seed != run.steps[:8], "3.9a other seed")
    _require_equal_use(run.steps, "3.9a unequal")
    require(whole[:NUMBER] != whole[NUMBER : 2 * NUMBER], "3.9a same order")
    saved = _run(stream_class, ranks, SAVED, workers=2)
    got, right = ([each[0] for each in one.steps[:6]] for one in (saved, run))
    require(saved.steps == run.steps[:SAVED], "3.9a workers", got=got, right=right)
    _judge_resume(stream_class, saved, run)


def _judge_resume(stream_class: Any, saved: _Run, unbroken: _Run) -> None:
    """Judge a state, a resume on as many ranks, and a chain on other numbers of ranks."""
    ranks, state = len(saved.states), saved.states[0]
    require(len(repr(state)) <= STATE_LENGTH, "3.9a large state", length=len(repr(state)))
    others = [each for each in saved.states if repr(each) != repr(state)]
    require(not others, "3.9a own states", one=state, other="".join(map(repr, others[:1])))
    again = _run(stream_class, ranks, RESUMED, workers=2, state=state).steps
    mistakes = {0: "3.9a begins again", SAVED - 1: "3.9a step behind", SAVED: ""}
    found = (name for at, name in mistakes.items() if again == unbroken.steps[at : at + RESUMED])
    mistake = next(found, "3.9a not continued")
    require(not mistake, mistake, step=SAVED)
    steps, before = saved.steps, ranks
    for other, count, workers in ((1, RESUMED, 2), (ranks + 1, NUMBER, 0), (ranks, SAVED, 1)):
        run = _run(stream_class, other, count, workers=workers, state=state)
        steps, state = steps + run.steps, run.states[0]
        _require_equal_use(steps, "3.9a other ranks", before=before, ranks=other)
        before = other


@judge("3.9b")
def pack(pack: Any) -> None:
    """Judge ``pack(lengths, size)`` by its rows, and by the share of padding."""
    require_function(pack, "lengths", "size")
    generator = torch.Generator().manual_seed(7)
    lengths = (30 + 600 * torch.rand(300, generator=generator) ** 3).long().tolist()
    rows = pack([*lengths], SIZE)
    is_list = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    require(is_list, "3.9b no lists")
    times = Counter(chain.from_iterable(rows))
    wrong = [each for each in {*times, *range(len(lengths))} if times[each] != 1]
    require(times.keys() <= {*range(len(lengths))}, "3.9b other numbers", last=len(lengths) - 1)
    require(not wrong, "3.9b not once", wrong=wrong[:5], count=len(wrong))
    longest = max(sum(lengths[each] for each in row) for row in rows)
    require(longest <= SIZE, "3.9b too long", longest=longest, size=SIZE)
    padding = 1 - sum(lengths) / (len(rows) * SIZE)
    require(padding <= PADDING, "3.9b padding", padding=padding, goal=PADDING)
