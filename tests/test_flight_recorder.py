"""What torch's flight recorder says of a collective, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nbddp.worker.flight_recorder import Collective, newest_collective


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
