"""Ranks with ``--backend shm``: right results, and a clean end of every failure."""

import os
import re
import signal
from contextlib import suppress
from functools import partial

import psutil
import pytest
from conditions import interrupt_at, when
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from random_collectives import compare

from nbddp import CellFailedError
from nbddp.worker.watch import flight_recorder

COLLECTIVES = int(os.environ.get("NBDDP_SHM_COLLECTIVES", "60"))
SEED = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
GROUPS = """
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
pair = dist.new_group([0, 1], group_desc="pair")
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
def use():
    x = torch.ones(2)
    dist.all_reduce(x)
    if rank < 2:
        dist.all_reduce(x, group=pair)
    x = funcol.all_reduce(x, "sum", (mesh, 0)) + 0
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return x.sum().item()
"""
BEGUN = "open(f'begun{rank}', 'w').close()\n"
WAIT = f"{BEGUN}if rank == 1:\n    import time; time.sleep(60)\n"


@pytest.fixture
def shm_group(make_group: MakeRanks) -> Ranks:
    return make_group(2, backend="shm")


@pytest.mark.gate_runs("2", "3")
@pytest.mark.parametrize("world_size", range(2, 9))
def test_random_collectives_have_the_results_of_gloo(
    make_group: MakeRanks, world_size: int
) -> None:
    group = make_group(world_size, backend="shm")
    assert group.evaluate("dist.get_backend()") == ["shm"] * world_size
    group.run(f"{imported(compare)}compare({COLLECTIVES}, seed={10 * SEED + world_size})")


def test_types_that_gloo_does_not_have_are_sent_and_reduced(shm_group: Ranks) -> None:
    shm_group.run(
        "for dtype in (torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16):\n"
        "    own = torch.arange(rank, rank + 6).to(dtype)\n"
        "    found = [torch.empty_like(own) for _ in range(2)]\n"
        "    dist.all_gather(found, own)\n"
        "    for number, each in enumerate(found):\n"
        "        expected = torch.arange(number, number + 6).to(dtype)\n"
        "        assert each.view(torch.uint8).equal(expected.view(torch.uint8)), dtype\n"
        "flags, wave = torch.tensor([rank == 1, False]), torch.tensor([1j, rank + 1.0])\n"
        "dist.all_reduce(flags)\ndist.all_reduce(wave, dist.ReduceOp.AVG)\n"
        "assert flags.tolist() == [True, False] and wave.tolist() == [1j, 1.5]\n"
        "bits = torch.tensor([1 + rank])\ndist.all_reduce(bits, dist.ReduceOp.BXOR)\n"
        "assert bits.item() == 3"
    )


def test_groups_live_on_after_interrupts_in_each_kind_of_wait(
    shm_group: Ranks, capsys: Capture
) -> None:
    group = shm_group
    group.run(GROUPS + "before = use()")
    waits = ("dist.barrier()", "dist.all_reduce(torch.ones(1), async_op=True).wait()", "use()")
    for wait in (*waits, "dist.recv(torch.ones(1), 1)", "dist.new_group([0, 1])"):
        interrupt_at(group, group.begin(WAIT + wait), "begun0", "begun1")
        group.run("import os; os.unlink(f'begun{rank}')\nassert use() == before")
    group.run("weight = model.module.weight.tolist()")
    assert len({str(each) for each in group.pull("weight")}) == 1
    assert "usable" not in capsys.readouterr().out


def test_a_death_frees_the_others_at_once_and_the_groups_live_on(make_group: MakeRanks) -> None:
    group = make_group(3, backend="shm")
    group.run(GROUPS + "before = use()")
    for die in (signal.SIGKILL, signal.SIGSTOP):
        killing = when(partial(is_stopped, group.pids[2]), partial(kill, group.pids[2]))
        with pytest.raises(CellFailedError, match=r"rank 2 .*SIGKILL"):
            group.run(f"import os\nif rank == 2: os.kill(os.getpid(), {int(die)})\nuse()")
        killing.join()
        group.heal(donor=0)
        group.run("assert use() == before")


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, or has ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_different_calls_are_refused_with_both_of_them(shm_group: Ranks) -> None:
    code = (
        "x = torch.ones(3)\nif rank: dist.all_reduce(x)\n"
        "else: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))"
    )
    with pytest.raises(CellFailedError) as failed:
        shm_group.run(code)
    report = str(failed.value)
    assert "rank 0 called all_gather(2 float32) number 1" in report
    assert "rank 1 called all_reduce(sum, 3 float32) number 1" in report
    shm_group.assert_works()


