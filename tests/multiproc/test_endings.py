"""No process or thread outlives its rank or the kernel, and a failed start is harmless."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from textwrap import indent
from types import ModuleType

import psutil
import pytest
import torch  # noqa: F401 - in a folder that was deleted its import would end this process
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks, WarmLauncher, new_launcher
from local_nodes import all_ended, is_process_running
from notebook import Notebook
from processes import wait_until

from nbddp import CellFailedError, RequestError, StartError
from nbddp.launch import forkserver
from nbddp.worker.cuda_probe import DRIVER, has_used_cuda

WITH_WORKERS = (
    "%%ddp --nproc 2\nfrom torch.utils.data import DataLoader\n"
    "loader = DataLoader(range(99), num_workers=2, persistent_workers=True)\n"
    "it = iter(loader)\nprint(len(next(it)))"
)
SCRIPT = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
WAITS = (
    "%%ddp\nprint('begun')\nif rank == 0: dist.recv(torch.ones(1), src=1)\n"
    "import time\ntime.sleep(60)"
)


@pytest.mark.gate_runs("in a cell", "restart")
@pytest.mark.parametrize("how", ["kill in a cell", "kill in a script", "shutdown", "restart"])
def test_processes_and_files_of_a_kernel_end_with_it(fresh_notebook: Notebook, how: str) -> None:
    notebook = fresh_notebook
    (notebook.folder / "script.py").write_text(SCRIPT)
    assert notebook.run(WITH_WORKERS).lines(1) == ["1"]
    if "kill" in how:
        cell = "%ddp run script.py" if "script" in how else WAITS
        notebook.finish(notebook.begin(cell), until="begun", times=2)
    processes = psutil.Process(notebook.pid).children(recursive=True)
    assert len(processes) >= 7  # tracker, forkserver, 2 ranks, their 4 workers
    match how:
        case "restart":
            notebook.restart()
        case "shutdown":
            notebook.__exit__(None, None, None)
        case _:
            psutil.Process(notebook.pid).kill()
    _, alive = psutil.wait_procs(processes, timeout=40)
    assert not alive
    prefixes = tuple(f"torch_{each.pid}_" for each in processes)
    assert not [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes)]

    def leftovers() -> list[str]:
        """Return leftover temporary files, except the persistent cache of torch's compiler."""
        paths = [path.name for path in notebook.temporary.iterdir()]
        return [name for name in paths if not name.startswith("torchinductor_")]

    assert wait_until(lambda: not leftovers()), leftovers()


