"""Values that go to the notebook: what is bound to this rank is left here, or named."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.wire import parcels
from nbddp.wire.messages import JsonDict
from nbddp.wire.sources import Pickler
from nbddp.worker.cell.failure import error_text

T = TypeVar("T")


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

    Its ``note``, if it has one, is for the user to read. ``check`` is called before each piece is
    stored; an error that it raises ends this.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the text says why, and the way out.
    """
    data, note = dumps(value, name=name)
    parcel = parcels.put(store, key, data, check=check)
    return {**parcel, "note": note} if note else parcel


def dumps(value: Any, *, name: str) -> tuple[bytes, str]:
    """Pickle a value, and say what was left out of it, if anything was.

    Raises:
        pickle.PicklingError: the value cannot be pickled; the text says why, and the way out.
    """
    written = io.BytesIO()
    pickler = ValuePickler(written, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises
        raise pickle.PicklingError(_way_out(name, value, error)) from None
    note = f"{name}: without its DistributedDataParallel, which stays with the ranks"
    return written.getvalue(), note if pickler.has_unwrapped else ""


def _way_out(name: str, value: Any, error: Exception) -> str:
    kind = type(value).__name__
    begin = f"{name} is of type {kind} and cannot be sent to the notebook"
    if isinstance(value, nn.Module):
        return (
            f"{begin}; take its parameters: `from torch.distributed.checkpoint.state_dict import "
            f"*`, then `get_model_state_dict({name}, options=StateDictOptions("
            "full_state_dict=True))` on every rank"
        )
    return f"{begin} ({type(error).__name__}: {error_text(error)}); take parts of it that can"
