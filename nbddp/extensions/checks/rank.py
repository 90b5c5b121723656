"""Collect facts about a rank's variables for the checks: loaders, models, optimizers.

This runs at the end of each cell. So it inspects few objects, takes a few milliseconds, and never
waits: it starts no collective, runs no code of the user, and does not read from a busy GPU.
"""

from __future__ import annotations

import re
import socket
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer as TorchOptimizer
from torch.utils import data

from nbddp import accelerator
from nbddp.extension.backend import registered
from nbddp.extension.rank_half import EndedCell, RankHalf
from nbddp.extensions.checks import facts
from nbddp.extensions.checks.facts import NamedObject, RankFacts
from nbddp.reporting import this_rank
from nbddp.sharding import parameters_of
from nbddp.topology import cores_here
from nbddp.wire.messages import Failure, JsonDict
from nbddp.worker.cell.failure import ddp_models, describe_parameters, parameters_without_gradient
from nbddp.worker.watch.dataloader_waits import completed_epochs

CPU_SECONDS = 0.003  # CPU seconds; names that are not inspected by then are omitted
MAX_PARTS = 2000  # modules or parameters of a model; the rest is omitted
MAX_NAMED = 20  # parameters without a gradient whose names are sent
MAX_SAMPLED = 16  # parameters of a model that are sampled
_NAME = re.compile(r"[^\W\d]\w*")
MAX_INDICES = 64  # indices that identify a subset
MAX_ITEMS = 10_000  # items of a list; longer lists are not inspected
MAX_SIZE = 100_000  # items and characters of nested lists; their repr takes 20 ms
# names in the code of a stream that may yield different samples on each rank
_MAY_DIFFER = re.compile(
    r"(?i)rank|world|shard|node|replica|split|partition|islice|dist|rand|shuffle|seed|rng|generator"
    r"|time|environ|socket|pid|uuid|input|stdin|queue|request"
)
# names in the code of datasets that draw random numbers, and names that may set their seed
_RANDOM = re.compile(r"(?i)\brand|_rand|jitter|augment|noise|uniform")
_OWN_SEED = re.compile(r"(?i)rank|seed|generator|rng|worker_info|getpid")
_TRAINER_LIBRARIES = ("transformers.", "lightning.", "pytorch_lightning.")
_SAMPLERS = {
    data.DistributedSampler: "dealt",
    data.RandomSampler: "random",
    data.SequentialSampler: "in order",
}
UNSURE = "?"  # prefix of texts that do not identify data: equal texts may have different data

Names = Mapping[str, Any]


class Facts(RankHalf):
    """Describes the variables of each cell that has ended."""

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return the facts of this rank."""
        return collect_facts(cell.names, cell.source, failure=cell.failure).to_json()


def collect_facts(
    names: Names, source: str | None = None, *, failure: Failure | None = None
) -> RankFacts:
    """Return the facts of this rank.

    Args:
        names: the variables of the cells.
        source: source of the cell that has ended. None: describe all variables, without
            the short time limit.
        failure: what ended the cell. Then no tensors are read, because they may still be computed.
    """
    empty = RankFacts(
        objects={},
        ddp_ranks=[],
        aliases={},
        host=socket.gethostname(),
        cores=cores_here(),
        gpus=accelerator.device_count(),
        **_own_gpu(),
        threads=torch.get_num_threads(),
        own_backend=next((backend.name for backend in registered()), ""),
    )
    try:
        return _collect(empty, names, source, failure)
    except Exception:  # noqa: BLE001 - the user's objects may raise anything; the rank must not fail
        return empty


def _collect(
    empty: RankFacts, names: Names, source: str | None, failure: Failure | None
) -> RankFacts:
    deadline = time.thread_time() + (CPU_SECONDS if source is not None else 1.0)
    words = names if source is None else dict.fromkeys(_NAME.findall(source))
    wanted = [each for each in words if each in names and not each.startswith("_")]
    found: dict[str, NamedObject] = {}
    for name in wanted:
        if time.thread_time() > deadline:
            break
        found_facts = _facts_of(name, names, failure)
        if found_facts is not None:
            found[name] = found_facts
    groups = [vars(each).get("process_group") for each in ddp_models(names.values())]
    return replace(
        empty,
        objects=found,
        ddp_ranks=sorted({group.size() for group in groups if group is not None}),
        kinds={name: kind for name in wanted if (kind := _kind_of_value(names[name]))},
        aliases={name: whole for name in wanted if (whole := _import_name(names[name]))},
        batches=_batch_sizes(names, wanted),
    )


def _kind_of_value(value: Any) -> str:
    """Return ``rank`` for the rank or whether it is 0, ``set`` for a set of texts or objects."""
    if type(value) in (int, bool):
        rank = this_rank.rank()
        return "rank" if value == (rank if type(value) is int else rank == 0) else ""
    few = islice(value, MAX_INDICES) if type(value) in (set, frozenset) else ()
    return "set" if any(type(each) not in (int, float, bool) for each in few) else ""


def _own_gpu() -> dict[str, Any]:
    """Return the facts about the rank's own GPU, if it has used one."""
    module = accelerator.current().module
    if not module.is_initialized():
        return {}
    return {
        "gpu_bytes": module.max_memory_allocated(this_rank.device()),
        "has_bf16": module.is_bf16_supported(including_emulation=False),
    }


