"""Batches for each rank: its own part of the data, a new order each epoch, resumed where it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import default_collate as torch_collate

from nbddp.errors import ArgumentError
from nbddp.train import log_and_track, this_rank
from nbddp.train.epoch_batches import (
    BatchDataset,
    EpochBatches,
    EpochOrder,
    InterleavedStream,
    LoaderPosition,
)
from nbddp.train.this_rank import mix, warn_user

_OPTIONS_OF_LOADER = ("generator", "in_order")


def loader(
    dataset: Dataset[Any],
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    evaluation: bool = False,
    **options: Any,
) -> Loader:
    """Make a DataLoader that gives each rank its own part of the data.

    For training, all ranks get equally many batches, in a new order each time it is iterated.
    Where the samples cannot be shared out equally a few are used twice, as by DistributedSampler.
    For evaluation, every sample is given to exactly one rank, in the dataset's order. So a rank may
    get one sample, or batch, more than another: count, and then ``nbddp.all_reduce``. With fewer
    samples than ranks some get no batch at all; call ``model.module`` then, as a DDP model with
    BatchNorm waits for all ranks in the first forward pass after a training step.

    What a dataset draws from the generators of torch, numpy and ``random`` depends on seed, epoch,
    rank and batch alone, not on workers or on the training. What a sampler or a stream draws
    depends on seed and epoch alone, so that it is the same on all ranks. A generator of the
    dataset's own, or one on a GPU, is not under the loader's control.

    Args:
        dataset: anything with ``len()`` and ``[index]``; or an IterableDataset, which each rank
            reads from its beginning, keeping its part: it must give the same on all ranks.
        batch_size: samples in a batch of one rank; 1 if not given, as torch has it.
        shuffle: whether each epoch has an order of its own. That is so unless it is said
            otherwise, for training without a sampler; a stream is never shuffled.
        sampler: gives an epoch's indices for all ranks together, such as a WeightedRandomSampler;
            each rank gets its part of them.
        batch_sampler: gives an epoch's batches of indices, each of which goes to one rank.
        drop_last: whether to leave out what does not fill a batch on all ranks.
        num_workers: processes of each rank that load; 0 to load in the rank itself.
        seed: of the order and of the generators; the same on all ranks.
        evaluation: whether no sample may come twice, and no step is reported.
        options: more for DataLoader, such as ``collate_fn`` or ``pin_memory=True``. In a
            ``worker_init_fn``, the dataset is ``get_worker_info().dataset.dataset``.

    Returns:
        Batches as torch's DataLoader gives them, on the CPU; each iteration is an epoch. It has a
        ``len()``, the ``epoch`` and ``step`` that it is at, and a state for :class:`Checkpoint`.

    Raises:
        TypeError: the dataset has no length and is no IterableDataset.
        ArgumentError: a value makes no sense, or does not go with another.

    >>> batches = loader(range(10), 4, shuffle=False)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> batches.epoch, batches.step
    (1, 3)
    >>> [batch.tolist() for batch in loader(range(10), 2, sampler=[9, 3, 5])]
    [[9, 3], [5]]
    """
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "nbddp.loader needs a dataset with len() and [index], or an IterableDataset, got "
            f"{type(dataset).__name__}"
        )
    options |= {"num_workers": num_workers}
    given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    _check_samplers(sampler=sampler, batch_sampler=batch_sampler, **given)
    if is_stream:
        _check_stream(shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler, **options)
    for name in _OPTIONS_OF_LOADER:
        if name in options:
            raise ArgumentError(
                f"nbddp.loader makes its own {name}; use a torch DataLoader for yours"
            )
    size = 1 if batch_size is None else batch_size
    if size < 1:
        raise ArgumentError(f"batch_size must be a whole number above 0, got {batch_size!r}")
    if evaluation and drop_last:
        raise ArgumentError("an evaluation loader leaves nothing out: drop_last must be False")
    used_sampler = sampler if batch_sampler is None else batch_sampler
    can_shuffle = not evaluation and not is_stream and used_sampler is None
    order = EpochOrder(
        log_and_track.length_of(dataset if used_sampler is None else used_sampler),
        can_shuffle if shuffle is None else shuffle and can_shuffle,
        drop_last,
        evaluation,
        used_sampler,
    )
    return Loader(
        dataset, size if batch_sampler is None else None, order=order, seed=seed, options=options
    )


def _check_samplers(*, sampler: object, batch_sampler: object, **batch_options: object) -> None:
    """As torch has it: what a sampler decides is not said twice."""
    if batch_sampler is not None:
        for name in [name for name, each in {"sampler": sampler, **batch_options}.items() if each]:
            raise ArgumentError(
                f"nbddp.loader: batch_sampler makes the batches: leave {name} out, or batch_sampler"
            )
    if sampler is not None and batch_options["shuffle"]:
        raise ArgumentError("nbddp.loader: sampler gives the order: leave shuffle out, or sampler")
    for each in (sampler, batch_sampler):
        inner = getattr(each, "sampler", None)
        if isinstance(each, DistributedSampler) or isinstance(inner, DistributedSampler):
            raise ArgumentError(
                "nbddp.loader divides the samples among the ranks by itself: leave the "
                "DistributedSampler out"
            )


def _check_stream(
    *, shuffle: object, sampler: object, batch_sampler: object, **options: Any
) -> None:
    if shuffle:
        raise ArgumentError(
            "nbddp.loader: an IterableDataset has its own order: shuffle in its __iter__, which "
            "draws the same random numbers on all ranks"
        )
    if sampler is not None or batch_sampler is not None:
        raise ArgumentError("nbddp.loader: an IterableDataset has no indices to sample")
    if options["num_workers"] > 1 or options.get("persistent_workers"):
        raise ArgumentError(
            "nbddp.loader: every worker would read all of an IterableDataset, from the beginning "
            "in each epoch: take num_workers=1 and no persistent_workers"
        )


_loader_numbers = itertools.count()


class Loader(Iterable[Any]):
    """Batches for this rank; made by ``loader()``.

    Each iteration is an epoch. After a break out of one, the next iteration begins the next epoch;
    but a state that was taken in the broken one, or after the break, goes on in its middle.

    Attributes:
        dataset: what it loads from.
        batch_size: samples in a batch of one rank; None where a ``batch_sampler`` makes them.
        shuffles: whether each epoch has an order of its own.
        seed: of the order and of the generators.
        number: which one it is of those that this process made; the same on every rank, if all
            ranks make the same ones.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        *,
        order: EpochOrder,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffles = order.shuffle
        self.seed = seed
        self.number = next(_loader_numbers)
        self._order = order
        self._position = LoaderPosition()
        self._generator = torch.Generator()  # else each epoch would draw from the training's
        collate = options.get("collate_fn") or torch_collate
        self._reader: EpochBatches | InterleavedStream
        options = {**options, "collate_fn": _already_collated, "generator": self._generator}
        if isinstance(dataset, IterableDataset):
            self._reader = InterleavedStream(dataset, collate, order, batch_size or 1)
            self._loader = DataLoader(self._reader, batch_size=None, **options)
        else:
            self._reader = EpochBatches(order, batch_size)
            batches = BatchDataset(dataset, collate)  # an index of ours is a whole batch
            self._loader = DataLoader(batches, batch_size=None, sampler=self._reader, **options)

    @property
    def is_evaluation(self) -> bool:
        """Whether it is for evaluation: no sample comes twice, each iteration is all of them."""
        return self._order.evaluation

    @property
    def epoch(self) -> int:
        """The epoch that it is in, or, between two, the one that comes; from 0."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """How many batches it has given, over all epochs."""
        return self._position.step

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning.

        There is no need to: each iteration is the next epoch. In a loop that does it anyway, an
        epoch that a loaded state is in the middle of goes on there.

        Args:
            epoch: from 0; it decides the order.

        Raises:
            ArgumentError: it is below 0.

        >>> batches = loader(range(8), 4)
        >>> for epoch in range(3):
        ...     batches.set_epoch(epoch)
        ...     for batch in batches:
        ...         pass
        >>> batches.epoch, batches.step
        (3, 6)
        """
        if epoch < 0:
            raise ArgumentError(f"set_epoch: epoch must be 0 or above, got {epoch}")
        if epoch != self.epoch or self._position.is_started:
            self._position = LoaderPosition(epoch=int(epoch), step=self.step)

    @property
    def sampler(self) -> Loader:
        """The loader itself, for loops that say ``loader.sampler.set_epoch(epoch)``."""
        return self

    def __len__(self) -> int:
        """How many batches of a whole epoch are this rank's.

        Raises:
            TypeError: it is not known, as of a stream without ``len()``.
        """
        return self._order.batches_per_epoch(self.batch_size or 1)

    def __iter__(self) -> Iterator[Any]:
        if self._position.is_started:
            self._position = LoaderPosition(epoch=self.epoch + 1, step=self.step)
        position = self._position  # an iteration that is still open does not move it any more
        position.is_started = True
        self._reader.start_epoch(self.seed, position)
        self._generator.manual_seed(mix(self.seed, position.epoch, this_rank.rank()))
        for batch in self._loader:
            if not self._order.evaluation:
                log_and_track.report_step(position.step, source="loader")
            position.batches += 1  # what is given counts, not what the workers have prefetched
            position.step += 1
            yield batch
        if position is self._position:
            self._position = LoaderPosition(epoch=position.epoch + 1, step=position.step)

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
            "world_size": this_rank.world_size(),
            **self._fixed_settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration gives what was left of that epoch.

        On as many ranks, with batches as large, these are bit for bit the batches of a run that
        was never stopped. Otherwise the rest of the epoch's samples is divided anew, with a
        warning on rank 0. The state's seed replaces the loader's.

        Raises:
            ArgumentError: it is not a loader's state, or it was another kind of loader's.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ArgumentError(f"this is not a loader's state: it has no {', '.join(missing)}")
        for name, value in self._fixed_settings().items():
            if state[name] != value:
                raise ArgumentError(
                    f"the loader's state was saved with {name}={state[name]}, this loader has "
                    f"{name}={value}: make it as it was"
                )
        self.seed = state["seed"]
        position = LoaderPosition(state["epoch"], state["start"], state["batches"], state["step"])
        before, now = _describe_layout(state), _describe_layout(self.state_dict())
        if before != now:
            n_seen = state["batches"] * (state["batch_size"] or 1) * state["world_size"]
            position.start += n_seen
            if self._order.samples is not None:
                position.start = min(position.start, self._order.samples)
            position.batches = 0
            if this_rank.rank() == 0:
                warn_user(
                    f"the loader goes on at sample {position.start} of epoch {position.epoch}, "
                    f"saved on {before}, resumed on {now}: what is left of the epoch is seen once, "
                    "but augmentations, and batches of another total size, are not those of a run "
                    "that was never stopped"
                )
        self._position = position

    def _fixed_settings(self) -> dict[str, Any]:
        """What cannot change in the middle."""
        return {
            "samples": self._order.samples,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
        }


def _describe_layout(state: Mapping[str, Any]) -> str:
    size = state["batch_size"]
    return f"world size {state['world_size']} with batches of {size or 'its own'}"


def _already_collated(batch: Any) -> Any:
    return batch
