"""Facts that ranks report at the end of a cell, as the input of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, get_args

from nbddp.extensions.checks.source import CellSource

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """A DataLoader.

    Attributes:
        sampler: ``dealt`` (a DistributedSampler), ``random``, ``in order``, ``stream`` (an
            IterableDataset), or ``other``.
        seed, num_replicas, sampler_rank: the values of a DistributedSampler; -1 for others.
        shuffles: whether the order differs between epochs.
        epochs: the epochs that the cell completed, for a sampler that shuffles.
        samples: the number of samples in the dataset, on this rank.
        data: a checksum that is equal for equal data; empty if it cannot be computed.
        order: two checksums of the dataset's lists; only the second one depends on the order.
        batches: the number of batches of this rank.
        draws: a checksum of the state from which its worker processes get their seeds, if the
            dataset draws random numbers in them; else empty.
    """

    sampler: str = "other"
    seed: int = -1
    num_replicas: int = -1
    sampler_rank: int = -1
    shuffles: bool = False
    epochs: list[int] = field(default_factory=list)
    samples: int = -1
    data: str = ""
    order: str = ""
    batches: int = -1
    batch_size: int = -1
    workers: int = 0
    draws: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A module, with or without DDP.

    Attributes:
        ranks: the number of ranks that share its gradients; 0 without DDP.
        sample: a few numbers of its parameters; empty if reading them would take time.
        shapes: the number of parameters and of their elements.
        device: the unique id of the GPU; empty on a CPU.
        is_training: whether it is in training mode.
        differs_in_training: whether training mode and evaluation mode differ.
        with_gradient: the number of parameters with a gradient.
        without_gradient: the number of parameters that should have a gradient, but have none.
        unused: the names of some parameters without a gradient.
        is_refused: whether DDP has raised an error because ``unused`` had no gradient.
        is_nested: whether DDP wraps a DDP model.
        finds_unused: whether DDP looks for parameters without a gradient.
        is_sharded: whether its parameters are sharded over the ranks, as by FSDP.
        has_buffers: whether DDP sends its buffers from rank 0 to all ranks.
    """

    ranks: int = 0
    sample: list[float] = field(default_factory=list)
    shapes: str = ""
    device: str = ""
    is_training: bool = True
    differs_in_training: bool = False
    with_gradient: int = 0
    without_gradient: int = 0
    unused: list[str] = field(default_factory=list)
    is_refused: bool = False
    is_nested: bool = False
    finds_unused: bool = False
    is_sharded: bool = False
    has_buffers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """An optimizer.

    Attributes:
        rates: the learning rate of each group of parameters.
        shapes: the number of parameters and of their elements.
        replaced_model: the name of a module with equal shapes, but with other parameters than the
            optimizer's; empty if the optimizer updates a current model.
    """

    rates: list[float] = field(default_factory=list)
    shapes: str = ""
    replaced_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerFacts:
    """A GradScaler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A trainer of another library that has trained in the cell.

    Attributes:
        world_size: the number of ranks that it trains with.
        gpus: the number of GPUs that it drives with threads, by DataParallel; 0 for none.
        is_bf16: whether it trains in bf16.
        unused: ``FSDP`` or ``DeepSpeed`` if the user asked for it, and DDP is used instead.
        samples: the number of samples in the train set, on this rank; -1 if the trainer does not
            give each rank a share of it.
        columns: checksums of a few rows of the train set, by column. Columns in which these rows
            are equal are left out.
    """

    world_size: int
    gpus: int = 0
    is_bf16: bool = False
    unused: str = ""
    samples: int = -1
    columns: Mapping[str, int] = field(default_factory=dict)


