"""Models and optimizers are used again after a failure, in any container of the user."""

import pytest
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from syrupy.assertion import SnapshotAssertion

from nbddp import CellFailedError
from nbddp.worker.process_group import migration
from nbddp.worker.process_group.object_collectives import broadcast_tensors, gather_objects
from nbddp.worker.watch.flight_recorder import count_started

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
MESH = "from torch.distributed.tensor import Shard, distribute_tensor\n"
STEP = (
    "def step(model, optimizer):\n"
    "    optimizer.zero_grad()\n"
    "    model(torch.randn(8, 4)).square().sum().backward()\n"
    "    optimizer.step()\n"
)


def lose_the_group(group: Ranks) -> None:
    """Fail on one rank while the others wait for it: the group gets new connections."""
    with pytest.raises(CellFailedError, match="ValueError: on purpose"):
        group.run("if rank == 1: raise ValueError('on purpose')\ndist.barrier()")


def destroy_the_group(group: Ranks) -> None:
    group.run_cell("assert not dist.is_initialized()", needs_group=False)


def remarks(capsys: Capture) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [line.partition("nbddp: ")[2] for line in lines if "nbddp: " in line]


def taken_along(capsys: Capture) -> list[str]:
    return [line.partition(": ")[0] for line in remarks(capsys)]


def agree(group: Ranks, *expressions: str) -> bool:
    one, *others = group.pull(f"({', '.join(expressions)},)")
    return all(other == one for other in others)


def differ(model: str) -> str:
    """Return code after which the ranks have different parameters of a model."""
    return f"\nwith torch.no_grad(): next({model}.parameters()).add_(rank)\n"


MADE = {  # code that makes a model and an optimizer, a step of them, the model, and its name
    "object": (
        "class Trainer:\n    def __init__(self):\n"
        "        self.model = DDP(torch.nn.Linear(4, 4))\n"
        "        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)\n"
        "trainer = Trainer()",
        "step(trainer.model, trainer.optimizer)",
        "trainer.model",
        "trainer.model",
    ),
    "closure": (
        "def make():\n    inner = DDP(torch.nn.Linear(4, 4))\n"
        "    optimizer = torch.optim.Adam(inner.parameters())\n"
        "    def train(): step(inner, optimizer)\n"
        "    def get(): return inner\n    return train, get\n"
        "train, get = make()",
        "train()",
        "get()",
        "a DDP model (Linear)",
    ),
    "optimizer of two groups": (
        "model = DDP(torch.nn.Linear(4, 4))\nweight, bias = model.parameters()\n"
        "groups = [{'params': [weight], 'lr': 0.1}, {'params': [bias]}]\n"
        "optimizer = torch.optim.SGD(groups, lr=0.01)",
        "step(model, optimizer)",
        "model",
        "model",
    ),
    "static graph": (
        "model = DDP(torch.nn.Linear(4, 4), static_graph=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "step(model, optimizer)",
        "model",
        "model",
    ),
    "zero": (
        "model = DDP(torch.nn.Linear(4, 4))\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)",
        "step(model, optimizer)",
        "model",
        "model",
    ),
}


@pytest.mark.parametrize(("made", "step", "model", "name"), MADE.values(), ids=MADE)
def test_model_and_optimizer_of_any_kind_move_to_the_new_process_group(
    group: Ranks, capsys: Capture, made: str, step: str, model: str, name: str
) -> None:
    group.run(f"{DDP}{STEP}torch.manual_seed(rank)\n{made}\n{step}")
    lose_the_group(group)
    group.run(f"for _ in range(3): {step}")
    assert taken_along(capsys) == []  # they were equal on all ranks
    assert agree(group, f"[p.tolist() for p in {model}.parameters()]")
    group.run(differ(model))
    lose_the_group(group)
    group.run(step)
    assert taken_along(capsys) == [name]
    assert agree(group, f"[p.tolist() for p in {model}.parameters()]")


def test_ranks_that_differ_get_the_values_of_most_ranks(
    make_group: MakeRanks, capsys: Capture
) -> None:
    group = make_group(3)
    group.run(
        f"{DDP}{STEP}torch.manual_seed(rank)\n"
        "model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\nstep(model, optimizer)"
    )
    lose_the_group(group)
    group.run("step(model, optimizer)")
    assert remarks(capsys) == []  # running statistics differ between two forward passes
    group.run("if rank == 0: optimizer.step()")
    lose_the_group(group)
    group.run("state = str(optimizer.state_dict()), str([*model.parameters()])")
    assert agree(group, "state")
    [line] = remarks(capsys)
    assert line.startswith("model, optimizer: set to the values of rank 1, because the ranks ")