def test_ranks_start_if_their_folder_is_deleted(make_group: MakeRanks, folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    group = make_group(1, name="after-the-flood")
    assert group.pull("__import__('os').getcwd()", rank=0) == str(Path.home())
    runs = group.run_folder
    group.stop()
    shutil.rmtree(runs)


def test_changes_to_the_process_by_a_cell_do_not_break_the_next_cell(group: Ranks) -> None:
    for source in (
        "import os\nos.chdir('/')",
        "import os\nif os.fork() == 0: print('child')\nelse: os.wait()",
        "import threading\nthreading.Thread(target=print, args=('hi',)).start()",
        "import sys, io\nsys.stdout = io.StringIO()\nsys.stderr.close()",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import sys\nsys.exit()",
        "dist.destroy_process_group()",
        "import os\nos.environ.clear()",
        "del rank, torch, dist",
        "%reset -f",
    ):
        group.run(source, quiet=True)
        group.assert_works()
        assert group.pull("rank") == [0, 1], source


def test_only_loopback_is_listened_on(group: Ranks) -> None:
    group.run("dist.barrier()\npair = dist.new_group([0, 1])\ndist.barrier(group=pair)")
    group.run(
        "from torch.distributed import rpc\n"
        "rpc.init_rpc(str(rank), rank=rank, world_size=world_size)"
    )
    pids = [os.getpid(), *group.pids.values()]
    listening = [
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the store, and gloo's in each rank
    assert set(listening) == {"127.0.0.1"}


def test_garbage_at_the_port_of_the_store_writes_nothing(
    group: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    group.assert_works()
    port = group.session.require_link().port
    magic = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # what a client of torch sends first
    for data in (b"GET / HTTP/1.1\r\n\r\n", magic + b"\xff" * 99, magic + b"\2" + b"\1" * 99):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert not client.recv(1)  # the store has handled it
    group.assert_works()
    assert "c10d" not in capfd.readouterr().err


def test_secret_is_not_readable_by_other_processes(group: Ranks) -> None:
    group.run("import os\nprint(dict(os.environ))")
    secret, folder = group.secret, group.run_folder
    forms = {secret, secret.hex().encode(), repr(secret).encode()}
    for pid in [os.getpid(), *group.pids.values()]:
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not any(form in content for form in forms)
    for path in folder.iterdir():
        assert not any(form in path.read_bytes() for form in forms)
        assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_failed_start_names_rank_and_reason_and_leaves_no_process(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "no-such-device")])  # else refused
    for _ in range(2):  # all six fail at once, and often several report it
        with pytest.raises(StartError, match=r"^rank \d .*no-such-device") as fail:
            make_group(6)
        assert "init_process_group" in fail.value.details
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    group = make_group(2)
    with pytest.raises(RequestError, match="ready"):
        group.start()
    group.assert_works()


def test_forkserver_that_is_starting_closes_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slow_disk.py").write_text("import time\ntime.sleep(50)\n")
    monkeypatch.syspath_prepend(folder)
    modules = ["slow_disk", *forkserver.PRELOADED_MODULES]
    monkeypatch.setattr(forkserver, "PRELOADED_MODULES", modules)
    server, begun, closing = forkserver.Forkserver(), threading.Event(), threading.Event()
    start_helper = ForkServer.ensure_running

    def start_slowly(helper: ForkServer) -> None:
        begun.set()
        closing.wait(20)
        start_helper(helper)

    monkeypatch.setattr(ForkServer, "ensure_running", start_slowly)
    with ThreadPoolExecutor(1) as thread:
        forking = thread.submit(server.fork, print, "hello", "test-rank")
        assert begun.wait(20)
        threading.Timer(0.3, closing.set).start()  # while it is being closed
        began = time.monotonic()
        server.close()
        with pytest.raises(EOFError):
            forking.result(30)
    assert time.monotonic() - began < 25


def test_stopped_forkserver_is_resumed_and_a_killed_one_is_named_and_replaced(
    launcher: WarmLauncher, make_group: MakeRanks
) -> None:
    if launcher.forkserver is None:
        pytest.skip("ranks are spawned")
    group, helper = make_group(2, grace=1.0), launcher.forkserver.pid
    assert helper is not None
    os.kill(helper, signal.SIGSTOP)
    group.session.kill(1)  # nothing else reports the exit
    os.kill(helper, signal.SIGSTOP)
    group.restart()
    group.assert_works()
    os.kill(helper, signal.SIGKILL)
    with pytest.raises(CellFailedError) as failed:
        group.run("import time\ntime.sleep(50)", quiet=True)
    assert forkserver.FORKSERVER_ENDED in failed.value.report
    group.restart()
    group.assert_works()
    assert group.pull("'torch._dynamo' in __import__('sys').modules") == [True, True]


def test_closed_groups_leave_no_descriptor(make_group: MakeRanks) -> None:
    make_group(2).close()
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        group = make_group(2)
        group.run("pass", quiet=True)
        group.restart()
        group.stop()
        group.start()
        group.close()
    assert wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)


GRACE = 40.0  # seconds: long enough that a wait for it is noticed
IMPORTS = (
    "import atexit, itertools, multiprocessing, pathlib, signal, subprocess, threading, time\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
)
# a process; one with its own session; one that ignores SIGTERM; a daemon, and one of a daemon; a
# loader's worker that looks rarely whether its rank has ended
CHILDREN = """
multiprocessing.Process(target=time.sleep, args=(600,)).start()
subprocess.Popen(['sleep', '600'], start_new_session=True)
deaf = ['sh', '-c', 'trap "" TERM; echo; while :; do sleep 99; done']
subprocess.Popen(deaf, stdout=subprocess.PIPE).stdout.read(1)
for daemon in ("setsid sleep 600 & echo", "setsid sh -c 'sleep 600 & sleep 601' &"):
    subprocess.run(['sh', '-c', daemon], stdout=subprocess.DEVNULL)
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
worker.MP_STATUS_CHECK_INTERVAL = 600.0
it = iter(DataLoader(range(99), num_workers=1, persistent_workers=True)); next(it)
"""
STARTED = 8  # at least so many processes of a rank
THREADS = """
threading.Thread(target=time.sleep, args=(600,)).start()
ThreadPoolExecutor().submit(time.sleep, 600)
threading.Thread(target=lambda: rank or dist.recv(torch.ones(1), src=1)).start()
def talk():
    for step in itertools.count():
        print('on and on')
        nbddp.log(step=step, loss=1.0)
        time.sleep(0.001)
threading.Thread(target=talk).start()
"""


