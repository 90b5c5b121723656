"""Sweeps, scaling studies and comparisons from Python, without a notebook."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conditions import when
from drivers.ranks import Capture, Ranks

from nbddp import ArgumentError, CellFailedError, CellInterruptedError, compare, runs
from nbddp.archive.sweep_grid import SweepEntry
from nbddp.group import sweep
from nbddp.lifecycle.group_state import GroupState

pytestmark = pytest.mark.multiproc


def test_repeated_sweep_runs_only_failed_combinations(group: Ranks, folder: Path) -> None:
    group.stop()
    source = f"import pathlib\nassert lr == 1 or pathlib.Path({str(folder / 'there')!r}).exists()"
    first = group.sweep(source, {"lr": [1, 2]}, quiet=True)
    assert [run.outcome.partition(":")[0] for run in first] == ["ok", "ranks 0-1"]
    (folder / "there").touch()
    again = group.sweep(source, {"lr": [1, 2]}, quiet=True)
    assert again[0].path == first[0].path
    assert [run.outcome for run in again] == ["ok", "ok"]
    over = group.sweep(source, {"lr": [1, 2]}, start_over=True, quiet=True)
    assert not {run.path for run in over} & {run.path for run in again}
    assert not group.is_live


def test_sweep_with_repeat_and_fresh_uses_seeds_and_skips_earlier_cells(group: Ranks) -> None:
    group.run("x = 1", quiet=True)
    found = group.sweep("assert 'x' not in globals()", repeat=2, fresh=True, quiet=True)
    assert [run.config for run in found] == [{"seed": 0}, {"seed": 1}]


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Send SIGINT to the main thread as soon as a condition is true."""
    main = threading.main_thread().ident or 0
    return when(condition, lambda: signal.pthread_kill(main, signal.SIGINT))


def test_interrupt_ends_a_python_sweep_and_keeps_names(group: Ranks, capsys: Capture) -> None:
    group.run("kept = 7", quiet=True)
    pids = group.pids
    presser = interrupt_when(
        lambda: group.is_idle and group.scripts.active_session.life.state.is_busy
    )
    with pytest.raises(CellInterruptedError, match="sweep of 2: 1 ended by you, 1 not run"):
        group.sweep("import time\nprint('here')\ntime.sleep(60)", {"lr": [1, 2]})
    presser.join()
    assert group.pull("kept") == [7, 7]
    assert group.pids == pids
    assert "lr=1: ended" in capsys.readouterr().out


def test_sweep_interrupted_while_ranks_start_records_its_settings(group: Ranks) -> None:
    presser = interrupt_when(lambda: group.scripts.last_session.life.state is GroupState.STARTING)
    with pytest.raises(CellInterruptedError, match="sweep of 2: 1 ended by you, 1 not run"):
        group.sweep("1", {"lr": [1, 2]})
    presser.join()
    [run] = [run for run in runs(Path.cwd()) if run.path != group.folder]
    assert run.config == {"lr": 1}


def test_interrupt_between_two_runs_ends_the_sweep(
    group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe_row(_row: SweepEntry) -> str:
        group.interrupt()
        return "interrupted"

    monkeypatch.setattr(sweep, "describe_row", describe_row)
    with pytest.raises(CellInterruptedError, match="sweep of 2: 1 ok, 1 not run"):
        group.sweep("1", {"lr": [1, 2]})


def test_invalid_sweep_is_refused_and_a_sweep_without_success_fails(group: Ranks) -> None:
    for settings in ({}, {"lr": []}, {"rank": [1]}, {"a b": [1]}, {"lr": 0.1}, {"net": "cnn"}):
        with pytest.raises(ArgumentError):
            group.sweep("1", settings)
    for sizes, rounds in (([2, 2], 3), ([1, 2], 2), ("1,2", 3), (2, 3)):
        with pytest.raises(ArgumentError):
            group.scale("1", sizes, rounds=rounds)
    for retries in ({"heal": -1}, {"max_restarts": -1}, {"heal": "1"}):
        with pytest.raises(ArgumentError):
            group.run("1", **retries)
    with pytest.raises(CellFailedError, match=r"none of the 1 runs succeeded; .*ZeroDivisionError"):
        group.sweep("1 / 0", {"lr": [1]}, quiet=True)
    with pytest.raises(ArgumentError):
        compare(*runs(Path.cwd())[:1])
