"""The state in a run's folder, and the commands that read it; without ranks."""

import json
import os
import platform
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import FakeLauncher, FakeLink, fake_session
from processes import wait_until
from refusals import refusal
from runs_on_disk import FAILED, lines, make_run

from nbddp.__main__ import command_parser, main
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extension.installed import installed
from nbddp.extensions.runs import SCHEMA, STATE_FILE
from nbddp.extensions.runs.live_index import IndexEntry, entered_runs
from nbddp.extensions.runs.open_run import checked, find, live_runs, read_state
from nbddp.extensions.terminal import action_socket
from nbddp.extensions.terminal.action_socket import MAX_PATH
from nbddp.record.cell import CellRequest
from nbddp.wire.group_spec import GroupSpec

PAGE = (Path(__file__).parents[3] / "docs" / "terminal.md").read_text()
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command. Return its exit code, output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def session() -> Iterator[Session]:
    """A session that has run a cell, with an odd metric."""
    session = fake_session(FakeLauncher(), FakeLink())
    session.start(GroupSpec())
    session.submit(CellRequest(source="# why\nx = 1\nx"))
    assert wait_until(lambda: not session.life.state.is_busy)
    session.rank_monitor.metrics.add(0, time.time(), 3, {"loss": float("nan")})
    yield session
    session.close()


def run_of(session: Session, cell: str = "is done") -> Path:
    """Return the folder of a session's run, once its state has a text."""
    path = session.event_log.path
    assert path is not None
    assert wait_until(lambda: (path / STATE_FILE).exists() and cell in why_of(path))
    assert wait_until(lambda: "loss" in read_state(path)["metrics"])
    return path


def why_of(path: Path) -> str:
    return str(read_state(path)["why"]["text"])


def write_state(path: Path, *, age: float = 0.0, is_over: bool = False, **kernel: Any) -> Path:
    """Write a state as this process would, or another one, in a run's folder."""
    started = psutil.Process().create_time()
    kernel_facts = {"pid": os.getpid(), "started": started, "host": platform.node()}
    facts = {
        "schema": SCHEMA,
        "run": path.name,
        "is_over": is_over,
        "state": "running a cell",
        "cell": None,
        "ranks": [],
        "metrics": {"loss": {"mean": 0.5}},
        "kernel": kernel_facts | kernel,
        "why": {"kind": "hang", "text": "no progress", "way_out": "interrupt it"},
        "text": "running a cell",
    }
    (path / STATE_FILE).write_text(json.dumps(facts))
    written = time.time() - age
    os.utime(path / STATE_FILE, (written, written))
    return path


def make_live(base: Path, name: str, **state: Any) -> Path:
    return write_state(make_run(base, name, is_stopped=False), **state)


# ---- the state


def test_state_is_private_has_a_heartbeat_and_tells_the_end(session: Session) -> None:
    path = run_of(session)
    facts = read_state(path)
    assert stat.S_IMODE((path / STATE_FILE).stat().st_mode) == 0o600
    assert [*path.glob("*.tmp")] == []
    assert facts["state"] == "ready"
    assert facts["cell"]["source"] == "x = 1"
    assert facts["metrics"] == {"loss": {"mean": "nan", "low": "nan", "high": "nan"}}
    assert facts["kernel"]["pid"] == os.getpid()
    assert facts["kernel"]["is_alive"] is True
    assert live_runs() == [path.resolve()]
    before = (path / STATE_FILE).stat()
    assert wait_until(lambda: (path / STATE_FILE).stat().st_mtime > before.st_mtime)
    assert (path / STATE_FILE).stat().st_ino == before.st_ino  # nothing changed: it is not replaced
    session.stop()
    session.close()
    assert read_state(path)["is_over"]
    assert read_state(path)["state"] == "ended"
    assert live_runs() == []
    assert [*entered_runs()] == []


def test_each_run_of_a_session_has_its_end_also_if_the_next_one_starts_at_once(
    session: Session,
) -> None:
    first = run_of(session)
    session.stop()
    session.start(GroupSpec())
    assert read_state(first)["is_over"]
    second = run_of(session, "nothing has failed")
    assert second != first
    assert live_runs() == [second.resolve()]


