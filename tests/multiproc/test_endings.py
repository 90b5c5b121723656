"""No process outlives the kernel, no other process connects, and a failed start is harmless."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from multiprocessing import process
from multiprocessing.forkserver import ForkServer
from pathlib import Path

import psutil
import pytest
import torch  # noqa: F401 - in a folder that was deleted its import would end this process
from drivers.ranks import MakeRanks, Ranks
from notebook import Notebook
from processes import wait_until

from nbddp import RequestError, StartError
from nbddp.launch import forkserver
from nbddp.wire.rank_start import SOCKET_FOLDER_VARIABLE

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


@pytest.mark.gate_runs("kill", "restart")
@pytest.mark.parametrize("how", ["kill in a cell", "kill in a script", "shutdown", "restart"])
def test_all_processes_and_files_of_a_kernel_end_with_it(
    fresh_notebook: Notebook, how: str
) -> None:
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
    mine = tuple(f"torch_{each.pid}_" for each in processes)
    assert not [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]

    def left() -> list[str]:
        """Return leftover temporary files, except the persistent cache of torch's compiler."""
        paths = [path.name for path in notebook.temporary.iterdir()]
        return [name for name in paths if not name.startswith("torchinductor_")]

    assert wait_until(lambda: not left()), left()


def test_deleted_working_folder_does_not_break_the_next_start(
    make_group: MakeRanks, folder: Path
) -> None:
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
        each.laddr.ip
        for pid in pids
        for each in psutil.Process(pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the store, and gloo's in each rank
    assert set(listening) == {"127.0.0.1"}


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
    for _ in range(2):  # all six fail at once, and often several report it
        with pytest.raises(StartError, match=r"^rank \d .*no-such-device") as fail:
            make_group(6)
        assert "init_process_group" in fail.value.details
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    group = make_group(2)
    with pytest.raises(RequestError, match="ready"):
        group.start()
    group.assert_works()


@pytest.fixture
def slow_helper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the forkserver import a slow module."""
    (folder / "slow_disk.py").write_text("import time\ntime.sleep(50)\n")
    monkeypatch.syspath_prepend(folder)
    modules = ["slow_disk", *forkserver.PRELOADED_MODULES]
    monkeypatch.setattr(forkserver, "PRELOADED_MODULES", modules)


@pytest.mark.usefixtures("slow_helper")
def test_forkserver_that_is_starting_closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, begun, closing = forkserver.Forkserver(), threading.Event(), threading.Event()
    start_helper = ForkServer.ensure_running

    def start_slowly(helper: ForkServer) -> None:
        begun.set()
        closing.wait(20)
        start_helper(helper)

    monkeypatch.setattr(ForkServer, "ensure_running", start_slowly)
    failed: list[type[BaseException]] = []

    def launch() -> None:
        try:
            server.fork(print, "hello", "test-rank")
        except (EOFError, OSError) as error:
            failed.append(type(error))

    thread = threading.Thread(target=launch)
    thread.start()
    assert begun.wait(20)
    threading.Timer(0.3, closing.set).start()  # while it is being closed
    began = time.monotonic()
    server.close()
    thread.join(30)
    assert failed == [EOFError]
    assert time.monotonic() - began < 25


def test_closed_groups_leave_no_thread_and_no_descriptor(make_group: MakeRanks) -> None:
    make_group(2).close()
    threads = {thread.name for thread in threading.enumerate()}
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        group = make_group(2)
        group.run("pass", quiet=True)
        group.restart()
        group.stop()
        group.start()
        group.close()
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not {name for name in left if name.startswith("nbddp")}
    assert wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)


@pytest.mark.full
def test_groups_started_at_the_same_time_use_different_folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("x")  # a short name: a socket's may have 107 characters
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = process.current_process()._config.get("tempdir")
    start_helper = ForkServer.ensure_running

    def start_slowly(helper: ForkServer) -> None:
        time.sleep(0.1)  # so that the other threads can interleave
        start_helper(helper)

    monkeypatch.setattr(ForkServer, "ensure_running", start_slowly)
    groups = [Ranks(nproc=1) for _ in range(3)]
    starts = [threading.Thread(target=each.start) for each in groups]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    folders = {each.pull("__import__('multiprocessing').util.get_temp_dir()")[0] for each in groups}
    assert len(folders) == 3
    assert len(list(folder.glob("nbddp_*"))) == 3
    for each in groups:
        psutil.Process(each.helper_pid).kill()  # its folder is then ours
        each.close()
    assert not list(folder.glob("nbddp_*"))
    assert process.current_process()._config.get("tempdir") == before
    assert SOCKET_FOLDER_VARIABLE not in os.environ
