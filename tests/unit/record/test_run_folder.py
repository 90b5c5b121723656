"""The record of a run: its folder, its facts, and its events in memory and on disk."""

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from nbddp.errors import StartError
from nbddp.record.event_log import (
    MAX_FACT_CHARS,
    MAX_FACT_ENTRIES,
    MAX_OWN_EVENTS,
    MAX_REPORTED_EVENTS,
    MIN_ENTRY_CHARS,
    EventLog,
    merge_equal_failures,
)
from nbddp.record.run_events import (
    CellEnded,
    CellStarted,
    CheckpointSaved,
    Configured,
    GroupStopped,
    NoProgress,
    OtherEvent,
    RankExited,
    RankFailed,
    RanksHealed,
    RanksReady,
    RanksStarted,
    Resumed,
    RunEvent,
    StartFailed,
    event_of,
    reported_event,
)
from nbddp.record.run_folder import FORMAT, new_facts, read_facts, to_text

Begin = Callable[..., EventLog]
READY = RanksReady(attempt=1)


def exited(rank: int) -> RankExited:
    return RankExited(attempt=1, rank=rank, how="was killed by SIGKILL")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run goes that cannot be recorded beside the notebook."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture
def remarks() -> list[str]:
    return []


@pytest.fixture
def begin(base: Path, remarks: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.setattr(time, "strftime", lambda *_: "20250102-030405")
    with ExitStack() as records:

        def begin(name: str = "") -> EventLog:
            event_log = records.enter_context(closing(EventLog(remarks.append)))
            event_log.open(base, name, {})
            return event_log

        yield begin


no_space = Mock(side_effect=OSError(28, "No space left on device"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_run_has_its_own_folder_without_unsafe_characters(
    base: Path, begin: Begin, remarks: list[str]
) -> None:
    names = [("lr-0.1_A", "-lr-0.1_A"), ("lr-0.1_A", "-lr-0.1_A-1"), ("", ""), ("", "-1")]
    names += [("..", "-2"), ("  ", "-3"), ("my first run", "-my-first-run"), (".hidden", "-hidden")]
    names += [("lr 0.1/größe", "-lr-0.1-größe"), ("lr=0.1,b=2", "-lr-0.1-b-2"), ("\ud800x", "-x")]
    names += [
        ("../../etc/passwd", "-etc-passwd"),
        ("эксперимент 1", "-эксперимент-1"),
        ("🎉", "-4"),
    ]
    names += [("実験", "-実験"), ("हिन्दी", "-हिन्दी"), ("e\u0301te\u0301-1", "-été-1")]
    names += [("𠀀" * 61, f"-{'𠀀' * 55}"), ("a\0b\nc", "-a-b-c"), ("n" * 61, f"-{'n' * 60}")]
    for name, safe in names:
        path = begin(name).path
        assert path == base / ".nbddp" / "runs" / f"20250102-030405{safe}"
        assert path.is_dir()
    assert remarks == []


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_only_its_owner_reads_a_run(base: Path, umask: int, temporary: Path, begin: Begin) -> None:
    before = os.umask(umask)
    try:
        folder = begin("x")
        folder.add_facts({"nproc": 2})
        folder.record(READY)
        shutil.move(base / ".nbddp", base / "moved")
        (base / ".nbddp").touch()
        elsewhere = begin()
    finally:
        os.umask(before)
    [moved] = (base / "moved" / "runs").iterdir()
    found = {path.name: oct(mode(path)) for path in moved.iterdir()}
    assert found == {"run.json": "0o600", "events.jsonl": "0o600"}
    assert elsewhere.path.is_relative_to(temporary)
    folders = (moved, elsewhere.path, elsewhere.path.parent)
    assert [mode(path) for path in folders] == [0o700] * 3


def test_a_run_without_a_writable_folder_uses_a_temporary_folder_and_reports_it(
    base: Path,
    temporary: Path,
    begin: Begin,
    remarks: list[str],
    snapshot: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["20250102-030405", *(f"20250102-030405-{count}" for count in range(1, 1000))]
    for name in names:
        (base / ".nbddp" / "runs" / name).mkdir(parents=True)
    too_many = begin()
    shutil.rmtree(base / ".nbddp")
    (base / ".nbddp").touch()  # a file where a folder should be: refused to root as well
    no_folder = begin("x")
    (base / ".nbddp").unlink()
    (base / ".nbddp").mkdir()
    (base / ".nbddp").chmod(0o777)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # as on a file system without modes
    is_open = begin()
    for folder, remark in zip((too_many, no_folder, is_open), remarks, strict=True):
        assert folder.path.is_relative_to(temporary)
        assert folder.path.is_dir()
        remark = remark.replace(str(folder.path), "TEMPORARY")
        assert remark.replace(str(base), "BASE") == snapshot


def test_git_ignores_the_runs_folder_unless_the_user_decides(base: Path, begin: Begin) -> None:
    begin()
    ignore = base / ".nbddp" / ".gitignore"
    assert ignore.read_text() == "*\n"
    ignore.write_text("mine\n")
    begin()
    assert ignore.read_text() == "mine\n"


def test_run_json_has_the_start_facts_and_the_versions(begin: Begin) -> None:
    folder = begin()
    folder.add_facts({"nproc": 2, "backend": "gloo", "odd": Path("x"), "name": 'a "b"\n'})
    text = (folder.path / "run.json").read_text()
    facts = json.loads(text)
    assert (facts["nproc"], facts["backend"]) == (2, "gloo")
    assert (facts["odd"], facts["name"]) == ("x", 'a "b"\n')
    assert set(facts["versions"]) == {"nbddp", "torch", "ipykernel"}
    assert facts["versions"]["torch"]
    assert all(facts[name] for name in ("format", "started", "host", "pid", "python"))
    assert len(text.splitlines()) == len(facts), "a line for each"
    assert not list(folder.path.glob("*.tmp")), "no draft is left"


def test_run_json_names_the_notebook_or_script_that_started_the_run(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session, file, code, name in (
        ("", None, None, ""),
        ("/home/me/digits.ipynb", None, None, "digits.ipynb"),
        ("", None, "/home/me/in code.ipynb", "in code.ipynb"),
        ("/home/me/digits.ipynb", "train.py", None, "train.py"),
    ):
        monkeypatch.setenv("JPY_SESSION_NAME", session)
        main = SimpleNamespace(__file__=file, __vsc_ipynb_file__=code)
        monkeypatch.setitem(sys.modules, "__main__", cast(ModuleType, main))
        assert begin().run_facts["started_by"] == name


def test_a_full_disk_does_not_stop_the_run_and_is_reported_once(
    begin: Begin, remarks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = begin(), os.write
    folder.record(OtherEvent(kind="one"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        folder.record(OtherEvent(kind="two"))
        patch.setattr(os, "write", no_space)
        folder.record(OtherEvent(kind="lost"))
    [remark] = remarks
    assert str(folder.path) in remark
    assert remark.endswith("No space left on device")
    folder.record(OtherEvent(kind="three"))
    first, torn, last = (folder.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in (first, last)] == ["one", "three"]
    assert len(torn) == 5
    shutil.rmtree(folder.path)  # a deleted folder does not stop it either
    folder.record(exited(1))
    assert folder.final_output([0]) == ""


def test_the_final_output_of_ranks_is_the_end_of_their_logs(begin: Begin) -> None:
    folder = begin()
    assert EventLog(pytest.fail).final_output([0]) == folder.final_output([0]) == ""
    with (folder.path / "rank0.log").open("wb") as file:
        file.truncate(50 << 30)  # takes no space, and no memory holds it
        file.seek(0, os.SEEK_END)
        file.write("grüße\n".encode() * 1000 + b"\xff")
    words = folder.final_output([0])
    assert len(words) == 2000
    assert words.endswith("grüße\n" * 300 + "\ufffd")
    for rank in (1, 2):
        (folder.path / f"rank{rank}.log").write_text(f"words of {rank}")
    assert folder.final_output([2, 1]) == "words of 2\nwords of 1"


def test_a_run_that_cannot_be_recorded_leaves_no_files(
    base: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", no_space)
    with pytest.raises(StartError, match=rf"{base} .*No space left on device"):
        EventLog(pytest.fail).open(base, "", {})
    assert not list(temporary.iterdir())


def facts_of(*events: RunEvent) -> dict[str, Any]:
    facts = new_facts()
    for event in events:
        event.apply(facts)
    return facts


def test_a_stopped_cell_does_not_count_as_failed() -> None:
    stopped = CellEnded(number=1, outcome="ranks 0-1 interrupted", interrupted=True)
    facts = facts_of(stopped)
    assert (facts["outcome"], facts["failures"]) == ("ranks 0-1 interrupted", 0)
    assert facts["interrupted"]
    facts = facts_of(stopped, CellEnded(number=2, outcome="oh"))
    assert (facts["interrupted"], facts["failures"]) == (False, 1)


def test_restarts_heals_lost_time_and_the_end_are_recorded() -> None:
    facts = facts_of(
        RanksStarted(attempt=4, world_size=2),
        RanksStarted(attempt=5, world_size=3),
        Resumed(step=1, lost=0, seconds=0.5, detected=0.1),
        event_of("healed", dict.fromkeys(RanksHealed.defaults), 1.0),
        Resumed(step=1, lost=0, seconds=0.25, detected=0.1),
        StartFailed(reason="rank 1: no room\nin full", interrupted=False),
    )
    assert (facts["world_size"], facts["restarts"], facts["heals"]) == (3, 1, 1)
    assert facts["seconds_lost"] == 0.75
    assert facts["outcome"] == "start failed: rank 1: no room"
    assert "ended" not in facts_of(RanksStarted(attempt=1, world_size=1))
    stopped = GroupStopped(attempt=1, time=1.0)
    assert datetime.fromisoformat(facts_of(stopped)["ended"]).timestamp() == 1.0
    restarted = facts_of(stopped, RanksStarted(attempt=2, world_size=1))
    assert "ended" not in restarted


def test_later_settings_win_and_settings_of_rank_0_win_over_other_ranks() -> None:
    events = [({"lr": 0.1}, 0), ({"lr": 0.2, "seed": 7}, 1), ({"lr": 0.3}, 0), ({"lr": 0.4}, 1)]
    facts = facts_of(*(Configured(values=values, rank=rank) for values, rank in events))
    assert facts["config"] == {"lr": 0.3, "seed": 7}


def test_the_batch_size_gives_samples_per_second() -> None:
    facts = new_facts({"steps_per_second": 2.5, "samples_per_step": 64})
    assert json.loads(to_text(facts))["samples_per_second"] == 160.0


def test_run_json_has_all_facts_and_outcomes_even_of_a_resumed_run(begin: Begin) -> None:
    folder, again = begin(), begin()
    folder.add_facts({"nproc": 2, "pid": 1})
    folder.record(CellEnded(number=1, outcome="ok"))
    folder.add_facts({"devices": ["cpu", "cpu"]})
    facts = read_facts(folder.path)
    assert (facts["format"], facts["nproc"], facts["outcome"]) == (FORMAT, 2, "ok")
    assert facts["devices"] == ["cpu", "cpu"]
    again.resume(folder.path)
    again.record(CellEnded(number=2, outcome="rank 0: no"))
    again.add_facts({})
    facts = read_facts(folder.path)
    assert (facts["nproc"], facts["pid"]) == (2, 1)
    assert (facts["outcome"], facts["failures"]) == ("rank 0: no", 1)


def test_an_unwritable_run_json_stays_and_a_torn_one_has_no_facts(
    base: Path, begin: Begin, remarks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin()
    folder.add_facts({"nproc": 2})
    monkeypatch.setattr(os, "replace", no_space)
    folder.add_facts({"nproc": 3})
    assert remarks[0].endswith("No space left on device")
    assert read_facts(folder.path)["nproc"] == 2
    assert not (folder.path / "run.json.tmp").exists()
    for text in ("", "{", "[]", "7", '{"a": ' * 100_000, "\x00", '{"nproc": 2'):
        (base / "run.json").write_text(text)
        assert read_facts(base) == {}, text[:9]


def test_settings_that_all_ranks_report_are_recorded_once(begin: Begin) -> None:
    folder = begin()
    for rank, rate in ((0, 0.1), (1, 0.1), (2, 0.2)):
        folder.record(Configured(rank=rank, values={"lr": rate}))
    assert [event.facts()["rank"] for event in folder.since(0.0)] == [0, 2]


# ---- events


def kinds(events: tuple[RunEvent, ...]) -> list[str]:
    return [event.kind for event in events]


def on_disk(event_log: EventLog) -> list[dict[str, Any]]:
    path = event_log.path / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_listed_by_time_or_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    event_log = EventLog(pytest.fail)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    recorded: list[RunEvent] = [RanksStarted(attempt=1, world_size=2), READY, exited(1), READY]
    for event in recorded:  # all of the same moment
        event_log.record(replace(event, time=1.0))
    monkeypatch.setattr(time, "time", lambda: 2.0)
    newest = (RanksStarted(attempt=2, world_size=2), exited(1))
    for event in newest:
        event_log.record(event)
    kinds_in_order = ["start", "ready", "exit", "ready", "start", "exit"]
    assert kinds(event_log.since(0.0)) == kinds(event_log.of_attempt(1)) == kinds_in_order
    assert event_log.since(2.0) == event_log.of_attempt(2) == newest
    assert event_log.since(2.5) == event_log.of_attempt(3) == ()


def test_the_facts_of_an_event_may_have_any_name(begin: Begin) -> None:
    event_log = begin()
    facts = {"kind": "full", "self": "x", "time": 3, "other_facts": 1, "cls": 2}
    for kind, kind_facts in (("mine", {}), ("checkpoint", {"step": 1, "seconds": 2})):
        event_log.record(reported_event(0, kind, facts | kind_facts))
        event = event_log.since(0.0)[-1]
        assert (event.kind, event.facts()) == (kind, {"rank": 0, **facts, **kind_facts})
        assert event.time > 3
        assert on_disk(event_log)[-1].items() >= {"self": "x", "kind": kind}.items()


def test_memory_has_the_newest_events_and_the_file_all(begin: Begin) -> None:
    event_log = begin()
    event_log.record(RanksStarted(attempt=1, world_size=1))
    event_log.record(CellStarted(number=1, ranks=[0], source=""))
    for number in range(MAX_REPORTED_EVENTS + 50):
        event_log.record(CheckpointSaved(rank=0, step=number, seconds=1.0))
    event_log.record(CellEnded(number=1, outcome="ok"))
    kept = event_log.of_attempt(1)
    assert kinds(kept) == ["start", "cell", *["checkpoint"] * MAX_REPORTED_EVENTS, "cell ended"]
    assert [event.facts()["step"] for event in kept[2:-1]] == list(
        range(50, MAX_REPORTED_EVENTS + 50)
    )
    assert [each["step"] for each in on_disk(event_log)[2:-1]] == list(
        range(MAX_REPORTED_EVENTS + 50)
    )
    event_log.record(RanksStarted(attempt=1, world_size=1))
    for _ in range(MAX_OWN_EVENTS):
        event_log.record(READY)
    assert set(kinds(event_log.since(0.0))) == {"checkpoint", "ready"}


def test_a_large_fact_is_truncated_only_in_memory(begin: Begin) -> None:
    event_log = begin()
    facts = {"text": "x" * 100_000, "list": [1] * 100_000, "fine": [1, 2]}
    event_log.record(reported_event(0, "mine", facts))
    settings = {f"name_{number}": "x" * 500 for number in range(500)}
    event_log.record(Configured(rank=0, values=settings))
    shortened, configured = (event.facts() for event in event_log.since(0.0))
    assert shortened["text"] == "x" * MAX_FACT_CHARS + " …"
    assert shortened["list"] == [1] * MAX_FACT_ENTRIES
    assert configured["values"] == dict.fromkeys(settings, "x" * MIN_ENTRY_CHARS + " …")
    assert shortened["fine"] == [1, 2]
    assert len(on_disk(event_log)[0]["text"]) == 100_000


def test_a_new_folder_is_opened_after_the_end_or_deletion(base: Path, begin: Begin) -> None:
    event_log = begin("first")
    first = event_log.path
    event_log.record(READY)
    assert event_log.open(base, "first", {}) == first
    event_log.close()
    assert (event_log.folder, event_log.path) == (None, first)
    event_log.close()
    second = event_log.open(base, "first", {"nproc": 2})
    assert second != first
    assert read_facts(second)["nproc"] == 2
    shutil.rmtree(second)
    event_log.open(base, "first", {})
    event_log.record(RanksStarted(attempt=1, world_size=1))
    assert kinds(event_log.since(0.0)) == ["ready", "start"]
    assert [each["kind"] for each in on_disk(event_log)] == ["start"]


def failure(rank: int, what: str = "ValueError: no", at: float = 1.0) -> RankFailed:
    return RankFailed(time=at, rank=rank, what=what)


def test_equal_failures_of_ranks_are_merged_and_do_not_repeat_the_first_cause() -> None:
    other = failure(3, "KeyError: 'x'", at=1.5)
    events = [failure(2), other, failure(0, at=2.0), READY, failure(1)]
    joined = replace(failure(2), other_ranks=(0,))
    assert merge_equal_failures(events) == (joined, other, *events[3:])
    [told] = merge_equal_failures([failure(0), failure(1)], cause="ValueError: no")
    assert told.describe() == "ranks 0-1: failed"
    [alone] = merge_equal_failures([failure(0)], cause="ValueError: no")
    assert alone.describe() == "rank 0: failed"


def test_the_event_of_an_alarm_is_shortened_if_the_view_shows_the_alarm_in_full() -> None:
    alarm = "no progress for 10 s: rank 1 never came\n  rank 0 waits"
    event = NoProgress(text=alarm)
    assert merge_equal_failures([event], alarm="another") == (event,)
    [cut] = merge_equal_failures([event], alarm=alarm)
    assert cut == replace(event, text="no progress for 10 s")
