"""``nbddp.prepare()``: move a model to this rank's device and wrap it in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp import accelerator
from nbddp.errors import ArgumentError
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import warn_user
from nbddp.reporting.training_objects import prepared_models
from nbddp.sharding import fsdp_classes, has_dtensors


def prepare(
    model: nn.Module,
    *,
    find_unused_parameters: bool = False,
    sync_batch_norm: bool = True,
    **ddp_options: Any,
) -> nn.Module:
    """Move a model to this rank's device and wrap it for training on all ranks.

    The function converts batch norms to SyncBatchNorm and wraps the model in
    DistributedDataParallel, which sends rank 0's parameters to all ranks and averages gradients in
    ``backward()``. Call it on every rank, before you create the optimizer. The original model is
    then ``model.module``.

    Without a process group, the model is only moved. A model without trainable parameters is not
    wrapped. A model with parameters on several devices is not moved. A prepared model is returned
    unchanged.

    Args:
        model: any module.
        find_unused_parameters: True for a model that does not use all parameters in each step;
            slower.
        sync_batch_norm: whether batch norms use the batches of all ranks. torch supports this on
            GPUs only; on the CPU, the conversion is skipped with a warning on rank 0.
        ddp_options: more options for DistributedDataParallel, such as ``bucket_cap_mb=50``.

    Returns:
        The DistributedDataParallel model, or the model itself if it was not wrapped.

    Raises:
        ArgumentError: the model, or a part of it, already averages its gradients.
        TypeError: ``model`` is not a module.

    >>> prepare(nn.Linear(4, 2))
    Linear(in_features=4, out_features=2, bias=True)
    """
    _check_can_be_prepared(model)
    if not _is_ddp(model):
        options = {"find_unused_parameters": find_unused_parameters, **ddp_options}
        model = _wrap(model, sync_batch_norm=sync_batch_norm, options=options)
    prepared_models.add(model)
    return model


def _is_ddp(model: nn.Module) -> bool:
    """Return whether the model is a DDP model, perhaps inside the wrapper of torch.compile."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def _check_can_be_prepared(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare: expected a model, got {type(model).__name__}")
    parts = list(model.named_modules())
    if any(isinstance(each, fsdp_classes()) for _, each in parts):
        raise ArgumentError(
            "prepare: the model is sharded (FSDP) and averages its own gradients; use it directly"
        )
    if has_dtensors(model):
        raise ArgumentError(
            "prepare: the model has parameters that are sharded over ranks (DTensor); prepare it "
            "before you shard it, or use it without prepare"
        )
    wrapped = [name for name, each in parts if isinstance(each, DistributedDataParallel)]
    if wrapped and not _is_ddp(model):
        raise ArgumentError(
            f"prepare: {wrapped[0]} in the model is wrapped in DistributedDataParallel already; "
            "prepare the model before its parts, or the parts alone"
        )


def _wrap(model: nn.Module, *, sync_batch_norm: bool, options: dict[str, Any]) -> nn.Module:
    device = this_rank.device()
    spans_devices = len({each.device for each in model.parameters()}) > 1
    if not spans_devices:
        model = model.to(device)
    if not dist.is_initialized() or not any(each.requires_grad for each in model.parameters()):
        return model
    if sync_batch_norm and this_rank.world_size() > 1:
        model = _sync_batch_norm(model, options.get("process_group"))
    device_ids = [device.index] if device.type != "cpu" and not spans_devices else None
    return DistributedDataParallel(model, **{"device_ids": device_ids, **options})


def _sync_batch_norm(model: nn.Module, process_group: Any) -> nn.Module:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if not any(isinstance(each, kinds) for each in model.modules()):
        return model
    if all(each.device.type == accelerator.current().device_type for each in model.parameters()):
        convert: Callable[..., nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model, process_group)
    if this_rank.rank() == 0:
        warn_user(
            "SyncBatchNorm is left out: torch has it for GPUs only, and this model is on the CPU. "
            "Each rank normalizes over its own batch. Set sync_batch_norm=False to accept that."
        )
    return model
