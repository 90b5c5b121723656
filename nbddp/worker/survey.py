"""What a rank says of its names, for checks: loaders, models, optimizers, and how they stand.

It is asked at each cell's end, so it looks at few things, for a few milliseconds, and never waits:
no collective, no user's code, and nothing of a GPU that is still at work.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader

from nbddp.checks import facts
from nbddp.checks.facts import RankFacts, Thing
from nbddp.topology import cores_here
from nbddp.wire.messages import Failure
from nbddp.worker.cell.failure import ddp_models, parameters_in, unused_in
from nbddp.worker.datasets import loader_facts
from nbddp.worker.object_state import parameters_of

PATIENCE = 0.003  # seconds of a processor: what is not looked at by then is left out
MANY = 2000  # modules or parameters of a model: the rest is left out
NAMED = 20  # parameters without a gradient that are named
SAMPLED = 16  # parameters of a model of which a few numbers are taken
_NAME = re.compile(r"[^\W\d]\w*")

Names = Mapping[str, Any]


def survey(names: Names, source: str | None = None, *, failure: Failure | None = None) -> RankFacts:
    """What is known of this rank.

    Args:
        names: those of the cells.
        source: the cell that has ended; None for all names, and all the time that it takes.
        failure: what ended it; then no tensors are read, which may still be computed.
    """
    begin = RankFacts(
        things={},
        ddp=[],
        aliases={},
        host=socket.gethostname(),
        cores=cores_here(),
        threads=torch.get_num_threads(),
    )
    try:
        return _look_at_all(begin, names, source, failure)
    except Exception:  # noqa: BLE001 - what users make may answer anything: it costs no rank
        return begin


def _look_at_all(
    begin: RankFacts, names: Names, source: str | None, failure: Failure | None
) -> RankFacts:
    deadline = time.thread_time() + (PATIENCE if source is not None else 1.0)
    words = names if source is None else dict.fromkeys(_NAME.findall(source))
    wanted = [each for each in words if each in names and not each.startswith("_")]
    found: dict[str, Thing] = {}
    for name in wanted:
        if time.thread_time() > deadline:
            break
        thing = _look(name, names, failure)
        if thing is not None:
            found[name] = thing
    return replace(
        begin,
        things=found,
        ddp=_sharing(names),
        aliases={name: whole for name in wanted if (whole := _whole_name(names[name]))},
        batches=_batches(names, wanted),
    )


def _batches(names: Names, wanted: Iterable[str]) -> dict[str, int]:
    """Of the kit's own loaders, which no rule has to look at."""
    kit = sys.modules.get("nbddp.train.data")  # else nobody has made one
    known = {name: names[name] for name in wanted if kit and type(names[name]) is kit.Loader}
    return {
        name: each.batch_size for name, each in known.items() if each.shuffles and each.batch_size
    }


def _sharing(names: Names) -> list[int]:
    """How many ranks share the gradients of DDP models here."""
    groups = [vars(each).get("process_group") for each in ddp_models(names.values())]
    return sorted({group.size() for group in groups if group is not None})


def _whole_name(value: object) -> str:
    """What one writes to import it, of torch's and ours; empty for all else."""
    if type(value) is ModuleType:
        return value.__name__ if value.__name__.startswith(("torch", "nbddp")) else ""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return ""
    room, name = str(value.__module__), value.__name__
    if room.startswith("nbddp."):
        return f"nbddp.{name}"
    if room == "torch.distributed.distributed_c10d":
        return f"torch.distributed.{name}"
    return f"{room}.{name}" if room.startswith("torch") else ""


def _look(name: str, names: Names, failure: Failure | None) -> Thing | None:
    value = names[name]
    kind = type(value)
    try:
        if issubclass(kind, nn.Module):
            return _refused(value, _model(value, is_ok=failure is None), failure)
        if issubclass(kind, DataLoader):
            return loader_facts(value)
        if issubclass(kind, TorchOptimizer):
            return _optimizer(value, names)
        if issubclass(kind, torch.amp.GradScaler):
            return facts.Scaler()
    except Exception:  # noqa: BLE001 - a user's class may answer anything: then it is not known
        return None
    return None


def _model(model: nn.Module, *, is_ok: bool) -> facts.Model:
    parameters = list(islice(model.parameters(), MANY))
    trained = [each for each in parameters if each.requires_grad]
    wrapper: Any = model if isinstance(model, DistributedDataParallel) else None
    without = sum(each.grad is None for each in trained)
    is_partly = wrapper is not None and 0 < without < len(trained)
    return facts.Model(
        ranks=wrapper.process_group.size() if wrapper is not None else 0,
        sample=_sample(parameters) if is_ok else [],
        shapes=_shapes(parameters),
        device=_gpu(parameters),
        is_training=model.training,
        minds_mode=_minds_mode(model),
        with_gradient=len(trained) - without,
        without=without,
        unused=_without_gradient(wrapper.module) if is_partly else [],
        is_nested=wrapper is not None and isinstance(wrapper.module, DistributedDataParallel),
        finds_unused=wrapper is not None
        and bool(wrapper.find_unused_parameters or wrapper.static_graph),
        is_sharded=_is_sharded(model, parameters),
        has_buffers=wrapper is not None
        and bool(wrapper.broadcast_buffers and wrapper.modules_buffers),
    )