def test_optimizers_of_which_each_rank_has_a_part_keep_it(group: Ranks, capsys: Capture) -> None:
    group.run(
        f"{DDP}{STEP}class Parted(torch.optim.Optimizer):\n"
        "    def __init__(self, parameters): super().__init__(parameters, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for index, each in enumerate(self.param_groups[0]['params']):\n"
        "            each.sub_(each.grad)\n"
        "            if index == rank: self.state[each]['momentum'] = each.grad.clone()\n"
        "model = DDP(torch.nn.Linear(4, 4))\noptimizer = Parted(model.parameters())\n"
        "step(model, optimizer)\nbefore = str(optimizer.state)"
    )
    lose_the_group(group)
    group.run("assert 'momentum' in before and str(optimizer.state) == before")
    assert remarks(capsys) == []


def test_gradient_accumulation_restarts_and_the_scaler_is_copied_from_rank_0(
    group: Ranks, capsys: Capture
) -> None:
    """The gradients of its micro-steps are lost, and the ranks had done different numbers."""
    group.run(
        f"{DDP}model = DDP(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)\n"
        "amp = nbddp.precision('bf16', accumulate=4)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\n"
        "def micro_step():\n    with amp.autocast(model):\n"
        "        loss = model(torch.randn(8, 4)).square().mean()\n"
        "    return amp.step(loss, optimizer)\n"
        "for _ in range(1 + rank): micro_step()\n"
        "if rank == 1:\n    scaler.scale(torch.ones(1))\n    scaler.update(2.0)\n"
        "    scaler.unscale_(optimizer)"
    )
    lose_the_group(group)
    group.run("stepped = [micro_step() for _ in range(4)]")
    assert taken_along(capsys) == ["scaler"]
    assert group.pull("stepped, scaler.get_scale()") == [([False] * 3 + [True], 8.0)] * 2
    group.run("scaler.scale(torch.ones(1))\nscaler.unscale_(optimizer)")
    assert agree(group, "[p.tolist() for p in model.parameters()]")


def test_communication_hooks_move_to_the_new_process_group(group: Ranks) -> None:
    group.run(
        f"{DDP}from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "calls = []\ndef hook(state, bucket):\n    calls.append(1)\n"
        "    return default_hooks.fp16_compress_hook(state, bucket)\n"
        "model = DDP(torch.nn.Linear(4, 4))\nmodel.register_comm_hook(None, hook)\n"
        "model(torch.ones(1, 4)).sum().backward()\nassert calls"
    )
    lose_the_group(group)
    group.run("calls.clear()\nmodel(torch.ones(1, 4)).sum().backward()\nassert calls")


NAMED = {  # objects that are not moved, by reason
    "the ranks have different ones": (
        "import copy\nmodel = DDP(torch.nn.Linear(4, 4))\nlast = DDP(torch.nn.Linear(4, 2))\n"
        "if rank == 1: extra = copy.deepcopy(last)"
    ),
    "it was on a group of its own": (
        "pair = dist.new_group([0, 1], group_desc='pair')\n"
        "model = DDP(torch.nn.Linear(4, 4), process_group=pair)\n"
        f"{MESH}mesh = dist.init_device_mesh('cpu', (2, 1), mesh_dim_names=('row', 'one'))\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "parts, line = [torch.nn.Linear(4, 4) for _ in '01'], dist.init_device_mesh('cpu', (2,))\n"
        "for each in parts: parallelize_module(each, mesh['one'], ColwiseParallel())\n"
        "del each\nfully_shard(parts[1], mesh=mesh['row'])\n"
        "usable, lost = (distribute_tensor(torch.ones(2), each) for each in (line, mesh['one']))"
    ),
    "it cannot be bound": (
        "class Odd(DDP):\n    def __setstate__(self, state):\n"
        "        if rank == 1: raise KeyError('odd')\n        super().__setstate__(state)\n"
        "odd = Odd(torch.nn.Linear(4, 2))\nmodel = DDP(torch.nn.Linear(4, 4))"
    ),
}


@pytest.mark.parametrize("made", NAMED.values(), ids=NAMED)
def test_objects_that_cannot_move_to_the_new_group_are_named(
    group: Ranks, capsys: Capture, snapshot: SnapshotAssertion, made: str
) -> None:
    group.run(f"{DDP}{made}{differ('model')}")
    lose = destroy_the_group if "pair" in made else lose_the_group
    lose(group)
    group.run("if 'pair' not in globals(): model(torch.ones(1, 4)).sum().backward()")
    assert remarks(capsys) == snapshot
    group.assert_works()
    if "pair" in made:
        with pytest.raises(CellFailedError, match=r"^ranks 0-1: ValueError") as failed:
            group.run("parts[1](torch.ones(1, 4)).sum().backward()")
        advice = failed.value.report.splitlines()[-1]
        assert advice == "`parts[1]` is on the old process group: create it again."


def test_failed_migration_is_reported_once_and_the_next_cell_runs(
    group: Ranks, capsys: Capture
) -> None:
    group.run(
        f"{DDP}model = DDP(torch.nn.Linear(4, 4))\n{imported(migration)}"
        "def broken(*_): raise MemoryError('no room')\n"
        f"if rank == 1: migration.broadcast_tensors = broken{differ('model')}"
    )
    lose_the_group(group)
    with pytest.raises(CellFailedError, match=r"^rank 1: MemoryError: no room"):
        group.run("dist.barrier()")
    group.run("dist.barrier()")
    [line] = remarks(capsys)
    assert " model: " in line


