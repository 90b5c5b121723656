"""Faults in real ranks fire once and are recorded; the unit tests have each kind of fault."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from conditions import output_of_hang
from drivers.ranks import Capture, MakeRanks, Ranks

from nbddp.controller.store_link import StoreLink

LOOP = """
kept = rank
for step in range(6):
    x = torch.ones(1)
    dist.all_reduce(x)
    nbddp.log(step=step, total=x.item())
"""


def arm(kind: str) -> str:
    return f"nbddp.faults.at(step=3, rank=1, kind={kind!r})\n"


def steps(group: Ranks, rank: int) -> list[int]:
    """Return the steps that a rank recorded."""
    return [row["step"] for row in group.read_lines("metrics.jsonl") if row["rank"] == rank]


def assert_fired_once(group: Ranks, fault: str) -> None:
    """Check that the time line and the file have the fault once, before the rank's exit."""
    expected = {"fault": fault, "at_step": 3, "rank": 1}
    assert [event.facts for event in group.events() if event.kind == "fault"] == [expected]
    lines = group.read_lines("events.jsonl")
    kinds = [line["kind"] for line in lines]
    assert kinds.count("fault") == 1
    assert "exit" not in kinds[: kinds.index("fault")]
    assert lines[kinds.index("fault")].items() >= expected.items()


def test_raise_fault_is_the_first_cause_and_all_names_are_kept(group: Ranks) -> None:
    report = group.failure_of(arm("raise") + LOOP).report
    assert "rank 1: FaultError: fault: raise@rank=1,step=3, line 7" in report.splitlines()[0]
    assert "in log(" not in report, "the traceback goes from the cell to the fault"
    assert_fired_once(group, "raise@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept") == [0, 1]
    group.run(arm("raise") + LOOP)  # the same process: the fault has fired
    assert_fired_once(group, "raise@rank=1,step=3")


def test_kill_fault_is_recorded_before_the_exit_even_if_the_reader_is_slow(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = StoreLink.get

    def collect_late(link: StoreLink) -> Any:
        time.sleep(0.1)  # a rank that is about to die waits for its reader, for 2 s in all
        return collect(link)

    monkeypatch.setattr(StoreLink, "get", collect_late)
    group = make_group(2)
    report = group.failure_of(arm("kill") + LOOP).report
    assert re.search("rank 1 .*SIGKILL$", report.splitlines()[0])
    assert_fired_once(group, "kill@rank=1,step=3")
    assert steps(group, 1) == [0, 1, 2, 3]
    assert group.pull("kept", rank=0) == 0


def test_hang_fault_is_reported_and_an_interrupt_keeps_all_names(
    group: Ranks, capsys: Capture
) -> None:
    said = output_of_hang(group, arm("hang") + LOOP, capsys)
    assert re.search(r"^  rank 0 .*all_reduce #5 float \[1\], line 6$", said, re.MULTILINE)
    assert re.search(r"^  rank 1 .*: line 7 in log\(\)$", said, re.MULTILINE)
    assert_fired_once(group, "hang@rank=1,step=3")
    assert group.pull("kept") == [0, 1]
    group.run(LOOP)
    assert_fired_once(group, "hang@rank=1,step=3")


def test_manual_restart_rearms_faults(group: Ranks) -> None:
    for count in (1, 2):
        group.failure_of(arm("exit") + LOOP)
        kinds = [line["kind"] for line in group.read_lines("events.jsonl")]
        assert kinds.count("fault") == count
        group.restart()
