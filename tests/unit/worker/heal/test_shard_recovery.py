"""A heal chooses from where a new rank gets its shards, or says why they cannot be restored."""

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nbddp import RequestError
from nbddp.worker.heal import shard_copies, sharded_pickling
from nbddp.worker.heal.shard_copies import Copy, ShardCopies
from nbddp.worker.heal.shard_recovery import choose_sources
from nbddp.worker.heal.spread_state import dtensors_in, pack, spread_objects
from nbddp.worker.process_group.bound_objects import BoundObjects

ROWS = [[[0]], [[1]], [[0]], [[1]]]


@pytest.mark.parametrize(
    ("others", "sources"),
    [
        ([[4, 4], [4, 4], [4, 4]], [0, 3, 2, 3]),
        ([[5, 5], [4, 4], [4, 4]], [2, 3, 2, 3]),  # rank 0 is ahead, with no partner
        ([[4, 4], [4, 4], [5, 5]], []),
        ([[5, 5], [5, 5], [5, 4]], []),  # rank 3 stopped inside a step
        ([[5, 5], [5, 4], [5, 5]], [0, 3, 0, 3]),
    ],
)
def test_sources_of_shards_have_finished_the_same_step(
    others: list[list[int]], sources: list[int]
) -> None:
    first, *rest = [{"optimizer": [*counts, True]} for counts in others]
    steps: Any = [first, {}, *rest]
    assert choose_sources(ROWS, steps, {1}) == sources


def test_a_model_on_several_meshes_is_not_sharded_again() -> None:
    mesh = SimpleNamespace(mesh="two dimensions")
    group = SimpleNamespace(mesh_info=mesh, post_forward_mesh_info=SimpleNamespace(mesh="one"))
    state = SimpleNamespace(_fsdp_param_groups=[group], _mp_policy=None)
    with pytest.raises(pickle.PicklingError, match="cannot shard it again on several meshes"):
        sharded_pickling._describe_state(state, mesh)


def test_there_are_no_copies_over_nccl() -> None:
    lines: list[str] = []
    unused: Any = None
    group: Any = SimpleNamespace(backend="nccl", lasts=False)
    ShardCopies({}, group, unused, 0, 2, lines.append).begin_cell("cell", 100)
    assert lines == ["no copies of shards: a heal over nccl cannot use them"]


def test_copies_of_different_steps_restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    objects: Any = {"optimizer": optim.SGD(model.parameters(), lr=1.0)}
    unused: Any = None
    group: Any = SimpleNamespace(step_counts=SimpleNamespace(total=lambda _: 6))
    copies = ShardCopies({}, group, unused, 0, 3, unused)
    assert "there is no copy of it yet" in copies.why_not(objects, [1])
    copies._copies = [Copy(4, references={path: ref(each) for path, each in objects.items()})]
    assert copies.why_not(objects, [1]) == ""
    assert copies.why_not(objects, [0, 1]) == (
        ", and rank 1, which had the copy of rank 0, died too"
    )
    assert "no copy" in copies.why_not({"optimizer": optim.SGD(model.parameters(), lr=1.0)}, [1])
    gathered = [[[4], 6], [[], 0], [[5], 6]]
    monkeypatch.setattr(shard_copies, "gather_objects", lambda _: gathered)
    with pytest.raises(RequestError, match=r"no copies of the same step .*: run `%ddp restart"):
        copies.restore(objects, {1}, lambda _: None)


def test_a_generator_that_is_whole_for_a_moment_is_copied_as_its_shards() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        generator: Any = fully_shard(nn.Linear(2, 2))
        sharded = [*generator.parameters()]
        namespace: Any = {"generator": generator}
        objects = spread_objects(namespace, BoundObjects())
        before = pack(objects)
        # without a backward pass, the parameters of the root stay whole
        generator(torch.ones(1, 2)).detach()
        assert not any(isinstance(each, DTensor) for each in generator.parameters())
        assert [*spread_objects(namespace, BoundObjects())] == ["generator"]
        assert [*map(id, dtensors_in(objects))] == [*map(id, sharded)]
        assert torch.equal(pack(objects), before)
    finally:
        dist.destroy_process_group()


@pytest.mark.process
def test_a_heal_without_sharded_models_does_not_import_fsdp() -> None:
    code = (
        "import sys\nfrom nbddp.worker.heal.sharded_pickling import shard_again\n"
        "shard_again([])\nprint('torch.distributed.fsdp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