def _batch_sizes(names: Names, wanted: Iterable[str]) -> dict[str, int]:
    """Return the batch sizes of ``nbddp.loader`` objects that shuffle; no rule needs more."""
    loaders = [name for name in wanted if _import_name(type(names[name])) == "nbddp.Loader"]
    sizes = {name: names[name].batch_size for name in loaders if names[name].shuffles}
    return {name: size for name, size in sizes.items() if size}


def _import_name(value: Any) -> str:
    """Return the qualified name of an object of torch or nbddp, or the class of a trainer.

    Return "" for all others, and for a trainer that does not train with all ranks.
    """
    if type(value) is ModuleType:
        return value.__name__ if value.__name__.startswith(("torch", "nbddp")) else ""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _trainer_name(value)
    module, name = str(value.__module__), value.__name__
    if module.startswith("nbddp."):
        return f"nbddp.{name}"
    if module == "torch.distributed.distributed_c10d":
        return f"torch.distributed.{name}"
    return f"{module}.{name}" if module.startswith("torch") else ""


def _trainer_name(value: Any) -> str:
    libraries = [
        base.__module__.partition(".")[0]
        for base in type(value).__mro__
        if base.__name__ == "Trainer" and base.__module__.startswith(_TRAINER_LIBRARIES)
    ]
    if not libraries:
        return ""
    with suppress(Exception):  # a trainer of which __init__ has failed
        size = value.args.world_size if libraries[-1] == "transformers" else value.world_size
        return f"{libraries[-1]}.Trainer" if size == this_rank.world_size() else ""
    return ""


def _facts_of(name: str, names: Names, failure: Failure | None) -> NamedObject | None:
    value = names[name]
    kind = type(value)
    try:
        if issubclass(kind, nn.Module):
            return _model_facts(value, failure)
        if issubclass(kind, data.DataLoader):
            return loader_facts(value)
        if issubclass(kind, TorchOptimizer):
            return _optimizer_facts(value, names)
        if issubclass(kind, torch.amp.GradScaler):
            return facts.ScalerFacts()
    except Exception:  # noqa: BLE001 - a user's class may raise anything; then there are no facts
        return None
    return None


