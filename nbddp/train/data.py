"""Batches for each rank: its own part of the data, a new order each epoch, resumed where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import default_collate as torch_collate

from nbddp.errors import ArgumentError
from nbddp.train import place, report
from nbddp.train.warn import warn

_OWN = ("sampler", "batch_sampler", "generator", "in_order")


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    evaluation: bool = False,
    **options: Any,
) -> Loader:
    """Make a DataLoader that gives each rank its own part of the data.

    For training, all ranks get equally many batches (a few samples are used twice if it does not
    work out, as DistributedSampler does), in a new order each time it is iterated. For evaluation,
    every sample is given to exactly one rank, in the dataset's order, so that ranks may get one
    sample, or batch, more than others: count, and then ``nbddp.all_reduce``. With fewer samples
    than ranks some get no batch at all; call ``model.module`` then, as a DDP model with BatchNorm
    waits for all ranks in the first forward pass after a training step.

    What a dataset draws from the generators of torch, numpy and ``random`` depends on seed, epoch,
    rank and batch alone, not on workers or on the training. A generator of the dataset's own, or
    one on a GPU, is not under the loader's control.

    Args:
        dataset: anything with ``len()`` and ``[index]``.
        batch_size: samples in a batch of one rank.
        shuffle: whether each epoch has an order of its own; evaluation is never shuffled.
        drop_last: whether to leave out what does not fill a batch on all ranks.
        num_workers: processes of each rank that load; 0 to load in the rank itself.
        seed: of the order and of the generators; the same on all ranks.
        evaluation: whether no sample may come twice, and no step is reported.
        options: more for DataLoader, such as ``collate_fn`` or ``pin_memory=True``. In a
            ``worker_init_fn``, the dataset is ``get_worker_info().dataset.dataset``.

    Raises:
        TypeError: the dataset has no length or is an IterableDataset.
        ArgumentError: a value makes no sense.

    >>> batches = loader(range(10), 4, shuffle=False)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> batches.epoch, batches.step
    (1, 3)
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"nbddp.loader needs a dataset with len() and [index], got {type(dataset).__name__}; "
            "an IterableDataset must divide its samples among the ranks by itself: give it to a "
            "torch DataLoader"
        )
    for name in _OWN:
        if name in options:
            raise ArgumentError(
                f"nbddp.loader makes its own {name}; use a torch DataLoader for yours"
            )
    if batch_size < 1:
        raise ArgumentError(f"batch_size must be a whole number above 0, got {batch_size!r}")
    if evaluation and drop_last:
        raise ArgumentError("an evaluation loader leaves nothing out: drop_last must be False")
    return Loader(
        dataset,
        batch_size,
        order=_Order(len(dataset), shuffle and not evaluation, drop_last, evaluation),
        seed=seed,
        options={"num_workers": num_workers, **options},
    )


@dataclass(slots=True)
class _Position:
    """Where a loader is.

    Attributes:
        epoch: from 0.
        start: samples of this epoch that another number of ranks has had.
        batches: batches of this epoch that this rank has had since.
        step: batches that this rank has had in all epochs.
    """

    epoch: int = 0
    start: int = 0
    batches: int = 0
    step: int = 0
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Order:
    """Which samples come in which order, on which rank."""

    samples: int
    shuffle: bool
    drop_last: bool
    evaluation: bool

    def mine(self, seed: int, epoch: int, start: int) -> list[int]:
        """This rank's samples of an epoch, from its ``start``-th sample of all ranks on."""
        everything: DistributedSampler[Any] = DistributedSampler(
            cast("Dataset[Any]", range(self.samples)),
            num_replicas=1,
            rank=0,
            shuffle=self.shuffle,
            seed=seed,
        )
        everything.set_epoch(epoch)
        rest = list(everything)[start:]
        return [rest[index] for index in self._share(len(rest))]

    def _share(self, samples: int) -> range | DistributedSampler[Any]:
        """This rank's places in a row of samples: without padding, or equally many on all ranks."""
        rank, world_size = place.rank(), place.world_size()
        if self.evaluation:
            return range(rank, samples, world_size)
        return DistributedSampler(
            cast("Dataset[Any]", range(samples)),
            num_replicas=world_size,
            rank=rank,
            shuffle=False,
            drop_last=self.drop_last,
        )

    def batches(self, batch_size: int) -> int:
        """How many batches of a whole epoch are this rank's."""
        samples = len(self._share(self.samples))
        return samples // batch_size if self.drop_last else -(-samples // batch_size)


