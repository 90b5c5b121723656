"""Whether two values are the same to a cell, also when they were made in different kernels.

Pickled bytes do not tell: a notebook's function has the kernel's process id in its file name, a
class a random number, and a tensor the address of its values.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

_OF_CODE = (
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
)
_NOT_OURS = {"__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__"}
_NOT_OURS |= {"_abc_impl", "__abstractmethods__"}  # the functions say it; a set has no order


def digest(data: bytes) -> str:
    """What is the same for the same bytes."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def digest_of(values: Any) -> str:
    """What is the same for the same values: functions and classes count by what they do.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: when one cannot be pickled.

    >>> digest_of({"lr": 0.1}) == digest_of({"lr": 0.1}), digest_of(1) == digest_of(2)
    (True, False)
    """
    written = io.BytesIO()
    _Printer(written, protocol=pickle.HIGHEST_PROTOCOL).dump(values)
    return digest(written.getvalue())


def digest_or_bytes_of(values: Any) -> str:
    """The same, but of what cannot be looked into the pickled bytes must do.

    Raises:
        Exception: whatever the value's own pickling raises.
    """
    try:
        return digest_of(values)
    except Exception:  # noqa: BLE001 - what can be pushed is not refused for this
        return digest(cloudpickle.dumps(values))


class _Printer(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes what is never read again."""

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {types.CodeType: lambda code: _told(*(_ordered(getattr(code, name)) for name in _OF_CODE))},
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, thing: Any) -> Any:
        """As for cloudpickle, but for tensors and classes that travel by value: what is in them."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(thing, torch.Tensor) and _has_values(thing, torch):
            plain = thing.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
            data = plain.view(torch.uint8).numpy().tobytes()
            return _told(str(thing.dtype), tuple(thing.shape), data)
        if isinstance(thing, type) and thing.__module__ == "__main__":
            own = [pair for pair in vars(thing).items() if pair[0] not in _NOT_OURS]
            # as a state, which is written when the class is known: members and slots lead back
            return tuple, ((thing.__qualname__,),), (thing.__bases__, sorted(own, key=_first))
        return super().reducer_override(thing)


def _told(*parts: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return tuple, (parts,)


def _has_values(tensor: Any, torch: Any) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _ordered(part: Any) -> Any:
    """Constants may be sets, whose order is another one in each process."""
    if isinstance(part, tuple):
        return tuple(map(_ordered, part))
    return sorted(map(repr, part)) if isinstance(part, frozenset) else part


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]
