"""Numbers, states and events in words; no kind of event is without words by mistake."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import BARS, EVENTS

import nbddp
from nbddp.lifecycle.comeback import Comeback, Setback
from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.timeline import Happening
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui import words
from nbddp.ui.words import (
    say_bar,
    say_bytes,
    say_devices,
    say_event,
    say_facts,
    say_rate,
    say_seconds,
    say_step,
    shorten,
)

CONTROLLER = Path(nbddp.__file__).parent / "controller"
TRAIN = CONTROLLER.with_name("train")


# ---- what the controller records, from its source


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called == name:
                yield node


def texts_of(kind: ast.expr, tree: ast.Module, call: ast.Call) -> list[str]:
    """The texts that an argument may be: its own, or for each caller of the function it is in."""
    if isinstance(kind, ast.Constant):
        return [str(kind.value)]
    inside = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and call in ast.walk(node)
    )
    names = [each.arg for each in inside.args.args if each.arg != "self"]
    if not isinstance(kind, ast.JoinedStr):
        return []  # a kind that a rank has chosen
    texts = []
    for caller in calls_of(tree, inside.name):
        known = dict(zip(names, caller.args, strict=False))
        texts.append("".join(_part(part, known) for part in kind.values))
    return texts


def _part(part: ast.expr, known: dict[str, ast.expr]) -> str:
    if isinstance(part, ast.FormattedValue):
        assert isinstance(part.value, ast.Name)
        part = known[part.value.id]
    assert isinstance(part, ast.Constant)
    return str(part.value)


def facts_of_comeback(call: ast.expr) -> set[str]:
    """The names of what one of its methods gives for the record."""
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    setback = Setback(attempt=1, what="it failed", at=0.0, step=3)
    comeback = Comeback(setback=setback, detected=0.1, restarted=0.1, replayed=0.1, cells=1)
    return set(getattr(comeback, call.func.attr)(*range(len(call.args))))


def recorded() -> dict[str, set[str]]:
    """Every kind of event that the controller records, with the names of its facts."""
    found: dict[str, set[str]] = {}
    for path in sorted(CONTROLLER.glob("*.py")):
        tree = ast.parse(path.read_text())
        for call in calls_of(tree, "record"):
            for kind in texts_of(call.args[0], tree, call):
                found[kind] = {each.arg for each in call.keywords if each.arg}
                for each in call.keywords:
                    if each.arg is None:  # **comeback.facts()
                        found[kind] |= facts_of_comeback(each.value)
    return found


def told_by_ranks() -> set[str]:
    """The kinds of events that nbddp's own code in a rank tells of."""
    calls = [
        call
        for path in TRAIN.glob("*.py")
        for call in calls_of(ast.parse(path.read_text()), "happened")
    ]
    return {each.args[0].value for each in calls if isinstance(each.args[0], ast.Constant)}


RECORDED = recorded()
SAMPLES: dict[str, Any] = {
    "logs": {"0": 3},
    "attempt": 2,
    "bytes": 7400,
    "cells": 2,
    "detected": 0.2,
    "donor": 0,
    "carry": 0.01,
    "fork": 0.12,
    "meet": 0.2,
    "how": "was killed by SIGKILL",
    "left": {"lock": "cannot pickle '_thread.lock' object"},
    "lost": 4,
    "more": {"cannot pickle '_thread.lock' object": 2995},
    "more_places": 0,
    "names": 12,
    "number": 7,
    "outcome": "ok",
    "own": ["ddp_rank"],
    "places": ["trainer.rank"],
    "rank": 3,
    "ranks": (0, 1),
    "reason": "no GPU",
    "replayed": 0.3,
    "restarted": 0.1,
    "seconds": 0.9,
    "source": "x = 1",
    "step": 31,
    "text": "no progress for 10 s:\n  ranks 0-1 waiting",
    "unknown": ["seed_offset"],
    "what": "ValueError: no",
    "world_size": 2,
}


def test_what_is_recorded_is_found_in_the_source() -> None:
    assert {"start", "exit", "failure", "restart asked", "stop asked"} <= set(RECORDED)
    assert RECORDED["exit"] >= {"rank", "how"}


