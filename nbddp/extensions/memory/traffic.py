"""The collectives and messages that a step calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(NamedTuple):
    """A collective or a message.

    Attributes:
        name: torch's name for it, such as ``c10d._allgather_base_.default``.
        num_bytes: the bytes of its tensor.
        is_blocking: whether a collective was called without ``async_op``.
        waits: how often the rank had waited for another one before.
    """

    name: str
    num_bytes: int
    is_blocking: bool
    waits: int


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the collectives and messages that are called inside it.

    Args:
        waits: the waits so far, as ``recording_waits`` lists them.
    """

    def __init__(self, waits: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the base class is untyped
        if DTensor in types:
            return NotImplemented  # DTensor calls the collectives of its parts
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            is_blocking = len(args) > 3 and args[-1] is False  # async_op; left out if true
            sent = Sent(str(func), _bytes_of(args[0]), is_blocking, len(self._waits))
            self.sent.append(sent)
        return func(*args, **(kwargs or {}))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0
