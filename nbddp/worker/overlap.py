"""What the models of a rank have measured of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp.train.models import prepared

MOST = 8  # models
_KEPT = (
    "iteration",
    "backward_compute_time_end",
    "avg_forward_compute_time",
    "avg_backward_compute_time",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
    "bucket_sizes",
    "rebuilt_bucket_sizes",
)


def measured(names: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What DDP says of each of its models that has a name, or was prepared: its numbers by name."""
    found: dict[int, tuple[str, DistributedDataParallel]] = {}
    for name, model in _models(names):
        if isinstance(model, DistributedDataParallel) and len(found) < MOST:
            found.setdefault(id(model), (name, model))
    return [(name, _numbers(model)) for name, model in found.values()]


def _models(names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The modules among the names, without what torch.compile has put around."""
    for name, value in list(names.items()):
        if isinstance(value, nn.Module) and not name.startswith("_"):
            yield name, getattr(value, "_orig_mod", value)
    for model in prepared():
        yield "prepared", getattr(model, "_orig_mod", model)


def _numbers(model: DistributedDataParallel) -> dict[str, Any]:
    told = model._get_ddp_logging_data()  # type: ignore[no-untyped-call, unused-ignore]
    return {name: told[name] for name in _KEPT if name in told}
