"""Process groups, and the models in them, work again after an interrupt, with the same objects."""

import re

import pytest
import torch
from conditions import interrupt_at, run_and_interrupt, when
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from sharded_models import MESHES, SHARDED

from nbddp import CellFailedError, CellInterruptedError
from nbddp.worker.cell import last_step
from nbddp.worker.process_group import revival
from nbddp.worker.watch.flight_recorder import count_started, group_name, read_entries

pytestmark = pytest.mark.usefixtures("lasting_group")

GROUPS = """
import torch.distributed._functional_collectives as funcol
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
world = dist.group.WORLD
pair = dist.new_group([0, 1], group_desc="pair")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("row", "one"))
local = dist.new_group([rank], timeout=timedelta(seconds=7), use_local_synchronization=True)
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(4, 4), process_group=pair)
optimizer = torch.optim.AdamW(model.parameters())
objects = [id(each) for each in (world, pair, mesh, model)]
def use():
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.all_reduce(x, group=pair)
    x = funcol.all_reduce(x, "sum", (mesh, 0)) + funcol.all_reduce(x, "sum", pair)
    x = x + funcol.all_reduce(x, "sum", mesh["one"])
    dist.all_reduce(x, group=local)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert objects == [id(each) for each in (dist.group.WORLD, pair, mesh, model)]
    seconds = local._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    assert seconds == 7
    assert dist.get_process_group_ranks(pair) == [0, 1] and pair.group_desc == "pair"
    return x.sum().item()
"""
WAIT = "open(f'begun{rank}', 'w').close()\nif rank == 1:\n    import time; time.sleep(60)\n"


FAIL = "if rank == 1: raise ValueError('on purpose')\ndist.barrier()"


