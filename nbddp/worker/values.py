"""Values that go to the notebook: what is bound to this rank is left here, or named."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import RequestError
from nbddp.wire import parcels
from nbddp.wire.messages import JsonDict
from nbddp.wire.sources import Pickler
from nbddp.worker.headline import text_of
from nbddp.worker.registry import PLAIN

T = TypeVar("T")

DEPTH = 5  # how far into a value to look for what cannot be pickled
MAX_TRIED = 10_000  # parts of one object that are pickled alone; 300,000 would take seconds


class ValuePickler(Pickler):
    """Pickles a DistributedDataParallel model as the module in it.

    torch pickles the wrapper too, and fails where it is opened: there is no process group.
    """

    has_unwrapped = False

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what cannot be opened in the kernel to what can."""
        if isinstance(obj, DistributedDataParallel):
            self.has_unwrapped = True
            return _itself, (obj.module,)
        if isinstance(obj, type) and obj.__module__ == "__main__":
            _track_by_content(obj)
        return super().reducer_override(obj)


def _track_by_content(kind: type) -> None:
    """Give a cell's class an id made from its content: equal classes of all ranks get the same id.

    The kernel then makes one class of them, and equal values of two ranks are equal there.
    cloudpickle's own id is random in each process (``class_tracker_id`` in cloudpickle 3.1).
    """
    module: Any = cloudpickle.cloudpickle
    written = io.BytesIO()
    _ContentPickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(kind)
    tracker = hashlib.sha256(written.getvalue()).hexdigest()
    with module._DYNAMIC_CLASS_TRACKER_LOCK:
        module._DYNAMIC_CLASS_TRACKER_BY_CLASS[kind] = tracker
        module._DYNAMIC_CLASS_TRACKER_BY_ID[tracker] = kind


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """Pickles classes without the ids by which cloudpickle tells them apart."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a class to its content, without its id."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, arguments, *more = reduced  # the arguments end with the id and one more
            return make, (*arguments[:-2], None, None), *more
        return reduced


def _itself(value: T) -> T:
    return value


def pack(
    store: dist.Store,
    key: str,
    value: Any,
    *,
    name: str,
    check: Callable[[], None] = lambda: None,
) -> JsonDict:
    """Put a value into the store and return what a signed message must say about it.

    Its ``note``, if it has one, is for the user to read. What ``check`` raises, which is asked
    again and again meanwhile, ends this.

    Raises:
        pickle.PicklingError: it cannot be pickled; says which part, and the way out.
    """
    data, note = dumps(value, name=name, check=check)
    parcel = parcels.put(store, key, data, check=check)
    return {**parcel, "note": note} if note else parcel


class _Buffer(io.BytesIO):
    """Bytes in memory; before more of them come, somebody is asked whether they are wanted."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def write(self, data: Any, /) -> int:
        self._check()
        return super().write(data)


def dumps(value: Any, *, name: str, check: Callable[[], None] = lambda: None) -> tuple[bytes, str]:
    """Pickle a value, and say what was left out of it, if anything was.

    Raises:
        pickle.PicklingError: it cannot be pickled; says which part, and the way out.
    """
    buffer = _Buffer(check)
    pickler = ValuePickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except RequestError:  # of the check
        raise
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises
        raise pickle.PicklingError(_way_out(*_culprit(name, value, DEPTH), error)) from None
    note = f"{name}: without its DistributedDataParallel, which stays with the ranks"
    return buffer.getvalue(), note if pickler.has_unwrapped else ""


def _can_be_pickled(value: Any) -> bool:
    try:
        ValuePickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # noqa: BLE001 - this is the question
        return False
    return True


def _culprit(name: str, value: Any, depth: int) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, under the name that leads there."""
    parts = ((part, inner) for part, inner in _parts(value) if type(inner) not in PLAIN)
    for part, inner in islice(parts, MAX_TRIED) if depth else ():
        if not _can_be_pickled(inner):
            return _culprit(f"{name}{part}", inner, depth - 1)
    return name, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif not isinstance(value, (nn.Module, type)):
        attributes = getattr(value, "__dict__", {})
        yield from ((f".{key}", each) for key, each in attributes.items())


def _way_out(name: str, value: Any, error: Exception) -> str:
    kind = type(value).__name__
    begin = f"{name} is of type {kind} and cannot be sent to the notebook"
    if isinstance(value, nn.Module):
        return (
            f"{begin}; take its parameters: `from torch.distributed.checkpoint.state_dict import "
            f"*`, then `get_model_state_dict({name}, options=StateDictOptions("
            "full_state_dict=True))` on every rank"
        )
    return f"{begin} ({type(error).__name__}: {text_of(error)}); take parts of it that can"
