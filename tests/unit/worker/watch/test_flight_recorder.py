"""The description of a collective from torch's flight recorder."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from nbddp.worker.watch.flight_recorder import (
    NCCL_OFFSET,
    is_synchronizing,
    newest_collective,
    read_entries,
)


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
    dump = pickle.dumps({"entries": entries})
    monkeypatch.setattr(recorder, "_dump_fr_trace", lambda **_options: dump)
    newest = newest_collective()
    assert newest is not None
    assert str(newest.call).startswith(said)
    assert (newest.call.number, newest.began_at) == (3, 5.0)


def test_only_some_collectives_synchronize_all_ranks() -> None:
    names = ["gloo:all_reduce", "gloo:barrier", "gloo:broadcast", "nccl:all_reduce", "gloo:send"]
    assert [is_synchronizing(entry(profiling_name=name)) for name in names] == [
        True,
        True,
        *[False] * 3,
    ]


def test_recorder_entries_are_sorted_by_age_and_empty_if_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = torch._C._distributed_c10d
    entries = [entry(record_id=9), entry(record_id=7)]
    dump = pickle.dumps({"entries": entries})
    monkeypatch.setattr(recorder, "_dump_fr_trace", lambda **_options: dump)
    assert [each["record_id"] for each in read_entries()] == [7, 9]

    def fail(**_options: bool) -> bytes:
        raise MemoryError

    monkeypatch.setattr(recorder, "_dump_fr_trace", fail)
    assert read_entries() == []
    assert newest_collective() is None


# ---- NCCL


def of_nccl(record_id: int, **facts: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it for NCCL (``getCollectiveTrace`` of FlightRecorder.hpp).

    It has ``duration_ms`` if timing is on, and once the watchdog has seen the end.
    """
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "",
        "thread_id": "140",
        "collective_seq_id": record_id + 1,
        "p2p_seq_id": 0,
        "op_id": record_id + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 5_000_000_000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": 5_000_100_000,
        "time_discovered_completed_ns": 5_000_900_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | facts


def test_entries_of_the_nccl_recorder_are_read_before_those_of_other_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = torch._C._distributed_c10d
    of_others = pickle.dumps({"entries": [entry(record_id=9)]})
    monkeypatch.setattr(recorder, "_dump_fr_trace", lambda **_options: of_others)
    dumped = {"entries": [of_nccl(1, state="started", retired=False), of_nccl(0)]}

    def dump(*, includeStackTraces: bool) -> bytes:  # noqa: N803 - as torch calls it
        assert not includeStackTraces
        return pickle.dumps(dumped)

    monkeypatch.setattr(recorder, "_dump_nccl_trace", dump, raising=False)
    assert [each["record_id"] for each in read_entries()] == [NCCL_OFFSET, NCCL_OFFSET + 1]
    newest = newest_collective()
    assert newest is not None
    assert (newest.call.title, newest.backend, newest.is_in_flight) == (
        "all_reduce #2",
        "nccl",
        True,
    )
    dumped["entries"] = []
    assert [each["record_id"] for each in read_entries()] == [9], "of a rank that has not called it"