def _model_facts(model: nn.Module, failure: Failure | None) -> facts.ModelFacts:
    parameters = list(islice(model.parameters(), MAX_PARTS))
    kinds = [type(model).__name__, *(type(each).__name__ for each in parameters)]
    trained = [each for each in parameters if each.requires_grad]
    without = sum(each.grad is None for each in trained)
    model_facts = facts.ModelFacts(
        sample=_sample(parameters) if failure is None else [],
        shapes=_shapes(parameters),
        device=_gpu_uuid(parameters),
        is_training=model.training,
        differs_in_training=_has_training_mode(model),
        with_gradient=len(trained) - without,
        without_gradient=without,
        is_sharded="FullyShardedDataParallel" in kinds or "DTensor" in kinds,
    )
    if not isinstance(model, DistributedDataParallel):
        return model_facts
    is_partly = 0 < without < len(trained)
    named = islice(model.module.named_parameters(), MAX_PARTS if is_partly else 0)
    unused = [name for name, each in named if each.requires_grad and each.grad is None]
    model_facts = replace(
        model_facts,
        ranks=model.process_group.size(),
        unused=unused[:MAX_NAMED],
        is_nested=isinstance(model.module, DistributedDataParallel),
        finds_unused=bool(model.find_unused_parameters or model.static_graph),
        has_buffers=bool(model.broadcast_buffers and model.modules_buffers),
    )
    refused = parameters_without_gradient(model, failure.text) if failure else []
    if not failure or not refused or failure.because != describe_parameters(model, failure.text):
        return model_facts  # DDP's error, if any, is not about this model
    return replace(
        model_facts, unused=refused[:MAX_NAMED], without_gradient=len(refused), is_refused=True
    )


def _shapes(parameters: Sequence[torch.Tensor]) -> str:
    return f"{len(parameters)}:{sum(each.numel() for each in parameters)}"


def _has_training_mode(model: nn.Module) -> bool:
    """Return whether the model behaves differently in training: it has batch norm or dropout."""
    modules = list(islice(model.modules(), MAX_PARTS))
    dropouts = [each for each in modules if isinstance(each, nn.modules.dropout._DropoutNd)]
    has_norm = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in modules)
    return has_norm or any(each.p > 0 for each in dropouts)


