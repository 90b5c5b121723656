"""What a DataLoader deals out on this rank, as far as torch's own classes tell it for nothing."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
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
from nbddp.worker.loaders import epochs_of

SHOWN = 64  # indices of a subset that tell it from others
MANY = 10_000  # items of a list that is looked at
LARGE = 100_000  # items and characters of a list and the lists in it; its repr takes 20 ms
# names in the code of a stream that may give each rank different samples
_NO_STREAM = re.compile(
    r"(?i)rank|world|shard|node|replica|split|partition|islice|dist|rand|shuffle|seed|rng|generator"
    r"|time|environ|socket|pid|uuid|input|stdin|queue|request"
)
UNSURE = "?"  # before what differs for sure where it differs, and may differ where it does not


def loader_facts(loader: DataLoader[Any]) -> facts.Loader:
    """What is known of it; nothing of the user's own is asked, but the dataset's length."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return facts.Loader(
            sampler="stream",
            data=_stream(loader.dataset),
            workers=loader.num_workers,
            batch_size=loader.batch_size or -1,
        )
    kind, samples = type(sampler), _length(loader.dataset)
    drawn = _drawn(sampler, samples)
    is_dealt = kind is DistributedSampler
    return facts.Loader(
        sampler={DistributedSampler: "dealt", RandomSampler: "random"}.get(
            kind, "in order" if kind is SequentialSampler else "other"
        ),
        seed=sampler.seed if is_dealt else -1,
        replicas=sampler.num_replicas if is_dealt else -1,
        place=sampler.rank if is_dealt else -1,
        shuffles=sampler.shuffle if is_dealt else kind is RandomSampler,
        epochs=epochs_of(sampler) if kind in (DistributedSampler, RandomSampler) else [],
        samples=samples,
        data=data_of(loader.dataset),
        order=_order(loader.dataset) if is_dealt else "",
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


def _stream(dataset: IterableDataset[Any]) -> str:
    """Return a text that identifies the data of a stream; empty if ranks may get different samples.

    They get the same samples if the stream's class is the user's own, nothing that it uses depends
    on the rank or on chance, and all of its attributes are plain values, and few.
    """
    own = [each for each in type(dataset).__mro__ if each.__module__ == "__main__"]
    rest = {each.__module__.partition(".")[0] for each in type(dataset).__mro__} - {"__main__"}
    functions = [each for kind in own for each in vars(kind).values() if callable(each)]
    if not own or not rest <= {"torch", "typing", "collections", "builtins"}:
        return ""
    words, known = _words_of(functions)
    values = [*vars(dataset).values(), *known]
    if _NO_STREAM.search(" ".join(words)) or not _are_plain(values, depth=3):
        return ""
    return f"{type(dataset).__qualname__} {_checksum(repr((words, values)))}"


def _words_of(functions: Iterable[Any]) -> tuple[list[str], list[Any]]:
    """Return every name and text in the code of functions, and the values of names of the cell."""
    words: list[str] = []
    values: list[Any] = []
    for function in functions:
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        if not codes:
            words.append("rank")  # its code is not known
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            words += [*code.co_names, *code.co_varnames, *code.co_freevars]
            words += [each for each in code.co_consts if isinstance(each, str)]
            found = [function.__globals__.get(each) for each in code.co_names]
            values += [each for each in found if not isinstance(each, ModuleType | type)]
    return words, values


def _are_plain(values: Sequence[Any], depth: int) -> bool:
    """Return whether the ``repr`` of a list holds all values in it, and is not too long.

    Args:
        values: the list.
        depth: levels of lists that it may have, itself included.
    """
    size, lists = 0, [(values, depth)]
    while lists:
        items, levels = lists.pop()
        size += len(items)
        if levels == 0 or len(items) > MANY or size > LARGE:
            return False
        for item in items:
            if type(item) in (list, tuple):
                lists.append((item, levels - 1))
            elif type(item) is str:
                size += len(item)
            elif item is not None and type(item) not in (bool, int, float, range):
                return False
    return size <= LARGE


def _order(dataset: Any) -> str:
    """Return two checksums of a dataset's lists; only the second one depends on the order.

    Return "" unless the dataset is a list, or an object of a user's class with list attributes.
    """
    lists = [dataset] if type(dataset) is list else []
    if type(dataset).__module__ == "__main__":
        lists = [each for each in vars(dataset).values() if type(each) is list]
    same, own = [], []
    for each in lists:
        shown = each[:: max(1, len(each) // SHOWN)][:SHOWN]
        if 1 < len(each) <= MANY and _are_plain(shown, depth=2) and len(set(map(type, shown))) == 1:
            with suppress(TypeError):  # items without an order, such as None
                same.append((len(each), min(each), max(each)))
                own.append(shown)
    return f"{_checksum(repr(same))} {_checksum(repr(own))}" if same else ""


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
