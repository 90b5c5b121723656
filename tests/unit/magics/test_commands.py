"""How `%ddp` and `%%ddp` use their options: the start of ranks, and the code they run."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from refusals import refusal
from typed import RUNS, Run, Typed

from nbddp.controller.session import Session
from nbddp.errors import CellFailedError
from nbddp.lifecycle.retries import Retries
from nbddp.magics import load as extension
from nbddp.magics.presenter import Presenter
from nbddp.record.cell import CellResult
from nbddp.sigint import run_in_thread
from nbddp.ui.log_lines import LogBuffer
from nbddp.ui.report.render import render_html
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import RankStart
from nbddp.wire.request_messages import Push

start = Session.start


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


def test_a_change_of_the_view_is_confirmed(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    for choice, shown in {"text": "text", "panel": "a panel", "auto": "a panel if"}.items():
        typed.line(f"view {choice}")
        assert capsys.readouterr().out.startswith(f"nbddp: later cells are shown as {shown}")


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
}


RETRIES = {
    "--max-restarts 2": Retries(restarts=2),
    "--heal 3": Retries(heals=3),
    "--elastic": Retries(is_elastic=True),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_cell_or_a_script_runs_with_the_given_options(typed: Typed, run: Run) -> None:
    run(typed, "")
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


def test_a_free_threaded_python_is_refused(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert "free-threaded Python: use a build" in refusal(UsageError, extension.load, shell)
    assert getattr(shell, extension.ATTRIBUTE, None) is None
