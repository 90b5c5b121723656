"""What a DataLoader deals out on this rank, as far as torch's own classes tell it for nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from nbddp.checks import facts

SHOWN = 64  # indices of a subset that tell it from others
UNSURE = "?"  # before what differs for sure where it differs, and may differ where it does not


def loader_facts(loader: DataLoader[Any]) -> facts.Loader:
    """What is known of it; nothing of the user's own is asked, but the dataset's length."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return facts.Loader(workers=loader.num_workers, batch_size=loader.batch_size or -1)
    kind, samples = type(sampler), _length(loader.dataset)
    drawn = _drawn(sampler, samples)
    is_dealt = kind is DistributedSampler
    return facts.Loader(
        sampler={DistributedSampler: "dealt", RandomSampler: "random"}.get(
            kind, "in order" if kind is SequentialSampler else "other"
        ),
        seed=sampler.seed if is_dealt else -1,
        epoch=sampler.epoch if is_dealt else -1,
        replicas=sampler.num_replicas if is_dealt else -1,
        place=sampler.rank if is_dealt else -1,
        shuffles=sampler.shuffle if is_dealt else kind is RandomSampler,
        samples=samples,
        data=data_of(loader.dataset),
        batches=_batches(loader, drawn),
        batch_size=loader.batch_size or -1,
        workers=loader.num_workers,
    )


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(type(dataset), "__len__") else -1


def _drawn(sampler: Any, samples: int) -> int:
    """How many samples this rank gets, -1 where only the user's own code knows."""
    if type(sampler) in (DistributedSampler, RandomSampler):
        return int(sampler.num_samples)
    return samples if type(sampler) is SequentialSampler else -1


def _batches(loader: DataLoader[Any], drawn: int) -> int:
    size = loader.batch_size
    if drawn < 0 or not size or type(loader.batch_sampler) is not BatchSampler:
        return -1
    return drawn // size if loader.drop_last else -(-drawn // size)


def data_of(dataset: Any) -> str:
    """What tells this data from other data; empty where nothing does, but its own code.

    >>> data_of(range(9)) == data_of(range(9)), data_of(range(9)) == data_of(range(1, 10))
    (True, False)
    >>> data_of([object()])
    ''
    """
    if type(dataset) is Subset:
        base = data_of(dataset.dataset)
        known = base or f"{UNSURE}{_length(dataset.dataset)}"
        return f"{known}[{_checksum(_some(dataset.indices))}]"
    if type(dataset) is TensorDataset:
        return " ".join(map(_of_tensor, dataset.tensors))
    if isinstance(dataset, torch.Tensor):
        return _of_tensor(dataset)
    return repr(dataset) if type(dataset) is range else ""


def _some(indices: Sequence[Any]) -> str:
    step = max(1, len(indices) // SHOWN)
    return f"{len(indices)}:{[int(each) for each in indices[::step][:SHOWN]]}"


def _of_tensor(tensor: torch.Tensor) -> str:
    """Its shape, and a checksum of its first and last row."""
    if tensor.device.type != "cpu" or not len(tensor) or tensor[0].numel() > 1 << 16:
        return f"{UNSURE}{list(tensor.shape)}"
    ends = torch.stack([tensor[0], tensor[-1]]).contiguous().reshape(-1)
    return f"{list(tensor.shape)}#{_checksum(str(ends[:512].tolist()))}"


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
