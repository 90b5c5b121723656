"""What torch's flight recorder says of a collective, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nbddp.worker.flight_recorder import Collective, arrivals, newest_collective


def entry(**facts: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it for Gloo."""
    return {
        "record_id": 8,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 3,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": 5_000_000_000,
        "input_sizes": [[2, 4]],
        "input_dtypes": ["Float"],
        "retired": False,
    } | facts


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "all_reduce #3 float [2, 4]"),
        ({"process_group": ["7", "tensor parallel"]}, "all_reduce #3 of group 'tensor parallel' "),
        ({"process_group": ["c0ffee1234", "undefined"]}, "all_reduce #3 of group c0ffee12 "),
    ],
)
def test_a_collective_is_numbered_by_its_group(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], said: str
) -> None:
    entries = [entry(record_id=7, process_group=["0", "default_pg"]), entry(**facts)]
    recorder = torch._C._distributed_c10d
    text = json.dumps({"entries": entries})
    monkeypatch.setattr(recorder, "_dump_fr_trace_json", lambda: text)
    newest = newest_collective()
    assert newest is not None
    assert str(newest).startswith(said)
    assert (newest.number, newest.record, newest.began_at) == (3, 8, 5.0)


def test_the_title_has_no_shape() -> None:
    one = Collective("broadcast", 2, is_in_flight=True, shape="float [4]", group="[0, 2]")
    assert one.title == "broadcast #2 of group [0, 2]"
    assert str(one) == "broadcast #2 of group [0, 2] float [4]"


def test_when_a_rank_came_is_told_of_the_default_group_in_order_and_once() -> None:
    def came(number: int, name: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
        at = (1000 + number) * 1_000_000_000 + 1234
        facts = {"record_id": number, "collective_seq_id": number, "time_created_ns": at}
        return entry(**facts, profiling_name=name, **more)

    entries = [
        came(5, "nccl:all_reduce"),
        came(1),
        came(2, "gloo:barrier"),
        came(3, process_group=["7", "tensor parallel"]),
        came(4, "gloo:broadcast"),
        came(6, "gloo:send", is_p2p=True),
    ]
    told = [[2, 1002.000001, True], [4, 1004.000001, False], [5, 1005.000001, False]]
    assert arrivals(entries, since=0.0, after=1) == told
    assert arrivals(entries, since=1004.5, after=-1) == told[2:]
    assert arrivals([], since=0.0, after=-1) == []
