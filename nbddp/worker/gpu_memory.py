"""What filled a GPU when an allocation failed there: who held how much, and which tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbddp.formatting import format_bytes
from nbddp.worker.watch.namespace import Part, walk

SHOWN = 5  # tensors, the largest
_GPU = re.compile(r"\bGPU (\d+)")
LOOSE = 0.2  # of what torch has reserved and no tensor holds: then it is in pieces

Names = Mapping[str, Any]
Named = tuple[str, torch.Tensor]


def tell(error: BaseException, names: Names, frames: Iterable[Names]) -> str:
    """What is to be known of a failed allocation on this rank's GPU; empty for other errors.

    Args:
        error: what ended the cell.
        names: those of the cells.
        frames: the local names of the functions that it came through.
    """
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():
        return ""
    said = _GPU.search(str(error))  # as seen from here
    device = torch.device("cuda", int(said[1]) if said else torch.cuda.current_device())
    try:
        return "\n".join(_card(device, largest_tensors([names, *frames], device)))
    except Exception as inner:  # noqa: BLE001 - whatever a user's module does when it is asked
        return f"  what holds its memory cannot be told: {type(inner).__name__}: {inner}"


def _card(device: torch.device, largest: list[Named]) -> Iterator[str]:
    free, total = torch.cuda.mem_get_info(device)
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    others = max(0, total - free - reserved)
    has = f"has {format_bytes(total)}; {format_bytes(free)} free"
    yield f"  {device}, {torch.cuda.get_device_name(device)}, {has}"
    unused = format_bytes(reserved - held)
    yield f"    this rank: {format_bytes(held)} in tensors, {unused} reserved beside them"
    yield f"    all else (CUDA itself, other ranks, other processes): {format_bytes(others)}"
    if largest:
        yield f"    largest tensors: {', '.join(_say(*each) for each in largest)}"
    yield f"    {_way_out(held, reserved, others, total)}"


def _way_out(held: int, reserved: int, others: int, total: int) -> str:
    if others > total / 2:
        return "most of it is not this rank's: `nvidia-smi` names the processes; fewer ranks on it"
    if reserved and (reserved - held) / reserved > LOOSE:
        return (
            "much is free, but in pieces: "
            "`--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` puts them together"
        )
    return (
        "a smaller batch needs less, and so do `nbddp.precision(accumulate=4)` with a quarter of "
        "it, and bf16; `del` gives a name's memory back"
    )


def _say(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {format_bytes(tensor.nbytes)} ({kind} {list(tensor.shape)})"


def largest_tensors(scopes: Iterable[Names], device: torch.device | None = None) -> list[Named]:
    """Return the largest tensors on a device, and their paths; of those that share memory one."""
    found = [named for scope in scopes for part in walk(scope) for named in _tensors(part)]
    found.sort(key=lambda each: -each[1].nbytes)
    largest: dict[int, Named] = {}
    for path, tensor in found:
        address = tensor.untyped_storage().data_ptr()
        if address and (device is None or tensor.device == device):
            largest.setdefault(address, (path, tensor))
    return [*largest.values()][:SHOWN]


def _tensors(part: Part) -> Iterator[Named]:
    """Yield the tensors of one object, each with an expression that a user can type."""
    path, value = part.path, part.value
    if type(value) in (torch.Tensor, nn.Parameter):
        yield path, value
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", value.grad
    elif isinstance(value, nn.Module) and not isinstance(part.holder, nn.Module):
        for name, each in (*value.named_parameters(), *value.named_buffers()):
            yield from _tensors(Part(f"{path}.{name}", value, name, each))
    elif isinstance(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            for key, each in state.items():
                yield from _tensors(Part(f"{path}.state[{number}][{key!r}]", state, key, each))
