"""Read the times that DDP has measured for the models of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.reporting.training_objects import prepared_models

MAX_MODELS = 8


def read_ddp_timing(names: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return DDP's measurements for each model with a name, and each prepared model."""
    candidates = [each for each in list(names.items()) if not each[0].startswith("_")]
    candidates += [("prepared", each) for each in prepared_models]
    found: dict[int, tuple[str, Any]] = {}
    for name, value in candidates:
        model = getattr(value, "_orig_mod", value) if isinstance(value, nn.Module) else None
        if isinstance(model, DistributedDataParallel) and len(found) < MAX_MODELS:
            found.setdefault(id(model), (name, model))
    return [(name, model._get_ddp_logging_data()) for name, model in found.values()]