def test_state_that_cannot_be_written_is_logged_once_and_the_cells_go_on(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_of(session)
    path.chmod(0o777)
    assert wait_until(lambda: "could not be written" in caplog.text)
    session.submit(CellRequest(source="x"))
    assert wait_until(lambda: not session.life.state.is_busy)
    path.chmod(0o700)
    session.close()
    assert read_state(path)["is_over"]
    assert caplog.text.count("could not be written") == 1


# ---- staleness


def test_old_state_and_dead_kernel_are_told(folder: Path) -> None:
    path = make_live(folder, "20270115-080000-a")
    assert read_state(path)["note"] == ""
    write_state(path, age=8.2)
    assert read_state(path)["note"].startswith(
        f"this state is 8.2 s old: the kernel (process {os.getpid()}) is alive, but it is stopped"
    )
    write_state(path, age=30.0, host="elsewhere")
    assert read_state(path)["note"] == (
        "this state is 30.0 s old; the kernel is on elsewhere, and may be dead"
    )
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for kernel in ({"pid": gone.pid}, {"started": psutil.Process().create_time() - 100}):
        state = read_state(write_state(path, age=1.0, **kernel))
        assert state["kernel"]["is_alive"] is False
        pid, started = state["kernel"]["pid"], time.localtime(state["kernel"]["started"])
        shown = time.strftime("%Y-%m-%d %H:%M:%S", started)
        assert f"the kernel is dead (process {pid}, started {shown})" in state["note"]
    assert read_state(write_state(path, is_over=True, pid=gone.pid))["note"] == ""


def test_why_of_a_dead_kernel_names_it_and_what_it_knew_last(folder: Path, run: Run) -> None:
    make_live(folder, "20270115-080000-a", started=1.0)
    code, printed, _ = run("why")
    assert code == 0
    assert "the kernel is dead (process" in printed
    assert "the last that it knew: no progress\n" in printed
    assert printed.endswith("run the cells again; the logs and metrics are kept\n")
    assert json.loads(run("why", "--json")[1])["kind"] == "dead kernel"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not readable"),
        ("[]", "is not readable"),
        ('{"schema": 99}', "it has schema 99, and this version reads 1; `nbddp show"),
        (None, "it has just started, or it is of another version of nbddp; `nbddp show"),
    ],
)
def test_state_of_another_version_or_a_damaged_one_is_refused(
    text: str | None, reason: str, folder: Path
) -> None:
    path = make_run(folder)
    if text is not None:
        (path / STATE_FILE).write_text(text)
    assert reason in refusal(RequestError, read_state, path)


# ---- which run


def test_live_run_of_this_folder_is_found_first_then_the_only_one_of_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = folder / "here", folder / "other"
    newest = make_run(here, "20270115-080009-newest")
    monkeypatch.chdir(here)
    assert find(None) == newest
    far = make_live(other, "20270115-080000-far")
    entry = IndexEntry()
    entry.write(far)
    assert find(None) == far
    assert find("far") == far
    assert find("newest") == newest
    second = IndexEntry()
    second.write(make_live(other, "20270115-080000-far2"))
    assert "you have 2 live runs, so name one: " in refusal(RequestError, find, None)
    assert "'far' matches 2 live runs" in refusal(RequestError, find, "far")
    assert find(far.name) == far  # in full, though the other name begins with it
    live = make_live(here, "20270115-080001-live")
    assert find(None) == live
    write_state(live, started=1.0)
    second.remove()
    assert find(None) == far  # its kernel is dead
    assert find("live") == live
    assert "there is no run 'x'" in refusal(RequestError, find, "x")