def test_models_meshes_and_functions_use_a_later_group(group: Ranks, capsys: Capture) -> None:
    group.run(
        f"{DDP}{MESH}model = DDP(torch.nn.Linear(4, 4))\n"
        "import importlib, torch.distributed.nn.functional as functional\n"
        "importlib.reload(functional)  # a rank of a test has imported it before it had a group\n"
        "def add(x, group=dist.group.WORLD): dist.all_reduce(x, group=group)\n"
        "def multiply():\n"
        "    mesh = dist.DeviceMesh.from_group(dist.new_group([0, 1]), 'cpu')\n"
        "    a, b = (distribute_tensor(torch.ones(2, 2), mesh, [Shard(dim)]) for dim in (1, 0))\n"
        "    return (a @ b).full_tensor().sum()"
    )
    use = "x = torch.ones(1)\nfunctional.reduce(x, 0), add(x)\nassert x == 2 and multiply() == 8"
    group.run(use)
    destroy_the_group(group)
    group.run(f"{use}\nmodel(torch.ones(1, 4)).sum().backward()")
    assert taken_along(capsys) == []


def test_ranks_without_models_exchange_two_messages(group: Ranks) -> None:
    count = "count_started()"
    group.run(imported(gather_objects) + imported(count_started) + "before = " + count)
    group.run(f"gather_objects(None)\none_exchange = {count} - before")
    lose_the_group(group)
    group.run(f"regroup = {count}")
    assert group.pull("2 * one_exchange == regroup > 0") == [True, True]


def test_gather_objects_accepts_objects_of_any_length(make_group: MakeRanks) -> None:
    group = make_group(3)
    group.run(imported(gather_objects))
    group.run("long, none = gather_objects('ä' * 1000 * (2 - rank)), gather_objects(None)")
    assert group.pull("long, none") == [(["ä" * 2000, "ä" * 1000, ""], [None] * 3)] * 3


def test_broadcast_tensors_sends_all_dtypes_and_layouts(group: Ranks) -> None:
    group.run(
        imported(broadcast_tensors) + "def kinds(seed):\n"
        "    torch.manual_seed(seed)\n"
        "    return [torch.rand(3) < 0.5, torch.randn(2, 3, dtype=torch.float64), torch.zeros(0),\n"
        "            torch.randn(5).to(torch.float16), torch.randn(4, 5).t(), torch.tensor(seed),\n"
        "            torch.randn(7, dtype=torch.complex64), torch.randn(2500000), torch.rand(1)]\n"
        "mine, theirs = kinds(rank), kinds(1)\nbroadcast_tensors(mine, 1)"
    )
    same = "all(map(torch.equal, mine, theirs))"
    assert group.pull(f"{same}, not torch.equal(kinds(0)[1], theirs[1])") == [(True, True)] * 2


def test_garbage_models_are_not_moved_and_block_no_others(group: Ranks, capsys: Capture) -> None:
    group.run(f"{DDP}import gc\ngc.disable()\nkept = [DDP(torch.nn.Linear(4, n)) for n in (2, 4)]")
    group.run("for each in kept: each.me = each\ndel each\nmodel = DDP(torch.nn.Linear(4, 4))")
    group.run(f"if rank == 1:\n    kept.pop()\n    gc.collect()\nkept.clear(){differ('model')}")
    lose_the_group(group)
    group.run("model(torch.ones(1, 4)).sum().backward()\ngc.enable()")
    assert taken_along(capsys) == ["model"]


@pytest.mark.parametrize("failing", ["True", "rank == 1"], ids=["all ranks", "one rank"])
def test_a_model_trains_on_after_an_error_in_its_backward(
    group: Ranks, capsys: Capture, failing: str
) -> None:
    group.run(
        f"{DDP}{STEP}model = DDP(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    )
    with pytest.raises(CellFailedError, match="ValueError: on purpose"):
        group.run(
            f"def fail(grad):\n    if {failing}: raise ValueError('on purpose')\n"
            "x = torch.ones(2, 4, requires_grad=True)\nx.register_hook(fail)\n"
            "model(x).sum().backward()"
        )
    group.run("step(model, optimizer)\nstep(model, optimizer)")
    assert taken_along(capsys) == []
    assert agree(group, "model.module.weight.tolist()")


def test_an_error_in_a_backward_without_ddp_keeps_the_group(group: Ranks) -> None:
    group.run("pair = dist.new_group([0, 1])\nx = torch.ones(2, requires_grad=True)")
    with pytest.raises(CellFailedError, match="ZeroDivisionError"):
        group.run("x.register_hook(lambda grad: 1 / 0)\nx.sum().backward()")
    group.run("dist.barrier(group=pair)")