def notices(capsys: Capture) -> list[str]:
    """Return nbddp's lines, without those that only a busy machine adds."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "nbddp: " in line and "interrupt again" not in line]


def interrupt(group: Ranks, code: str) -> None:
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, code)


def test_groups_and_the_models_in_them_live_on_after_interrupts(
    group: Ranks, capsys: Capture
) -> None:
    group.run(imported(count_started, group_name, read_entries))
    group.run(GROUPS + "before = use()")
    capsys.readouterr()
    for wait in ("dist.barrier()", "dist.all_reduce(torch.ones(1), group=pair)", "use()"):
        interrupt(group, WAIT + wait)
        group.run("assert use() == before\nother = dist.new_group([0, 1])\ndist.barrier(other)")
        group.run(
            "count = count_started(pair)\ndist.barrier(pair)\n"
            "assert count_started(pair) == count + 1\n"
            "assert group_name(read_entries()[-1]) == '[0, 1]'"
        )
    group.run("weight = model.module.weight.tolist()")
    assert len({str(each) for each in group.pull("weight")}) == 1
    assert "usable" not in capsys.readouterr().out
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run("if rank == 1: raise ValueError('on purpose')\nuse()")
    group.run("assert use() == before")


def check_sharded(group: Ranks, kinds: dict[str, str]) -> None:
    """Interrupt a step of each model at three places. The next steps equal an undisturbed run."""
    meshes = ", ".join(f"{kind!r}: init_device_mesh('cpu', {of})" for kind, of in kinds.items())
    group.run(f"{SHARDED}meshes = {{{meshes}}}")
    for kind in kinds:
        group.run(
            f"wanted, optimizer = build({kind!r})\n"
            "for number in (0, 2, 4, 6): step(wanted, optimizer, number)\n"
            f"net, optimizer = build({kind!r})\nmade = id(net)\nstep(net, optimizer, 0)"
        )
        for number, place in enumerate(["forward", "backward", "gradients"]):
            group.run(f"handle = wait_at({place!r})")
            interrupt(group, f"step(net, optimizer, {2 * number + 1})\ndist.barrier()")
            group.run(f"handle.remove()\nstep(net, optimizer, {2 * number + 2})")
        group.run(
            "assert id(net) == made\n"
            "for one, other in zip(whole(net), whole(wanted)): assert torch.equal(one, other)"
        )


def test_fsdp_and_tensor_parallel_models_train_on_as_without_the_interrupted_steps(
    group: Ranks, capsys: Capture
) -> None:
    check_sharded(group, MESHES[2])
    assert notices(capsys) == []


@pytest.mark.full
def test_models_on_meshes_of_two_dimensions_train_on(
    make_group: MakeRanks, capsys: Capture
) -> None:
    check_sharded(make_group(4), MESHES[4])
    assert notices(capsys) == []


@pytest.mark.gate_runs("one rank")
@pytest.mark.parametrize("failing", ["True", "rank == 1"], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_sharded_model_trains_on_after_an_error(group: Ranks, place: str, failing: str) -> None:
    group.run(
        f"{SHARDED}meshes = {{'dp': init_device_mesh('cpu', (2,))}}\n"
        "wanted, optimizer = build('dp')\n"
        "for number in (0, 2): step(wanted, optimizer, number)\n"
        "net, optimizer = build('dp')\nstep(net, optimizer, 0)\n"
        f"def wait_at(place, raises={failing}):\n"
        "    def fail(*_):\n        if raises: raise ValueError('on purpose')\n"
        "    if place == 'forward': return net[1].up.register_forward_pre_hook(fail)\n"
        "    return net[1].norm.register_full_backward_hook(fail)\n"
        f"handle = wait_at({place!r})"
    )
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run("step(net, optimizer, 1)\ndist.barrier()")
    group.run(
        "handle.remove()\nstep(net, optimizer, 2)\n"
        "for one, other in zip(whole(net), whole(wanted)): assert torch.equal(one, other)"
    )


def test_schedules_of_a_sharded_model_are_equal_after_an_interrupt_between_them(
    group: Ranks, capsys: Capture
) -> None:
    group.run(
        f"{SHARDED}meshes = {{'dp': init_device_mesh('cpu', (2,))}}\n"
        "net, optimizer = build('dp')\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)"
    )
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run(
            "step(net, optimizer, 0)\nif rank == 1: raise ValueError('on purpose')\n"
            "schedule.step()\ndist.barrier()"
        )
    group.run("state = schedule.last_epoch, optimizer.param_groups[0]['lr']")
    first, second = group.pull("state")
    assert first == second
    assert "schedule: set to the values of rank 0" in capsys.readouterr().out


def test_an_interrupted_evaluation_keeps_the_gradients_of_an_earlier_cell(
    make_group: MakeRanks,
) -> None:
    group = make_group(2)
    meshes = ", ".join(f"{each!r}: init_device_mesh('cpu', {of})" for each, of in MESHES[2].items())
    group.run(
        f"{SHARDED}from torch.nn.parallel import DistributedDataParallel as DDP\n"
        f"meshes = {{{meshes}}}\nx = torch.ones(4, 8)\n"
        "def accumulate(net): net(x * (1 + rank)).square().mean().backward()\n"
        "def new(kind):\n"
        "    net, optimizer = build(kind)\n"
        "    return net if kind else DDP(net), optimizer\n"
        "def wait(*_):\n"
        "    open(f'begun{rank}', 'w').close()\n"
        "    if rank == 1: time.sleep(60)\n"
    )
    for kind in ("dp", "tp", ""):
        group.run(
            f"wanted, optimizer = new({kind!r})\naccumulate(wanted)\noptimizer.step()\n"
            f"net, optimizer = new({kind!r})\naccumulate(net)\n"
            "inner = getattr(net, 'module', net)\n"
            "handle = inner[1].up.register_forward_pre_hook(wait)"
        )
        interrupt(group, "with torch.no_grad(): net(x)\ndist.barrier()")
        group.run(
            "assert torch.is_grad_enabled()\nhandle.remove()\noptimizer.step()\n"
            "assert all(map(torch.equal, whole(net), whole(wanted)))\n"
            "inner[1].norm.register_full_backward_hook(wait)"
        )
        interrupt(group, "accumulate(net)\ndist.barrier()")
        group.run("assert all(each.grad is None for each in net.parameters())")


PIPELINE = """
import time
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
torch.manual_seed(9)
layer = torch.nn.Linear(8, 8)
def make():
    global schedule
    stage = PipelineStage(layer, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda a, b: (a - b).square().mean())
make()
def evaluate():
    if rank == 0: schedule.eval(torch.ones(8, 8))
    else: schedule.eval(target=torch.zeros(8, 8))
def step():
    layer.zero_grad()
    if rank == 0: schedule.step(torch.ones(8, 8))
    else: schedule.step(target=torch.zeros(8, 8))
    return layer.weight.grad.clone()
wanted = step()
calls = []
def wait(*_):
    calls.append(1)
    if len(calls) == 3: open(f"begun{rank}", "w").close()
    if rank == 1 and len(calls) == 3: time.sleep(60)
