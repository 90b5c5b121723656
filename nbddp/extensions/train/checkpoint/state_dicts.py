"""The state of a training run as plain values, which ``weights_only`` loading can read."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nbddp import accelerator
from nbddp.errors import CheckpointError
from nbddp.reporting import this_rank

_PLAIN_TYPES = (
    *(str, bytes, bool, int, float, complex, type(None)),
    *(torch.dtype, torch.device, torch.Size),
)

CopyTensor = Callable[[str, torch.Tensor], torch.Tensor]


def plain_states(parts: Mapping[str, Any], copy_tensor: CopyTensor) -> dict[str, Any]:
    """Return the states of parts as plain values, by name."""
    return {name: plain_value(part.state_dict(), name, copy_tensor) for name, part in parts.items()}


def plain_value(value: Any, path: str, copy_tensor: CopyTensor) -> Any:
    """Convert a value to plain types, with each tensor passed through ``copy_tensor``.

    Args:
        value: tensors, numbers and strings, and dicts, lists, tuples and sets of them.
        path: the name of the value, for the error and for ``copy_tensor``.
        copy_tensor: called with a name and a detached tensor; returns the tensor to save.

    Raises:
        CheckpointError: a value could not be loaded again; the message contains its path.

    >>> plain_value({"seen": [1, 2]}, "extra", without_copy)
    {'seen': [1, 2]}
    >>> plain_value({"log": [print]}, "extra", without_copy)
    Traceback (most recent call last):
    nbddp.errors.CheckpointError: extra['log'][0] is a builtin_function_or_method: it could \
not be loaded again; save tensors, numbers and strings, and lists, dicts and sets of them
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return copy_tensor(path, value.detach())
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, copy_tensor)
    if isinstance(value, (list, tuple)):
        items = [plain_value(each, f"{path}[{i}]", copy_tensor) for i, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return {plain_value(item, f"an item of {path}", copy_tensor) for item in value}
    if isinstance(value, np.number):
        return value.item()
    if isinstance(value, (int, float)):  # an IntEnum, for example
        return int(value) if isinstance(value, int) else float(value)
    raise CheckpointError(
        f"{path} is a {type(value).__qualname__}: it could not be loaded again; save tensors, "
        "numbers and strings, and lists, dicts and sets of them"
    )


def _plain_mapping(value: Mapping[Any, Any], path: str, copy_tensor: CopyTensor) -> dict[Any, Any]:
    items = {}
    for key, item in value.items():
        plain_key = plain_value(key, f"a key of {path}", copy_tensor)
        items[plain_key] = plain_value(item, f"{path}[{key!r}]", copy_tensor)
    if not hasattr(value, "_metadata"):
        return items
    state = OrderedDict(items)
    state._metadata = value._metadata  # type: ignore[attr-defined]  # versions of modules
    return state


def without_copy(path: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - a CopyTensor
    """Return the tensor; clone a view, so that the rest of its storage is not saved."""
    is_view = not tensor.is_sparse and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_view else tensor


class StagingBuffers:
    """Copies of tensors on the CPU, in memory that the next save reuses."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._has_gpu = False

    def __call__(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; call :meth:`synchronize` before you read the copies."""
        if tensor.is_sparse:
            return tensor.to("cpu", copy=True)
        is_on_gpu = tensor.device.type == accelerator.current().device_type
        copy = self._copies.get(path)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu)
            self._copies[path] = copy
        self._has_gpu |= is_on_gpu
        return copy.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for pending copies from a GPU."""
        if self._has_gpu:
            accelerator.current().module.current_stream().synchronize()


# ---- random numbers


def random_state() -> dict[str, Any]:
    """Return the states of the generators of torch, the GPU, Python and NumPy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = this_rank.device()
    if device.type != "cpu":
        state[device.type] = accelerator.current().module.get_rng_state(device)
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    state["numpy"] = (name, keys.tolist(), *rest)
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Restore the states of the generators that exist in this process."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    device = this_rank.device()
    if device.type in state:  # a state has no "cpu"
        accelerator.current().module.set_rng_state(state[device.type], device)
    np.random.set_state(state["numpy"])