def test_every_kind_of_event_has_words_or_is_left_unsaid_on_purpose() -> None:
    said = {*words._SAID, *words._UNSAID}
    assert set(RECORDED) <= said
    assert said - set(RECORDED) <= told_by_ranks()
    assert not set(words._SAID) & words._UNSAID


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_every_event_can_be_said_with_the_facts_that_it_is_recorded_with(kind: str) -> None:
    text = say_event(Happening(1.0, kind, {name: SAMPLES[name] for name in RECORDED[kind]}))
    assert bool(text) == (kind in words._SAID)
    assert "\n" not in text


# ---- events


@pytest.mark.parametrize(
    ("kind", "facts", "said"),
    [
        ("start", {"attempt": 1, "world_size": 2}, "start: attempt 1"),
        ("start", {"attempt": 3, "world_size": 2}, "restart: attempt 3"),
        ("start failed", {"reason": "no GPU"}, "start failed: no GPU"),
        (
            "healed",
            {"ranks": [1], "donor": 0, "fork": 0.12, "carry": 0.01, "meet": 0.2, "bytes": 7400}
            | {"left": {"lock": "cannot pickle '_thread.lock' object"}},
            "rank 1 healed with the names of rank 0: forked in 0.12 s, 7.4 kB packed in 0.01 s, "
            "met in 0.20 s; not carried: lock",
        ),
        ("not healed", {"reason": "it was interrupted"}, "not healed: it was interrupted"),
        ("interrupt", {}, "interrupt asked"),
        ("restart asked", {}, "restart asked"),
        ("stop asked", {}, "stop asked"),
        ("kill asked", {"rank": 2}, "kill asked for rank 2"),
        ("failure", {"rank": 1, "what": "ValueError: no"}, "rank 1: ValueError: no"),
        ("exit", {"rank": 1, "how": "was killed by SIGKILL"}, "rank 1 was killed by SIGKILL"),
        ("no progress", {"text": SAMPLES["text"]}, "no progress for 10 s"),
        ("ready", {"attempt": 1}, ""),
        ("cell", {"number": 1}, ""),
        ("cell ended", {"outcome": "ok"}, ""),
        ("stopped", {"attempt": 1}, ""),
        ("save", {"rank": 0, "path": "a/b", "step": 3}, "rank 0: save (path a/b, step 3)"),
        ("save", {"rank": 0}, "rank 0: save"),
        ("save", {}, "save"),
        ("config", {"rank": 0, "values": {"lr": 0.1, "depth": 3}}, "config: lr 0.1, depth 3"),
    ],
)
def test_an_event_in_words(kind: str, facts: dict[str, Any], said: str) -> None:
    before = dict(facts)
    assert say_event(Happening(1.0, kind, facts)) == said
    assert facts == before


@given(EVENTS)
def test_any_event_can_be_said(event: Happening) -> None:
    assert bool(say_event(event)) == (event.kind != "ready")


# ---- numbers


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 ms"),
        (0.0994, "99 ms"),
        (0.1, "0.1 s"),
        (59.94, "59.9 s"),
        (59.95, "1:00"),
        (60, "1:00"),
        (119.6, "2:00"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_a_time_in_words(seconds: float, said: str) -> None:
    assert say_seconds(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, ""),
        (2**20, "1 MiB"),
        (2**30 - 2**20, "1023 MiB"),
        (2**30, "1.0 GiB"),
        (141 * 2**30, "141.0 GiB"),
    ],
)
def test_an_amount_of_memory_in_words(count: int, said: str) -> None:
    assert say_bytes(count) == said


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (-1, ""),
        (0, ""),
        (0.01, "1:40 each"),
        (0.1, "10.0 s each"),
        (0.2, "0.2/s"),
        (99.94, "99.9/s"),
        (100, "100/s"),
        (12345.6, "12,346/s"),
    ],
)
def test_a_rate_in_words(rate: float, said: str) -> None:
    assert say_rate(rate) == said


@pytest.mark.parametrize(
    ("step", "rate", "said"),
    [
        (None, 0.0, ""),
        (None, 5.0, ""),
        (0.0, 0.0, "0"),
        (12345678.0, 0.0, "12345678"),
        (120.0, 5.0, "120 · 5.0/s"),
    ],
)
def test_a_step_in_words(step: float | None, rate: float, said: str) -> None:
    each = RankSnapshot(rank=0, state="running", step=step, steps_per_second=rate)
    assert say_step(each) == said