def test_a_wait_ends_with_the_timeout_of_the_group(make_group: MakeRanks) -> None:
    group = make_group(3, backend="shm", timeout=2.0)
    code = "if rank != 1: dist.barrier()\nelse: import time; time.sleep(60)"
    error = group.failure_of(code)
    assert re.match("rank 1 .*barrier #1", str(error))
    assert re.search(r"Timed out waiting 2 s in barrier.*\(a consequence of rank 1\)", error.report)
    assert "for ranks" not in error.report, "rank 2 has come, too"
    group.assert_works()


def test_a_hang_names_the_collective_of_each_rank(shm_group: Ranks) -> None:
    shm_group.run(imported(flight_recorder))
    shm_group.run(
        "dist.barrier()\nx = torch.ones(4)\ndist.all_reduce(x)\n"
        "if rank == 0: dist.send(x, 1)\nelse: dist.recv(x, 0)\n"
        "first, second, third = flight_recorder.read_entries()[-3:]\n"
        "assert [each['name'] for each in (first, second)] == ['barrier', 'all_reduce']\n"
        "assert third['name'] in ('send', 'recv') and third['is_p2p']\n"
        "assert flight_recorder.format_inputs(second) == 'float32 [4]'\n"
        "assert all(each['retired'] and each['duration_ms'] > 0 for each in (first, third))\n"
        "assert flight_recorder.count_started() == 2"
    )


def test_models_train_as_with_gloo_with_as_many_collectives_in_shared_memory(
    make_group: MakeRanks,
) -> None:
    found = {}
    for backend in ("gloo", "shm"):
        group = make_group(2, backend=backend)
        group.run(f"{imported(flight_recorder)}{TRAIN}")
        results, backends = group.pull("(results, backends)", rank=0)
        assert backends == {backend}
        found[backend] = results
        group.close()
    assert found["shm"] == found["gloo"]
    assert len(found["shm"]) == 5
    assert all(count > 3 for _, count in found["shm"].values())


def test_trackers_of_memory_do_not_count_what_the_ranks_share(shm_group: Ranks) -> None:
    shm_group.run(
        "from torch.distributed._tools.mem_tracker import MemTracker\n"
        "with MemTracker() as tracker:\n"
        "    x = torch.ones(100_000)\n"
        "    dist.all_reduce(x)\n"
        "peak = tracker.get_tracker_snapshot('peak')[torch.device('cpu')]['Total']\n"
        "assert peak == x.nbytes, peak"
    )


def test_groups_that_ranks_call_in_different_orders_do_not_wait_for_each_other(
    shm_group: Ranks,
) -> None:
    shm_group.run(
        "groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])]\n"
        "x = [torch.full((300_000,), number + 1.0) for number in range(3)]\n"
        "order = [0, 1, 2] if rank == 0 else [2, 1, 0]\n"
        "works = [dist.all_reduce(x[at], group=groups[at], async_op=True) for at in order]\n"
        "for work in works:\n    work.wait()\n"
        "assert [each.unique().tolist() for each in x] == [[2], [4], [6]]"
    )


def test_what_shm_cannot_send_is_refused(shm_group: Ranks) -> None:
    with pytest.raises(CellFailedError, match="only dense tensors on the CPU, not one on meta"):
        shm_group.run("dist.all_reduce(torch.ones(2, device='meta'))")
    with pytest.raises(CellFailedError, match="a process that a rank has forked cannot use"):
        shm_group.run(
            "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(1) as pool:\n"
            "    pool.apply(dist.barrier)"
        )
    shm_group.run(
        "from pathlib import Path\nfrom torch.utils.data import DataLoader, Dataset\n"
        "def mapped(): return Path('/proc/self/maps').read_text().count('nbddp-shm')\n"
        "class Mapped(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return mapped()\n"
        "loader = DataLoader(Mapped(), num_workers=2, multiprocessing_context='fork')\n"
        "assert mapped() == 1 and torch.cat([*loader]).tolist() == [0] * 8"
    )
    shm_group.assert_works()