class Loader(Iterable[Any]):
    """Batches for this rank; made by ``loader()``.

    Each iteration is an epoch. Break out of one, and the next begins the next epoch; but a state
    taken in it, or after the break, goes on in the middle of it.

    Attributes:
        dataset: what it loads from.
        batch_size: samples in a batch of one rank.
        seed: of the order and of the generators.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        order: _Order,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self._order = order
        self._position = _Position()
        self._plan = _Plan()
        self._generator = torch.Generator()
        collate = options.get("collate_fn") or torch_collate
        self._loader = DataLoader(
            _Batches(dataset, collate),
            batch_size=None,  # an index of ours is a whole batch
            sampler=self._plan,
            generator=self._generator,  # else each epoch would draw from the training's
            **{**options, "collate_fn": _as_it_is},
        )

    @property
    def epoch(self) -> int:
        """The epoch that it is in, or, between two, the one that comes; from 0."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """How many batches it has given, over all epochs."""
        return self._position.step

    def __len__(self) -> int:
        """How many batches of a whole epoch are this rank's."""
        return self._order.batches(self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        position = self._begin()
        self._plan.batches = self._batches(position)
        self._generator.manual_seed(_mix(self.seed, position.epoch, place.rank()))
        for batch in self._loader:
            if not self._order.evaluation:
                report.reached(position.step, source="loader")
            position.batches += 1  # what is given counts, not what the workers have prefetched
            position.step += 1
            yield batch
        if position is self._position:
            self._position = _Position(epoch=position.epoch + 1, step=position.step)

    def _begin(self) -> _Position:
        """The place to go on from; an iteration that is still open does not move it any more."""
        if self._position.is_begun:
            self._position = _Position(epoch=self.epoch + 1, step=self.step)
        self._position.is_begun = True
        return self._position

    def _batches(self, position: _Position) -> list[_Batch]:
        """What is left of the epoch."""
        mine = self._order.mine(self.seed, position.epoch, position.start)
        end = len(mine)
        if self._order.drop_last:
            end -= end % self.batch_size
        epoch = 0 if self._order.evaluation else position.epoch  # the same at every evaluation
        origin = (self.seed, epoch, place.rank(), position.start)
        return [
            _Batch(mine[begin : min(begin + self.batch_size, end)], _mix(*origin, begin))
            for begin in range(position.batches * self.batch_size, end, self.batch_size)
        ]

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Where it is, for a checkpoint; the same on all ranks that are equally far.

        Taken in the loop's body, it counts the batch that the body has. It holds plain numbers.
        """
        return {
            "epoch": self._position.epoch,
            "start": self._position.start,
            "batches": self._position.batches,
            "step": self._position.step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": place.world_size(),
            **self._fixed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration gives what was left of that epoch.

        On as many ranks, with batches as large, these are bit for bit the batches of a run that
        was never stopped. Otherwise the rest of the epoch's samples is divided anew, with a
        warning on rank 0. The state's seed replaces the loader's.

        Raises:
            ArgumentError: it is not a loader's state, or it was another kind of loader's.
        """
        self._check(state)
        self.seed = state["seed"]
        position = _Position(state["epoch"], state["start"], state["batches"], state["step"])
        before, now = _ranks_and_batch(state), _ranks_and_batch(self.state_dict())
        if before != now:
            had = state["batches"] * state["batch_size"] * state["world_size"]
            position.start = min(position.start + had, self._order.samples)
            position.batches = 0
            self._warn(position, f"saved on {before}, resumed on {now}")
        self._position = position

    def _fixed(self) -> dict[str, Any]:
        """What cannot change in the middle."""
        return {
            "samples": self._order.samples,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
        }

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ArgumentError(f"this is not a loader's state: it has no {', '.join(missing)}")
        for name, value in self._fixed().items():
            if state[name] != value:
                raise ArgumentError(
                    f"the loader's state was saved with {name}={state[name]}, this loader has "
                    f"{name}={value}: make it as it was"
                )

    def _warn(self, position: _Position, change: str) -> None:
        if place.rank() == 0:
            warn(
                f"the loader goes on at sample {position.start} of epoch {position.epoch}, {change}"
                ": what is left of the epoch is seen once, but augmentations, and batches of "
                "another total size, are not those of a run that was never stopped"
            )


def _ranks_and_batch(state: Mapping[str, Any]) -> str:
    return f"world size {state['world_size']} with batches of {state['batch_size']}"


# ---- what the DataLoader handles


class _Batch(NamedTuple):
    """An order to load a batch: its samples, and what its generators begin with."""

    indices: list[int]
    seed: int


class _Plan:
    """The DataLoader's sampler: the batches of the epoch that begins."""

    def __init__(self) -> None:
        self.batches: Sequence[_Batch] = ()

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Batches(Dataset[Any]):
    """A dataset of whole batches, each loaded with generators of its own."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, batch: _Batch) -> Any:
        with _seeded(batch.seed):
            if callable(getattr(self.dataset, "__getitems__", None)):
                return self._collate(self.dataset.__getitems__(batch.indices))
            return self._collate([self.dataset[index] for index in batch.indices])


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on the seed alone; the training's own go on as if nothing was."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def _mix(*numbers: int) -> int:
    """One seed out of several numbers, another for others."""
    digest = blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits
