"""Describe a rank's training data, so that the data of all ranks can be compared.

Rows are compared, and not the fingerprint of ``datasets.Dataset`` (5.2): it differs for equal data
after a ``map`` with a function that cannot be pickled, and is equal for different data after a
``map`` with random numbers.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import data

MAX_ROWS = 16
MAX_COLUMNS = 32

_PLAIN = (type(None), bool, bytes, complex, float, int, str)

Columns = dict[str, list[Any]]


def data_facts(loader: Any) -> dict[str, Any]:
    """Return the facts of a trainer that describe the data of a DataLoader.

    Return none if the library does not give each rank a share of what the loader reads: the ranks
    may then have different data. No code of the user runs, except for the data set's length.
    """
    try:
        # Accelerate, and so Transformers, divides the data by rank, and so does Lightning
        is_accelerates = type(loader.batch_sampler).__name__ == "BatchSamplerShard"
        if not is_accelerates and not isinstance(loader.sampler, data.DistributedSampler):
            return {}
        return {"samples": len(loader.dataset), "columns": column_checksums(loader.dataset)}
    except Exception:  # noqa: BLE001 - a user's class may raise anything; then there are no facts
        return {}


def column_checksums(dataset: Any) -> dict[str, int]:
    """Return a checksum of a few rows for each column in which these rows differ.

    >>> rows = [{"text": "a", "label": 0}, {"text": "b", "label": 0}]
    >>> list(column_checksums(rows))
    ['text']
    >>> column_checksums(rows) == column_checksums(rows[::-1])
    False
    """
    found = {}
    for name, values in list(_few_rows(dataset).items())[:MAX_COLUMNS]:
        texts = [repr(value) for value in values if _has_same_repr_on_all_ranks(value)]
        if len(texts) == len(values) and len(set(texts)) > 1:
            found[name] = zlib.crc32("\n".join(texts).encode())
    return found


def _few_rows(dataset: Any) -> Columns:
    """Return rows at equal distances by column; none if reading them would run code of the user."""
    rows = range(0, len(dataset), -(-len(dataset) // MAX_ROWS) or 1)
    datasets: Any = sys.modules.get("datasets")  # else no such data set exists
    if datasets and isinstance(dataset, datasets.Dataset):
        # "arrow" neither decodes images nor calls a transform
        table = dataset.with_format("arrow")[list(rows)]
        return {name: table[name].to_pylist() for name in table.column_names}
    if type(dataset) is data.Subset:
        return {"index": [int(dataset.indices[row]) for row in rows]}
    if type(dataset) is data.TensorDataset:
        tensors = enumerate(dataset.tensors)
        return {str(number): [tensor[row] for row in rows] for number, tensor in tensors}
    return _columns([dataset[row] for row in rows]) if type(dataset) is list else {}


def _columns(rows: Sequence[Any]) -> Columns:
    if not all(type(row) is dict for row in rows):
        return {"": list(rows)}
    return {name: [row.get(name) for row in rows] for row in rows[:1] for name in row}


def _has_same_repr_on_all_ranks(value: Any) -> bool:
    """Return whether equal values have equal texts on all ranks: no addresses, no GPU's number."""
    if type(value) in (list, tuple):
        return all(map(_has_same_repr_on_all_ranks, value))
    if type(value) is dict:
        return all(map(_has_same_repr_on_all_ranks, (*value, *value.values())))
    if type(value) is torch.Tensor:
        return value.device.type == "cpu"
    return type(value) in _PLAIN or type(value).__module__ in ("datetime", "decimal")