def test_a_wrong_rank_or_reduction_is_refused_before_the_call(shm_group: Ranks) -> None:
    shm_group.run(
        "import pytest\nx = torch.ones(2)\n"
        "for call in (dist.broadcast, dist.reduce, dist.send, dist.recv):\n"
        "    with pytest.raises(ValueError, match='a group of 2 ranks has no rank 9'):\n"
        "        call(x, 9)\n"
        "with pytest.raises(ValueError, match='cannot reduce torch.float32 by band'):\n"
        "    dist.all_reduce(x, dist.ReduceOp.BAND)\n"
        "dist.all_reduce(x)\nassert x.tolist() == [2, 2]"
    )


def test_groups_used_in_inference_mode_work_outside_it(shm_group: Ranks) -> None:
    shm_group.run(
        "x = torch.ones(50_000)\n"
        "for mode in (True, False):\n"
        "    with torch.inference_mode(mode):\n"
        "        group = dist.new_group([0, 1]) if mode else group\n"
        "        for each in 2 * [dist.group.WORLD, group]:\n"
        "            dist.all_reduce(x, group=each)\n"
        "assert x.unique().tolist() == [256]"
    )


def test_a_collective_of_a_signal_handler_in_another_one_is_refused(shm_group: Ranks) -> None:
    with pytest.raises(CellFailedError, match="a signal handler has called a collective inside"):
        shm_group.run(
            "import os, signal, time\nfrom threading import Timer\n"
            "signal.signal(signal.SIGUSR1, lambda *_: dist.barrier())\n"
            "if rank == 1: Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()\n"
            "else: time.sleep(60)\n"
            "dist.barrier()"
        )
    shm_group.assert_works()


def test_a_compiled_ddp_model_trains(shm_group: Ranks) -> None:
    shm_group.run(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))\n"
        "model = torch.compile(DDP(inner), backend='eager')\n"
        "for _ in range(2):\n"
        "    model(torch.randn(3, 4)).square().sum().backward()\n"
        "grads = [each.grad.tolist() for each in model.parameters()]"
    )
    first, second = shm_group.pull("grads")
    assert first == second


def test_ranks_with_another_backend_load_nothing_of_shm(group: Ranks) -> None:
    group.run("import sys\nfound = [each for each in sys.modules if 'extensions.shm.' in each]")
    assert group.pull("found", rank=0) == []
    with pytest.raises(CellFailedError, match=r"with gloo, .* `--backend shm`"):
        group.run("dist.new_group(backend='shm')")


TRAIN = """
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*[
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)
    ])

def train(model, optimizer=torch.optim.AdamW):
    optimizer = optimizer(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    first = next(model.parameters())
    first = first.full_tensor() if hasattr(first, "full_tensor") else first
    return first.detach().double().sum().item()

mesh = init_device_mesh("cpu", (world_size,))
sharded, parallel = blocks(), blocks()
for block in sharded:
    fully_shard(block, mesh=mesh)
for block in parallel:
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
def zero(parameters, lr):
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)
def call_functional():
    x, group = torch.ones(4), (mesh, 0)
    done = [
        funcol.all_reduce(x, "sum", group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.broadcast(x, 0, group),
        funcol.all_to_all_single(x, None, None, group),
    ]
    return sum(each.sum().item() for each in done)

def counted(run):
    before = len(flight_recorder.read_entries())
    result, entries = run(), flight_recorder.read_entries()[before:]
    backends.update(each["backend"] for each in entries)
    return result, len(entries)

backends = set()
results = {
    "DDP": counted(lambda: train(DDP(blocks()))),
    "FSDP2": counted(lambda: train(sharded)),
    "tensor parallelism": counted(lambda: train(parallel)),
    "ZeRO": counted(lambda: train(DDP(blocks()), zero)),
    "functional collectives": counted(call_functional),
}
"""