def started_by(rank_pid: int) -> list[psutil.Process]:
    rank = psutil.Process(rank_pid)
    assert wait_until(lambda: len(rank.children(recursive=True)) >= STARTED)
    return rank.children(recursive=True)


@pytest.fixture
def patient(make_group: MakeRanks) -> Ranks:
    return make_group(2, grace=GRACE)


@pytest.mark.parametrize("how", ["stop", "restart"])
def test_processes_and_threads_of_a_cell_end_with_the_ranks(patient: Ranks, how: str) -> None:
    patient.run(IMPORTS + CHILDREN + THREADS, quiet=True)
    started = [each for pid in patient.pids.values() for each in started_by(pid)]
    began = time.monotonic()
    getattr(patient, how)()
    assert time.monotonic() - began < GRACE / 2
    assert all_ended(started)  # a resource tracker ends after those that it serves
    if how == "restart":
        patient.run("assert 'time' not in globals()\ndist.barrier()")


def test_child_processes_end_only_with_their_own_rank(patient: Ranks) -> None:
    patient.run(IMPORTS + CHILDREN, quiet=True)
    spared, lost = (started_by(pid) for pid in patient.pids.values())
    os.kill(patient.pids[1], signal.SIGKILL)
    assert all_ended(lost)
    assert all(map(is_process_running, spared))
    patient.run("pass", ranks=[0])
    assert all(map(is_process_running, spared))


def test_child_processes_of_stopped_ranks_end_with_the_kernel(fresh_notebook: Notebook) -> None:
    assert fresh_notebook.run(f"%%ddp --nproc 2\n{IMPORTS}{CHILDREN}").status == "ok"
    pids = json.loads(fresh_notebook.run("%ddp pull __import__('os').getpid()").result)
    started = [each for pid in pids for each in started_by(pid)]
    for pid in pids:
        psutil.Process(pid).suspend()  # it cannot end them itself
    psutil.Process(fresh_notebook.pid).kill()
    assert all_ended(started)


# shared memory; a named semaphore; the batches of a loader, by torch's manager of shared memory
SHARES = """
import multiprocessing, os, pathlib, torch
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=10)
lock = multiprocessing.get_context("spawn").Lock()
torch.multiprocessing.set_sharing_strategy("file_system")
it = iter(torch.utils.data.DataLoader(torch.ones(64, 1000), batch_size=4, num_workers=1,
    multiprocessing_context='fork'))
kept = [next(it) for _ in range(2)]
worker = f"torch_{multiprocessing.active_children()[0].pid}_"
names = [shared.name, "sem." + lock._semlock.name[1:]]
names += [each for each in os.listdir("/dev/shm") if each.startswith(worker)]
pathlib.Path("names" + os.environ["RANK"]).write_text(" ".join(names))
"""


def test_shared_memory_is_freed_at_the_end_of_a_rank_or_script(
    make_group: MakeRanks, folder: Path
) -> None:
    (folder / "script.py").write_text(f"if __name__ == '__main__':{indent(SHARES, '    ')}")

    def shared() -> list[Path]:
        names = [folder / f"names{rank}" for rank in range(2)]
        return [Path("/dev/shm") / name for each in names for name in each.read_text().split()]

    group = make_group(2)
    for how in ("kill", "restart", "script", "stop"):
        if how == "script":
            group.run_script("script.py")
        else:
            group.run(SHARES, quiet=True)
            assert all(each.exists() for each in shared())
        assert len(shared()) >= 6
        match how:
            case "kill":
                for pid in group.pids.values():
                    os.kill(pid, signal.SIGKILL)
                group.restart()
            case "restart" | "stop":
                getattr(group, how)()
        assert wait_until(lambda: not any(each.exists() for each in shared())), how


def test_stopped_rank_runs_exit_handlers(group: Ranks, folder: Path) -> None:
    group.run(
        f"{IMPORTS}import tempfile, weakref\n"
        "class Kept: pass\nkept = Kept()\n"
        "weakref.finalize(kept, pathlib.Path(f'finalized{rank}').touch)\n"
        "atexit.register(pathlib.Path(f'hook{rank}').touch)\n"
        "atexit.register(print, 'goodbye from', rank)\n"
        "temporary = tempfile.TemporaryDirectory()\n"
        "pathlib.Path(f'named{rank}').write_text(temporary.name)"
    )
    logs = [group.log(rank) for rank in range(2)]
    group.stop()
    for rank in range(2):
        assert (folder / f"hook{rank}").exists()
        assert (folder / f"finalized{rank}").exists()
        assert not Path((folder / f"named{rank}").read_text()).exists()
        assert f"goodbye from {rank}" in logs[rank].read_text()


