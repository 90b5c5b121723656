"""The names of parameters for which DDP's errors give only indices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from traceback import walk_tb
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from nbddp.formatting import format_few

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_TWICE = re.compile(r"Parameter at index (\d+) ")


def blamed_by(error: BaseException, names: Mapping[str, Any]) -> str:
    """Say which parameters an error of DDP is about; empty for other errors.

    The model is the one whose forward pass failed. An error in backward has no frame of the model:
    then it is the only DDP model among ``names``, those of the cells.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not (_UNUSED.search(text) or _TWICE.search(text)):
        return ""
    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    models = ddp_models(frames) or ddp_models(names.values())
    return said(models[0], text) if len(models) == 1 else ""


def said(model: DistributedDataParallel, text: str) -> str:
    """Say which parameters of a model the text of an error is about, in a few words."""
    if found := unused_in(model, text):
        return f"without a gradient: {format_few(found)}"
    twice = _TWICE.search(text)
    return f"parameter: {format_few(_names(model, twice[1]))}" if twice else ""


def unused_in(model: DistributedDataParallel, text: str) -> list[str]:
    """Return the parameters that had no gradient when the next forward pass began."""
    unused = _UNUSED.search(text)
    return _names(model, unused[1]) if unused else []


def ddp_models(values: Iterable[Any]) -> list[DistributedDataParallel]:
    """Return the DDP models among some values, each once."""
    found = {id(each): each for each in values if issubclass(type(each), DistributedDataParallel)}
    return list(found.values())


def _names(model: DistributedDataParallel, indices: str) -> list[str]:
    # DDP's own counting: parameters that need gradients, each once (torch 2.13.0)
    counted, _ = model._build_params_for_reducer()
    known = {id(each): name for name, each in model.module.named_parameters()}
    places = [int(each) for each in indices.split()]
    if max(places) >= len(counted):
        return []
    return [known.get(id(counted[place]), "?") for place in places]
