"""How `%ddp` and `%%ddp` use their options: the start of ranks, and the code they run."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from fakes import FakeLauncher, FakeLink, fake_session
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from refusals import refusal
from traitlets.config import Config

from nbddp.controller.session import Session
from nbddp.errors import CellFailedError
from nbddp.extensions.export.items import ExportLog
from nbddp.extensions.nodes import notebook as nodes
from nbddp.extensions.nodes.node_pool import NodesSpec
from nbddp.extensions.publish import PublishOptions
from nbddp.extensions.publish.tracker import Target
from nbddp.extensions.timeline import notebook as timelines
from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.group.notebook_half import NotebookHalf
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.retries import Retries
from nbddp.magics import load as extension
from nbddp.magics.cell_magic import run_cell
from nbddp.magics.line_magic import run_command
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.presenter import Presenter
from nbddp.record.cell import CellRequest, CellResult
from nbddp.sigint import run_in_thread
from nbddp.ui.log_lines import LogBuffer
from nbddp.ui.report.blocks import note
from nbddp.ui.report.render import render_html
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import RankStart
from nbddp.wire.request_messages import Push

start = Session.start
WENT_WELL = Mock(spec=CellResult, is_ok=True, verdict=None, ranks=(0,), prompt=1)


class Typed:
    """A notebook's magics, without ranks: mocks start ranks, and run cells and scripts."""

    def __init__(self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, self.link = FakeLauncher(), FakeLink()
        self.notebook = NotebookState(shell)
        group = RankGroup(GroupSpec(), fake_session(self.launcher, self.link))
        self.notebook.group = self.notebook.ranks.group = group
        self.start, self.run = Mock(), Mock(return_value=WENT_WELL)
        monkeypatch.setattr(Session, "start", self.start)
        monkeypatch.setattr(Recovery, "run", self.run)
        Path("train.py").write_text("x = 1\n")

    def asked(self) -> tuple[CellRequest, Retries]:
        """The cell or script that was to run since the last time, and how often again."""
        self.run.assert_called_once()
        request, retries, begun = self.run.call_args.args
        assert begun is None
        self.run.reset_mock()
        return request, retries

    def line(self, line: str) -> None:
        run_command(self.notebook, line)

    def cell(self, line: str) -> None:
        run_cell(self.notebook, line, "x = 1")


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """A shell without a history; ``__main__`` is given back."""
    main = sys.modules["__main__"]
    yield InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    sys.modules["__main__"] = main


@pytest.fixture
def typed(
    shell: InteractiveShell,
    folder: Path,  # noqa: ARG001 - of the script and the runs
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Typed]:
    typed = Typed(shell, monkeypatch)
    yield typed
    typed.notebook.group.close()


Run = Callable[[Typed, str], object]
RUNS: dict[str, Run] = {
    "%%ddp": Typed.cell,
    "%ddp run": lambda typed, options: typed.line(f"run {options} train.py"),
}
BEGINS = RUNS | {
    "%ddp start": lambda typed, options: typed.line(f"start {options}"),
    "%ddp restart": lambda typed, options: typed.line(f"restart {options}"),
}
HOW: dict[str, tuple[str, Any]] = {
    "--nproc-per-node 3": ("nproc", 3),
    "--backend gloo": ("backend", "gloo"),
    "--gpus 0,2": ("gpus", (0, 2)),
    "--name mine": ("name", "mine"),
    "--timeout 9": ("timeout", 9.0),
    "--env A=1": ("env", {"A": "1"}),
    "--grace 3": ("grace", 3.0),
    "--threads 4": ("threads", 4),
}


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
def test_ranks_start_with_the_given_options(typed: Typed, begin: Run) -> None:
    begin(typed, " ".join(HOW))
    (spec,) = typed.start.call_args.args
    assert {name: getattr(spec, name) for name, _ in HOW.values()} == dict(HOW.values())
    assert [name for name, value in HOW.values() if getattr(GroupSpec(), name) == value] == []


@pytest.fixture
def with_ranks(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Ranks can be started, and have no process."""
    monkeypatch.setattr(Session, "start", start)
    return typed


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_fresh_option_restarts_the_ranks(with_ranks: Typed, run: Run) -> None:
    keep = "--keep" if run is not Typed.cell else ""  # on the ranks of cells
    for options, attempt in (("", 1), ("", 1), ("--fresh", 2)):
        run(with_ranks, f"{keep} {options}")
        assert with_ranks.notebook.group.life.attempt == attempt


def test_ranks_are_started_killed_restarted_and_stopped(with_ranks: Typed) -> None:
    group, launcher = with_ranks.notebook.group, with_ranks.launcher
    with_ranks.line("start --nproc 3")
    assert len(launcher.living()) == 3
    with_ranks.line("kill 1")
    assert group.life.alive == [0, 2]
    assert launcher.handles[1, 1].exitcode == -9
    with_ranks.line("restart")
    assert (group.life.alive, group.life.attempt) == ([0, 1, 2], 2)
    with_ranks.line("stop")
    assert (group.life.alive, launcher.living()) == ([], [])


def test_a_run_name_given_while_ranks_run_applies_to_the_next_run(
    with_ranks: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    group = with_ranks.notebook.group
    with_ranks.line("start --name first")
    for name, used in (
        ("se/cond", "be named se-cond"),
        ("..", "have no name"),
        ("second", "be named second"),
    ):
        capsys.readouterr()
        with_ranks.cell(f"--name {name}")
        assert f"the next run will {used}\n" in capsys.readouterr().out
    assert (group.session.spec.name, group.life.attempt) == ("first", 1)
    with_ranks.line("stop")
    with_ranks.line("start")
    assert group.session.spec.name == "second"


def test_the_ranks_and_the_status_count_the_attempts_of_the_run(
    with_ranks: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    started, notebook = [], with_ranks.notebook
    answer = with_ranks.launcher.on_launch

    def note(rank: RankStart) -> None:
        started.append((rank.attempt, rank.run_attempt))
        answer(rank)

    with_ranks.launcher.on_launch = note
    lines = ("start --nproc 1", "restart", "stop", "start", "restart --replay --name other")
    for line in lines:
        with_ranks.line(line)
    assert started == [(1, 1), (2, 2), (3, 1), (4, 1)]
    capsys.readouterr()
    with_ranks.line("status")
    assert " · attempt 1 · " in capsys.readouterr().out
    events = [each for each in notebook.group.session.event_log.since(0) if each.kind == "start"]
    assert [event.facts()["attempt"] for event in events] == [1, 2, 1, 1]
    assert notebook.group.session.spec.name == "other"


def test_status_of_a_page_has_the_output_of_ranks_and_no_notice_that_is_over(
    with_ranks: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ranks.line("start --nproc 1")
    session, buffer, show = with_ranks.notebook.group.session, LogBuffer(), Mock()
    presenter = with_ranks.notebook.presenter
    presenter._last_panel = Mock(session=session, attempt=session.life.attempt, log_buffer=buffer)
    monkeypatch.setattr(Presenter, "shows_panels", True)
    monkeypatch.setattr(Presenter, "show", show)
    buffer.write(0, "cleaned up\n")
    buffer.write_notice("rank 0: interrupted, and still busy")
    with_ranks.line("status")
    page = render_html(show.call_args.args[-1])
    assert "cleaned up" in page
    assert "still busy" not in page


def test_values_are_sent_to_the_ranks_that_the_option_names(with_ranks: Typed) -> None:
    with_ranks.notebook.shell.user_ns |= {"one": 1, "other": 2}
    with_ranks.line("start --nproc 3")
    for options, ranks in (("", [0, 1, 2]), ("--ranks 0,2", [0, 2])):
        with_ranks.link.sent.clear()
        with_ranks.line(f"push one other {options}")
        sent = [rank for rank, command in with_ranks.link.sent if isinstance(command, Push)]
        assert sorted(sent) == ranks


def test_a_fault_is_armed_on_the_given_rank_with_the_given_options(typed: Typed) -> None:
    typed.line("fault slow --rank 1 --step 7 --factor 3")
    request: CellRequest = typed.run.call_args.args[0]
    assert request.ranks == (1,)
    calls: list[dict[str, Any]] = []
    exec(request.source, {"nbddp": Mock(**{"faults.at": lambda **how: calls.append(how)})})
    assert calls == [{"kind": "slow", "rank": 1, "step": 7, "factor": 3.0, "again": True}]
    with pytest.raises(UsageError, match="required: --step; for "):
        typed.line("fault kill --rank 1")
    with pytest.raises(UsageError, match="disarms the faults of all ranks and steps"):
        typed.line("fault off --rank 1")
    typed.line("fault off")
    exec(typed.run.call_args.args[0].source, {"nbddp": (kit := Mock())})
    kit.faults.clear.assert_called_once_with()


def test_armed_faults_are_those_of_living_ranks_that_have_not_fired(
    with_ranks: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    session = with_ranks.notebook.group.session
    with_ranks.line("start --nproc 3")
    faults = {rank: [f"kill@rank={rank},step=4", f"raise@rank={rank},step=9"] for rank in range(3)}
    session.actor.state.armed_faults.update(faults)
    with_ranks.line("kill 1")
    session.record_fired({"kill@rank=2,step=4"})
    capsys.readouterr()
    with_ranks.line("status")
    armed = "nbddp: armed faults: kill@rank=0,step=4 raise@rank=0,step=9 raise@rank=2,step=9; "
    assert f"\n{armed}`%ddp fault off` disarms all\n" in capsys.readouterr().out
    with_ranks.line("stop")
    assert session.armed_now == ()


def test_wait_in_a_terminal_does_not_repeat_the_report_of_a_background_cell(typed: Typed) -> None:
    failed = Mock(spec=CellResult)
    failed.raise_for_failure.side_effect = CellFailedError("it failed", rank=0, report="a report")
    typed.notebook._background = run_in_thread("nbddp-view", lambda: (failed, ()))
    with pytest.raises(CellFailedError) as raised:
        typed.line("wait")
    assert raised.value._render_traceback_() == ["it failed (more above)"]


@pytest.mark.parametrize("has_record", [False, True])
def test_a_timeline_below_a_record_does_not_repeat_its_warning(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    timeline = Timeline(cell=1, ranks=(0,), span=(0.0, 1.0), awaited=Mock())
    monkeypatch.setattr(timelines, "timeline_of", lambda *_: timeline)
    monkeypatch.setattr(Presenter, "has_record", has_record)
    monkeypatch.setattr(Presenter, "show", Mock())
    monkeypatch.setattr(timelines, "timeline_report", report := Mock())
    typed.cell("--timeline")
    [shown] = report.call_args.args
    assert (shown.awaited is None) == has_record


def test_a_message_during_a_command_is_not_kept_for_the_next_cell(
    with_ranks: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    with_ranks.line("start")
    Path(".nbddp").rename("moved")  # at once: another thread may still write the record
    capsys.readouterr()
    with_ranks.line("restart")
    shown = capsys.readouterr().out
    assert shown.endswith(" is not complete: No such file or directory\n")
    router = with_ranks.notebook.group.session.router
    assert router.pending.get(0) is None


WHAT: dict[str, tuple[str, Any]] = {
    "--ranks 1": ("ranks", (1,)),
    "--break-ranks 1": ("break_ranks", (1,)),
    "--trace 2:4": ("options", {"trace": {"trace": {"first": 2, "last": 4, "with_memory": False}}}),
    "--no-trainer-metrics": ("options", {"trainers": {"no_trainer_metrics": True}}),
}


RETRIES = {
    "--max-restarts 2": Retries(restarts=2),
    "--heal 3": Retries(heals=3),
    "--elastic": Retries(is_elastic=True),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_cell_or_a_script_runs_with_the_given_options(
    typed: Typed, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbddp.extensions.publish.notebook.require_package", lambda _kind: None)
    extensions = Mock(run_cell=lambda _cell: False)
    extensions.before_cell.side_effect = lambda cell: cell.given
    typed.notebook.extensions = extensions
    run(typed, "--publish wandb:digits")
    [cell] = extensions.before_cell.call_args.args
    assert cell.options(PublishOptions).publish == [Target("wandb", "digits")]
    plain, _ = typed.asked()
    for options in (*WHAT, *RETRIES):
        run(typed, options)
        request, retries = typed.asked()
        assert retries == RETRIES.get(options, Retries())
        if options in WHAT:
            name, value = WHAT[options]
            assert getattr(request, name) == value != getattr(plain, name)


def test_a_cell_copies_shards_every_so_many_steps(typed: Typed) -> None:
    for options, steps in (("", 0), ("--heal 3 --shard-copies 100", 100)):
        typed.cell(options)
        assert typed.asked()[0].shard_copies == steps


def test_a_scripts_names_are_kept_and_replayed_only_with_the_keep_option(typed: Typed) -> None:
    for options, keeps in (("", False), ("--keep", True)):
        typed.line(f"run {options} train.py --lr 3")
        request, _ = typed.asked()
        assert request.script is not None
        assert (request.script.keeps_names, request.once) == (keeps, not keeps)
        assert list(request.script.arguments) == ["--lr", "3"]


def test_a_listener_opens_with_given_options(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock()
    monkeypatch.setattr(nodes, "open_nodes", opened)
    options = "--nnodes 2:4 --nproc-per-node 8 --host 10.0.0.7 --port 5555 --orphan-timeout 9"
    typed.line(f"nodes {options}")
    asked = {"min_nodes": 2, "max_nodes": 4, "nproc_per_node": 8, "host": "10.0.0.7", "port": 5555}
    spec = NodesSpec(**asked, orphan_timeout=9.0)
    opened.assert_called_once_with(typed.notebook.group, spec)
    for option in options.split("--")[1:]:  # each of them alone opens one
        typed.line(f"nodes --{option}")
    assert opened.call_count == 6


class Garbage(NotebookHalf):
    """Adds a remark below a cell, and then what is no block."""

    def on_event(self, event: Any) -> None:
        event.add([note("a remark")])
        event.add(["garbage"])


def test_what_is_no_block_is_an_error_of_its_extension_and_not_of_the_view(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = typed.notebook
    notebook.extensions._hooks.made["checks"] = Garbage(notebook)
    assert notebook.presenter.remarks(notebook.group.session, Mock()) == [note("a remark")]
    assert "the extension checks failed in its hook on_event" in capsys.readouterr().out


def test_the_port_of_a_store_is_known_after_the_notebook_has_dropped_the_store() -> None:
    no_session: Any = None
    log = ExportLog(no_session)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log.record_store_ports({"store": store, "rate": 0.1})
    log.record_store_ports({"rate": 0.1})
    assert log.store_ports == {store.port}


def test_a_free_threaded_python_is_refused(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert "free-threaded Python: use a build" in refusal(UsageError, extension.load, shell)
    assert getattr(shell, extension.ATTRIBUTE, None) is None
