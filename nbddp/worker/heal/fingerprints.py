"""Fingerprints of values that are not plain: short texts that differ for most different values."""

from __future__ import annotations

import gc
import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import count
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

from nbddp.wire import value_texts

DEPTH = 3  # levels of nested values
MAX_TEXT_END = 10_000  # characters or bytes that are used at each end of a text
DICTS = (dict, defaultdict, OrderedDict, Counter)
Facts = Iterable[object]


def restorable_text(value: object) -> str:
    """Return the text from which a value can be restored; empty for all other values."""
    kind = type(value)
    if kind in value_texts.PLAIN or kind.__module__ == "numpy":
        return value_texts.plain_text(value)
    if kind is torch.device:
        return f"{value_texts.DEVICE}{value}"
    items = value_texts.plain_text(_items(value)) if is_named_tuple(kind) else ""
    return items and f"{value_texts.NAMED_TUPLE}{kind.__name__} {items}"


def is_named_tuple(kind: type) -> bool:
    """Return whether a class was made by ``namedtuple`` or ``NamedTuple``."""
    return issubclass(kind, tuple) and "_fields" in vars(kind)


def fingerprint(value: Any) -> str:
    """Return a text that differs for most different values. Runs no code of the user."""
    return value_texts.FINGERPRINT + _fingerprint(value, DEPTH)


def _fingerprint(value: Any, depth: int) -> str:
    if text := restorable_text(value):
        return text
    kind = type(value)
    facts = " ".join(map(str, _facts(kind, value, depth - 1))) if depth else ""
    if len(facts) > value_texts.MAX_LENGTH:
        facts = str(zlib.crc32(facts.encode(errors="replace")))
    return f"{kind.__name__} {facts}"


def _facts(kind: type, value: Any, depth: int) -> Facts:
    if issubclass(kind, Enum):
        return [value._name_]
    if is_named_tuple(kind) or kind is torch.Size:
        return _item_facts(_items(value), depth)
    facts_of = _FACTS.get(kind) or _FACTS.get(f"{kind.__module__}.{kind.__name__}")
    try:
        return [*facts_of(value, depth)] if facts_of is not None else []
    except Exception:  # noqa: BLE001 - for example a tensor left over by torch.func.vmap
        return []


def _items(value: Any) -> tuple[Any, ...]:
    return (*tuple.__iter__(value),)


def _text_facts(text: Any, _: int) -> Facts:
    # a text may be a whole data set, so use only its ends
    ends = text[:MAX_TEXT_END] + text[-MAX_TEXT_END:]
    return [len(text), zlib.crc32(ends.encode(errors="replace") if type(text) is str else ends)]


def _item_facts(items: Sequence[Any], depth: int) -> Facts:
    ends = [items[0], items[-1]] if items else []
    return [len(items), *(_fingerprint(each, depth) for each in ends)]


def _set_facts(items: Any, depth: int) -> Facts:
    few = [*items] if len(items) <= value_texts.MAX_ITEMS else []
    return [len(items), *sorted(_fingerprint(each, depth) for each in few)]


def _dict_facts(items: Mapping[Any, Any], depth: int) -> Facts:
    """Return the keys, and the values that do not have paths of their own."""
    few = [*items.items()] if len(items) <= value_texts.MAX_ITEMS else []
    has_paths = depth == DEPTH - 1
    parts = [
        _fingerprint(key if has_paths and type(key) is str else (key, value), depth)
        for key, value in few
    ]
    return [len(items), *sorted(parts)]


def _function_facts(function: FunctionType, depth: int) -> Facts:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [*map(_cell_contents, function.__closure__ or ()), *defaults]
    return [function.__qualname__, *(_fingerprint(each, depth) for each in held)]


def _cell_contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _partial_facts(call: partial[Any], depth: int) -> Facts:
    return (_fingerprint(each, depth) for each in (call.func, call.args, call.keywords))


def _count_facts(numbers: Any, _: int) -> Facts:
    parts = gc.get_referents(numbers)  # its repr calls their repr
    return [repr(numbers)] if all(type(each) in (int, float) for each in parts) else []


def _array_facts(array: Any, _: int) -> Facts:
    """Return the shape, the first number, and one from the middle."""
    if not array.size or array.dtype.kind not in "biufc":
        return []
    middle = tuple(length // 2 for length in array.shape)
    return [*array.shape, array[(0,) * array.ndim].item(), array[middle].item()]


def _tensor_facts(tensor: torch.Tensor, _: int) -> Facts:
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return []
    if not tensor.untyped_storage().nbytes():  # FSDP frees the memory of parameters
        return []
    middle = tuple(length // 2 for length in tensor.shape)
    numbers = tensor.detach()
    return [*tensor.shape, numbers[(0,) * tensor.ndim].item(), numbers[middle].item()]


def _generator_facts(generator: torch.Generator, _: int) -> Facts:
    seed = generator.initial_seed()
    is_here = generator.device.type == "cpu"  # reading a GPU generator could wait for the GPU
    return [seed, *([zlib.crc32(generator.get_state().numpy().data)] if is_here else [])]


def _state_facts(state: Mapping[str, Any]) -> Facts:
    for part in state.values():
        if type(part) is dict:
            yield from _state_facts(part)
        else:
            yield zlib.crc32(part.tobytes()) if type(part) is np.ndarray else part


_FACTS: dict[type | str, Callable[[Any, int], Facts]] = {
    **dict.fromkeys((str, bytes, bytearray), _text_facts),
    **dict.fromkeys((list, tuple, deque), _item_facts),
    **dict.fromkeys((set, frozenset), _set_facts),
    **dict.fromkeys(DICTS, _dict_facts),
    FunctionType: _function_facts,
    partial: _partial_facts,
    count: _count_facts,
    np.ndarray: _array_facts,
    torch.Tensor: _tensor_facts,
    torch.Generator: _generator_facts,
    random.Random: lambda generator, _: [hash(generator.getstate()[1])],
    # by name: NumPy imports these classes on first use
    "numpy.random._generator.Generator": lambda made, _: _state_facts(made.bit_generator.state),
    "numpy.random.mtrand.RandomState": lambda made, _: _state_facts(made.get_state(legacy=False)),
}