def _refused(model: nn.Module, known: facts.Model, failure: Failure | None) -> facts.Model:
    """Add the names of the unused parameters, if DDP's error is about this model."""
    if failure is None or not issubclass(type(model), DistributedDataParallel):
        return known
    wrapper: Any = model
    unused = unused_in(wrapper, failure.text)
    is_it = bool(unused) and failure.because == parameters_in(wrapper, failure.text)
    if not is_it:
        return known
    return replace(known, unused=unused[:NAMED], without=len(unused), is_refused=True)


def _without_gradient(model: nn.Module) -> list[str]:
    named = islice(model.named_parameters(), MANY)
    return [name for name, each in named if each.requires_grad and each.grad is None][:NAMED]


def _is_sharded(model: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether FSDP (version 1 or 2) shards a model, or its parameters are DTensors."""
    kinds = [type(model).__name__, *(type(each).__name__ for each in parameters)]
    return "FullyShardedDataParallel" in kinds or "DTensor" in kinds


def _shapes(parameters: Sequence[torch.Tensor]) -> str:
    return f"{len(parameters)}:{sum(each.numel() for each in parameters)}"


def _minds_mode(model: nn.Module) -> bool:
    """Return whether training and evaluation differ: it has batch norm, or dropout."""
    return any(
        isinstance(each, nn.modules.batchnorm._BatchNorm)
        or (isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0)
        for each in islice(model.modules(), MANY)
    )


def _sample(parameters: list[nn.Parameter]) -> list[float]:
    """A few numbers from here and there: models that have drifted differ in nearly all."""
    step = max(1, len(parameters) // SAMPLED)
    chosen = [each for each in parameters[::step] if each.numel()][:SAMPLED]
    # a parameter of FSDP, for one, does not lie here as a whole
    are_whole = all(type(each) is nn.Parameter and each.layout is torch.strided for each in chosen)
    if not are_whole or _is_busy(chosen):
        return []
    with torch.no_grad():
        taken = [_of_one(each) for each in chosen]
        return torch.cat(taken).nan_to_num(1e30).tolist() if taken else []


def _of_one(parameter: nn.Parameter) -> torch.Tensor:
    """Return its first number and one from its middle; both parts of complex numbers."""
    middle = parameter.numel() // 2
    both = torch.as_strided(parameter.detach(), (2,), (middle,), parameter.storage_offset())
    if both.is_complex():
        both = torch.view_as_real(both.resolve_conj()).flatten()
    return both.to(torch.float64)


def _is_busy(parameters: list[nn.Parameter]) -> bool:
    """Whether a GPU is still at work: to read from it might wait for other ranks."""
    on_gpu = [each.device for each in parameters if each.device.type == "cuda"]
    others = [each for each in parameters if each.device.type not in ("cpu", "cuda")]
    return bool(others) or any(
        not torch.cuda.current_stream(each).query() for each in dict.fromkeys(on_gpu)
    )


def _gpu(parameters: list[nn.Parameter]) -> str:
    """The GPU's own name, where all of it lies on one."""
    devices = {each.device for each in parameters if each.device.type == "cuda"}
    if len(devices) != 1:
        return ""
    return str(torch.cuda.get_device_properties(devices.pop()).uuid)


def _optimizer(optimizer: TorchOptimizer, names: Names) -> facts.Optimizer:
    rates = [each["lr"] for each in optimizer.param_groups]
    return facts.Optimizer(
        rates=[float(each) for each in rates if isinstance(each, float | int)],
        shapes=_shapes(parameters_of(optimizer)[:MANY]),
        was_of=_lost_model(optimizer, names),
    )


def _lost_model(optimizer: TorchOptimizer, names: Names) -> str:
    """The module that looks like the one it was made for, has gradients, and is not its own."""
    mine = parameters_of(optimizer)[:MANY]
    shapes = [each.shape for each in mine]
    modules = {
        name: list(islice(each.parameters(), MANY))
        for name, each in names.items()
        if issubclass(type(each), nn.Module) and not name.startswith("_")
    }
    ours = {id(each) for parameters in modules.values() for each in parameters}
    if not mine or any(id(each) in ours for each in mine):
        return ""
    others = [each for each in names.values() if issubclass(type(each), TorchOptimizer)]
    updated = {id(each) for other in others for each in parameters_of(other)}
    for name, parameters in modules.items():
        is_alike = [each.shape for each in parameters] == shapes
        is_free = not any(id(each) in updated for each in parameters)
        if is_alike and is_free and all(each.grad is not None for each in parameters):
            return name
    return ""
