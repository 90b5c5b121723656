"""The description of a collective from torch's flight recorder."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes import recorder_entry

from nbddp.worker.watch.flight_recorder import (
    NCCL_OFFSET,
    newest_collective,
    read_entries,
)

Record = Callable[..., None]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Replaces the entries of torch's recorder, or of another one, such as NCCL's."""

    def write(*entries: dict[str, Any], recorder: str = "fr") -> None:
        def dump(*, includeStackTraces: bool) -> bytes:  # noqa: N803 - as torch calls it
            assert not includeStackTraces
            return pickle.dumps({"entries": entries})

        module = torch._C._distributed_c10d
        monkeypatch.setattr(module, f"_dump_{recorder}_trace", dump, raising=False)

    return write


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "all_reduce #3 float [4]"),
        ({"process_group": ["7", "tensor parallel"]}, "all_reduce #3 of group 'tensor parallel' "),
        ({"process_group": ["c0ffee1234", "undefined"]}, "all_reduce #3 of group c0ffee12 "),
    ],
)
def test_a_collective_is_numbered_by_its_group(
    record: Record, facts: dict[str, Any], said: str
) -> None:
    began = {"collective_seq_id": 3, "time_created_ns": 5_000_000_000}
    record(recorder_entry(record_id=7), recorder_entry(record_id=8, **began, **facts))
    newest = newest_collective()
    assert str(newest.call).startswith(said)
    assert (newest.call.number, newest.began_at) == (3, 5.0)


def test_recorder_entries_are_sorted_by_age_and_empty_if_memory_runs_out(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(recorder_entry(record_id=9), recorder_entry(record_id=7))
    assert [each["record_id"] for each in read_entries()] == [7, 9]
    full = Mock(side_effect=MemoryError)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", full)
    assert read_entries() == []
    assert newest_collective() is None


def test_entries_of_the_nccl_recorder_are_read_before_those_of_other_backends(
    record: Record,
) -> None:
    record(recorder_entry(record_id=9))
    of_nccl = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 2}
    started = recorder_entry(record_id=1, retired=False, **of_nccl)
    record(started, recorder_entry(record_id=0, **of_nccl), recorder="nccl")
    assert [each["record_id"] for each in read_entries()] == [NCCL_OFFSET, NCCL_OFFSET + 1]
    newest = newest_collective()
    told = (newest.call.number, newest.backend, newest.is_in_flight)
    assert told == (2, "nccl", True)
    record(recorder="nccl")
    assert [each["record_id"] for each in read_entries()] == [9], "of a rank that has not called it"
