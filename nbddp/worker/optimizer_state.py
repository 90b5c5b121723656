"""An optimizer's state as plain facts, so that every rank can take over rank 0's.

The ranks may have been interrupted on either side of a step, the first one included: then some
have a state and others none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

Layout = dict[str, Any]
_PLAIN = (type(None), bool, int, float, str)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that it updates, in the order of its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def layout_of(optimizer: Optimizer) -> Layout:
    """What the state is made of, in JSON: numbers as they are, of tensors type and shape."""
    groups = [
        plain_values({key: group[key] for key in group if key != "params"})
        for group in optimizer.param_groups
    ]
    state = {
        str(index): {
            str(key): _describe(value) if isinstance(key, str) else ["other", "key"]
            for key, value in optimizer.state[each].items()
        }
        for index, each in enumerate(parameters_of(optimizer))
        if each in optimizer.state
    }
    return {"groups": groups, "state": state}


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of these can be told in JSON."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def take_values(values: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Take over what was told; JSON knows no tuples."""
    for key, value in told.items():
        values[key] = tuple(value) if isinstance(values.get(key), tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


def _describe(value: Any) -> list[Any]:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), value.device.type == "cpu"]
    if _is_plain(value):
        return ["plain", value]
    return ["other", type(value).__name__]


def unsendable(layouts: Iterable[Layout]) -> str:
    """The kind of value that rank 0 would have to send and cannot; empty when all is well.

    What cannot be sent may stay, as long as it is there on every rank.
    """
    first, *others = [_shape_of_state(layout) for layout in layouts]
    if all(other == first for other in others):
        return ""
    kinds = (each for entry in first.values() for each in entry.values())
    return next((kind[1] for kind in kinds if kind[0] == "other"), "")


def _shape_of_state(layout: Layout) -> dict[str, dict[str, list[Any]]]:
    """Without the numbers, in which the ranks may differ."""
    return {
        index: {key: each if each[0] != "plain" else ["plain"] for key, each in entry.items()}
        for index, entry in layout["state"].items()
    }


def make_room(optimizer: Optimizer, layout: Layout) -> list[torch.Tensor]:
    """Give this optimizer the numbers of rank 0's layout, and room for its tensors.

    Returns:
        The tensors, to be filled with what rank 0 has, in the same order on every rank.
    """
    for group, told in zip(optimizer.param_groups, layout["groups"], strict=True):
        take_values(group, told)
    tensors: list[torch.Tensor] = []
    for index, parameter in enumerate(parameters_of(optimizer)):
        told = layout["state"].get(str(index))
        if told is None:
            optimizer.state.pop(parameter, None)
        else:
            entry = optimizer.state.setdefault(parameter, {})
            tensors += _fit(entry, told, parameter)
    return tensors


def _fit(
    entry: dict[str, Any], told: dict[str, list[Any]], parameter: torch.Tensor
) -> list[torch.Tensor]:
    for key in [each for each in entry if str(each) not in told]:
        del entry[key]
    tensors = []
    for key, what in told.items():
        if what[0] == "plain":
            entry[key] = what[1]
        elif what[0] == "tensor":
            if key not in entry or _describe(entry[key]) != what:
                _, dtype, sizes, is_on_cpu = what
                device = torch.device("cpu") if is_on_cpu else parameter.device
                entry[key] = torch.zeros(sizes, dtype=getattr(torch, dtype), device=device)
            tensors.append(entry[key])
    return tensors