def test_rank_that_ignores_stop_is_killed_and_named_but_its_files_are_flushed(
    make_group: MakeRanks, folder: Path, capsys: Capture
) -> None:
    group = make_group(2, grace=4.0)  # rank 0 ends in it, on a slow machine too
    group.run(
        f"{IMPORTS}if rank == 1: _ = atexit.register(time.sleep, 600)\n"
        "text = open(f'text{rank}', 'w')\n_ = text.write('saved')"
    )
    group.restart()
    assert [(folder / f"text{rank}").read_text() for rank in range(2)] == ["saved"] * 2
    late = ["functions of atexit still run" in group.log(rank).read_text() for rank in range(2)]
    assert late == [False, True]
    group.run("dist.barrier()")
    assert re.search("^nbddp: rank 1 .* 4 s.*killed$", capsys.readouterr().out, re.MULTILINE)


def test_exception_of_a_signal_handler_between_cells_fails_the_next_cell(group: Ranks) -> None:
    group.run(
        f"{IMPORTS}kept = rank\n"
        "def on_alarm(*_):\n    raise TimeoutError('the time is over')\n"
        "_ = signal.signal(signal.SIGALRM, on_alarm)"
    )
    for _ in range(3):
        os.kill(group.pids[1], signal.SIGALRM)
        error = group.failure_of("if rank == 1: time.sleep(50)\ndist.barrier()")
        assert str(error).startswith("rank 1: TimeoutError: the time is over")
        assert group.pull("kept") == [0, 1]
    group.run("assert signal.getsignal(signal.SIGALRM) is on_alarm")


@pytest.mark.full
def test_importing_forkserver_ends_with_the_kernels_process_group(fresh_notebook: Notebook) -> None:
    assert fresh_notebook.run("%load_ext nbddp\n%ddp status").status == "ok"
    kernel = fresh_notebook.pid
    helpers = psutil.Process(kernel).children(recursive=True)
    # it leaves the group first; if killed before that, the next start removes its folder
    assert wait_until(lambda: all(os.getpgid(each.pid) != kernel for each in helpers))
    os.killpg(kernel, signal.SIGKILL)
    assert not psutil.wait_procs(helpers, timeout=40)[1]
    assert wait_until(lambda: not list(fresh_notebook.temporary.glob("nbddp_*")))


def test_forkserver_starts_after_ipython_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    del main.__spec__  # as `%reset -f` does
    monkeypatch.setitem(sys.modules, "__main__", main)
    launcher = new_launcher("forkserver")
    launcher.preload()
    assert launcher.forkserver is not None
    assert psutil.pid_exists(launcher.forkserver.pid)
    launcher.close()


# ---- ranks are not forked from a forkserver that has used CUDA

# a fake libcuda, with two of its functions
DRIVER_SOURCE = """
static int initialized = 0;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!initialized) return 3; *count = 1; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "cuda.c", folder / DRIVER
    source.write_text(DRIVER_SOURCE)
    build = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(library), str(source)]
    try:
        subprocess.run(build, check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    return library


def test_probe_distinguishes_a_loaded_driver_from_a_used_driver(driver: Path) -> None:
    assert not has_used_cuda("libnbddp_is_not_there.so.1")
    code = (
        f"{imported(has_used_cuda)}import ctypes; print(has_used_cuda());"
        f"driver = ctypes.CDLL({str(driver)!r}); print(has_used_cuda());"
        "driver.cuInit(0); print(has_used_cuda())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


@pytest.mark.full
def test_ranks_are_spawned_if_an_import_in_the_forkserver_used_cuda(
    folder: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "uses_cuda.py").write_text(f"import ctypes\nctypes.CDLL({str(driver)!r}).cuInit(0)")
    monkeypatch.syspath_prepend(folder)
    modules = ["uses_cuda", *forkserver.PRELOADED_MODULES]
    monkeypatch.setattr(forkserver, "PRELOADED_MODULES", modules)
    with caplog.at_level(logging.WARNING, "nbddp"), Ranks(nproc=2) as group:
        group.run(f"{imported(has_used_cuda)}import os")
        assert group.pull("has_used_cuda()") == [False, False]
        assert group.pull("os.getppid()") == [os.getpid()] * 2
        group.assert_works()
    [warning] = [each.getMessage() for each in caplog.records]
    assert "CUDA" in warning