NamedObject = LoaderFacts | ModelFacts | OptimizerFacts | ScalerFacts | TrainerFacts
T = TypeVar("T", LoaderFacts, ModelFacts, OptimizerFacts, ScalerFacts, TrainerFacts)
_KINDS: dict[str, type[NamedObject]] = {each.__name__: each for each in get_args(NamedObject)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The facts of one rank.

    Attributes:
        objects: the loaders, models, optimizers, scalers and trainers by name.
        ddp_ranks: the numbers of ranks among which its DDP models share gradients.
        aliases: the full names of torch's and nbddp's modules, classes and functions, by name; also
            ``transformers.Trainer`` and the like for a trainer of all ranks.
        kinds: ``rank`` for a name whose value tells the rank, ``set`` for a set whose items are not
            all numbers.
        batches: the batch sizes of the training kit's loaders that shuffle, by name.
        host, cores, gpus, threads: its machine, the cores and the number of GPUs that it may use,
            and torch's threads.
        gpu_bytes: the most memory that its tensors had on its own GPU; -1 without one.
        has_bf16: whether its GPU computes in bf16; true without one.
        own_backend: the backend of its groups, if only nbddp has it; otherwise empty.
    """

    objects: Mapping[str, NamedObject] = field(default_factory=dict)
    ddp_ranks: list[int] = field(default_factory=list)
    aliases: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    host: str = ""
    cores: int = 0
    gpus: int = 0
    threads: int = 1
    gpu_bytes: int = -1
    has_bf16: bool = True
    own_backend: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a JSON dict.

        >>> rank = RankFacts(objects={"adam": OptimizerFacts(rates=[0.1])}, cores=2)
        >>> RankFacts.from_reported({"checks": rank.to_json()}) == rank
        True
        """
        objects = {name: [type(each).__name__, asdict(each)] for name, each in self.objects.items()}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"objects": objects}

    @classmethod
    def from_reported(cls, reported: Json) -> RankFacts:
        """Create the facts from those that a rank has reported, by extension.

        The objects also have the trainers that the extension ``trainers`` reports.
        """
        facts, trainers = reported.get("checks", {}), reported.get("trainers", {})
        objects: dict[str, NamedObject] = {
            name: TrainerFacts(**values) for name, values in trainers.items()
        }
        for name, (kind, values) in facts.get("objects", {}).items():
            objects[name] = _KINDS[kind](**values)
        return cls(**{**facts, "objects": objects})


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """The facts of all ranks.

    Attributes:
        ranks: the facts by rank; ranks that reported nothing are missing.
        world_size: the number of ranks.
        source: the code of the cell, or no code if the check does not belong to a cell.
        is_ok: whether the cell succeeded on all ranks, so that no rank is in the middle of a step.
        is_requested: whether the user requested the check; then all variables count, not only
            those in the cell.
    """

    ranks: Mapping[int, RankFacts]
    world_size: int
    source: CellSource
    is_ok: bool = True
    is_requested: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether there are several ranks, and all of them have reported."""
        return len(self.ranks) == self.world_size > 1

    @property
    def has_ddp(self) -> bool:
        """Whether all ranks have a DDP model that all ranks share, and not only a subgroup."""
        return self.is_complete and all(
            self.world_size in rank.ddp_ranks for rank in self.ranks.values()
        )

    def all_have(self, kind: type[T]) -> Iterator[tuple[str, dict[int, T]]]:
        """Yield the names that have an object of this kind on every rank, with the objects."""
        if not self.is_complete:
            return
        first = min(self.ranks)
        for name in self.ranks[first].objects:
            found = {rank: each.objects.get(name) for rank, each in sorted(self.ranks.items())}
            values = {rank: each for rank, each in found.items() if isinstance(each, kind)}
            if len(values) == self.world_size:
                yield name, values

    def line(self, name: str) -> int:
        """Return the first line of the cell that uses this name; 0 if no line does."""
        return self.source.shared_names.get(name, 0)


def kinds_by_name(ranks: Mapping[int, RankFacts]) -> dict[str, str]:
    """Map variable names of the first rank to kinds, such as ``ddp`` or ``loader plain``.

    The rules that check source code get this map. A value that tells the rank does so on all ranks.
    """
    rank = ranks[min(ranks)] if ranks else RankFacts()
    found: dict[str, str] = {
        name: kind
        for name, kind in rank.kinds.items()
        if all(each.kinds.get(name) == kind for each in ranks.values())
        and (kind != "rank" or len(ranks) > 1)
    }
    for name, obj in rank.objects.items():
        if isinstance(obj, ModelFacts):
            mode = " in training" if obj.is_training and obj.differs_in_training else ""
            buffers = " with buffers" if obj.has_buffers else ""
            kind = "ddp" if obj.ranks else "fsdp" if obj.is_sharded else "module"
            found[name] = f"{kind}{buffers}{mode}"
        elif isinstance(obj, LoaderFacts):
            found[name] = "loader divided" if obj.sampler == "dealt" else "loader plain"
        else:
            found[name] = type(obj).__name__.removesuffix("Facts").lower()
    return found
