"""Scripts run as under torchrun; ``test_script_processes.py`` tests their processes."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from drivers.ranks import Lines, Ranks, Write
from notebook import Notebook
from processes import free_port, under_torchrun
from syrupy.assertion import SnapshotAssertion

from nbddp import CellFailedError, RequestError, runs
from nbddp.extensions.runs.summary import summarize

pytestmark = pytest.mark.usefixtures("lasting_group")
SHARES_KERNEL = True


TRAIN = """
import argparse, logging, os, random, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index): return torch.full((4,), index / 1), torch.tensor([index ** 2.0])

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    dist.init_process_group(INIT)
    sampler = torch.utils.data.DistributedSampler(Squares())
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for x, y in loader:
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        logging.info("%s %s %.6f", sys.argv, os.environ["WORLD_SIZE"], loss.item())
        print(__name__, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__))
        print(model.module.weight.flatten().tolist(), torch.rand(1).item())
    ENDING

if __name__ == "__main__":
    main()
"""


def test_script_prints_the_same_as_under_torchrun(
    group: Ranks, write: Write, lines: Lines, folder: Path
) -> None:
    write(TRAIN.replace("INIT", "'gloo'").replace("ENDING", "dist.destroy_process_group()"))
    wanted = under_torchrun("work/script.py", "--lr", "2e-5", cwd=folder)
    for _ in range(2):  # the second is as fresh as the first
        group.run_script("work/script.py", "--lr", "2e-5")
        assert lines() == wanted


BY_ADDRESS = (
    "'gloo', init_method='tcp://127.0.0.1:PORT', rank=int(os.environ['RANK']), world_size=2"
)


@pytest.mark.parametrize("how", [BY_ADDRESS, ""], ids=["by address", "by default"])
def test_script_can_init_by_address_and_leave_its_group_open(
    group: Ranks, write: Write, lines: Lines, how: str
) -> None:
    write(TRAIN.replace("INIT", how.replace("PORT", str(free_port()))).replace("ENDING", "pass"))
    for _ in range(2):
        group.run_script("work/script.py")
    assert len(lines()) == 6
    group.assert_works()


def test_script_imports_the_current_version_of_its_modules(
    group: Ranks, write: Write, lines: Lines
) -> None:
    write("import own, package.part\nprint(own.value, package.part.value)")
    write("value = 1", "work/own.py")
    (write("", "work/script.txt").parent / "package").mkdir()
    for value in (1, 2, 3):  # within the second that a .pyc is exact to
        write(f"value = {value}", "work/own.py")
        write(f"value = {value}", "work/package/part.py")
        group.run_script("work/script.py")
    assert lines() == ["1 1", "2 2", "3 3"]


# ---- how it ends


def test_script_with_exit_code_0_succeeds(group: Ranks, write: Write) -> None:
    for ending in ("sys.exit()", "sys.exit(0)", "sys.exit(256)", "raise SystemExit(None)"):
        write(f"import sys\n{ending}")
        assert group.run_script("work/script.py").is_ok, ending
    assert summarize(runs(Path.cwd())[0].path).started_by == "script.py"


@pytest.mark.parametrize(
    ("source", "printed", "failure"),
    [
        ("import sys\nif RANK: sys.exit(3)", [], "rank 1: SystemExit: 3, script.py line 3"),
        ("import sys\nsys.exit('no')", ["no"], "ranks 0-1: SystemExit: no, script.py line 3"),
        ("import sys\nsys.exit(0.0)", ["0.0"], "ranks 0-1: SystemExit: 0.0, script.py line 3"),
        (
            "import argparse\nargparse.ArgumentParser(prog='train').parse_args()",
            ["usage: train [-h]", "train: error: unrecognized arguments: --lr"],
            "ranks 0-1: SystemExit: 2, script.py line 3",
        ),
        ("import own\nif RANK: own.fail()", [], "rank 1: ValueError: too high, own.py line 2"),
    ],
    ids=["number", "text", "float", "argparse", "error"],
)
def test_script_with_another_exit_code_fails_with_rank_and_code(
    group: Ranks, write: Write, lines: Lines, source: str, printed: list[str], failure: str
) -> None:
    write(f"import os; RANK = os.environ['RANK'] == '1'\n{source}")
    write("def fail():\n    raise ValueError('too high')", "work/own.py")
    with pytest.raises(CellFailedError) as error:
        group.run_script("work/script.py", "--lr")
    assert str(error.value) == failure
    assert ("Traceback" in error.value.report) is not ("SystemExit" in failure), "as in Python"
    assert lines() == printed


def test_script_runs_exit_handlers_joins_threads_and_ends_pools(
    group: Ranks, write: Write, lines: Lines
) -> None:
    write(
        "import atexit, multiprocessing, time, threading\n"
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "def say(*words):\n    print(*words)\n"
        "executor, pool = ProcessPoolExecutor(2), multiprocessing.Pool(2)\n"
        "assert [executor.submit(abs, -1).result()] == pool.map(abs, [-1]) == [1]\n"
        "go = threading.Event()\n"
        "def later():\n    go.wait(); time.sleep(0.2); print('thread\\n', end='')\n"  # two
        "atexit.register(say, 'first'); atexit.register(say, 'second')\n"
        "atexit.register(later); atexit.unregister(later)\n"
        "@atexit.register\ndef fails():\n    raise ValueError('at exit')\n"
        "threads = ThreadPoolExecutor(2)\nthreads.submit(later)\n"
        "threading.Thread(target=later).start()\n"
        "multiprocessing.Process(target=time.sleep, args=(600,), daemon=True).start()\n"
        "multiprocessing.Process(target=print, args=('child',)).start()\n"
        "print('main'); go.set()"
    )
    group.run_script("work/script.py", ranks=[0])
    output = lines()
    in_order = ["main", "thread", "thread", "second", "first"]
    assert [line for line in output if line in in_order] == in_order
    assert "ValueError: at exit" in output
    assert "child" in output
    assert not [line for line in output if line.startswith("nbddp")]


FORKS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
def fork(ending):
    pid = os.fork()
    if pid == 0:
        ending()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def fail():
    raise ValueError("in the child")
print(fork(lambda: sys.exit(3)), fork(fail), fork(sys.exit))
dist.barrier()
"""