"""


@pytest.mark.skipif(torch.__version__ < "2.10", reason="Gloo ends ranks in any pipeline")
def test_a_pipeline_works_again_after_an_interrupt_and_an_error(group: Ranks) -> None:
    group.run(PIPELINE)
    group.run(
        "def fail(*_):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3 - rank: raise ValueError('on purpose')\n"
        "handle = layer.register_forward_pre_hook(fail)"
    )
    group.failure_of("step()")  # no rank waits for the other
    group.run("handle.remove()\nassert torch.equal(step(), wanted)")
    group.run("calls.clear()\nhandle = layer.register_forward_pre_hook(fail)\nmake()")
    group.failure_of("calls.extend([1] * rank)\nevaluate()")  # of rank 1, while shapes are sent
    group.run("handle.remove()\nevaluate()\nassert torch.equal(step(), wanted)")
    for _ in range(2):
        group.run("calls.clear()\nhandle = layer.register_forward_pre_hook(wait)")
        interrupt(group, "step()\ndist.barrier()")
        group.run("handle.remove()\nassert torch.equal(step(), wanted)")


@pytest.mark.skipif(torch.__version__ < "2.10", reason="Gloo ends ranks in any pipeline")
def test_a_stage_that_is_a_step_behind_is_named(group: Ranks, capsys: Capture) -> None:
    group.run(f"{PIPELINE}optimizers = {{rank: torch.optim.SGD(layer.parameters())}}")
    group.failure_of(
        "step()\nif rank == 1: raise ValueError('on purpose')\noptimizers[rank].step()"
    )
    group.run("step()")
    assert "optimizers[1]: rank 1 is 1 step behind; load a" in capsys.readouterr().out


LOOP = """
import time
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
steps = whole = 0
optimizer.register_step_post_hook(lambda *_: exec("steps += 1", globals()))
def train(count, pause=0.0, mark=""):
    global whole
    for number in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        time.sleep(pause * rank)
        schedule.step()
        whole += 1
        if number == 3: open(f"begun{mark}{rank}", "w").close()
