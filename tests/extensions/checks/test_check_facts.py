"""The facts that a rank collects about its variables: small, quick, and certain."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    dataloader,
)

import nbddp
from nbddp.extensions.checks.cells import samples_per_step
from nbddp.extensions.checks.facts import LoaderFacts, OptimizerFacts, RankFacts, kinds_by_name
from nbddp.extensions.checks.rank import (
    MAX_ITEMS,
    MAX_SIZE,
    collect_facts,
    describe_data,
    loader_facts,
)
from nbddp.wire.messages import CellEnded, Failure
from nbddp.worker.cell.failure import describe_failure
from nbddp.worker.watch.dataloader_waits import begin_cell, install_hooks

DATA = TensorDataset(torch.arange(10.0).reshape(10, 1))
FAILED = Failure(name="ValueError", text="", traceback="")


def thing(value: object, **others: object) -> Any:
    """The facts of a value."""
    return collect_facts({"it": value, **others}).objects.get("it")


def test_facts_are_collected_only_for_names_that_the_cell_uses() -> None:
    names = {"net": nn.Linear(1, 1), "other": nn.Linear(1, 1), "_": nn.Linear(1, 1)}
    assert list(collect_facts(names, "y = net(x) + _(x)").objects) == ["net"]
    assert list(collect_facts(names).objects) == ["net", "other"]


def test_the_facts_of_a_loader_describe_its_sampler() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=7)
    sampler.set_epoch(3)
    assert thing(DataLoader(DATA, batch_size=2, sampler=sampler)) == LoaderFacts(
        sampler="dealt",
        seed=7,
        num_replicas=2,
        sampler_rank=1,
        shuffles=True,
        samples=10,
        data=describe_data(DATA),
        batches=3,
        batch_size=2,
    )
    plain = thing(DataLoader(DATA, batch_size=4, drop_last=True, num_workers=2))
    assert (plain.sampler, plain.batches, plain.workers) == ("in order", 2, 2)
    assert thing(DataLoader(DATA, shuffle=True)).sampler == "random"


def test_the_facts_of_a_loader_list_the_epochs_that_a_cell_iterated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (DistributedSampler, RandomSampler):
        monkeypatch.setattr(kind, "__iter__", kind.__iter__)
    several, any_loader = dataloader._MultiProcessingDataLoaderIter, dataloader._BaseDataLoaderIter
    monkeypatch.setattr(several, "_reset", several._reset)
    monkeypatch.setattr(any_loader, "__next__", any_loader.__next__)
    install_hooks()
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    next(iter(loader))
    assert thing(loader).epochs == []
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 3
    assert thing(loader).epochs == [0, 1, 1]
    begin_cell()
    assert thing(loader).epochs == []


def refuses(*_: object) -> Any:
    raise AssertionError


def test_only_the_length_of_a_user_defined_loader_is_read() -> None:
    class Odd(DataLoader[Any]):
        __len__ = refuses

    class Stream(IterableDataset[int]):
        __iter__ = __len__ = refuses

    class Drawn(list[int]):
        __len__ = refuses

    class Broken(list[int]):
        def __len__(self) -> int:
            raise RuntimeError

    assert thing(Odd(DATA)).batches == 10
    assert thing(DataLoader(Stream(), batch_size=2)) == LoaderFacts(sampler="stream", batch_size=2)
    assert thing(DataLoader(DATA, sampler=Drawn([1, 2]))).batches == -1
    assert thing(DataLoader(Broken([1]), sampler=[0])) is None


def test_data_descriptions_are_equal_only_for_equal_data() -> None:
    other = TensorDataset(torch.arange(1.0, 11.0).reshape(10, 1))
    assert describe_data(DATA) == describe_data(TensorDataset(torch.arange(10.0).reshape(10, 1)))
    assert describe_data(DATA) != describe_data(other)
    assert describe_data(Subset(DATA, [1, 2])) != describe_data(Subset(DATA, [2, 1]))
    unknown: Any = [object(), object()]
    assert describe_data(Subset(unknown, [0])).startswith("?")
    assert describe_data(Subset(unknown, [0])) != describe_data(Subset(unknown, [1]))


def test_the_facts_of_a_model_describe_its_mode_gradients_and_parameters() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net_facts = thing(net)
    assert (net_facts.ranks, net_facts.differs_in_training, net_facts.is_training) == (
        0,
        True,
        True,
    )
    assert (net_facts.with_gradient, net_facts.without_gradient) == (0, 6)
    assert net_facts.shapes == f"6:{sum(each.numel() for each in net.parameters())}"
    assert len(net_facts.sample) == 12
    net(torch.ones(2, 2)).sum().backward()
    assert (thing(net).with_gradient, thing(net).without_gradient) == (6, 0)
    with torch.no_grad():
        net[0].weight.add_(1)
    assert thing(net).sample != net_facts.sample
    assert not thing(nn.Linear(1, 1)).differs_in_training
    after_failure: Any = collect_facts({"net": net}, "net", failure=FAILED).objects["net"]
    assert after_failure.sample == []


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("is_conjugated", [False, True])
def test_both_parts_of_complex_parameters_are_compared(
    dtype: torch.dtype, is_conjugated: bool
) -> None:
    net = nn.Linear(3, 2, dtype=dtype)
    if is_conjugated:
        net.weight = nn.Parameter(net.weight.detach().conj())
    net_facts = thing(net)
    assert len(net_facts.sample) == 8
    with torch.no_grad():
        net.weight += 1j
    changed = thing(net)
    assert changed.shapes == net_facts.shapes
    moved = [after - before for before, after in zip(net_facts.sample, changed.sample, strict=True)]
    assert moved == pytest.approx([0, 1, 0, 1, 0, 0, 0, 0], abs=1e-6)


def test_an_optimizer_of_a_replaced_model_is_reported() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    adam = torch.optim.Adam(old.parameters(), lr=0.5)
    assert thing(adam, old=old, new=new) == OptimizerFacts(rates=[0.5], shapes="2:6")
    assert thing(adam, new=new).replaced_model == "", "no optimizer trains it"
    new(torch.ones(2)).sum().backward()
    assert thing(adam, new=new).replaced_model == "new"
    assert thing(adam, new=new, sgd=torch.optim.SGD(new.parameters())).replaced_model == ""
    assert thing(adam, new=nn.Linear(3, 3)).replaced_model == ""


def test_aliases_of_imports_are_reported_with_qualified_names() -> None:
    names = {"DL": DataLoader, "reduce": dist.all_reduce, "d": dist, "nb": nbddp.all_reduce}
    assert collect_facts({**names, "x": 1, "Path": str}).aliases == {
        "DL": "torch.utils.data.dataloader.DataLoader",
        "reduce": "torch.distributed.all_reduce",
        "d": "torch.distributed",
        "nb": "nbddp.all_reduce",
    }


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("transformers.trainer", "transformers.Trainer"),
        ("lightning.pytorch.trainer.trainer", "lightning.Trainer"),
        ("__main__", ""),
    ],
)
def test_trainers_of_all_ranks_have_the_name_of_their_library(module: str, expected: str) -> None:
    base = type("Trainer", (), {"__module__": module})
    subclass = type("SFTTrainer", (base,), {"__module__": "trl.trainer"})
    one, other = subclass(), subclass()
    for trainer, size in ((one, 1), (other, 2)):
        trainer.args, trainer.world_size = SimpleNamespace(world_size=size), size
    found = collect_facts(
        {"one": one, "other": other, "broken": subclass()}
    ).aliases  # without a group
    assert found == ({"one": expected} if expected else {})


def test_a_model_without_its_group_and_a_module_without_a_name_are_skipped() -> None:
    unbound = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(unbound)
    assert collect_facts({"model": unbound, "net": nn.Linear(1, 1)}).objects.keys() == {"net"}
    odd = ModuleType("odd")
    del odd.__name__
    assert collect_facts({"odd": odd}).cores >= 1


def test_the_batch_size_of_nbddp_training_loaders_is_reported() -> None:
    train, test = nbddp.loader(range(9), 4), nbddp.loader(range(9), 3, shuffle=False)
    names = {"train": train, "test": test, "other": 3}
    rank = collect_facts(names, "for batch in train: test, other")
    assert (rank.batches, rank.objects) == ({"train": 4}, {})
    assert RankFacts.from_reported({"checks": rank.to_json()}) == rank
    assert collect_facts(names, "other").batches == {}


STREAM = """
class Stream(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        {}
"""


def stream_facts(body: str, files: object, **names: object) -> LoaderFacts:
    """The facts of a loader over a stream that a cell has defined."""
    cell = {"__name__": "__main__", "IterableDataset": IterableDataset, "torch": torch, **names}
    exec(STREAM.format(body), cell)
    return thing(DataLoader(cell["Stream"](files)))


def test_streams_are_compared_only_if_their_code_does_not_depend_on_the_rank() -> None:
    plain = "yield from map(torch.tensor, self.files)"
    facts = stream_facts(plain, [1, 2])
    assert (facts.sampler, bool(facts.data)) == ("stream", True)
    assert stream_facts(plain, [1, 2]) == facts
    assert stream_facts(plain, [2, 1]).data not in ("", facts.data)
    assert stream_facts("yield from names", [1, 2], names=["a"]).data
    for body in (
        "yield from self.files[rank::2]",
        "yield from self.files[int(os.environ['RANK']) :: 2]",
        "yield from itertools.islice(self.files, first, None, 2)",
        "yield from random.sample(self.files, 2)",
        "yield from open_all(self.files)",
    ):
        assert stream_facts(body, [1, 2], first=0, open_all=lambda it: it).data == "", body
    assert stream_facts(plain, [[1] * 100] * 100).data != ""
    much = (["x" * MAX_SIZE], [[1] * 1000] * 1000, [[[1]]], [1] * (MAX_ITEMS + 1))
    for files in ([object()], *much):
        assert stream_facts(plain, files).data == ""


def test_the_order_facts_distinguish_reordered_lists_from_different_lists() -> None:
    def order_of(files: list[Any]) -> tuple[str, str, str]:
        sampler = DistributedSampler(files, num_replicas=2, rank=0)
        order: str = thing(DataLoader(files, sampler=sampler)).order
        return order.partition(" ")

    one, other, longer = order_of(["a", "b", "c"]), order_of(["c", "a", "b"]), order_of(["a"] * 9)
    assert one[0] == other[0] != longer[0]
    assert one[2] != other[2]
    assert order_of(["x" * MAX_SIZE] * 2) == order_of([[1] * MAX_ITEMS] * 50) == ("", "", "")
    assert order_of(["a", 1]) == order_of([None, None]) == order_of([object()] * 2) == ("", "", "")


def test_values_that_tell_the_rank_and_sets_of_texts_are_reported() -> None:
    names = {"r": 0, "first": True, "n": 1, "no": False, "a": {"x"}, "b": {1, 2}, "c": 0.0}
    assert collect_facts(names).kinds == {"r": "rank", "first": "rank", "a": "set"}


class Noisy(Dataset[torch.Tensor]):
    """A dataset with an augmentation."""

    def __init__(self, transform: object = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + index


class Crop(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index)


class RandomCrop:
    pass


def test_the_seed_of_loader_workers_is_reported_if_they_draw_random_numbers() -> None:
    def draws(dataset: Noisy, **options: Any) -> str:
        return loader_facts(DataLoader(dataset, **{"num_workers": 1, **options})).draws

    torch.manual_seed(1)
    first = draws(Noisy())
    assert first
    assert first == draws(Crop(lambda x: x * torch.rand(1))) == draws(Crop(RandomCrop()))
    assert first == draws(Crop(SimpleNamespace(transforms=[RandomCrop()])))
    assert first == draws(Noisy(), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    assert draws(Noisy()) not in ("", first)
    unsure = [draws(Crop()), draws(Noisy(), num_workers=0), draws(Noisy(), worker_init_fn=print)]
    unsure += [draws(Crop(lambda x: torch.rand(x, generator=x))), draws(Crop(lambda x: x + 1))]
    assert unsure == [""] * 5


def test_the_number_of_torchs_threads_is_reported() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert collect_facts({}).threads == threads + 1
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("group_of_one")
def test_the_facts_of_a_model_on_all_ranks_describe_its_wrapper() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    still = DistributedDataParallel(model.module)
    still.broadcast_buffers = False  # torch warns about the argument
    names = {
        "model": model,
        "still": still,
        "plain": DistributedDataParallel(nn.Linear(4, 8)),
        "twice": DistributedDataParallel(DistributedDataParallel(nn.Linear(4, 8))),
        "parts": fully_shard(nn.Linear(4, 8)),
    }
    found: Any = collect_facts(names)
    assert kinds_by_name({0: found}) == {
        "model": "ddp with buffers in training",
        "still": "ddp in training",
        "plain": "ddp",
        "twice": "ddp",
        "parts": "fsdp",
    }
    assert [name for name in names if found.objects[name].is_nested] == ["twice"]


class Two(nn.Module):
    """A module that has a frozen and an idle part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 3).requires_grad_(requires_grad=False)
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def failure_of(names: dict[str, Any], train: Callable[[], object]) -> Failure:
    """The facts about the error in which a training ends."""
    with pytest.raises(RuntimeError) as raised:
        train()
    shell = Mock(user_ns=names)
    shell.is_cell_file.return_value = False
    return describe_failure(raised.value, shell, stuck_in=None, at=0.0)


