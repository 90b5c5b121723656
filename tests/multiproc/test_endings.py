"""Nobody outlives the kernel, nobody else gets in, and nothing that was written is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import process
from multiprocessing.forkserver import ForkServer
from pathlib import Path

import psutil
import pytest
from drivers.ranks import Ranks
from notebook import Notebook
from processes import wait_until

from nbddp import CellFailedError, RequestError, StartError
from nbddp.launch import forkserver
from nbddp.wire.helper import FOLDER

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

WITH_WORKERS = (
    "%%ddp --nproc 2\nfrom torch.utils.data import DataLoader\n"
    "loader = DataLoader(range(99), num_workers=2, persistent_workers=True)\n"
    "it = iter(loader)\nprint(len(next(it)))"
)
# seconds after which a worker sees by itself that its rank is gone
PATIENT = "from torch.utils.data._utils import worker\nworker.MP_STATUS_CHECK_INTERVAL = 600.0\n"


def shared_memory(processes: Sequence[psutil.Process]) -> list[str]:
    """What these have there; other tests that run just now have theirs."""
    mine = tuple(f"torch_{each.pid}_" for each in processes)
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]


def descendants(notebook: Notebook) -> list[psutil.Process]:
    return psutil.Process(notebook.pid).children(recursive=True)


def left_in(notebook: Notebook) -> list[str]:
    """What is in the kernel's folder for temporary files.

    But for the cache that torch makes there, which lasts, when the helper has come to import its
    compiler.
    """
    paths = [path.name for path in notebook.temporary.iterdir()]
    return [name for name in paths if not name.startswith("torchinductor_")]


@pytest.mark.gate_runs("kill", "restart")
@pytest.mark.parametrize("how", ["kill", "shutdown", "restart"])
def test_when_the_kernel_goes_everything_it_started_goes(
    fresh_notebook: Notebook, how: str
) -> None:
    assert fresh_notebook.run(WITH_WORKERS).lines(1) == ["1"]
    processes = descendants(fresh_notebook)
    assert len(processes) >= 7  # tracker, forkserver, 2 ranks, their 4 workers
    if how == "restart":
        fresh_notebook.restart()
    elif how == "kill":
        psutil.Process(fresh_notebook.pid).kill()
    else:
        fresh_notebook.__exit__(None, None, None)
    _, alive = psutil.wait_procs(processes, timeout=40)
    assert not alive
    assert not shared_memory(processes)
    assert wait_until(lambda: not left_in(fresh_notebook)), left_in(fresh_notebook)


@pytest.mark.full
def test_a_rank_that_was_stopped_goes_with_the_kernel_too(fresh_notebook: Notebook) -> None:
    assert fresh_notebook.run(WITH_WORKERS).lines(1) == ["1"]
    processes = descendants(fresh_notebook)
    stopped, _ = json.loads(fresh_notebook.run("%ddp pull __import__('os').getpid()").result)
    psutil.Process(stopped).suspend()
    psutil.Process(fresh_notebook.pid).kill()
    assert not psutil.wait_procs(processes, timeout=40)[1]


def test_a_kernel_that_is_killed_in_the_middle_of_a_cell_leaves_nobody(
    fresh_notebook: Notebook,
) -> None:
    request = fresh_notebook.begin(
        "%%ddp --nproc 2\nprint('begun')\nif rank == 0: dist.recv(torch.ones(1), src=1)\n"
        "import time\ntime.sleep(60)"
    )
    fresh_notebook.finish(request, until="begun", times=2)
    processes = descendants(fresh_notebook)
    psutil.Process(fresh_notebook.pid).kill()
    assert not psutil.wait_procs(processes, timeout=40)[1]


def test_stop_ends_the_workers_of_a_dataloader_too(group: Ranks) -> None:
    group.run(WITH_WORKERS.partition("\n")[2])
    pids = group.pids.values()
    processes = [each for pid in pids for each in psutil.Process(pid).children(recursive=True)]
    assert len(processes) == 4
    group.stop()
    assert not psutil.wait_procs(processes, timeout=40)[1]


def test_a_killed_rank_leaves_no_workers_behind(group: Ranks) -> None:
    group.run(PATIENT + WITH_WORKERS.partition("\n")[2])
    processes = psutil.Process(group.pids[1]).children(recursive=True)
    assert len(processes) == 2
    group.kill(1)
    assert not psutil.wait_procs(processes, timeout=40)[1]


def test_reset_does_not_break_the_next_start(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2\npass")
    assert notebook.run("%reset -f").status == "ok"
    assert notebook.run("%ddp restart").status == "ok"
    assert notebook.run("%%ddp\n%reset -f").status == "ok"
    assert notebook.run("%%ddp\nworld_size").text == "Out [ranks 0-1] 2\n"


def test_a_folder_deleted_under_the_kernel_does_not_break_the_next_start(
    make_group: Callable[..., Ranks], folder: Path
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


def test_a_module_edited_on_disk_is_seen_after_a_restart(
    make_group: Callable[..., Ranks], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = folder / "edited.py"
    module.write_text("value = 1\n")
    group = make_group(1)
    group.run("import edited")
    module.write_text("value = 22\n")
    os.environ["SEEN_LATER"] = "yes"
    group.restart()
    group.run("import edited, os")
    assert group.pull("(edited.value, os.environ['SEEN_LATER'])", rank=0) == (22, "yes")
    del os.environ["SEEN_LATER"]


@pytest.mark.parametrize(
    "source",
    [
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
    ],
)
def test_whatever_a_cell_does_to_its_process_the_next_cell_works(
    group: Ranks, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(source)
    capsys.readouterr()
    group.run("x = torch.ones(1)\ndist.all_reduce(x)\nprint(rank, x.item())")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] 0 2.0", "[rank 1] 1 2.0"]


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


def test_the_secret_is_nowhere_to_be_read(group: Ranks) -> None:
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


def test_a_forged_command_is_not_obeyed(group: Ranks) -> None:
    from nbddp.wire.letters import CONTROLLER, Letter, seal
    from nbddp.wire.messages import Leave
    from nbddp.wire.start import command_queue

    queue = command_queue(group.attempt, 0)
    forged = seal(Letter(CONTROLLER, group.attempt, 10**6, Leave()), queue=queue, secret=b"guessed")
    group.store.queue_push(queue, forged)
    group.store.queue_push(queue, b"")
    group.store.queue_push("up", b"rubbish")
    group.run("still_here = 1")
    assert group.pull("still_here") == [1, 1]
    assert group.refused == 1


def test_a_rank_that_is_killed_while_it_prints_loses_no_line(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(7)
    for _ in range(5):
        group = make_group(1)
        delay = chance.uniform(0.0, 0.05)
        with pytest.raises(CellFailedError):
            group.run(
                "import os, threading, signal\n"
                f"threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
                "i = 0\nwhile True:\n    print(f'{i:09d}')\n    i += 1"
            )
        in_file = group.log(0).read_text().split("\n")
        shown = re.findall(r"^\[rank 0\] (\d+)$", capsys.readouterr().out, re.MULTILINE)
        whole = [line for line in in_file if len(line) == 9]
        assert [int(line) for line in whole] == list(range(len(whole)))
        assert [line for line in shown if len(line) == 9] == whole
        group.close()


def test_a_start_that_fails_says_which_rank_and_why_and_leaves_nobody(
    make_group: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    for _ in range(4):  # all six fail at once, and often more than one of them can say so
        with pytest.raises(StartError, match=r"^rank \d could not start: .*no-such-device") as fail:
            make_group(6)
        assert "init_process_group" in fail.value.details
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert make_group(2).state == "ready"


def test_a_start_can_be_stopped_while_its_helper_still_imports(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slow_disk.py").write_text("import time\ntime.sleep(50)\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(forkserver, "PRELOAD", ["slow_disk", *forkserver.PRELOAD])
    group = Ranks(nproc=2)
    said: list[str] = []

    def start() -> None:
        try:
            group.start()
        except StartError as error:
            said.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    assert wait_until(lambda: group.state == "starting")
    began = time.monotonic()
    group.stop()
    thread.join(30)
    assert said == ["stopped while it started"]
    group.close()
    assert time.monotonic() - began < 25
    assert not [each.name for each in threading.enumerate() if each.name.startswith("nbddp")]


def test_a_helper_that_is_just_being_started_is_closed_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slow_disk.py").write_text("import time\ntime.sleep(50)\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(forkserver, "PRELOAD", ["slow_disk", *forkserver.PRELOAD])
    server, begun, closing = forkserver.Forkserver(), threading.Event(), threading.Event()
    start_helper = ForkServer.ensure_running

    def start_slowly(helper: ForkServer) -> None:
        begun.set()
        closing.wait(20)
        start_helper(helper)

    monkeypatch.setattr(ForkServer, "ensure_running", start_slowly)
    said: list[type[BaseException]] = []

    def launch() -> None:
        try:
            server.fork(print, "hello", "test-rank")
        except (EOFError, OSError) as error:
            said.append(type(error))

    thread = threading.Thread(target=launch)
    thread.start()
    assert begun.wait(20)
    monkeypatch.setattr(
        forkserver.Forkserver,
        "_kill",
        lambda self, kill=forkserver.Forkserver._kill: (kill(self), closing.set()),
    )
    began = time.monotonic()
    server.close()
    thread.join(30)
    assert said == [EOFError]
    assert time.monotonic() - began < 25


def test_where_there_is_no_room_for_a_run_the_start_says_so_and_a_later_one_works(
    make_group: Callable[..., Ranks], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".nbddp").write_text("a file in the way")
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", no_room)
        with pytest.raises(StartError, match="the run cannot be recorded, neither"):
            make_group(2)
    (folder / ".nbddp").unlink()
    group = make_group(2)
    group.run("assert world_size == 2")


def no_room(*_arguments: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_requests_in_the_wrong_state_are_refused_and_change_nothing(group: Ranks) -> None:
    with pytest.raises(RequestError, match="the worker group is ready already"):
        group.start()
    with pytest.raises(RequestError, match="there is no rank 7; the group has ranks 0 to 1"):
        group.kill(7)
    group.stop()
    with pytest.raises(RequestError, match="there is no worker group"):
        group.run("pass")
    group.start()
    group.run("pass")


def test_a_group_that_was_closed_leaves_no_thread_and_no_descriptor(
    make_group: Callable[..., Ranks],
) -> None:
    import threading

    make_group(2).close()
    threads = {thread.name for thread in threading.enumerate()}
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        group = make_group(2)
        group.run("pass", quiet=True)
        group.restart()
        group.close()
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not {name for name in left if name.startswith("nbddp")}
    assert wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)


@pytest.mark.full
def test_groups_that_are_started_at_the_same_time_have_a_folder_each(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("x")  # a short name: a socket's may have 107 characters
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = process.current_process()._config.get("tempdir")
    start_helper = ForkServer.ensure_running

    def start_slowly(helper: ForkServer) -> None:
        time.sleep(0.1)  # for the others to come in between, if they can
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
    assert FOLDER not in os.environ