@pytest.mark.parametrize(
    ("bar", "long", "short"),
    [
        (LoopProgress("a", 20, 80, 4.0), "a 20/80 · 5.0/s · 12.0 s left", "a 20/80 · 12.0 s left"),
        (LoopProgress("", 20, 0, 4.0), "20 · 5.0/s", "20 · 5.0/s"),
        (LoopProgress("", 80, 80, 4.0), "80/80 · 20.0/s", "80/80 · 20.0/s"),
        (LoopProgress("x", 0, 80, 0.0), "x 0/80", "x 0/80"),
        (LoopProgress("", 0, 0, 0.0), "0", "0"),
    ],
)
def test_a_bar_in_words(bar: LoopProgress, long: str, short: str) -> None:
    assert (say_bar(bar), say_bar(bar, is_short=True)) == (long, short)


@given(BARS, st.booleans())
def test_any_bar_can_be_said(bar: LoopProgress, is_short: bool) -> None:
    count = f"{bar.done}/{bar.total}" if bar.total else f"{bar.done}"
    assert say_bar(bar, is_short=is_short).startswith(f"{bar.label} {count}".strip())


# ---- the group


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ((), ""),
        (("cpu", "cpu"), "cpu"),
        (("cuda:0", "cuda:1"), "cuda:0,1"),
        (("cuda:0", "cpu", "cuda:0"), "cuda:0, cpu"),
    ],
)
def test_devices_are_said_once(devices: tuple[str, ...], said: str) -> None:
    assert say_devices(Snapshot(state=GroupState.IDLE, devices=devices)) == said


def test_the_facts_of_a_group_are_those_that_are_known() -> None:
    one = RankSnapshot(rank=0, state="ready")
    snapshot = Snapshot(
        state=GroupState.IDLE, ranks=(one, one), backend="gloo", devices=("cpu", "cpu"), attempt=3
    )
    assert say_facts(snapshot) == ["2 ranks", "gloo", "cpu", "attempt 3"]
    assert say_facts(Snapshot(state=GroupState.STARTING, ranks=(one,), attempt=1)) == [
        "1 rank",
        "attempt 1",
    ]


def test_a_path_is_relative_to_the_notebooks_folder_where_it_lies_in_there(folder: Path) -> None:
    assert shorten(str(folder / "a" / "b")) == "a/b"
    assert shorten("/elsewhere/b") == "/elsewhere/b"


def test_a_path_is_whole_where_the_notebooks_folder_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    assert shorten(str(folder / "a")) == str(folder / "a")


@pytest.mark.parametrize(
    ("kind", "facts", "said"),
    [
        ("fault", {"fault": "kill@rank=1,step=30", "at_step": 30}, "fault: kill@rank=1,step=30"),
        ("checkpoint", {"step": 3, "seconds": 0.5}, "rank 1: checkpoint of step 3, 0.5 s"),
        ("checkpoint", {"step": 3, "seconds": "x"}, "rank 1: checkpoint of step 3, x"),
        ("checkpoint", {}, "rank 1: checkpoint"),
        ("resume", {"step": 3}, "rank 1: resumes from the checkpoint of step 3"),
        ("told: exit", {}, "rank 1: told: exit"),
        ("mine", {"a": 1}, "rank 1: mine (a 1)"),
    ],
)
def test_what_ranks_tell_of_has_words_whatever_its_facts(
    kind: str, facts: dict[str, Any], said: str
) -> None:
    assert say_event(Happening(1.0, kind, facts | {"rank": 1})) == said


def test_a_recovery_is_told_with_what_it_cost() -> None:
    comeback = {"detected": 0.2, "restarted": 0.1, "replayed": 0.35, "cells": 2}
    words = "noticed after 0.20 s, restarted in 0.10 s, 2 cells replayed in 0.35 s"
    facts = {"step": 31, "lost": 4, "seconds": 0.9} | comeback
    said = "resumed at step 31, 0.9 s after the failure"
    assert say_event(Happening(1.0, "resumed", facts)) == f"{said}, 4 steps lost ({words})"
    assert say_event(Happening(1.0, "resumed", facts | {"lost": None})) == f"{said} ({words})"
    assert say_event(Happening(1.0, "recovery", comeback | {"attempt": 2})) == f"recovery: {words}"
    healed = {"detected": 0.02, "healed": 0.31, "attempt": 1}
    assert say_event(Happening(1.0, "recovery", healed)) == (
        "recovery: noticed after 0.02 s, healed in 0.31 s"
    )


def test_one_message_is_one_message() -> None:
    assert words.say_refused(1) == "1 message was refused: not signed by this group"
    assert words.say_refused(2) == "2 messages were refused: not signed by this group"
