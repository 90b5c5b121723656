"""``nbddp.config()``: record the settings of a run, such as the learning rate."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from nbddp.errors import ArgumentError
from nbddp.reporting import log_and_track

MAX_SETTINGS = 500
MAX_TEXT = 500  # characters of a name or a value

Setting = str | int | float | bool | None


def config(values: Any = None, /, **named: Any) -> None:
    """Record settings of this run, such as its learning rate.

    The settings are stored in the run's ``run.json``. ``%ddp runs`` filters and sorts by them, and
    ``%ddp compare`` shows in which of them runs differ. Call it on one rank or on all ranks, in
    any cell, as often as you like. The latest value counts; if ranks differ, rank 0's value
    counts. Under torchrun the settings go to the logger ``nbddp``.

    Args:
        values: settings by name: a mapping, an ``argparse.Namespace`` or a dataclass. The name of
            a nested setting contains a dot, as in ``optim.lr``.
        named: settings by keyword. Numbers, strings, booleans and None are kept unchanged. A
            module is kept as its class and its number of parameters. Any other value is kept as
            its ``repr``, or as a note that ``repr`` failed.

    Raises:
        TypeError: a name is not a string, or ``values`` has no names.
        ArgumentError: there are more than 500 settings, or a name is empty or given twice.

    >>> config(lr=0.1, model="resnet18")
    >>> config({"optim": {"lr": 0.1, "betas": (0.9, 0.95)}}, seed=1)
    >>> config(0.1)
    Traceback (most recent call last):
    TypeError: nbddp.config: settings need names, as in nbddp.config(lr=0.1); got float
    """
    __tracebackhide__ = True  # errors point at the user's line
    mapping = {} if values is None else _as_mapping(values)
    if mapping is None:
        raise TypeError(
            "nbddp.config: settings need names, as in nbddp.config(lr=0.1); "
            f"got {type(values).__name__}"
        )
    if duplicates := mapping.keys() & named.keys():
        raise ArgumentError(f"nbddp.config: {', '.join(sorted(duplicates))}: given twice")
    settings = dict(_flatten({**mapping, **named}))
    if len(settings) > MAX_SETTINGS:
        raise ArgumentError(
            f"nbddp.config: {len(settings)} settings, but a run has at most {MAX_SETTINGS}: "
            "leave out settings that are the same in all runs"
        )
    if settings:
        log_and_track.record_config(settings)


def _as_mapping(value: object) -> dict[Any, Any] | None:
    """Return a mapping, namespace or dataclass as a dict; None for any other value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return None


def _flatten(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Setting]]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"nbddp.config: a name must be a string, got {name!r}")
        if not name.strip():
            raise ArgumentError("nbddp.config: a name is empty: name each setting")
        full_name, inner = before + name, _as_mapping(value)
        if inner is None:
            yield full_name[:MAX_TEXT], _as_setting(value)
        elif len(full_name) < MAX_TEXT:  # a mapping may contain itself
            yield from _flatten(inner, f"{full_name}.")


def _as_setting(value: Any) -> Setting:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return _as_setting(value.item())
    try:
        return _describe_value(value)[:MAX_TEXT]
    except Exception:  # noqa: BLE001 - repr() is user code: a setting must not end a training
        return f"<{type(value).__name__}: its repr failed>"


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, nn.Module):
        inner = getattr(value, "module", value)
        made = (each for each in value.parameters() if not isinstance(each, UninitializedParameter))
        count = sum(each.numel() for each in made)
        return f"{type(inner).__name__}, {count:,} parameters"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return str(value.__qualname__)
    return repr(value)
