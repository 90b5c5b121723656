"""The memory and the messages of a training step, on real or fake ranks.

Fake ranks do not exist: torch's ``fake`` process group has no other rank, and its collectives do
nothing. ``FakeTensorMode`` makes tensors without memory. So one process can play a rank of hundreds
that trains a model larger than the machine. Times and values of such a step mean nothing.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.hooks import RemovableHandle

from nbddp.errors import ArgumentError
from nbddp.extensions.memory.traffic import Traffic
from nbddp.reporting.this_rank import communication_device

_KINDS = {  # torch's names, and those of StepMemory
    "Sharded Param": "parameters",
    "Parameter": "parameters",
    "Unsharded Param": "whole parameters",
    "Sharded Grad": "gradients",
    "Gradient": "gradients",
    "Unsharded Grad": "whole gradients",
    "OptState": "optimizer",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "All Gather": "buffers",
    "Reduce Scatter": "buffers",
}

_RINGS = {"allgather": "all_gather", "allreduce": "all_reduce", "reducescatter": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a training step on this rank, and the bytes that it sends.

    Attributes:
        moments: names of moments, in their order, each with the bytes by kind.
        peak: the bytes by kind at the moment with the most bytes.
        sent: the bytes that this rank sends, by collective, if all of them are rings.
    """

    moments: list[tuple[str, dict[str, int]]]
    peak: dict[str, int]
    sent: dict[str, int]


def memory_of_step(
    make: Callable[[DeviceMesh], tuple[nn.Module, Optimizer]],
    step: Callable[[nn.Module, Optimizer], Any],
    *,
    fake_ranks: int | None = None,
) -> StepMemory:
    """Measure the memory of the second step of a training.

    Args:
        make: creates the model and its optimizer, for a mesh of all ranks in one dimension.
        step: makes one step of the training.
        fake_ranks: play rank 0 of so many ranks, which do not exist, without memory for tensors.
            Call it in a process without a process group: in the notebook, without ``%%ddp``.

    Raises:
        ArgumentError: there is a process group already, or torch cannot play this training.

    >>> import torch
    >>> from torch.distributed.fsdp import fully_shard
    >>> def make(mesh):
    ...     model = nn.Linear(64, 64)
    ...     fully_shard(model, mesh=mesh)
    ...     return model, torch.optim.SGD(model.parameters())
    >>> def step(model, optimizer):
    ...     model(torch.ones(2, 64)).sum().backward()
    >>> memory_of_step(make, step, fake_ranks=64).peak["parameters"]  # a row and a bias
    260
    """
    if fake_ranks is None:
        return _measure(make, step, _mesh())
    try:
        with _fake_group(fake_ranks):
            mesh = _mesh()  # it reads the numbers of the ranks
            with FakeTensorMode():
                return _measure(make, step, mesh)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ArgumentError(
            "fake ranks cannot play this training, because an operation needs the values of a "
            "tensor, as meshes of two dimensions do in torch 2.13. Use real ranks"
        ) from error


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ArgumentError(
            "fake ranks need a process without a process group: call it in the notebook, "
            "without %%ddp"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mesh() -> DeviceMesh:
    return init_device_mesh(communication_device().type, (dist.get_world_size(),))


def _measure(make: Callable[..., Any], step: Callable[..., Any], mesh: DeviceMesh) -> StepMemory:
    model, optimizer = make(mesh)
    step(model, optimizer)  # creates the optimizer's state
    optimizer.zero_grad()
    tracker: MemTracker
    if isinstance(model, FSDPModule):
        tracker = FSDPMemTracker(cast("nn.Module", model), optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
    moments: list[tuple[str, dict[str, int]]] = []
    with (
        _noting(model, lambda name: moments.append((name, _by_kind(tracker, "current")))),
        warnings.catch_warnings(),
        Traffic() as traffic,
        tracker,
    ):
        warnings.simplefilter("ignore")  # of torch's hooks
        step(model, optimizer)
        moments.append(("after the step", _by_kind(tracker, "current")))
    sent: Counter[str] = Counter()
    for call in traffic.sent:
        kind = next((kind for kind in _RINGS if kind in call.name.replace("_", "")), "")
        if kind:
            sent[_RINGS[kind]] += _ring_bytes(kind, call.num_bytes)
    return StepMemory(moments, _by_kind(tracker, "peak"), dict(sent))


def _ring_bytes(kind: str, num_bytes: int) -> int:
    """Return the bytes that a rank sends in a ring; ``num_bytes`` is the size of its first tensor.

    That tensor is the result of an all-gather and of a reduce-scatter.
    """
    world_size = dist.get_world_size()
    count = {"allgather": 1, "allreduce": 2, "reducescatter": world_size}[kind]
    return count * num_bytes * (world_size - 1) // world_size


def _by_kind(tracker: MemTracker, when: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for kinds in tracker.get_tracker_snapshot(when).values():
        for kind, count in kinds.items():
            if kind != "Total" and count:
                found[_KINDS.get(getattr(kind, "value", kind), "other")] += count
    return dict(found)


@contextmanager
def _noting(model: nn.Module, note: Callable[[str], object]) -> Iterator[None]:
    """Call ``note`` when a pass reaches a layer of a list, or leaves it."""
    handles: list[RemovableHandle] = []
    for name, layer in model.named_modules():
        if not name.rpartition(".")[2].isdigit():
            continue

        def before(_: nn.Module, __: Any, name: str = name) -> None:
            note(f"forward, {name}")

        def after(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            note(f"after forward, {name}")
            output.register_hook(lambda _: note(f"backward, {name}"))

        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
