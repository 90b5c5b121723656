"""``nbddp.loader()``: a DataLoader for each rank's part of the data; it can be resumed.

Training data has by default a new order in each epoch, unless a sampler or a stream sets the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import default_collate as torch_collate

from nbddp.errors import ArgumentError
from nbddp.extensions.train.epoch_batches import (
    BatchDataset,
    EpochBatches,
    EpochOrder,
    InterleavedStream,
    LoaderPosition,
)
from nbddp.reporting import log_and_track, state_providers, this_rank
from nbddp.reporting.state_providers import StateProvider
from nbddp.reporting.this_rank import mix, warn_user


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
    """Create a DataLoader that gives each rank its own part of the data.

    For training, all ranks get equally many batches, by default in a new order each epoch. If the
    samples cannot be divided equally, a few are used twice, as with DistributedSampler.

    For evaluation, every sample goes to exactly one rank, in the dataset's order. A rank may get
    one sample or batch more than another: add up your counts with ``nbddp.all_reduce``. With fewer
    samples than ranks, some ranks get no batch. Call ``model.module`` then, because a DDP model
    with BatchNorm waits for all ranks in the first forward pass after a training step.

    Random numbers that a dataset draws from torch, numpy and ``random`` depend only on seed, epoch,
    rank and batch, not on workers or on the training. Random numbers of a sampler or a stream
    depend only on seed and epoch, so they are the same on all ranks. The loader does not seed a
    generator that the dataset creates, nor generators on a GPU.

    Args:
        dataset: an object with ``len()`` and ``[index]``; or an IterableDataset, which must yield
            the same samples on all ranks: each rank reads all of them and keeps its part.
        batch_size: samples in a batch of one rank; 1 by default, as in torch.
        shuffle: whether each epoch has another order. The default is True for training without a
            sampler. A stream is never shuffled.
        sampler: yields an epoch's indices for all ranks together, such as a WeightedRandomSampler;
            each rank gets its part of them.
        batch_sampler: yields an epoch's batches of indices; each batch goes to one rank.
        drop_last: whether to drop samples that do not fill a batch on all ranks.
        num_workers: loading processes of each rank; 0 to load in the rank itself.
        seed: the seed of the order and of the random generators; the same on all ranks.
        evaluation: whether to use each sample exactly once and report no steps.
        options: more options for DataLoader, such as ``collate_fn`` or ``pin_memory=True``. In a
            ``worker_init_fn``, the dataset is ``get_worker_info().dataset.dataset``.

    Returns:
        An iterable of batches as torch's DataLoader gives them, on the CPU; each iteration is an
        epoch. It has a ``len()``, the current ``epoch`` and ``step``, and a state for
        :class:`Checkpoint`.

    Raises:
        TypeError: the dataset has no length and is not an IterableDataset.
        ArgumentError: a value is invalid, or cannot be combined with another one.

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
    for name in options.keys() & {"generator", "in_order"}:
        raise ArgumentError(f"nbddp.loader makes its own {name}; use a torch DataLoader for yours")
    size = 1 if batch_size is None else batch_size
    if size < 1:
        raise ArgumentError(f"batch_size must be a whole number above 0, got {batch_size!r}")
    if evaluation and drop_last:
        raise ArgumentError("an evaluation loader leaves nothing out: drop_last must be False")
    used_sampler = sampler if batch_sampler is None else batch_sampler
    can_shuffle = not evaluation and not is_stream and used_sampler is None
    shuffles = can_shuffle and shuffle in (None, True)
    samples = log_and_track.length_of(dataset if used_sampler is None else used_sampler)
    order = EpochOrder(samples, shuffles, drop_last, evaluation, used_sampler)
    own_size = size if batch_sampler is None else None
    return Loader(dataset, own_size, order=order, seed=seed, options=options)


