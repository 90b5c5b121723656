"""The event log: what happened since a moment, and the whole of it in the run's folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbddp.record.event_log import (
    MAX_FACT_CHARS,
    MAX_OWN_EVENTS,
    MAX_REPORTED_EVENTS,
    EventLog,
    RunEvent,
    merge_equal_failures,
)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def event_log(said: list[str]) -> Iterator[EventLog]:
    event_log = EventLog(said.append)
    yield event_log
    event_log.close()


def opened(event_log: EventLog, base: Path) -> Path:
    return event_log.open(base, "first", {"nproc": 2})


def kinds(events: tuple[RunEvent, ...]) -> list[str]:
    return [event.kind for event in events]


def on_disk(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_events_are_listed_by_time_or_attempt(
    event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    told = ["start", "b", "a", "cell", "a", "b", "exit"]
    for kind in told:  # all of the same moment
        event_log.record(kind, attempt=1)
    monkeypatch.setattr(time, "time", lambda: 2.0)
    event_log.record("start", attempt=2)
    event_log.record("exit", rank=1, how="was killed by SIGKILL")
    newest = (
        RunEvent(2.0, "start", {"attempt": 2}),
        RunEvent(2.0, "exit", {"rank": 1, "how": "was killed by SIGKILL"}),
    )
    assert kinds(event_log.since(0.0)) == kinds(event_log.of_attempt(1)) == [*told, "start", "exit"]
    assert event_log.since(2.0) == event_log.of_attempt(2) == newest
    assert event_log.since(2.5) == event_log.of_attempt(3) == ()


def test_the_facts_of_an_event_may_have_any_name(event_log: EventLog, tmp_path: Path) -> None:
    folder = opened(event_log, tmp_path)
    event_log.record("checkpoint", kind="full", self="x", at=3)
    [event] = event_log.since(0.0)
    assert (event.kind, event.facts) == ("checkpoint", {"kind": "full", "self": "x", "at": 3})
    assert on_disk(folder)[-1]["self"] == "x"


def test_memory_has_the_newest_events_and_the_file_all(event_log: EventLog, tmp_path: Path) -> None:
    folder = opened(event_log, tmp_path)
    event_log.record("start", attempt=1)
    event_log.record("cell", number=1)
    for number in range(MAX_REPORTED_EVENTS + 50):
        event_log.record_reported(0, "checkpoint", {"step": number})
    event_log.record("cell ended", number=1)
    kept = event_log.of_attempt(1)
    assert kinds(kept) == ["start", "cell", *["checkpoint"] * MAX_REPORTED_EVENTS, "cell ended"]
    assert [each.facts["step"] for each in kept[2:-1]] == list(range(50, MAX_REPORTED_EVENTS + 50))
    assert [each["step"] for each in on_disk(folder)[2:-1]] == list(range(MAX_REPORTED_EVENTS + 50))
    event_log.record("start", attempt=1)
    for number in range(MAX_OWN_EVENTS):
        event_log.record("cell", number=number)
    assert kinds(event_log.of_attempt(1)) == ["cell"] * MAX_OWN_EVENTS


def test_a_large_fact_is_truncated_only_in_memory(event_log: EventLog, tmp_path: Path) -> None:
    folder = opened(event_log, tmp_path)
    event_log.record_reported(
        0, "mine", {"text": "x" * 100_000, "list": [1] * 100_000, "fine": [1, 2]}
    )
    [event] = event_log.since(0.0)
    assert event.facts["text"] == "x" * MAX_FACT_CHARS + " …"
    assert len(event.facts["list"]) == MAX_FACT_CHARS + 2
    assert event.facts["fine"] == [1, 2]
    assert len(on_disk(folder)[0]["text"]) == 100_000


def test_a_run_folder_is_opened_once_reports_its_errors_and_has_no_earlier_events(
    event_log: EventLog, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_log.record("start", attempt=1)
    folder = opened(event_log, tmp_path)
    event_log.record("ready")
    assert opened(event_log, tmp_path) is folder is event_log.folder
    assert folder.is_relative_to(tmp_path)
    assert folder.name.endswith("-first")
    assert json.loads((folder / "run.json").read_text())["nproc"] == 2
    assert [each["kind"] for each in on_disk(folder)] == ["ready"]
    assert said == []
    monkeypatch.setattr("os.write", lambda _fd, data: len(data) - 1)
    event_log.record("exit")
    assert str(folder) in said[0]
    assert kinds(event_log.since(0.0)) == ["start", "ready", "exit"]


def test_a_new_folder_is_opened_after_the_end_or_deletion(
    event_log: EventLog, tmp_path: Path
) -> None:
    first = opened(event_log, tmp_path)
    event_log.close()
    assert event_log.folder is None
    event_log.close()
    second = opened(event_log, tmp_path)
    assert second != first
    shutil.rmtree(second)
    third = opened(event_log, tmp_path)
    assert third.is_dir()
    event_log.record("start", attempt=1)
    assert [each["kind"] for each in on_disk(third)] == ["start"]


def test_final_output_has_the_logs_of_the_given_ranks(event_log: EventLog, tmp_path: Path) -> None:
    assert event_log.final_output([0]) == ""
    folder = opened(event_log, tmp_path)
    for rank in range(3):
        (folder / f"rank{rank}.log").write_text(f"words of {rank}")
    assert event_log.final_output([2, 0]) == "words of 2\nwords of 0"


def failure(rank: int, what: str = "ValueError: no", at: float = 1.0) -> RunEvent:
    return RunEvent(at, "failure", {"rank": rank, "what": what})


def test_equal_failures_of_ranks_are_merged_and_do_not_repeat_the_first_cause() -> None:
    other = failure(3, "KeyError: 'x'", at=1.5)
    events = [failure(2), other, failure(0, at=2.0), RunEvent(3.0, "cell ended"), failure(1)]
    joined = RunEvent(1.0, "failure", {"ranks": [0, 2], "what": "ValueError: no"})
    assert merge_equal_failures(events) == (joined, other, *events[3:])
    [told] = merge_equal_failures([failure(0), failure(1)], cause="ValueError: no")
    assert told.facts == {"ranks": [0, 1], "what": "failed"}
    [alone] = merge_equal_failures([failure(0)], cause="ValueError: no")
    assert alone.facts == {"ranks": [0], "what": "failed"}


def test_the_event_of_an_alarm_is_shortened_if_the_view_shows_the_alarm_in_full() -> None:
    alarm = "no progress for 10 s: rank 1 never came\n  rank 0 waits"
    event = RunEvent(1.0, "no progress", {"text": alarm})
    assert merge_equal_failures([event], alarm="another") == (event,)
    [cut] = merge_equal_failures([event], alarm=alarm)
    assert cut == replace(event, facts={"text": "no progress for 10 s"})