@pytest.mark.usefixtures("group_of_one")
def test_parameters_without_a_gradient_are_named_also_from_the_indices_in_ddps_error() -> None:
    names: dict[str, Any] = {"model": DistributedDataParallel(Two())}
    names |= {"copy": DistributedDataParallel(Two()), "plain": Two()}
    names["copy"](torch.ones(2, 4)).sum().backward()
    copied = thing(names["copy"])
    assert (copied.with_gradient, copied.without_gradient) == (2, 2)
    assert copied.unused == ["idle.weight", "idle.bias"]
    assert thing(names["model"]).unused == []

    def train() -> None:
        for _ in range(2):
            names["model"].zero_grad()
            names["model"](torch.ones(2, 4)).sum().backward()

    failure = failure_of(names, train)
    assert failure.text.startswith("Expected to have finished reduction")
    assert failure.because == "without a gradient: idle.weight, idle.bias"

    def refused(name: str, failure: Failure) -> Any:
        return collect_facts(names, name, failure=failure).objects[name]

    facts = refused("model", failure)
    assert (facts.is_refused, facts.without_gradient) == (True, 2)
    assert facts.unused == ["idle.weight", "idle.bias"]
    assert not refused("model", FAILED).is_refused
    assert not refused("plain", failure).is_refused


@pytest.mark.usefixtures("group_of_one")
def test_a_parameter_that_is_ready_twice_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = DistributedDataParallel(Twice(), find_unused_parameters=True)

    def train() -> None:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()

    because = failure_of({"model": model}, train).because
    assert because in ("parameter: layer.weight", "parameter: layer.bias")
    others = {"model": model, "other": DistributedDataParallel(Two())}
    assert failure_of(others, train).because == ""


def test_the_batch_size_is_known_if_all_loaders_agree() -> None:
    for batches, batch in {
        (("train", 32),): 64,
        (("train", 32), ("check", 10)): None,
        (("one", 32), ("other", 32)): 64,
        (): None,
    }.items():
        facts = {"checks": RankFacts(batches=dict(batches)).to_json()}
        ended = CellEnded(cell=1, in_group=True, facts=facts)
        assert samples_per_step([ended, ended]) == batch, batches
