"""What the DataLoader handles: a dataset of whole batches, indexed or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from nbddp.train import place
from nbddp.train.order import Batch, Order, Position
from nbddp.train.seeds import mix, seeded

Collate = Callable[[list[Any]], Any]


class Batches(Dataset[Any]):
    """A dataset of whole batches, each loaded with generators of its own."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, batch: Batch) -> Any:
        with seeded(batch.seed):
            if callable(getattr(self.dataset, "__getitems__", None)):
                return self._collate(self.dataset.__getitems__(batch.indices))
            return self._collate([self.dataset[index] for index in batch.indices])


class Rounds(IterableDataset[Any]):
    """A stream that all ranks read alike, in rounds of one batch for each rank.

    The batches are those of a dataset with the same samples that is not shuffled.
    """

    def __init__(self, dataset: Any, collate: Collate, order: Order, batch_size: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._order = order
        self._batch_size = batch_size
        self._seed = 0
        self._position = Position()
        self._rank, self._world_size = 0, 1  # a worker of the DataLoader has no process group

    def begin(self, seed: int, position: Position) -> None:
        """Go on from there in the iteration that begins."""
        epoch = 0 if self._order.evaluation else position.epoch  # the same at every evaluation
        self._seed, self._position = seed, replace(position, epoch=epoch)
        self._rank, self._world_size = place.rank(), place.world_size()

    def __iter__(self) -> Iterator[Any]:
        origin = (self._seed, self._position.epoch, self._position.start)
        for number, samples in enumerate(self._rounds(origin)):
            mine = samples[self._rank :: self._world_size]
            if mine and number >= self._position.batches:
                with seeded(mix(*origin, number, self._rank)):
                    batch = self._collate(mine)
                yield batch

    def _rounds(self, origin: tuple[int, ...]) -> Iterator[list[Any]]:
        """The samples of all ranks' next batches; random numbers are the same on all ranks."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self._position.epoch)
        with seeded(mix(*origin)):
            stream = iter(self.dataset)
            for _ in islice(stream, self._position.start):
                pass
        first: list[Any] = []
        size = self._world_size * self._batch_size
        number = 0
        while True:
            with seeded(mix(*origin, number)):
                samples = list(islice(stream, size))
            first = first or samples[: self._world_size]
            if len(samples) < size:
                yield self._completed(samples, first)
                return
            yield samples
            number += 1

    def _completed(self, samples: list[Any], first: list[Any]) -> list[Any]:
        """The last round: without padding, or with equally many samples for all ranks, or none."""
        if self._order.drop_last:
            return []
        missing = 0 if self._order.evaluation else -len(samples) % self._world_size
        return samples + list(islice(cycle(first), missing))