def _sample(parameters: list[nn.Parameter]) -> list[float]:
    """Return a few numbers of the parameters: models that have drifted differ in nearly all."""
    step = max(1, len(parameters) // MAX_SAMPLED)
    chosen = [each for each in parameters[::step] if each.numel()][:MAX_SAMPLED]
    # a parameter of FSDP, for example, is not whole on this rank
    are_whole = all(type(each) is nn.Parameter and each.layout is torch.strided for each in chosen)
    if not are_whole or _is_busy(chosen):
        return []
    with torch.no_grad():
        taken = [_two_numbers(each) for each in chosen]
        return torch.cat(taken).nan_to_num(1e30).tolist() if taken else []


def _two_numbers(parameter: nn.Parameter) -> torch.Tensor:
    """Return the first number and one from the middle; both parts of complex numbers."""
    middle = parameter.numel() // 2
    both = torch.as_strided(parameter.detach(), (2,), (middle,), parameter.storage_offset())
    if both.is_complex():
        both = torch.view_as_real(both.resolve_conj()).flatten()
    return both.to(torch.float64)


def _is_busy(parameters: list[nn.Parameter]) -> bool:
    """Return whether a GPU is still computing: reading from it could wait for other ranks."""
    devices = {each.device for each in parameters if each.device.type != "cpu"}
    kind = accelerator.current()
    return any(
        device.type != kind.device_type or not kind.module.current_stream(device).query()
        for device in devices
    )


def _gpu_uuid(parameters: list[nn.Parameter]) -> str:
    """Return the UUID of the GPU if all parameters are on one GPU; else ""."""
    kind = accelerator.current()
    devices = {each.device for each in parameters if each.device.type == kind.device_type}
    if len(devices) != 1:
        return ""
    return str(kind.module.get_device_properties(devices.pop()).uuid)


def _optimizer_facts(optimizer: TorchOptimizer, names: Names) -> facts.OptimizerFacts:
    rates = [each["lr"] for each in optimizer.param_groups]
    return facts.OptimizerFacts(
        rates=[float(each) for each in rates if isinstance(each, float | int)],
        shapes=_shapes([*parameters_of(optimizer)][:MAX_PARTS]),
        replaced_model=_lost_model(optimizer, names),
    )


def _lost_model(optimizer: TorchOptimizer, names: Names) -> str:
    """Return the name of a module that should be the optimizer's, but is not.

    The module has the same shapes as the optimizer's parameters and has gradients, and no optimizer
    updates it.
    """
    of_optimizer = [*parameters_of(optimizer)][:MAX_PARTS]
    shapes = [each.shape for each in of_optimizer]
    modules = {
        name: list(islice(module.parameters(), MAX_PARTS))
        for name, module in names.items()
        if issubclass(type(module), nn.Module) and not name.startswith("_")
    }
    ours = {id(each) for parameters in modules.values() for each in parameters}
    if not of_optimizer or any(id(each) in ours for each in of_optimizer):
        return ""
    others = [each for each in names.values() if issubclass(type(each), TorchOptimizer)]
    updated = {id(each) for other in others for each in parameters_of(other)}
    for name, parameters in modules.items():
        is_alike = [each.shape for each in parameters] == shapes
        is_free = not any(id(each) in updated for each in parameters)
        if is_alike and is_free and all(each.grad is not None for each in parameters):
            return name
    return ""


# ---- what a DataLoader yields on this rank, as far as torch's own classes show it


def loader_facts(loader: data.DataLoader[Any]) -> facts.LoaderFacts:
    """Return the facts of a DataLoader; of the user's code it calls only the dataset's length."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, data.IterableDataset):
        return facts.LoaderFacts(
            sampler="stream",
            data=_describe_stream(loader.dataset),
            workers=loader.num_workers,
            batch_size=loader.batch_size or -1,
        )
    kind, samples = type(sampler), _length(loader.dataset)
    is_dealt = kind is data.DistributedSampler
    batches: Any = loader.batch_sampler
    # of other classes, only the user's code knows the number of samples
    is_torchs = kind in _SAMPLERS and type(batches) is data.BatchSampler
    return facts.LoaderFacts(
        sampler=_SAMPLERS.get(kind, "other"),
        seed=sampler.seed if is_dealt else -1,
        num_replicas=sampler.num_replicas if is_dealt else -1,
        sampler_rank=sampler.rank if is_dealt else -1,
        shuffles=sampler.shuffle if is_dealt else kind is data.RandomSampler,
        epochs=completed_epochs(sampler) if kind in _SAMPLERS else [],
        samples=samples,
        data=describe_data(loader.dataset),
        order=_order_checksums(loader.dataset) if is_dealt else "",
        batches=len(batches) if is_torchs and samples >= 0 else -1,
        batch_size=loader.batch_size or -1,
        workers=loader.num_workers,
        draws=_worker_draws(loader),
    )


def _worker_draws(loader: data.DataLoader[Any]) -> str:
    """Return a checksum of the state that seeds the workers, if their dataset is random.

    The code of the dataset's class or of a transform must draw random numbers, and set no seed.
    """
    dataset: Any = loader.dataset
    while type(dataset) is data.Subset:
        dataset = dataset.dataset
    if not loader.num_workers or loader.worker_init_fn is not None:
        return ""
    parts = [*getattr(dataset, "__dict__", {}).values()]
    lists = [getattr(each, "__dict__", {}).get("transforms") for each in parts]
    parts += [each for given in lists if type(given) is list for each in given]
    methods: dict[str, Any] = {}
    for kind in reversed(type(dataset).__mro__[:-1]):
        methods |= vars(kind)  # an overridden method draws nothing
    functions = [e for e in (*methods.values(), *parts) if isinstance(e, FunctionType)]
    words, _ = _names_and_values(functions)
    text = " ".join(words + [type(each).__name__ for each in parts])
    if _OWN_SEED.search(text) or not _RANDOM.search(text):
        return ""
    state = (loader.generator or torch.default_generator).get_state()
    return str(zlib.crc32(state.numpy().tobytes()))


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(type(dataset), "__len__") else -1


def describe_data(dataset: Any) -> str:
    """Return a text that identifies the data; empty if finding out would run user code.

    >>> [describe_data(each) == describe_data(range(9)) for each in (range(9), range(1, 10))]
    [True, False]
    >>> describe_data([object()])
    ''
    """
    if type(dataset) is data.Subset:
        described = describe_data(dataset.dataset) or f"{UNSURE}{_length(dataset.dataset)}"
        indices = [int(each) for each in _few(dataset.indices)]
        return f"{described}[{_checksum(f'{len(dataset.indices)}:{indices}')}]"
    if type(dataset) is data.TensorDataset:
        return " ".join(map(_describe_tensor, dataset.tensors))
    if isinstance(dataset, torch.Tensor):
        return _describe_tensor(dataset)
    return repr(dataset) if type(dataset) is range else ""


def _describe_stream(dataset: data.IterableDataset[Any]) -> str:
    """Return a text that identifies the data of a stream; empty if ranks may get other samples.

    Ranks get the same samples under three conditions. The stream's class is the user's own. Nothing
    that it uses depends on the rank or on chance. All of its attributes are plain values, and few.
    """
    classes = [each for each in type(dataset).__mro__ if each.__module__ == "__main__"]
    rest = {each.__module__.partition(".")[0] for each in type(dataset).__mro__} - {"__main__"}
    functions = [each for kind in classes for each in vars(kind).values() if callable(each)]
    if not classes or not rest <= {"torch", "typing", "collections", "builtins"}:
        return ""
    words, constants = _names_and_values(functions)
    values = [*vars(dataset).values(), *constants]
    if _MAY_DIFFER.search(" ".join(words)) or not _are_plain(values, depth=3):
        return ""
    return f"{type(dataset).__qualname__} {_checksum(repr((words, values)))}"


def _names_and_values(functions: Iterable[Any]) -> tuple[list[str], list[Any]]:
    """Return all names and texts in the code of functions, and the values of the cell's names."""
    words: list[str] = []
    values: list[Any] = []
    for function in functions:
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        if not codes:
            words.append("rank")  # unknown code may depend on the rank
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            words += [*code.co_names, *code.co_varnames, *code.co_freevars]
            names = [each for each in code.co_consts if type(each) is tuple]  # of arguments
            constants = [*code.co_consts, *chain.from_iterable(names)]
            words += [each for each in constants if isinstance(each, str)]
            found = [function.__globals__.get(each) for each in code.co_names]
            values += [each for each in found if not isinstance(each, ModuleType | type)]
    return words, values


def _are_plain(values: Sequence[Any], depth: int) -> bool:
    """Return whether the ``repr`` of a list shows all values in it and is not too long.

    Args:
        values: the list.
        depth: levels of lists that it may have, itself included.
    """
    size, lists = 0, [(values, depth)]
    while lists:
        items, levels = lists.pop()
        size += len(items)
        if levels == 0 or len(items) > MAX_ITEMS or size > MAX_SIZE:
            return False
        for item in items:
            if type(item) in (list, tuple):
                lists.append((item, levels - 1))
            elif type(item) is str:
                size += len(item)
            elif item is not None and type(item) not in (bool, int, float, range):
                return False
    return size <= MAX_SIZE


def _order_checksums(dataset: Any) -> str:
    """Return two checksums of a dataset's lists; only the second one depends on the order.

    Return "" unless the dataset is a list, or an object of a user's class with list attributes.
    """
    lists = [dataset] if type(dataset) is list else []
    if type(dataset).__module__ == "__main__":
        lists = [each for each in vars(dataset).values() if type(each) is list]
    same, special = [], []
    for values in lists:
        shown = _few(values)
        is_alike = len(set(map(type, shown))) == 1
        if is_alike and 1 < len(values) <= MAX_ITEMS and _are_plain(shown, depth=2):
            with suppress(TypeError):  # items without an order, such as None
                same.append((len(values), min(values), max(values)))
                special.append(shown)
    return f"{_checksum(repr(same))} {_checksum(repr(special))}" if same else ""


def _few(items: Sequence[Any]) -> Sequence[Any]:
    """Return items at equal distances, at most MAX_INDICES."""
    return items[:: max(1, len(items) // MAX_INDICES)][:MAX_INDICES]


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Return the shape, and a checksum of the first and last row."""
    if tensor.device.type != "cpu" or not len(tensor) or tensor[0].numel() > 1 << 16:
        return f"{UNSURE}{list(tensor.shape)}"
    ends = torch.stack([tensor[0], tensor[-1]]).contiguous().reshape(-1)
    return f"{list(tensor.shape)}#{_checksum(str(ends[:512].tolist()))}"


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