def test_index_forgets_what_killed_kernels_left(folder: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    entry = folder / ".nbddp" / "live" / f"{platform.node()}-{gone.pid}-12345678"
    entry.parent.mkdir(parents=True)
    entry.touch()
    (entry.parent / "elsewhere-1-12345678").write_text("/far")
    IndexEntry().write(make_live(folder, "20270115-080000-a"))
    assert not entry.exists()
    assert Path("/far") in entered_runs()


def test_links_folders_of_others_and_paths_outside_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_live(folder, "20270115-080008-a")
    link = path.with_name("20270115-080001-b")
    link.symlink_to(path)
    assert "is a link" in refusal(RequestError, checked, link)
    outside = make_run(folder / "elsewhere").rename(folder / "outside")
    assert "is not in a folder `.nbddp/runs`" in refusal(RequestError, find, str(outside))
    path.chmod(0o777)
    assert "other users can write to" in refusal(RequestError, find, "8-a")
    path.chmod(0o700)
    assert find("8-a") == path
    secret = folder / "secret"
    secret.write_text("hidden")
    (path / "rank1.log").symlink_to(secret)
    assert main(["logs", "1", "--run", "8-a"]) == 1
    (path / STATE_FILE).unlink()
    (path / STATE_FILE).symlink_to(secret)
    assert "is not readable" in refusal(RequestError, read_state, path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in refusal(RequestError, find, "8-a")


# ---- the commands


def test_texts_and_json_have_no_control_sequences(folder: Path, run: Run) -> None:
    path = make_live(folder, "20270115-080000-a")
    (path / "rank0.log").write_text("one\n\x1b[31mred\x1b[m\x1b]0;title\x07\nlast\n")
    (path / "rank10.log").write_text("of ten\n")
    assert run("logs")[1].splitlines()[-2:] == ["[rank 0] last", "[rank 10] of ten"]
    assert run("logs", "0", "-n", "2")[1] == "red\nlast\n"
    answer = json.loads(run("logs", "0", "-n", "2", "--json")[1])
    assert answer["logs"] == [{"rank": 0, "lines": ["red", "last"], "has_more": True}]
    code, _, error = run("logs", "3")
    assert (code, error) == (1, f"nbddp: there is no log rank3.log in {path}\n")
    code, printed, _ = run("logs", "3", "--json")
    assert (code, json.loads(printed)) == (1, {"schema": 1, "error": error[7:-1]})
    assert "\x1b" not in run("show")[1]


def test_runs_and_metrics_are_listed_as_asked(folder: Path, run: Run) -> None:
    make_run(folder, "20270115-080000-a")
    make_run(folder, "20270115-080001-b")
    assert "1 more: " in run("runs", "--number", "1")[1]
    answer = json.loads(run("runs", "0-a", "--json")[1])
    assert [each["run"] for each in answer["runs"]] == ["20270115-080000-a"]
    assert answer["total"] == 2
    assert run("metrics", "--metrics", "acc*")[1].startswith("accuracy: 0.8601\n")
    assert "no metric" in run("metrics", "--metrics", "x")[2]
    assert run("runs", "--live")[1] == "none of your runs is live on this machine\n"


def test_watch_prints_each_change_until_the_run_ends(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_live(folder, "20270115-080000-a")
    (path / "rank0.log").write_text("\x1b[31mred\n")
    waits = iter([lambda: write_state(path), lambda: write_state(path, is_over=True)])
    monkeypatch.setattr(time, "sleep", lambda _seconds: next(waits)())
    code, printed, _ = run("watch", "--json")
    assert code == 0
    assert [json.loads(line)["is_over"] for line in printed.splitlines()] == [False, True]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    screen = run("watch")[1]
    assert screen.startswith("\x1b[H\x1b[2Jrunning a cell\n")
    assert "\nloss 0.5\n" in screen
    assert "\n[rank 0] red\n" not in screen  # a single log needs no rank
    assert "\nred\n" in screen


@pytest.mark.process
def test_watch_ends_with_its_reader_though_nothing_changes(folder: Path) -> None:
    later = time.time() + 3600  # its state is never old
    os.utime(make_live(folder, "20270115-080000-a") / STATE_FILE, (later, later))
    command = [sys.executable, "-m", "nbddp", "watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "running a cell\n"
        watching.stdout.close()
        try:
            assert watching.wait(20) == 0
        finally:
            watching.kill()


@pytest.mark.process
def test_a_terminal_without_utf_8_gets_other_characters(folder: Path) -> None:
    make_run(folder, "20270115-080000-\N{SNOWMAN}")
    command = [sys.executable, "-m", "nbddp", "runs"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20270115-080000-?" in done.stdout


def test_deleted_folder_is_named(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    code, _, error = run("status")
    assert (code, error) == (
        1,
        "nbddp: the current folder cannot be used: No such file or directory; change to another\n",
    )


def test_command_of_a_missing_extension_or_an_unknown_one_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = run("wy")[2]
    assert error.startswith("nbddp: there is no `nbddp wy`; the commands are: ")
    assert " status, why," in error
    monkeypatch.setattr("nbddp.__main__.installed", dict)
    code, _, error = run()
    assert code == 1
    assert error == "nbddp: there is no `nbddp status`; the extension terminal is not installed\n"


@pytest.mark.process
def test_light_commands_import_neither_torch_nor_ipython_nor_the_views(folder: Path) -> None:
    make_live(folder, "20270115-080000-a")
    program = (
        "import sys\nfrom nbddp.__main__ import main\n"
        "for word in ('status', 'why', 'logs'): main([word])\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "running a cell" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "IPython", "numpy", "ipywidgets", "nbddp.record.snapshot", "asyncio"}
    assert loaded & heavy == set()


# ---- the acting commands


def test_acting_commands_ask_first_and_go_through_a_private_socket(
    session: Session, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(session)
    socket = Path(read_state(path)["kernel"]["socket"])
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(socket)) <= MAX_PATH
    assert run("interrupt", "--yes")[2] == "nbddp: no cell is running\n"
    assert "add --yes" in run("stop")[2]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "n\n", raising=False)
    assert run("kill", "1")[2].endswith(" [y/N] nbddp: nothing was done\n")
    assert "there is no rank 7" in run("kill", "7", "--yes")[2]
    killed = f"{path.name}: rank 1 was killed; `%ddp heal` replaces it"
    assert run("kill", "1", "--yes")[1].startswith(killed)
    with monkeypatch.context() as patch:
        patch.setattr(action_socket, "_user_of", lambda _peer: -1)
        assert "belongs to another user" in run("stop", "--yes")[2]
    answer = json.loads(run("stop", "--yes", "--json")[1])
    assert answer["done"] == "all ranks are stopped and their variables are lost"
    assert not session.life.state.is_live
    session.close()
    assert not socket.exists()
    assert run("interrupt", "--yes")[2] == f"nbddp: run {path.name} is over\n"


def test_another_user_at_the_kernels_side_gets_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(session)
    users = iter([os.geteuid(), -1])  # of the kernel, as the terminal sees it, and of the terminal
    monkeypatch.setattr(action_socket, "_user_of", lambda _peer: next(users))
    request = {"act": "stop"}
    ask = action_socket.ask
    reason = refusal(RequestError, ask, read_state(path)["kernel"]["socket"], request)
    assert reason.startswith("the kernel ")  # it refuses, or does not answer
    assert session.life.state.is_live
    assert "no socket" in refusal(RequestError, ask, "/tmp/x", request)


# ---- the schema

TYPES = {str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}
OPEN = {"facts", "runs[].config"}  # whose fields others choose
HEAD = {"schema", "run", "folder", "kernel", "age", "note", "is_over", "state", "cell"}
NAMED = {"metrics": "NAME", "metrics[].last": "RANK", "runs[].last": "NAME"}  # by names of users


def documented(command: str) -> dict[str, set[str]]:
    """Return the types of each field in the tables of the page."""
    section = PAGE.partition(f"\n### {command}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", section, re.MULTILINE)
    return {
        name: set(kind.split(" or ")) for names, kind in rows for name in names[1:-1].split("`, `")
    }


def fields_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of an answer, with their types."""
    if isinstance(value, dict) and path in OPEN:
        yield path, "object"
    elif isinstance(value, dict):
        for name, item in value.items():
            name = NAMED.get(path, name)
            yield from fields_of(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from fields_of(item, f"{path}[]")
    elif isinstance(value, list):
        kinds = {TYPES[type(item)] for item in value} or {"?"}
        yield path, f"list of {kinds.pop()}s"
    else:
        yield path, TYPES[type(value)]


def test_page_has_the_fields_of_all_answers_and_their_types(
    session: Session, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_of(session)
    session.kill(0)
    assert wait_until(lambda: read_state(path)["state"] != "ready")
    stored = make_run(folder / "stored", is_stopped=False)
    failures = [{"ranks": [1], "what": "x", "consequence": True}]
    events = [*FAILED[:5], FAILED[5] | {"failures": failures}]
    (stored / "events.jsonl").write_text(lines(events))
    found: dict[str, dict[str, set[str]]] = {}
    for command in ("status", "why", "logs", "metrics", "runs", "show"):
        if command == "logs":
            monkeypatch.chdir(folder / "stored")
        named = {"logs": ("--run", "digits"), "metrics": ("digits",), "show": ("digits",)}
        code, printed, error = run(command, *named.get(command, ()), "--json")
        assert code == 0, error
        kinds: dict[str, set[str]] = {}
        for name, kind in fields_of(json.loads(printed)):
            kinds.setdefault(name, set()).add(kind)
        found[command] = kinds
    tables = {command: documented(command) for command in found}
    roots = {name: name.partition(".")[0].partition("[")[0] for name in tables["status"]}
    of_ranks = {f"ranks[].{name}" for name in ("rank", "state", "line", "file", "code", "call")}
    shared = {name for name, root in roots.items() if root in HEAD} | of_ranks
    tables["why"] |= {name: tables["status"][name] for name in shared}
    for command, kinds in found.items():
        table = {
            name: types
            for name, types in tables[command].items()
            if "object" not in types or name in OPEN
        }
        empty = {name for name in kinds if any(each.startswith(f"{name}[]") for each in table)}
        assert set(kinds) - empty == set(table), command
        for name, seen in [(name, seen) for name, seen in kinds.items() if name in table]:
            assert seen - {"list of ?s"} <= table[name], f"{command}: {name}"


def test_all_commands_are_on_the_page_and_belong_to_the_extension() -> None:
    parser, kinds = command_parser()
    assert set(kinds) == set(re.findall(r"`nbddp (\w+)", PAGE.partition("\n## ")[0])) - {"COMMAND"}
    assert "watch" in parser.format_help()
    assert installed()["terminal"].needs == ("runs",)
