"""Numbers, states and events in words; each kind of event."""

from pathlib import Path
from typing import Any

import pytest

from nbddp.formatting import format_seconds
from nbddp.lifecycle.group_state import GroupState
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.run_events import EVENT_CLASSES, event_of, reported_event
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui import wording

RESTART = {"detected": 0.2, "restarted": 0.1, "replayed": 0.35, "cells": 2}
HEAL = {"detected": 0.02, "healed": 0.31}
RESUMED = {"step": 31, "lost": 4, "seconds": 0.9, **RESTART}
HEALED = {
    "ranks": [1],
    "donor": 0,
    "names": 12,
    "own": ["ddp_rank"],
    "unknown": ["seed_offset"],
    "places": ["trainer.rank"],
    "more_places": 0,
    "bytes": 7400,
    "carry": 0.01,
    "fork": 0.12,
    "meet": 0.2,
    "left": {"lock": "cannot pickle '_thread.lock' object"},
    "more": {},
}
RECORDED: list[tuple[str, dict[str, Any]]] = [
    ("start", {"attempt": 1, "world_size": 2}),
    ("start", {"attempt": 3, "world_size": 2}),
    ("start failed", {"reason": "no GPU", "interrupted": False}),
    ("ready", {"attempt": 1}),
    ("cell", {"number": 1, "ranks": [0], "source": "x"}),
    ("cell ended", {"number": 1, "outcome": "ok"}),
    ("trial ended", {"outcome": "ended by you"}),
    ("interrupt", {}),
    ("restart asked", {}),
    ("stop asked", {}),
    ("kill asked", {"rank": 2}),
    ("failure", {"rank": 1, "what": "ValueError: no"}),
    ("exit", {"rank": 1, "attempt": 1, "how": "was killed by SIGKILL"}),
    ("no progress", {"text": "no progress for 10 s:\n  ranks 0-1 waiting"}),
    ("recovery", {"attempt": 2, **RESTART}),
    ("recovery", {"attempt": 1, **HEAL}),
    ("resumed", RESUMED),
    ("resumed", {**RESUMED, "lost": None}),
    ("resumed", {**RESUMED, "lost": 1}),
    ("healed", HEALED),
    ("healed", HEALED | {"left": dict.fromkeys("abcdefghi", "open"), "more": {"": 2995}}),
    ("not healed", {"reason": "it was interrupted"}),
    ("taken back", {"attempt": 1, "ranks": [0, 1], "world_size": 2, "pid": 9, "at": 1.0}),
    ("node", {"what": "node 1 is gone"}),
    ("stopped", {"attempt": 1}),
]
TOLD_BY_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("config", {"rank": 0, "values": {"lr": 0.1, "depth": 3, "path": "x" * 120}}),
    ("fault", {"rank": 1, "fault": "kill@rank=1,step=30", "at_step": 30}),
    ("checkpoint", {"rank": 1, "step": 3, "seconds": 0.5}),
    ("checkpoint", {"rank": 1, "step": 3, "seconds": "x"}),
    ("checkpoint", {"rank": 1}),
    ("resume", {"rank": 1, "step": 3}),
    ("exit", {"rank": 1}),
    ("mine", {"rank": 1, "a": 1}),
    ("save", {"rank": 0, "path": "a/b", "step": 3}),
    ("save", {"rank": 0}),
    ("save", {}),
]


def test_every_recorded_event_has_a_one_line_description(snapshot: Any) -> None:
    recorded = [event_of(kind, facts, 1.0) for kind, facts in RECORDED]
    reported = [
        reported_event(facts["rank"], kind, facts) if facts else event_of(kind, facts, 1.0)
        for kind, facts in TOLD_BY_RANKS
    ]
    assert {kind for kind, _ in [*RECORDED, *TOLD_BY_RANKS]} >= EVENT_CLASSES.keys()
    lines = [f"{event.kind} | {event.describe()}" for event in [*recorded, *reported]]
    assert not [line for line in lines if "\n" in line]
    assert "\n".join([*lines, wording.describe_refused(1), wording.describe_refused(2)]) == snapshot


def test_seconds_rates_and_steps_in_words() -> None:
    texts = {0: "0 ms", 0.0994: "99 ms", 0.1: "0.1 s", 59.94: "59.9 s", 59.95: "1:00", 60: "1:00"}
    texts |= {119.6: "2:00", 3599.4: "59:59", 3599.6: "1:00:00", 90061: "25:01:01"}
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts
    texts = {-1: "", 0: "", 0.01: "1:40 each", 0.1: "10.0 s each", 0.2: "0.2/s", 99.94: "99.9/s"}
    texts |= {100: "100/s", 12345.6: "12,346/s"}
    assert {rate: wording.format_rate(rate) for rate in texts} == texts
    steps = {(None, 5): "", (0, 0): "0", (12345678, 0): "12345678", (120, 5): "120 · 5.0/s"}
    for (step, rate), shown in steps.items():
        rank = RankSnapshot(rank=0, state="running", step=step, steps_per_second=rate)
        assert wording.format_step(rank) == shown


def test_format_progress_bar() -> None:
    for bar, long, short in (
        (LoopProgress("", 80, 80, 4.0), "80/80 · 20.0/s", "80/80 · 20.0/s"),
        (LoopProgress("x", 0, 80, 0.0), "x 0/80", "x 0/80"),
        (LoopProgress("", 0, 0, 0.0), "0", "0"),
    ):
        assert wording.format_progress_bar(bar) == long
        assert wording.format_progress_bar(bar, is_short=True) == short


def test_a_group_description_lists_known_facts_and_each_device_once() -> None:
    devices, ranks = ("cuda:0", "cpu", "cuda:0"), (RankSnapshot(rank=0, state="ready"),)
    group = Snapshot(state=GroupState.IDLE, ranks=ranks, devices=devices, attempt=3)
    assert wording.describe_group(group) == ["1 rank", "cuda:0, cpu", "attempt 3"]


def test_paths_are_shown_relative_to_the_notebook(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    assert wording.relative_path(str(folder / "a" / "b")) == "a/b"
    assert wording.relative_path("/elsewhere/b") == "/elsewhere/b"
    monkeypatch.setattr(Path, "cwd", gone)
    assert wording.relative_path(str(folder / "a")) == str(folder / "a")
