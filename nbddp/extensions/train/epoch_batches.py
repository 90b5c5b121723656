"""The order of samples and batches on each rank, and the datasets that load the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import mix, seeded

Collate = Callable[[list[Any]], Any]


@dataclass(slots=True)
class LoaderPosition:
    """The position of a loader.

    Attributes:
        epoch: counts from 0.
        start: samples of this epoch that were used before, with another world size or batch size.
        batches: batches of this epoch that this rank has got after ``start``.
        step: batches that this rank has got in all epochs.
        is_started: whether an iteration of this epoch has started.
    """

    epoch: int = 0
    start: int = 0
    batches: int = 0
    step: int = 0
    is_started: bool = False


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of an epoch's samples, and each rank's share of them.

    Attributes:
        samples: the number of samples in an epoch, on all ranks together; None if unknown.
        sampler: yields an epoch's samples or batches; None for the dataset's order, which
            ``shuffle`` may shuffle.
    """

    samples: int | None
    shuffle: bool
    drop_last: bool
    evaluation: bool
    sampler: Iterable[Any] | None = None

    def indices_of_rank(self, seed: int, epoch: int, start: int) -> list[Any]:
        """Return this rank's sample indices of an epoch, without the first ``start`` samples."""
        if self.sampler is not None:
            indices = _draw_indices(self.sampler, seed, epoch)
        elif self.shuffle:  # the order of a DistributedSampler
            generator = torch.Generator().manual_seed(seed + epoch)
            indices = torch.randperm(self.samples or 0, generator=generator).tolist()
        else:
            indices = [*range(self.samples or 0)]
        rest = indices[start:]
        return [rest[index] for index in self._positions_of_rank(len(rest))]

    def _positions_of_rank(self, samples: int) -> range | DistributedSampler[Any]:
        """Return this rank's positions in a list of samples.

        Evaluation gives each sample to exactly one rank. Training gives all ranks equally many.
        """
        rank, world_size = this_rank.rank(), this_rank.world_size()
        if self.evaluation:
            return range(rank, samples, world_size)
        return DistributedSampler(
            cast("Dataset[Any]", range(samples)),
            num_replicas=world_size,
            rank=rank,
            shuffle=False,
            drop_last=self.drop_last,
        )

    def batches_per_epoch(self, batch_size: int) -> int:
        """Return the number of this rank's batches in a whole epoch.

        Raises:
            TypeError: the number of samples is unknown.
        """
        if self.samples is None:
            raise TypeError("the number of batches is unknown: the samples have no len()")
        samples = len(self._positions_of_rank(self.samples))
        return samples // batch_size if self.drop_last else -(-samples // batch_size)


def _draw_indices(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """Draw an epoch's indices from a sampler, with the same random numbers on all ranks."""
    epoch_seed = mix(seed, epoch)
    for source in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(generator := getattr(source, "generator", None), torch.Generator):
            generator.manual_seed(epoch_seed)
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(epoch)
    with seeded(epoch_seed):
        return list(sampler)


class BatchIndices(NamedTuple):
    """The samples of one batch, and the seed of the random generators that load it."""

    indices: list[Any]
    seed: int


class EpochBatches:
    """The sampler of the DataLoader: yields the batches of the current epoch.

    Args:
        order: the order of the samples, or of the batches if the sampler yields batches.
        batch_size: samples in a batch; None if the sampler yields batches.
    """

    def __init__(self, order: EpochOrder, batch_size: int | None) -> None:
        self._order = order
        self._batch_size = batch_size
        self._batches: Sequence[BatchIndices] = ()

    def start_epoch(self, seed: int, position: LoaderPosition) -> None:
        """Compute the remaining batches of the epoch."""
        samples = self._order.indices_of_rank(seed, position.epoch, position.start)
        size = self._batch_size or 1
        end = len(samples)
        if self._order.drop_last:
            end -= end % size
        epoch = 0 if self._order.evaluation else position.epoch  # the same at every evaluation
        seed_parts = (seed, epoch, this_rank.rank(), position.start)
        self._batches = [
            BatchIndices(
                samples[begin : min(begin + size, end)]
                if self._batch_size
                else list(samples[begin]),
                mix(*seed_parts, begin),
            )
            for begin in range(position.batches * size, end, size)
        ]

    def __iter__(self) -> Iterator[BatchIndices]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class BatchDataset(Dataset[Any]):
    """A dataset of whole batches; each batch is loaded with its own random seed."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, batch: BatchIndices) -> Any:
        with seeded(batch.seed):
            if callable(getattr(self.dataset, "__getitems__", None)):
                return self._collate(self.dataset.__getitems__(batch.indices))
            return self._collate([self.dataset[index] for index in batch.indices])


class InterleavedStream(IterableDataset[Any]):
    """A stream that every rank reads completely, in rounds of one batch per rank.

    The batches are the same as those of an unshuffled dataset with the same samples.
    """

    def __init__(self, dataset: Any, collate: Collate, order: EpochOrder, batch_size: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._order = order
        self._batch_size = batch_size
        self.start_epoch(0, LoaderPosition())

    def start_epoch(self, seed: int, position: LoaderPosition) -> None:
        """Start the next iteration at this position."""
        epoch = 0 if self._order.evaluation else position.epoch  # the same at every evaluation
        self._seed, self._position = seed, replace(position, epoch=epoch)
        # set in the rank: a DataLoader worker has no group
        self._rank, self._world_size = this_rank.rank(), this_rank.world_size()

    def __iter__(self) -> Iterator[Any]:
        seed_parts = (self._seed, self._position.epoch, self._position.start)
        for number, samples_of_all in enumerate(self._rounds(seed_parts)):
            samples = samples_of_all[self._rank :: self._world_size]
            if samples and number >= self._position.batches:
                with seeded(mix(*seed_parts, number, self._rank)):
                    batch = self._collate(samples)
                yield batch

    def _rounds(self, seed_parts: tuple[int, ...]) -> Iterator[list[Any]]:
        """Yield the samples of each round, with the same random numbers on all ranks."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self._position.epoch)
        with seeded(mix(*seed_parts)):
            stream = iter(self.dataset)
            for _ in islice(stream, self._position.start):
                pass
        first: list[Any] = []
        size = self._world_size * self._batch_size
        number = 0
        while True:
            with seeded(mix(*seed_parts, number)):
                samples = list(islice(stream, size))
            first = first or samples[: self._world_size]
            if len(samples) < size:  # the last round: pad it, except in evaluation
                missing = 0 if self._order.evaluation else -len(samples) % self._world_size
                if not self._order.drop_last:
                    yield samples + list(islice(cycle(first), missing))
                return
            yield samples
            number += 1