def test_forked_child_of_a_script_exits_normally(group: Ranks, write: Write, lines: Lines) -> None:
    write(FORKS)
    group.run_script("work/script.py")
    output = lines()
    assert output[-1] == "3 1 0"
    assert "ValueError: in the child" in output
    assert not [line for line in output if "nbddp" in line]
    group.run(
        "import os, sys\nif not (pid := os.fork()): sys.exit(4)\nprint(os.waitpid(pid, 0)[1] >> 8)"
    )
    assert lines() == ["4"]


# ---- the environment of a script


FOUND = """
import builtins, decimal, logging, multiprocessing as mp, numpy as np
import resource, sys, threading, torch, warnings
f = lambda: None
names = {name: type(value).__name__ for name, value in globals().items() if name.startswith("__")}
del names["__builtins__"]  # a module, and in a run with -m as well
print(sorted(names.items()), __builtins__ is builtins, globals() is vars(sys.modules["__main__"]))
print(mp.current_process().name, mp.parent_process(), mp.active_children())
print(mp.Process(target=f).name, threading.current_thread().name)
print(sys.stdout.name, sys.stdout.mode, sys.stderr.name, sys.argv)
print([name for name in ("__IPYTHON__", "display", "get_ipython") if hasattr(builtins, name)])
files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
print(torch.tensor([1.23456]), np.array([1.23456]), decimal.getcontext().prec, files)
print(np.geterr()["divide"], torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled)
print(sorted({each[2].__module__ for each in warnings.filters}))
print(torch.distributed.is_initialized(), torch.get_default_dtype(), torch.is_grad_enabled(),
      torch.are_deterministic_algorithms_enabled(), logging.root.manager.disable)
torch.set_num_interop_threads(2)  # a process may say it once, and each run is one
try:
    torch.set_num_interop_threads(2)
except RuntimeError:
    print("once")
"""


def test_script_sees_the_same_environment_as_a_plain_program(
    group: Ranks, write: Write, lines: Lines
) -> None:
    write(FOUND)
    alone = subprocess.run(
        [sys.executable, "work/script.py"], check=True, capture_output=True, text=True
    )
    for _ in range(2):
        group.run_script("work/script.py")
        assert lines() == alone.stdout.splitlines()
    group.run("assert display and __IPYTHON__")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_of_cells_and_scripts_have_names_in_ps(
    group: Ranks, write: Write, lines: Lines
) -> None:
    shown = {
        pid: Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for pid in group.pids.values()
    }
    assert [*shown.values()] == ["nbddp rank 0 of 2", "nbddp rank 1 of 2"]
    assert (
        Path(f"/proc/{group.helper_pid}/comm").read_text() == "nbddp forkserve\n"
    )  # 15 characters
    write(
        "import os\nwho = '/proc/self/cmdline'\nprint(open(who).read().strip('\\0'), flush=True)\n"
        "if not os.fork(): print(open(who).read().strip('\\0'), flush=True); os._exit(0)\nos.wait()"
    )
    group.run_script("work/script.py")
    assert lines(1) == ["nbddp rank 1 of 2", "nbddp rank 1 of 2: child process"]


