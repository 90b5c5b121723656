"""Ranks that outlive their kernel, and another kernel that takes them back."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from notebook import PATIENCE, Notebook, Reply
from processes import wait_until

pytestmark = pytest.mark.timeout(300)

TRAINS = """
import time
for step in range(30):
    dist.barrier()
    print("step", step)
    if step == 3:
        print("begun", flush=True)
    nbddp.log(step=step, loss=1.0 / (step + 1))
    time.sleep(0.3)
"""
ENDS = """
import time
print("begun", flush=True)
time.sleep(2)
print("the end")
"""
ASKS = """
print("begun", flush=True)
name = input(f"name of rank {rank}? ")
print("it is", name)
"""
HANGS = """
import time
print("begun", flush=True)
time.sleep(1000)
"""
CELLS = {"trains": TRAINS, "ends": ENDS, "asks": ASKS, "hangs": HANGS, "none": "print('begun')"}
NONE = "none of your runs is live on this machine\n"
BACK = re.compile(r"\b2 of 2 ranks are back\b")


class ServedNotebook(Notebook):
    """A kernel that a real Jupyter server has started."""

    def __init__(self, folder: Path) -> None:
        self._sockets = TemporaryDirectory(dir="/tmp")
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        kernels = ["--KernelManager.transport=ipc", f"--KernelManager.ip={self._sockets.name}/it"]
        places = {f"JUPYTER_{name}_DIR": str(folder) for name in ("CONFIG", "DATA", "RUNTIME")}
        with (folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                [*command, *kernels, "--port=0", "--IdentityProvider.token=secret"],
                env=os.environ | places,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        facts = folder / f"jpserver-{self._server.pid}.json"
        assert wait_until(lambda: facts.exists() and facts.read_text().endswith("}"))
        server = json.loads(facts.read_text())

        def is_listening() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", server["port"])) == 0

        assert wait_until(is_listening), "it writes its file before it listens"
        headers = {"Authorization": "token secret"}
        request = urllib.request.Request(f"{server['url']}api/kernels", b"{}", headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            path = str(folder / f"kernel-{json.load(answer)['id']}.json")
        children = psutil.Process(self._server.pid).children()
        [self._kernel] = [each for each in children if path in each.cmdline()]
        self.client = BlockingKernelClient(connection_file=path)
        self.client.load_connection_file()
        self.client.start_channels(hb=False)  # a slow start counts as its death
        self.client.wait_for_ready(timeout=PATIENCE)
        assert self.run("%load_ext nbddp").status == "ok"

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.kill_server()
        self._sockets.cleanup()

    def kill_server(self) -> None:
        """Kill the server. Its kernel looks for it once a second, and ends too."""
        self._server.kill()
        self._server.wait()
        assert not psutil.wait_procs([self._kernel], timeout=20)[1]


@pytest.fixture
def how() -> str:
    """How the first kernel ends; a test may choose it."""
    return "killed"


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> Iterator[Notebook]:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "first").mkdir()
    kind = ServedNotebook if how == "with its server" else Notebook
    with kind(tmp_path / "first") as notebook:
        yield notebook
    if own_files(tmp_path):  # only if the test has failed
        nbddp_command("stop", "2", "--yes")


def nbddp_command(*words: str) -> str:
    command = [sys.executable, "-m", "nbddp", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def live_runs() -> str:
    return nbddp_command("runs", "--live")


def own_files(home: Path) -> list[Path]:
    """Return the files of nodes in a home folder."""
    files = [path for path in (home / ".nbddp").rglob("*") if path.is_file()]
    return [path for path in files if path.parent.name != "live"]


def end(notebook: Notebook, how: str) -> None:
    match how:
        case "killed":
            os.kill(notebook.pid, signal.SIGKILL)
        case "shut down":
            notebook.shut_down()
        case "with its server":
            assert isinstance(notebook, ServedNotebook)
            notebook.kill_server()
        case _:
            notebook.restart()
            assert notebook.run("%load_ext nbddp").status == "ok"


def rejoin(notebook: Notebook, cell: str) -> Reply:
    if cell == "asks":
        return notebook.converse("%ddp rejoin", "Ada", "Emmy")
    if cell == "hangs":
        request = notebook.begin("%ddp rejoin")
        before = notebook.finish(request, until="begun", times=2)
        notebook.interrupt()
        return notebook.finish(request, so_far=before)
    return notebook.run("%ddp rejoin")


def check(reply: Reply, cell: str) -> None:
    assert BACK.search(reply.text), reply
    match cell:
        case "trains":
            for rank in (0, 1):
                lines = [line for line in reply.lines(rank) if line.startswith("step")]
                assert lines == [f"step {step}" for step in range(30)], reply.text
            assert "image/png" in reply.displays[0]  # the chart of the loss
        case "ends":
            assert [reply.lines(rank) for rank in (0, 1)] == [["begun", "the end"]] * 2, reply.text
        case "asks":
            assert {prompt for prompt, _ in reply.asked} == {
                f"[rank {rank}] name of rank {rank}? " for rank in (0, 1)
            }
            assert len(reply.asked) == 2, reply
            assert re.search(r"it is Ada\n(.*\n)*.*it is Emmy", reply.text), reply.text
        case "hangs":
            assert "ranks 0-1 interrupted" in reply.error, reply


@pytest.mark.gate_runs("killed-trains")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("how", ["killed", "restarted", "shut down", "with its server"])
def test_kept_ranks_are_taken_back_with_names_and_their_cell(
    first: Notebook, tmp_path: Path, how: str, cell: str
) -> None:
    assert first.run("%%ddp --keep-alive 90s\nkept, place = [rank], id(dist)").status == "ok"
    request = first.begin(f"%%ddp\n{CELLS[cell]}", asks=cell == "asks")
    first.finish(request, until="begun", times=2)
    end(first, how)
    assert wait_until(lambda: "kept for 1:" in live_runs(), timeout=20), live_runs()
    with ExitStack() as stack:
        notebook = first
        if how != "restarted":
            (tmp_path / "second").mkdir()
            notebook = stack.enter_context(Notebook(tmp_path / "second"))
        check(rejoin(notebook, cell), cell)
        same = notebook.run(
            "%%ddp\ntotal = torch.ones(1)\ndist.all_reduce(total)\n"
            "kept == [rank], place == id(dist), total.item()"
        )
        assert same.text == "Out [ranks 0-1] (True, True, 2.0)\n", same
        assert notebook.run("%ddp stop").status == "ok"
    assert wait_until(lambda: live_runs() == NONE, timeout=20)  # written once a second
    assert own_files(tmp_path) == []


@pytest.mark.full
def test_dead_rank_is_reported_and_ranks_that_nobody_takes_back_end_with_all_files(
    first: Notebook, tmp_path: Path
) -> None:
    assert first.run("%ddp keep-alive 30s --nproc 2").status == "ok"
    assert first.run("%%ddp\nimport os\nos.getpid()").status == "ok"
    assert "kept for 30.0 s after the end of the kernel" in first.run("%ddp runs --live").text
    assert "no ranks of run 'nothere'" in first.run("%ddp rejoin nothere").text
    assert "is alive: end it" in first.run("%ddp rejoin 2").text
    assert "`%ddp stop` first" in first.run("%ddp keep-alive 1h").text
    children = psutil.Process(first.pid).children()
    [agent] = [each for each in children if "torch.distributed.run" in each.cmdline()]
    family = [agent, *agent.children(recursive=True)]
    ranks = [each for each in family if "rank 1 of 2" in each.name() + str(each.cmdline())]
    end(first, "restarted")
    ranks[0].kill()
    text = first.run("%ddp rejoin").text
    assert "1 of 2 ranks are back with their variables" in text, text
    assert "%ddp heal" in text, text
    os.kill(first.pid, signal.SIGKILL)
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert wait_until(lambda: live_runs() == NONE, timeout=20)
    assert own_files(tmp_path) == []


@pytest.mark.full
def test_kept_ranks_are_ended_from_a_terminal(first: Notebook) -> None:
    for _ in range(2):
        assert "2 ranks on 1 node" in first.run("%ddp start --keep-alive 60s").text
    assert "outlive this kernel for 1:00" in first.run("%ddp start --keep-alive 2m").text
    end(first, "killed")
    assert wait_until(lambda: "its kernel is dead · 2 ranks" in live_runs(), timeout=20)
    [run] = json.loads(nbddp_command("runs", "--live", "--json"))["runs"]
    assert run["kept"].pop("memory") > 10_000_000
    assert 0 < run["kept"].pop("remaining") <= run["kept"]["seconds"]
    assert run["kept"].pop("text").endswith(f"`%ddp rejoin {run['run']}`")
    assert run["kept"] == {"ranks": 2, "seconds": 60.0}
    assert "`%ddp rejoin 2" in nbddp_command("why")
    assert nbddp_command("stop") == ""  # it asks first, and there is no terminal
    assert nbddp_command("interrupt", "--yes") == ""
    assert re.match(r"20\S+: 2 ranks ended", nbddp_command("stop", "--yes"))
    assert live_runs() == NONE


@pytest.mark.full
def test_kernel_with_another_version_leaves_the_ranks_to_the_next_one(first: Notebook) -> None:
    assert first.run("%%ddp --keep-alive 90s\nkept = rank").status == "ok"
    end(first, "restarted")
    first.run("import nbddp\nnbddp.__version__ = '0'")
    reason = first.run("%ddp rejoin").text
    assert re.search(r"nbddp is \S+ on \S+ and 0 in the notebook; `%ddp rejoin`", reason), reason
    end(first, "restarted")
    assert BACK.search(first.run("%ddp rejoin").text)
    assert "Out [ranks 0-1] True" in first.run("%%ddp\nkept == rank").text
    assert first.run("%ddp stop").status == "ok"
