"""Tests that need a GPU: ``pytest -m gpu``."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from drivers.ranks import MakeRanks, Ranks
from processes import wait_until

from nbddp import CellInterruptedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TRAIN = """
torch.manual_seed(0)
layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
model = nbddp.prepare(torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp = nbddp.precision("fp32", max_norm=1.0)
inputs, labels = torch.randn(16, 1, 8, 8, device=device), torch.arange(16, device=device) % 2
for step in range(20):
    with amp.autocast(model):
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
    amp.step(loss, optimizer)
"""


def test_one_rank_over_nccl_reduces_on_its_gpu_and_is_interrupted(make_group: MakeRanks) -> None:
    group = make_group(1)
    assert group.pull("(str(device), dist.get_backend())", rank=0) == ("cuda:0", "nccl")
    group.run("x = torch.ones(4, device=device)\ndist.all_reduce(x)")
    threading.Timer(1.0, group.interrupt).start()
    with pytest.raises(CellInterruptedError):
        group.run("import time\ntime.sleep(60)")
    group.run("dist.all_reduce(x)")
    assert group.pull("x.sum().item()", rank=0) == 4.0


def test_two_nccl_ranks_train_and_an_interrupt_ends_a_hang(make_group: MakeRanks) -> None:
    group = make_group(2, backend="nccl")
    last = f"cuda:{1 % torch.cuda.device_count()}"  # ranks may share a GPU
    assert group.pull("(str(device), dist.get_backend())") == [("cuda:0", "nccl"), (last, "nccl")]
    group.run(TRAIN)
    assert group.pull("type(model.module[1]).__name__") == ["SyncBatchNorm"] * 2
    first, second = group.pull("[p.sum().item() for p in model.parameters()]")
    assert first == second
    pids = group.pids
    for hang in (
        "if rank == 0:\n    dist.barrier()",
        "if rank == 1:\n    dist.all_reduce(x)\n    torch.cuda.synchronize()",
        # the kernel of rank 0 still waits when its cell has ended
        "import time\nif rank == 0:\n    dist.all_reduce(x)\nelse:\n    time.sleep(60)",
        "dist.all_reduce(x[: 2 * rank + 2])\nx.sum().item()",
    ):
        group.run("x = torch.ones(4, device=device)")
        threading.Timer(2.0, group.interrupt).start()
        with pytest.raises(CellInterruptedError):
            group.run(hang)
        assert sums_on_gpu(group) == [2.0, 2.0]
    assert group.pids == pids


def sums_on_gpu(group: Ranks) -> list[float]:
    group.run("ones = torch.ones(1, device=device)\ndist.all_reduce(ones)")
    sums: list[float] = group.pull("ones.item()")
    return sums


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ("None", "collective operation timeout"),
        ("dist.new_group([0, 1])", "collective operation timeout in group [0, 1]"),
    ],
    ids=["default group", "subgroup"],
)
def test_a_collective_that_times_out_fails_the_cell(
    make_group: MakeRanks, pair: str, reason: str
) -> None:
    group = make_group(2, backend="nccl", timeout=5)
    # NCCL connects the ranks in the first collective, which has no timeout
    source = f"x, pair = torch.ones(4, device=device), {pair}\ndist.all_reduce(x, group=pair)\n"
    source += "import time\nif rank == 0:\n    dist.all_reduce(x, group=pair)\n"
    source += "    x.sum().item()\nelse:\n    time.sleep(10)"
    error = group.failure_of(source)
    assert error.rank == 1, "it did not come"
    assert f"NCCL has given up a collective ({reason})" in error.report
    assert sums_on_gpu(group) == [2.0, 2.0]


def test_a_failed_graph_capture_does_not_end_the_rank(make_group: MakeRanks) -> None:
    group = make_group(1, backend="nccl")
    pids = group.pids
    group.failure_of("graph = torch.cuda.CUDAGraph()\ngraph.capture_begin()\nraise ValueError")
    assert group.pids == pids


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_is_healed_with_the_tensors_on_its_gpu(make_group: MakeRanks, backend: str) -> None:
    group = make_group(2, backend=backend)
    group.run(TRAIN)
    before = group.pids
    wait = "import time\nif rank == 0:\n    dist.all_reduce(inputs)\n    inputs.sum().item()\n"
    threading.Timer(2.0, group.kill, [1]).start()
    assert group.failure_of(wait + "else:\n    time.sleep(60)").rank == 1
    assert group.heal().ranks == (1,)
    assert group.pids[0] == before[0]
    first, second = group.pull("[p.sum().item() for p in model.parameters()]")
    assert first == second
    assert sums_on_gpu(group) == [2.0, 2.0]


def test_a_rank_that_fails_an_assert_on_the_gpu_is_healed(make_group: MakeRanks) -> None:
    group = make_group(2, backend="nccl")
    group.run("x = torch.zeros(2, device=device)")
    error = group.failure_of("x[torch.tensor([5 * rank], device=device)].item()\ndist.barrier()")
    assert error.rank == 1
    assert "device-side assert" in error.report
    assert group.dead == (1,)
    group.heal()
    assert sums_on_gpu(group) == [2.0, 2.0]


def test_a_checkpoint_restores_the_random_numbers_of_the_gpu(
    make_group: MakeRanks, tmp_path: Path
) -> None:
    group = make_group(2, backend="nccl")
    save = "saved.save(1, model=model, optimizer=optimizer, asynchronous=True)\nsaved.wait()"
    group.run(f"{TRAIN}saved = nbddp.Checkpoint({str(tmp_path / 'saved')!r})\n{save}")
    draw = "numbers = torch.rand(4, device=device).tolist()"
    group.run(draw)
    numbers = group.pull("numbers")
    group.run(f"saved.resume(model=model, optimizer=optimizer)\n{draw}")
    assert group.pull("numbers") == numbers


TOUCHED = """
import torch
from nbddp import WorkerGroup

if __name__ == "__main__":
    held = torch.ones(1, device="cuda")
    with WorkerGroup(nproc=1) as group:
        for attempt in range(20):
            group.run("x = torch.ones(1, device=device)")
            group.restart()
    print("20 of 20", held.item())
"""


def test_ranks_start_twenty_times_while_the_kernel_uses_cuda(tmp_path: Path) -> None:
    script = tmp_path / "touched.py"
    script.write_text(TOUCHED)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert "20 of 20 1.0" in done.stdout, done.stderr


def test_the_snapshot_shows_the_gpus_memory(make_group: MakeRanks) -> None:
    group = make_group(1)
    group.run("x = torch.ones(1 << 20, device=device)")
    assert wait_until(lambda: group.snapshot().ranks[0].gpu_memory >= 4 << 20)


def test_gpu_out_of_memory_report_names_rank_line_and_tensors(make_group: MakeRanks) -> None:
    group = make_group(1)
    group.run("big = torch.ones(1 << 26, device=device)")
    error = group.failure_of("def grow():\n    return torch.ones(1 << 50, device=device)\ngrow()")
    assert re.fullmatch(
        "rank 0: OutOfMemoryError: CUDA out of memory.*, line 2", str(error), re.DOTALL
    )
    assert "big 256 MiB (float32 [67108864])" in error.report
    assert "this rank: 256 MiB" in error.report