def test_script_gets_its_arguments_and_can_be_a_module(
    group: Ranks, write: Write, lines: Lines
) -> None:
    write("import sys\nprint(__package__, __spec__.name, sys.argv[1:], sys.path[0])", "pack/go.py")
    write("from . import go", "pack/__main__.py")
    group.run_script("pack.go", "-m", "--nproc", "7", is_module=True, ranks=[0])
    group.run_script("pack", "x", is_module=True, ranks=[0])
    assert lines() == [
        f"pack pack.go {arguments} {Path.cwd()}" for arguments in (["-m", "--nproc", "7"], ["x"])
    ]
    with pytest.raises(CellFailedError, match="ModuleNotFoundError: No module named missing"):
        group.run_script("missing", is_module=True)
    path = write("import sys\nprint(sys.argv)")
    group.run_script(path, Path("data"), "--fast", ranks=[0])
    assert lines() == [str([str(path), "data", "--fast"])]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes_of_a_script_can_unpickle_its_classes(
    group: Ranks, write: Write, method: str
) -> None:
    write(
        "import multiprocessing as mp\nclass Box: pass\n"
        "def work(queue, box):\n    queue.put(box if type(box) is Box else None)\n"
        f"if __name__ == '__main__':\n    context = mp.get_context('{method}')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue, Box()))\n    child.start()\n"
        "    assert type(queue.get(timeout=100)) is Box\n    child.join()"
    )
    for _ in range(2):
        group.run_script("work/script.py", ranks=[0])


def test_pull_that_needs_the_process_group_fails_without_it(group: Ranks) -> None:
    size = "dist.get_world_size()"
    assert group.pull(size) == [2, 2]
    group.run_cell("pass", needs_group=False)
    with pytest.raises(RequestError, match=r"^rank 0: .*process group"):
        group.pull(size)
    with pytest.raises(RequestError, match=r"ValueError: mine$"):
        group.pull("(_ for _ in ()).throw(ValueError('mine'))")
    assert group.pull("world_size") == [2, 2]
    group.run("pass")
    assert group.pull(size) == [2, 2]


def test_script_run_with_keeps_leaves_its_names(group: Ranks, write: Write, lines: Lines) -> None:
    write(TRAIN.replace("INIT", "").replace("ENDING", "global kept; kept = model"))
    group.run_script("work/script.py", keeps=True)
    group.run("kept(torch.ones(2, 4)).sum().backward()\nSquares()[3][1].item(), rank")
    assert lines()[-1:] != []
    assert group.pull("(Squares.__module__, rank, 'argparse' in globals())") == [
        ("__main__", 0, True),
        ("__main__", 1, True),
    ]


@pytest.mark.full
def test_ten_script_runs_leak_nothing_in_the_controller(group: Ranks, write: Write) -> None:
    write(TRAIN.replace("INIT", "").replace("ENDING", "pass"))
    me = psutil.Process()

    def measure() -> list[int]:
        gc.collect()
        processes = len(me.children(recursive=True))
        return [me.memory_full_info().uss, threading.active_count(), me.num_fds(), processes]

    for _ in range(3):  # one-time imports and caches
        group.run_script("work/script.py", quiet=True)
    before = measure()
    for _ in range(10):
        group.run_script("work/script.py", quiet=True)
    after = measure()
    assert after[0] - before[0] < 5 << 20
    assert after[1:] == before[1:]


def test_run_expands_notebook_variables_and_accepts_ranks(notebook: Notebook, write: Write) -> None:
    write("import os, sys\nprint(sys.argv[1:], os.environ['WORLD_SIZE'])")
    notebook.run(f"%cd -q {Path.cwd()}\nrate = 0.5")
    reply = notebook.run("%ddp run --nproc 3 --quiet work/script.py")
    assert (reply.status, reply.text) == ("ok", "")
    reply = notebook.run("%ddp run --ranks 1 work/script.py --nproc 7 --lr {rate} -m 'a b'")
    assert reply.lines(1) == ["['--nproc', '7', '--lr', '0.5', '-m', 'a b'] 2"]
    assert "rank 3" in notebook.run("%ddp run --ranks 3 work/script.py").text


def test_invalid_script_is_refused_before_ranks_start(
    folder: Path, snapshot: SnapshotAssertion
) -> None:
    refused = {
        "missing.py": None,
        ".": None,
        "lesson.ipynb": "{}",
        "deep.py": "x = 1" + " + 1" * 9000,
        "/dev/zero": None,
    }
    refused_by_python = {  # in words that differ by its version
        "bad.py": "x = 1\nfor x in",
        "latin.py": "# -*- coding: klingon -*-",
        "nul.py": "x = '\0'",
    }
    messages = {}
    group = Ranks(nproc=2)
    for name, source in (refused | refused_by_python).items():
        if source is not None:
            (folder / name).write_text(source)
        with pytest.raises(RequestError) as error:
            group.run_script(name)
        messages[name] = str(error.value).replace(str(folder), "FOLDER")
        assert name in messages[name]
    assert "line 2" in messages["bad.py"]
    assert {name: messages[name] for name in refused} == snapshot
    assert not group.alive
