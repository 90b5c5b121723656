"""``run.json`` is put together from what happens to a run, and is whole at any moment."""

from __future__ import annotations

import errno
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nbddp.checks.facts import RankFacts
from nbddp.controller.run_recorder import samples_per_step
from nbddp.record.event_log import EventLog
from nbddp.record.run_folder import FORMAT, RunFolder, RunJson, read_facts
from nbddp.wire.messages import CellEnded


def facts_of(*events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    run_json = RunJson()
    for kind, facts in events:
        run_json.update(kind, facts)
    return run_json.facts


def test_a_stopped_cell_does_not_count_as_failed() -> None:
    stopped = {"number": 1, "outcome": "ranks 0-1 interrupted", "interrupted": True}
    facts = facts_of(("cell ended", stopped))
    assert (facts["outcome"], facts["failures"]) == ("ranks 0-1 interrupted", 0)
    assert facts["interrupted"]
    facts = facts_of(("cell ended", stopped), ("cell ended", {"number": 2, "outcome": "oh"}))
    assert (facts["interrupted"], facts["failures"]) == (False, 1)


def test_restarts_heals_and_lost_time_are_counted() -> None:
    facts = facts_of(
        ("start", {"attempt": 4, "world_size": 2}),
        ("start", {"attempt": 5, "world_size": 3}),
        ("resumed", {"seconds": 0.5}),
        ("healed", {"ranks": [1]}),
        ("resumed", {"seconds": 0.25}),
        ("start failed", {"reason": "rank 1: no room\nin full"}),
    )
    assert (facts["world_size"], facts["restarts"], facts["heals"]) == (3, 1, 1)
    assert facts["seconds_lost"] == 0.75
    assert facts["outcome"] == "start failed: rank 1: no room"


def test_later_settings_win_and_settings_of_rank_0_win_over_other_ranks() -> None:
    events = [({"lr": 0.1}, 0), ({"lr": 0.2, "seed": 7}, 1), ({"lr": 0.3}, 0), ({"lr": 0.4}, 1)]
    facts = facts_of(*(("config", {"values": values, "rank": rank}) for values, rank in events))
    assert facts["config"] == {"lr": 0.3, "seed": 7}


def test_the_batch_size_is_known_if_all_shuffling_loaders_agree() -> None:
    for batches, batch in {
        (("train", 32),): 64,
        (("train", 32), ("check", 10)): None,
        (("one", 32), ("other", 32)): 64,
        (): None,
    }.items():
        facts = RankFacts(batches=dict(batches)).to_json()
        ended = CellEnded(cell=1, seconds=1.0, in_group=True, facts=facts)
        assert samples_per_step([ended, ended]) == batch, batches


def test_samples_per_second_are_steps_times_the_batch_of_all_ranks() -> None:
    run_json = RunJson({"steps_per_second": 2.5, "samples_per_step": 64})
    assert json.loads(run_json.text())["samples_per_second"] == 160.0


def test_a_run_has_an_end_time_only_after_its_stop_was_recorded() -> None:
    assert "ended" not in facts_of(("start", {"attempt": 1, "world_size": 1}))
    assert facts_of(("stopped", {"attempt": 1}))["ended"]
    restarted = facts_of(("stopped", {}), ("start", {"attempt": 2, "world_size": 1}))
    assert "ended" not in restarted


# ---- in the folder


def test_run_json_has_all_facts_and_outcomes_even_of_a_resumed_run(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path, notify=pytest.fail)) as folder:
        folder.add_facts(nproc=2, pid=1)
        folder.append_event("cell ended", number=1, outcome="ok")
        folder.add_facts(devices=["cpu", "cpu"])
        facts = read_facts(folder.path)
    assert (facts["format"], facts["nproc"], facts["outcome"]) == (FORMAT, 2, "ok")
    assert facts["devices"] == ["cpu", "cpu"]
    with closing(RunFolder(folder.path, notify=pytest.fail, is_existing=True)) as again:
        again.append_event("cell ended", number=2, outcome="rank 0: no")
        again.add_facts()
    facts = read_facts(folder.path)
    assert (facts["nproc"], facts["pid"]) == (2, 1)
    assert (facts["outcome"], facts["failures"]) == ("rank 0: no", 1)


def test_a_run_json_that_cannot_be_written_keeps_its_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with closing(RunFolder(tmp_path, notify=said.append)) as folder:
        folder.add_facts(nproc=2)

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "replace", fail)
        folder.add_facts(nproc=3)
        assert said[0].endswith("No space left on device")
        assert read_facts(folder.path)["nproc"] == 2
        assert not (folder.path / "run.json.tmp").exists()


def test_a_torn_run_json_has_no_facts(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "7", '{"a": ' * 100_000, "\x00", '{"nproc": 2'):
        (tmp_path / "run.json").write_text(text)
        assert read_facts(tmp_path) == {}, text[:9]


def test_settings_that_all_ranks_report_are_recorded_once(tmp_path: Path) -> None:
    line = EventLog(pytest.fail)
    line.open(tmp_path, "", {})
    for rank, rate in ((0, 0.1), (1, 0.1), (2, 0.2)):
        line.record_reported(rank, "config", {"values": {"lr": rate}})
    assert [each.facts["rank"] for each in line.since(0.0)] == [0, 2]
    line.close()
