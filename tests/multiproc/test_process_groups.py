"""Process groups that a cell creates itself, in its rank and in its child processes."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from conditions import interrupt_at
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from processes import free_port

from nbddp import CellFailedError
from nbddp.record.cell import CellResult
from nbddp.worker.process_group import process_group

pytestmark = pytest.mark.usefixtures("lasting_group")

# in the shape of the well-known tutorials: every process says its place and where to meet
TUTORIAL = """
def work(rank, size):
    import os, torch, torch.distributed as dist
    if {port}:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
    dist.init_process_group("gloo", init_method="{how}" or None, rank=rank, world_size=size)
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    assert total.item() == 3
    dist.destroy_process_group()

work(rank, world_size)
"""


@pytest.fixture
def own_group(make_group: MakeRanks) -> Ranks:
    return make_group(2)


def run_bare(group: Ranks, source: str, ranks: tuple[int, ...] | None = None) -> CellResult:
    return group.run_cell(source, needs_group=False, ranks=ranks)


# A pasted script. Its model and optimizer stay alive, and with them its process group.
PASTED = """
import time
begin = lambda: open(f"begun{rank}", "w").close()
dist.init_process_group("gloo"INIT)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
step()
ENDS
step()
dist.destroy_process_group()
"""


def pasted(ends: str = "pass", init: str = "") -> str:
    return PASTED.replace("ENDS", ends).replace("INIT", init)


def run_until_stopped(group: Ranks, source: str) -> None:
    """Run a cell with ``--no-init``, and interrupt it when both ranks have begun."""
    interrupt_at(group, group.begin(source, needs_group=False), "begun0", "begun1")


# ---- in the ranks themselves


def test_init_arguments_and_variables_override_rank_and_world_size(group: Ranks) -> None:
    run_bare(
        group,
        "import os\nassert dist.is_torchelastic_launched()\n"
        "dist.init_process_group('gloo', rank=world_size - 1 - rank, world_size=world_size)\n"
        "by_argument = dist.get_rank()\ndist.destroy_process_group()\n"
        "os.environ['RANK'] = str(1 - rank)\ndist.init_process_group('gloo')\n"
        "by_variable = dist.get_rank()\ndist.destroy_process_group()\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "alone = (dist.get_rank(), dist.get_world_size())\ndist.destroy_process_group()\n"
        "os.environ['RANK'] = str(rank)",
    )
    assert group.pull("(by_argument, by_variable, alone)") == [(1, 1, (0, 1)), (0, 0, (0, 1))]


def test_tutorial_function_can_init_and_destroy_repeatedly(own_group: Ranks) -> None:
    by_address = [f"tcp://{host}:{free_port()}" for host in ("localhost", "127.0.0.1")]
    for how, port in [*((address, 0) for address in by_address), ("", 0), ("", free_port())]:
        for _ in range(2):
            run_bare(own_group, TUTORIAL.format(how=how, port=port))
    own_group.assert_works()


def test_ranks_can_use_a_store_of_another_process(group: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_bare(group, TUTORIAL.format(how=f"tcp://127.0.0.1:{store.port}", port=0))
    assert store.num_keys() >= 2


def test_new_group_on_one_rank_does_not_break_later_groups(group: Ranks) -> None:
    group.run("if rank == 0: dist.new_group([0])")
    group.run(
        "pair = dist.new_group([0, 1])\nx = torch.ones(1)\n"
        "dist.all_reduce(x, group=pair)\nassert x == 2"
    )


RAISE = "raise ValueError('on purpose')"
FAILS = {  # code that fails, and its error
    "one raises": (pasted(f"if rank == 1: {RAISE}"), "ValueError: on purpose"),
    "the other waits for it": (pasted(f"if rank == 1: {RAISE}\nstep()"), "ValueError: on purpose"),
    "both raise": (pasted(RAISE), "ValueError: on purpose"),
    "one inits": (
        "from datetime import timedelta\nif rank == 0:\n"
        "    dist.init_process_group('gloo', timeout=timedelta(seconds=1))",
        "rank 0: ",
    ),
    "in init": (
        "c10d = dist.distributed_c10d\nupdate = c10d._update_default_pg\n"
        "def stop(_):\n    c10d._update_default_pg = update\n    raise KeyboardInterrupt\n"
        "c10d._update_default_pg = stop\ndist.init_process_group('gloo')",
        "KeyboardInterrupt in init_process_group",
    ),
}


@pytest.mark.gate_runs("waits", "both", "init")
@pytest.mark.parametrize("name", FAILS)
def test_failed_code_with_init_can_run_again(group: Ranks, name: str) -> None:
    source, error = FAILS[name]
    with pytest.raises(CellFailedError, match=error):
        run_bare(group, source)
    for _ in range(2):
        run_bare(group, pasted())
    group.assert_works()


@pytest.mark.gate_runs("steps", "waits")
@pytest.mark.parametrize(
    "ends",
    ["begin(); time.sleep(600)", "begin()\nwhile True: step()", "begin()\nif rank == 0: step()"],
    ids=["sleep", "steps", "one waits"],
)
def test_interrupted_code_with_init_can_run_again(group: Ranks, ends: str) -> None:
    run_until_stopped(group, pasted(f"{ends}\ntime.sleep(600)"))
    for _ in range(2):
        run_bare(group, pasted())
    group.assert_works()


def test_code_interrupted_in_a_file_rendezvous_can_run_again(
    group: Ranks, folder: Path, capsys: Capture
) -> None:
    url = f"file://{folder}/meeting"
    source = pasted(init=f", init_method='{url}', rank=rank, world_size=world_size")
    group.run("kept = rank")
    late = "import time\nopen(f'begun{rank}', 'w').close()\nif rank == 1: time.sleep(600)\n"
    run_until_stopped(group, late + source)
    for _ in range(5):
        run_bare(group, source)
    assert "killed" not in capsys.readouterr().out
    assert group.pull("kept") == [0, 1]


def test_some_ranks_can_init_a_process_group_also_after_another_rank_died(
    make_group: MakeRanks,
) -> None:
    group = make_group(3)
    pair = (
        "dist.init_process_group('gloo', rank=rank - 1, world_size=2)\n"
        "x = torch.ones(1) * rank\ndist.all_reduce(x)\nassert x.item() == 3"
    )
    run_bare(group, pair, ranks=(1, 2))
    group.assert_works()
    run_bare(group, pair, ranks=(1, 2))
    with pytest.raises(CellFailedError, match="rank 0 was killed"):
        run_bare(group, "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)")
    for _ in range(2):  # the first destroys the group that is left
        run_bare(group, pair, ranks=(1, 2))


def test_failure_report_keeps_the_users_process_group(group: Ranks) -> None:
    with pytest.raises(CellFailedError, match="rank 1: ValueError"):
        run_bare(group, pasted("if rank == 1: raise ValueError('no')\nstep()"))
    group.run_cell("assert dist.get_world_size() == 2", needs_group=None)


def test_second_init_is_refused_with_a_hint_at_no_init(group: Ranks) -> None:
    failure = str(group.failure_of("dist.init_process_group('gloo')"))
    assert failure.startswith("ranks 0-1: ValueError: ")
    assert "--no-init" in failure
    assert failure.endswith(", line 1")
    run_bare(group, "dist.init_process_group('gloo')\ndist.barrier()")
    group.run("dist.barrier()\ndist.destroy_process_group()")
    group.run("dist.barrier()")


def test_failure_to_form_the_group_fails_only_its_cell(group: Ranks) -> None:
    group.run(
        f"{imported(process_group)}from datetime import timedelta\n"
        "form = process_group.ProcessGroup.init\n"
        "def broken(self, *_, **__): raise OSError('no more ports')\n"
        "if rank == 1: process_group.ProcessGroup.init = broken\n"
        "long, process_group.FORM_TIMEOUT = process_group.FORM_TIMEOUT, timedelta(seconds=3)\n"
        "dist.destroy_process_group()"
    )
    for _ in range(2):
        with pytest.raises(CellFailedError, match=r"^rank 1: OSError: no more ports"):
            group.run("dist.barrier()")
    run_bare(
        group,
        "process_group.ProcessGroup.init, process_group.FORM_TIMEOUT = form, long\nalive = True",
    )
    group.run("assert alive\ndist.barrier()")


# ---- in processes that a cell would start


SPAWNS = {
    "spawn(main, args=(args,), nprocs=4)": "main(rank, args)",
    "mp.spawn(main,\n    (args, 1 + 2),\n    nprocs=4)": "main(rank, args, 1 + 2)",
    "mp.start_processes(main, args=args, nprocs=4, start_method='fork')": "main(rank, *args)",
    "start = mp.start_processes\nstart(main)": "main(rank, ...)",
}


def test_spawn_in_a_cell_is_refused_with_the_call_to_write(own_group: Ranks) -> None:
    begin = "import torch.multiprocessing as mp\nfrom torch.multiprocessing import spawn\n"
    own_group.run(f"{begin}def main(index, *args): pass\nargs = [7]")
    for source, call in SPAWNS.items():
        assert f"call `{call}`" in str(own_group.failure_of(source))
        own_group.run_cell("main(rank, args)")


def test_file_run_by_a_cell_can_start_processes(own_group: Ranks, folder: Path) -> None:
    (folder / "starts.py").write_text(
        "import torch.multiprocessing as mp\ndef main(index): print(f'index {index}')\n"
        "if __name__ == '__main__': mp.spawn(main, nprocs=1)"
    )
    own_group.run("%run starts.py", ranks=[0])


@pytest.mark.full
def test_subprocess_scripts_of_all_ranks_can_form_a_group(group: Ranks, folder: Path) -> None:
    place = "rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])"
    (folder / "script.py").write_text(f"import os\n{place}" + TUTORIAL.format(how="", port=0))
    for _ in range(2):
        group.run(
            "import subprocess, sys\nsubprocess.run([sys.executable, 'script.py'], check=True)"
        )


def test_subgroup_collective_is_reported_with_its_number_and_group(make_group: MakeRanks) -> None:
    failure = make_group(3).failure_of(
        "import os, time; pair = dist.new_group([0, 2])\nx = torch.ones(1)\n"
        "for _ in range(5): dist.all_reduce(x)\n"
        "if rank != 1: dist.all_reduce(x, group=pair)\n"
        "if rank == 0: open('waits', 'w').close(); dist.all_reduce(x, group=pair)\n"
        "while rank == 2 and not os.path.exists('waits'): time.sleep(0.01)\n"
        "if rank == 2: raise ValueError('on purpose')"
    )
    assert re.search(r"rank 0: .* all_reduce #2 of group \[0, 2\], line 5$", failure.report, re.M)


def test_rpc_continues_after_destroy_process_group(own_group: Ranks) -> None:
    own_group.run(
        "import torch.distributed.rpc as rpc\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
        "dist.barrier()\ndist.destroy_process_group()"
    )
    own_group.run(
        "assert rpc.rpc_sync(f'worker{1 - rank}', max, args=(1, 2)) == 2\n"
        "dist.barrier()\nrpc.shutdown()"
    )


COUNT = "[len(os.listdir(each)) for each in ('/dev/fd', '/proc/self/task')]"


@pytest.mark.gate_runs("asynchronous", "model", "default")
@pytest.mark.parametrize(
    "body",
    [
        "x = torch.ones(1)\ndist.all_reduce(x, group=pair)\ndestroy(pair); del pair",
        "for _ in range(4):\n"
        "    x = torch.ones(9)\n    work = dist.all_reduce(x, group=pair, async_op=True)\n"
        "del x\nwork.wait()\ndel work\ndestroy(pair); del pair",
        "model = torch.nn.parallel.DistributedDataParallel(layer, process_group=pair)\n"
        "model(torch.ones(20, 10)).sum().backward()\ndestroy(pair)\ndel pair\ndel model",
        "dist.barrier()\ndestroy()\ndist.init_process_group('gloo')",
    ],
    ids=["collective", "asynchronous", "model", "default"],
)
def test_destroyed_groups_keep_no_sockets_and_no_threads(own_group: Ranks, body: str) -> None:
    begin = ["pair = dist.new_group([0, 1])"] if "pair" in body else []
    lines = [*begin, *body.splitlines(), f"counts.append({COUNT})"]
    run_bare(
        own_group,
        "import os\ndestroy, layer = dist.destroy_process_group, torch.nn.Linear(10, 5)\n"
        "dist.init_process_group('gloo')\n"
        "counts = []\nfor _ in range(60):\n" + "\n".join(f"    {each}" for each in lines),
    )
    for descriptors, threads in own_group.pull("[max(each) for each in zip(*counts)]"):
        assert descriptors <= 40
        assert threads <= 40  # a leak of two for each group would be 120
    own_group.assert_works()


def test_group_of_a_backend_without_sequence_numbers_can_be_destroyed(group: Ranks) -> None:
    group.run(
        "import torch.testing._internal.distributed.fake_pg\n"
        "pair = dist.new_group([0, 1], backend='fake')\ndist.destroy_process_group(pair)"
    )
    group.run("dist.barrier()")


def test_destroyed_group_fails_the_collective_of_the_other_rank(group: Ranks) -> None:
    with pytest.raises(CellFailedError, match=r"^rank 1: connection .* all_reduce"):
        group.run(
            "x = torch.ones(1)\ndist.all_reduce(x)\nkept = dist.group.WORLD\n"
            "if rank == 0: dist.destroy_process_group()\nelse: dist.all_reduce(x)"
        )
    group.run("dist.barrier()")


def test_launcher_started_by_every_rank_gets_an_explanation(group: Ranks) -> None:
    launch = (
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def train(): import time; time.sleep(30)\n"
        "config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, run_id='none',\n"
        f"    rdzv_backend='static', rdzv_endpoint='127.0.0.1:{free_port()}',\n"
        "    rdzv_configs={'rank': 0})\n"
        "elastic_launch(config, train)()"
    )
    with pytest.raises(CellFailedError, match=r"train\(\) directly"):
        group.run(launch)
    group.assert_works()
