"""What ranks say of themselves at a cell's end, as rules over it see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar, get_args

from nbddp.checks.source import CellSource

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """A DataLoader.

    Attributes:
        sampler: ``dealt`` (a DistributedSampler), ``random``, ``in order``, ``stream`` (an
            IterableDataset), or ``other``.
        seed, num_replicas, sampler_rank: of a DistributedSampler; -1 of others.
        shuffles: whether it has another order in another epoch.
        epochs: those that the cell went through to the end, of a sampler that shuffles.
        samples: in its dataset, on this rank.
        data: tells equal data from other data; empty where that cannot be told.
        order: two checksums of the dataset's lists; only the second one depends on the order.
        batches: that this rank gets.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A module, wrapped by DDP or not.

    Attributes:
        ranks: how many it shares gradients with, 0 where DDP is not.
        sample: a few numbers of its parameters; empty where they cannot be had for nothing.
        shapes: how many parameters there are, and of how many numbers.
        device: the GPU's own name, empty on a CPU.
        differs_in_training: whether training and evaluation differ.
        with_gradient: parameters that have one; ``without_gradient`` have none, and should.
        unused: the names of some parameters without a gradient.
        is_refused: whether DDP has raised an error because ``unused`` had no gradient.
        is_nested: whether DDP wraps a DDP model.
        finds_unused: whether DDP was told to look for parameters without gradient.
        is_sharded: whether its parameters are sharded over the ranks, as FSDP does it.
        has_buffers: whether DDP sends its buffers from rank 0 to all.
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
        shapes: how many parameters it has, and of how many numbers.
        replaced_model: the name of a module whose parameters look like its own, and are others.
    """

    rates: list[float] = field(default_factory=list)
    shapes: str = ""
    replaced_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerFacts:
    """A GradScaler."""


NamedObject = LoaderFacts | ModelFacts | OptimizerFacts | ScalerFacts
T = TypeVar("T", LoaderFacts, ModelFacts, OptimizerFacts, ScalerFacts)
_KINDS: dict[str, type[NamedObject]] = {each.__name__: each for each in get_args(NamedObject)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank.

    Attributes:
        objects: that are known, by name.
        ddp_ranks: among how many ranks the DDP models share gradients, of all of its names.
        aliases: what names of torch's and nbddp's modules, classes and functions stand for.
        batches: of the training kit's loaders that shuffle how large a batch of theirs is, by name.
        host, cores, threads: its machine, what of it it may use, what torch does use.
    """

    objects: Mapping[str, NamedObject] = field(default_factory=dict)
    ddp_ranks: list[int] = field(default_factory=list)
    aliases: Mapping[str, str] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    host: str = ""
    cores: int = 0
    threads: int = 1

    def to_json(self) -> dict[str, Any]:
        """As it travels.

        >>> rank = RankFacts(objects={"adam": OptimizerFacts(rates=[0.1])}, cores=2)
        >>> RankFacts.from_json(rank.to_json()) == rank
        True
        """
        objects = {name: [type(each).__name__, asdict(each)] for name, each in self.objects.items()}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"objects": objects}

    @classmethod
    def from_json(cls, json: Json) -> RankFacts:
        """Back from how it travels."""
        objects = {
            name: _KINDS[kind](**values) for name, (kind, values) in json.get("objects", {}).items()
        }
        return cls(**{**json, "objects": objects})


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """All of it.

    Attributes:
        ranks: what each said; those that said nothing are missing.
        world_size: how many there are.
        source: the cell, if it is one that was looked at.
        is_ok: whether it went well on all ranks, so that their state is no half of a step.
        is_requested: whether somebody asked: then names that the cell does not have count, too.
    """

    ranks: Mapping[int, RankFacts]
    world_size: int
    source: CellSource
    is_ok: bool = True
    is_requested: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether there is something to compare, and nobody is missing."""
        return len(self.ranks) == self.world_size > 1

    @property
    def has_ddp(self) -> bool:
        """Whether all ranks have a DDP model."""
        return self.is_complete and all(each.ddp_ranks for each in self.ranks.values())

    def all_have(self, kind: type[T]) -> Iterator[tuple[str, dict[int, T]]]:
        """The names that are one such thing on every rank, and what it is there."""
        if not self.is_complete:
            return
        first = min(self.ranks)
        for name in self.ranks[first].objects:
            found = {rank: each.objects.get(name) for rank, each in sorted(self.ranks.items())}
            values = {rank: each for rank, each in found.items() if isinstance(each, kind)}
            if len(values) == self.world_size:
                yield name, values

    def line(self, name: str) -> int:
        """Where the cell has this name of the ranks first, 0 if it has not."""
        return self.source.shared_names.get(name, 0)


def kinds_by_name(rank: RankFacts) -> dict[str, str]:
    """What rules over code are told of a rank's names."""
    found: dict[str, str] = {}
    for name, each in rank.objects.items():
        if isinstance(each, ModelFacts):
            mode = " in training" if each.is_training and each.differs_in_training else ""
            buffers = " with buffers" if each.has_buffers else ""
            kind = "ddp" if each.ranks else "fsdp" if each.is_sharded else "module"
            found[name] = f"{kind}{buffers}{mode}"
        elif isinstance(each, LoaderFacts):
            found[name] = "loader divided" if each.sampler == "dealt" else "loader plain"
        else:
            found[name] = type(each).__name__.lower()
    return found
