"""The kinds of events: their lines in files, and who may report them."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.record.run_events import (
    EVENT_CLASSES,
    OtherEvent,
    ReportedEvent,
    RunEvent,
    event_of,
    read_event,
    reported_event,
)
from nbddp.record.run_folder import new_facts, read_facts

TESTS = Path(__file__).parents[2]
RUNS = [*(TESTS / "golden" / "recorded").iterdir(), *(TESTS / "recorded_runs").iterdir()]
COUNTED = ("outcome", "config", "restarts", "heals", "failures", "seconds_lost", "world_size")
LATER = {"time": 1.5, "kind": "peek", "rank": 1, "depth": {"a": [1, None]}, "other_facts": "x"}


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def row_of(event: RunEvent) -> dict[str, Any]:
    return event.facts() | {"time": event.time, "kind": event.kind}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_lines_of_earlier_versions_stay_the_same_and_give_their_facts(run: Path) -> None:
    events = [read_event(row) for row in rows(run)]
    assert [row_of(event) for event in events] == rows(run)
    assert not [event for event in events if isinstance(event, OtherEvent)]
    facts, recorded = new_facts(), read_facts(run)
    for event in events:
        event.apply(facts)
    assert {name: facts[name] for name in COUNTED} == {name: recorded[name] for name in COUNTED}


def test_an_unknown_kind_and_an_unknown_fact_survive() -> None:
    event = read_event(dict(LATER))
    assert isinstance(event, OtherEvent)
    assert row_of(event) == LATER
    row = {"time": 1.0, "kind": "ready", "attempt": 1, "seconds": 3.5}
    assert row_of(read_event(dict(row))) == row


def test_a_line_without_a_needed_fact_is_refused_or_becomes_an_event_of_another_kind() -> None:
    with pytest.raises(KeyError, match="how"):
        event_of("exit", {"attempt": 1, "rank": 1}, 1.0)
    assert event_of("checkpoint", {"step": 1}, 1.0).describe() == "checkpoint (step 1)"


@pytest.mark.parametrize("kind", EVENT_CLASSES)
def test_a_rank_reports_only_events_of_ranks(kind: str) -> None:
    facts = dict.fromkeys(EVENT_CLASSES[kind].defaults, 1)
    event = reported_event(2, kind, facts)
    assert event.facts() == facts | {"rank": 2}
    if issubclass(EVENT_CLASSES[kind], ReportedEvent):
        assert isinstance(event, EVENT_CLASSES[kind])
    else:
        assert isinstance(event, OtherEvent)
        assert event.kind == f"told: {kind}"


def test_no_code_compares_a_kind_of_events_with_a_text() -> None:
    for path in Path(nbddp.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Match)]
        for node in compared:
            texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if EVENT_CLASSES.keys().isdisjoint(texts):
                continue  # to unparse all comparisons takes seconds
            compared_with = ast.unparse(
                node.left if isinstance(node, ast.Compare) else node.subject
            )
            endings = (".kind", '["kind"]', "['kind']")
            is_kind = compared_with.endswith(endings) or compared_with == "kind"
            assert not is_kind, f"{path}:{node.lineno}"
