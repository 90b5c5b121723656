"""The states of models, optimizers, schedules, scalers and loaders, as JSON and tensors.

The ranks may have stopped on either side of a step, possibly the first one. Then some have a state
and others have none. Ranks send each other only JSON and tensors, because the connections of a
process group have no authentication: nothing that comes over them is unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbddp.formatting import with_article
from nbddp.reporting import state_providers
from nbddp.sharding import parameters_of
from nbddp.worker.process_group.object_collectives import fingerprints

PLAIN = (type(None), bool, int, float, str)
MakeTensor = Callable[[list[Any], Any], torch.Tensor]


def state_of(obj: Any) -> Any:
    """Return the state of an object, with its own tensors."""
    if not isinstance(obj, Optimizer):
        return state_providers.take(obj)
    groups = [{key: group[key] for key in group if key != "params"} for group in obj.param_groups]
    parameters = enumerate(parameters_of(obj))
    state = {index: obj.state[each] for index, each in parameters if each in obj.state}
    return {"groups": groups, "state": state}


def load_state(obj: Any, state: Any) -> None:
    """Load a state into an object.

    An optimizer keeps its groups and its dict of states, because wrappers share them. torch's own
    load_state_dict() creates new ones and casts the tensors to the type of the parameters. The
    optimizer of a schedule gets its rates.
    """
    if not isinstance(obj, Optimizer):
        state_providers.restore(obj, state)
        rates = obj.get_last_lr() if hasattr(obj, "get_last_lr") else ()
        for group, rate in zip(obj.optimizer.param_groups if rates else (), rates, strict=True):
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = group["lr"].fill_(rate) if is_tensor else rate
        return
    for group, values in zip(obj.param_groups, state["groups"], strict=True):
        group.update(values)
    for index, parameter in enumerate(parameters_of(obj)):
        obj.state.pop(parameter, None)
        if index in state["state"]:
            obj.state[parameter] = state["state"][index]


def describe_state(obj: Any) -> str:
    """Describe the state of an object as JSON: numbers as values, tensors by type and shape."""
    return json.dumps(describe(state_of(obj)))


def describe(value: Any) -> list[Any]:
    """Describe a state as JSON values, with a type and a shape for each tensor."""
    if _is_sendable(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, [*value.shape], value.device.type == "cpu"]
    if type(value) is dict and all(isinstance(key, PLAIN) for key in value):
        return ["dict", [[key, describe(each)] for key, each in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [*map(describe, value)]]
    return ["plain", value] if isinstance(value, PLAIN) else ["other", type(value).__name__]


def sent_tensors(model: DistributedDataParallel, *, buffers: bool = True) -> list[torch.Tensor]:
    """Return the parameters and buffers that DDP sends when it wraps a model."""
    named = [*model.module.named_parameters()]
    if buffers and model.broadcast_buffers:
        named += model.module.named_buffers()
    return [each for name, each in named if name not in model.parameters_to_ignore]


def fingerprint(obj: Any) -> list[int]:
    """Return numbers that differ for most different values of a DDP model or of a state.

    Leave out buffers: on two ranks they differ between two forward passes.
    """
    if isinstance(obj, DistributedDataParallel):
        return fingerprints(sent_tensors(obj, buffers=False))
    text, state = describe_state(obj), state_of(obj)
    return [zlib.crc32(text.encode()), *fingerprints(tensors_in(state))]


def _is_sendable(value: Any) -> bool:
    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.layout is torch.strided


def state_from_description(obj: Any, description: str, device: torch.device) -> Any:
    """Return a state with another rank's numbers, and tensors of its types and shapes.

    Tensors that fit stay, and so do values that are neither numbers nor tensors.

    Args:
        obj: the object.
        description: result of :func:`describe_state` on the other rank.
        device: device of new tensors that are not on the CPU.

    Raises:
        TypeError: this rank lacks a value that cannot be sent.
    """

    def make_tensor(description: list[Any], held: Any) -> torch.Tensor:
        if describe(held) == description:
            return cast("torch.Tensor", held)
        _, dtype, sizes, is_on_cpu = description
        location = "cpu" if is_on_cpu else device
        return torch.zeros(sizes, dtype=getattr(torch, dtype), device=location)

    return fill(json.loads(description), state_of(obj), make_tensor)


def fill(description: list[Any], held: Any, make_tensor: MakeTensor) -> Any:
    """Return a state with the numbers of a description.

    Args:
        description: result of :func:`describe`.
        held: the state of before; values that are neither numbers nor tensors stay.
        make_tensor: called with the description of each tensor, and the value that it replaces.

    Raises:
        TypeError: there is no such value as one that is neither a number nor a tensor.
    """
    match description:
        case ["tensor", *_]:
            return make_tensor(description, held)
        case ["plain", value]:
            return value
        case ["dict", items]:
            parts = held if type(held) is dict else {}
            return {key: fill(each, parts.get(key), make_tensor) for key, each in items}
        case ["list" | "tuple" as kind, items]:
            before = held[: len(items)] if type(held) in (list, tuple) else ()
            made = [fill(*pair, make_tensor) for pair in zip_longest(items, before)]
            return tuple(made) if kind == "tuple" else made
    if describe(held) == description:
        return held
    what = with_article(description[1])
    raise TypeError(f"the ranks' states differ, and {what} in them cannot be sent")


def tensors_in(state: Any, is_wanted: Callable[[Any], bool] = _is_sendable) -> Iterator[Any]:
    """Yield the tensors of a state, in the same order on all ranks."""
    if is_wanted(state):
        yield state
    elif type(state) in (dict, list, tuple):
        for part in state.values() if type(state) is dict else state:
            yield from tensors_in(part, is_wanted)