"""


def test_all_ranks_end_an_interrupted_cell_after_the_same_iteration(
    group: Ranks, capsys: Capture
) -> None:
    group.run(LOOP)
    made = 0
    for mark in "abc":
        handle = group.begin(f"train(10_000, 0.02, {mark!r})")
        interrupt_at(group, handle, f"begun{mark}0", f"begun{mark}1")
        assert handle.verdict is not None
        [last] = re.findall(r"^ranks 0-1 interrupted after step (\d+) of", handle.verdict.summary())
        made += int(last)
        assert group.pull("steps, whole, schedule.last_epoch") == [(made, made, made)] * 2
    capsys.readouterr()
    group.run("train(2)")
    assert notices(capsys) == []


def test_a_rank_before_its_first_step_goes_on_to_the_step_of_the_others(
    group: Ranks, capsys: Capture
) -> None:
    group.run(f"{imported(last_step)}last_step.MIN_LIMIT = 10.0\n{LOOP}")
    handle = group.begin(
        "for number in range(10_000):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).square().sum().backward()\n"
        "    open(f'begun{rank}', 'w').close()\n"
        "    if rank == 1 and number == 0: time.sleep(2)\n"
        "    optimizer.step()"
    )
    interrupt_at(group, handle, "begun0", "begun1")
    assert handle.verdict is not None
    assert "ranks 0-1 interrupted after step" in handle.verdict.summary()
    capsys.readouterr()
    group.run("train(1)\nlast_step.MIN_LIMIT = 1.0")
    assert notices(capsys) == []
    first, second = group.pull("steps")
    assert first == second


def test_a_cell_that_hangs_after_some_steps_is_interrupted_at_once(group: Ranks) -> None:
    group.run(LOOP)
    reason = r"interrupted at once \(a rank did not end its step within 1 s\)"
    with pytest.raises(CellInterruptedError, match=reason):
        run_and_interrupt(group, "train(5)\nif rank == 1: time.sleep(60)\ndist.barrier()")
    group.run("train(2)")
    handle = group.begin("train(5)\nopen(f'slept{rank}', 'w').close()\ntime.sleep(60)")
    when(lambda: group.state == "interrupting the cell", group.interrupt)
    interrupt_at(group, handle, "slept0", "slept1")
    assert handle.verdict is not None
    assert "interrupted at once (you interrupted again)" in handle.verdict.summary()


def test_ranks_that_made_uneven_steps_are_named(group: Ranks, capsys: Capture) -> None:
    group.run(
        f"{SHARDED}meshes = {{'dp': init_device_mesh('cpu', (2,))}}\n"
        "net, optimizer = build('dp')\nstep(net, optimizer, 0)"
    )
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run(
            "net(torch.randn(4, 8)).square().mean().backward()\n"
            "if rank == 1: raise ValueError('on purpose')\noptimizer.step()\ndist.barrier()"
        )
    group.run("step(net, optimizer, 2)")
    assert "optimizer: rank 1 is 1 step behind; load a checkpoint" in capsys.readouterr().out


def test_optimizers_are_named_if_all_ranks_stop_between_their_steps(
    group: Ranks, capsys: Capture
) -> None:
    group.run(
        f"{SHARDED}meshes = {{'dp': init_device_mesh('cpu', (2,))}}\n"
        "(net, first), (other, second) = build('dp'), build('dp')\n"
        "def train(stop):\n"
        "    for number in range(3):\n"
        "        step(net, first, number)\n"
        "        if number == stop: raise ValueError('on purpose')\n"
        "        step(other, second, number)\n"
        "    if rank == 1: raise ValueError('on purpose')\n"
        "    dist.barrier()"
    )
    line = "of one iteration: first made a step, and second did not; load a checkpoint if they must"
    for stop in (2, 3):  # the second time, all iterations are whole
        group.failure_of(f"train({stop} if rank == 1 else 3)")
        group.run("dist.barrier()")
        assert (line in capsys.readouterr().out) == (stop == 2)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("handle = optimizer.register_step_pre_hook(fail)", "handle.remove()"),
        ("if rank == 1: optimizer.step = fail", "optimizer.step = step"),
    ],
    ids=["in a step", "before a step"],
)
def test_models_are_equal_after_one_rank_has_failed(
    group: Ranks, capsys: Capture, begin: str, end: str
) -> None:
    group.run(
        f"{LOOP}def fail(*_):\n    if rank == 1: raise ValueError('on purpose')\n"
        f"step = optimizer.step\n{begin}"
    )
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run("train(1)")  # no rank waits for rank 1
    group.run(f"{end}\nweight = model.module.weight.tolist()")
    assert "set to the values of rank 0" in capsys.readouterr().out
    first, second = group.pull("weight")
    assert first == second


def test_a_group_that_not_all_of_its_ranks_have_is_named(
    make_group: MakeRanks, capsys: Capture
) -> None:
    group = make_group(2)  # other tests use up the revivals of their ranks
    group.run("pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])")
    with pytest.raises(CellFailedError, match="on purpose"):
        group.run(
            "if rank == 1:\n    dist.destroy_process_group(other)\n"
            "    raise ValueError('on purpose')\ndist.barrier()"
        )
    group.run("dist.barrier(pair)")
    [line] = notices(capsys)
    assert "usable: other: it was destroyed because some ranks do not have it; make it" in line
    group.assert_works()


def test_a_revival_that_is_interrupted_is_tried_again(make_group: MakeRanks) -> None:
    group = make_group(2)
    group.run(
        f"{imported(revival)}import time\npair = dist.new_group([0, 1])\n"
        "revive = revival.GroupReviver.revive_others\n"
        "def late(*arguments):\n"
        "    open(f'begun{rank}', 'w').close()\n"
        "    if rank == 1: time.sleep(2)\n"
        "    return revive(*arguments)\n"
        "revival.GroupReviver.revive_others = late"
    )
    group.failure_of(FAIL)
    interrupt(group, "pass")
    group.run("revival.GroupReviver.revive_others = revive\ndist.barrier(pair)")


def test_groups_are_new_ones_after_many_interrupts(group: Ranks, capsys: Capture) -> None:
    group.run(
        f"{imported(revival)}from torch.distributed.pipelining import PipelineStage\n"
        "pair = dist.new_group([0, 1])\n"
        "stage = PipelineStage(torch.nn.Linear(2, 2), rank, 2, torch.device('cpu'), group=pair)\n"
        "limit, revival.MAX_DEAD_BACKENDS = revival.MAX_DEAD_BACKENDS, 0\n"
    )
    group.failure_of(FAIL)
    capsys.readouterr()
    group.run(
        "revival.MAX_DEAD_BACKENDS = limit\nassert pair not in dist.distributed_c10d._world.pg_map"
    )
    first, second, third = notices(capsys)
    assert "new ones: after each interrupt torch keeps threads" in first
    assert "usable: pair: it was destroyed together with the default group; make it again" in second
    assert "usable: stage: its group was destroyed together with the default group" in third


@pytest.mark.full
def test_the_checks_of_torch_live_on(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    group = make_group(2)
    group.run("pair = dist.new_group([0, 1])")
    for _ in range(2):
        interrupt(group, f"{WAIT}dist.barrier(pair)")
        group.run("dist.barrier()\ndist.barrier(pair)")
    failure = group.failure_of("dist.all_reduce(torch.ones(1 + rank), group=pair)")
    assert "Detected mismatch between collectives on ranks" in str(failure)


@pytest.mark.full
@pytest.mark.parametrize("dies_in", ["revive_default", "revive_others", "_make_backend"])
def test_a_rank_that_dies_while_groups_connect_is_healed(
    make_group: MakeRanks, dies_in: str
) -> None:
    group = make_group(3)
    group.run(
        f"{imported(revival)}import os\nkept, pair = rank, dist.new_group([0, 1])\n"
        f"if rank == 1: revival.GroupReviver.{dies_in} = lambda *_: os._exit(3)"
    )
    group.failure_of(FAIL)
    assert "rank 1 exited with code 3" in str(group.failure_of("dist.barrier()"))
    group.heal()
    group.run("dist.barrier()")
    assert group.pull("kept") == [0, 1, 2]
