"""DDP models go on with a new process group: an interrupt must not cost the user the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_OF_THE_GROUP = ("process_group", "reducer", "logger")


def rebind(names: dict[str, Any], old_group: object, device: torch.device) -> list[str]:
    """Bind models of the old default group to the new one, and make the ranks agree again.

    The ranks may have been interrupted on either side of an optimizer's step. So parameters,
    buffers and the state of the models' optimizers are sent around from rank 0, as DDP does with
    the parameters when it is made. Called on every rank at the same place.

    Args:
        names: the rank's namespace.
        old_group: the process group that is gone.
        device: where the backend can send from.

    Returns:
        The names that go on: what every rank has under that name, in the same shape.
    """
    mine: dict[str, Any] = _models(names, old_group)
    mine |= _optimizers(names, list(mine.values()))
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, {name: _shapes(value) for name, value in mine.items()})
    common = [
        name for name in mine if all(each.get(name) == theirs[0].get(name) for each in theirs)
    ]
    for name in common:
        if isinstance(mine[name], Optimizer):
            _send_state(mine[name], device)
        else:
            _bind(mine[name])
    return common


def _optimizers(
    names: dict[str, Any], models: list[DistributedDataParallel]
) -> dict[str, Optimizer]:
    """The optimizers that update these models."""
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    found: dict[int, tuple[str, Optimizer]] = {}
    for name, value in sorted(names.items()):
        if isinstance(value, Optimizer) and not name.startswith("_"):
            first = value.param_groups[0]["params"][0]
            if id(first) in owned:
                found.setdefault(id(value), (name, value))
    return dict(found.values())


def _send_state(optimizer: Optimizer, device: torch.device) -> None:
    """Take over rank 0's state: tensor by tensor where all have it, else (a first step) whole."""
    state = optimizer.state_dict()
    tensors = [
        value
        for _, entry in sorted(state["state"].items())
        for _, value in sorted(entry.items())
        if isinstance(value, torch.Tensor)
    ]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, [tuple(tensor.shape) for tensor in tensors])
    if any(count != counts[0] for count in counts):
        whole = [state]
        dist.broadcast_object_list(whole, src=0, device=device)
        optimizer.load_state_dict(whole[0])
        return
    for tensor in tensors:
        sent = tensor.to(device)  # a step count may live on the CPU, where NCCL cannot send from
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


def _models(names: dict[str, Any], old_group: object) -> dict[str, DistributedDataParallel]:
    found: dict[int, tuple[str, DistributedDataParallel]] = {}
    for name, value in sorted(names.items()):
        is_ours = isinstance(value, DistributedDataParallel) and not name.startswith("_")
        if is_ours and value.process_group is old_group:
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _shapes(value: DistributedDataParallel | Optimizer) -> list[tuple[int, ...]]:
    parameters = (
        [each for group in value.param_groups for each in group["params"]]
        if isinstance(value, Optimizer)
        else value.parameters()
    )
    return [tuple(parameter.shape) for parameter in parameters]


def _bind(model: DistributedDataParallel) -> None:
    """As torch does when it unpickles a model, but in place."""
    state = {key: value for key, value in model.__dict__.items() if key not in _OF_THE_GROUP}
    for key in _OF_THE_GROUP:
        model.__dict__.pop(key, None)  # the old reducer takes its hooks along
    model.zero_grad(set_to_none=True)  # half a backward pass may have left some
    model.__setstate__(state)
    _sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=0,
        params_and_buffers_to_ignore=model.parameters_to_ignore,
        broadcast_buffers=getattr(model, "forward_sync_buffers", True),  # not in torch 2.9
    )