def _check_samplers(*, sampler: object, batch_sampler: object, **batch_options: object) -> None:
    """Check that no other option contradicts a sampler, as torch does."""
    for name, value in {"sampler": sampler, **batch_options}.items():
        if batch_sampler is not None and value:
            raise ArgumentError(
                f"nbddp.loader: batch_sampler makes the batches: leave out {name} or batch_sampler"
            )
    if sampler is not None and batch_options["shuffle"]:
        raise ArgumentError("nbddp.loader: sampler gives the order: leave out shuffle or sampler")
    for given in (sampler, batch_sampler):
        inner = getattr(given, "sampler", None)
        if isinstance(given, DistributedSampler) or isinstance(inner, DistributedSampler):
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
    """The batches of this rank; created by ``loader()``.

    Each iteration is an epoch. After a ``break``, the next iteration starts the next epoch. A
    state that was saved during the interrupted epoch, or right after the ``break``, continues in
    the middle of it.

    Attributes:
        dataset: the dataset of the samples.
        batch_size: samples in a batch of one rank; None if a ``batch_sampler`` makes the batches.
        shuffles: whether each epoch has another order.
        seed: the seed of the order and of the random generators.
        number: counts the loaders of this process; it is the same on every rank if all ranks
            create the same loaders.
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
        self._generator = torch.Generator()  # else each epoch would use the training's generator
        collate = options.get("collate_fn") or torch_collate
        self._reader: EpochBatches | InterleavedStream
        options = {**options, "collate_fn": _already_collated, "generator": self._generator}
        if isinstance(dataset, IterableDataset):
            self._reader = InterleavedStream(dataset, collate, order, batch_size or 1)
            self._loader = DataLoader(self._reader, batch_size=None, **options)
        else:
            self._reader = EpochBatches(order, batch_size)
            batches = BatchDataset(dataset, collate)  # one index is a whole batch
            self._loader = DataLoader(batches, batch_size=None, sampler=self._reader, **options)

    @property
    def is_evaluation(self) -> bool:
        """Whether the loader is for evaluation: each iteration gives every sample exactly once."""
        return self._order.evaluation

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two epochs; counts from 0."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """The number of batches that the loader has given, in all epochs."""
        return self._position.step

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch.

        You do not need to call this: each iteration is the next epoch. If your loop calls it
        after a state was loaded, the epoch of that state still continues in its middle.

        Args:
            epoch: counts from 0; it determines the order.

        Raises:
            ArgumentError: ``epoch`` is below 0.

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
        """The loader itself, for loops that call ``loader.sampler.set_epoch(epoch)``."""
        return self

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch.

        Raises:
            TypeError: the number is unknown, as for a stream without ``len()``.
        """
        return self._order.batches_per_epoch(self.batch_size or 1)

    def __iter__(self) -> Iterator[Any]:
        if self._position.is_started:
            self._position = LoaderPosition(epoch=self.epoch + 1, step=self.step)
        position = self._position  # an older iteration that is still open no longer moves it
        position.is_started = True
        self._reader.start_epoch(self.seed, position)
        self._generator.manual_seed(mix(self.seed, position.epoch, this_rank.rank()))
        for batch in self._loader:
            if not self._order.evaluation:
                log_and_track.report_step(position.step, source="loader")
            position.batches += 1  # counts given batches, not prefetched ones
            position.step += 1
            yield batch
        if position is self._position:
            self._position = LoaderPosition(epoch=position.epoch + 1, step=position.step)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, for a checkpoint.

        It is the same on all ranks that have got equally many batches. In the body of the loop, it
        includes the current batch. It contains only plain values.
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
        """Continue from a saved position: the next iteration gives the rest of that epoch.

        With the same world size and batch size, the batches are bit for bit those of a run that
        was never stopped. Otherwise the remaining samples are divided again, with a warning on
        rank 0. The state's seed replaces the loader's seed.

        Raises:
            ArgumentError: this is not the state of a loader, or of a different kind of loader.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ArgumentError(f"this is not a loader's state: it has no {', '.join(missing)}")
        for name, value in self._fixed_settings().items():
            if state[name] != value:
                raise ArgumentError(
                    f"the loader's state was saved with {name}={state[name]}, this loader has "
                    f"{name}={value}: create it with the same value"
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
                    f"the loader continues at sample {position.start} of epoch {position.epoch}, "
                    f"saved on {before}, resumed on {now}: each remaining sample is used once, but "
                    "augmentations, and batches of another total size, differ from those of a run "
                    "that was never stopped"
                )
        self._position = position

    def _fixed_settings(self) -> dict[str, Any]:
        """Return the settings that must be the same when a state is loaded."""
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


state_providers.register(StateProvider("loaders", Loader))
