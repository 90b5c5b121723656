"""The description of a collective from torch's flight recorder."""

import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fakes import recorder_entry

from nbddp.worker.watch.flight_recorder import (
    is_synchronizing,
    newest_collective,
    read_entries,
    record_key,
)

Record = Callable[..., None]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Replaces the entries of torch's recorder, or of another one, such as that of NCCL.

    With ``backends``, the recorder has torch 2.15's signature, and the entries of each backend.
    """

    def write(
        *entries: dict[str, Any],
        recorder: str = "fr",
        backends: dict[str, list[dict[str, Any]]] | None = None,
    ) -> None:
        def dump(*, includeStackTraces: bool) -> bytes:  # noqa: N803 - as torch calls it
            assert not includeStackTraces
            return pickle.dumps({"entries": entries})

        def dump_backend(*, includeStackTraces: bool, backend: str = "gloo") -> bytes:  # noqa: N803
            """_dump_fr_trace(includeStackTraces: bool | None = None, backend: str = 'gloo')."""
            assert not includeStackTraces
            return pickle.dumps({"entries": backends.get(backend, [])} if backends else {})

        module = torch._C._distributed_c10d
        function = dump if backends is None else dump_backend
        monkeypatch.setattr(module, f"_dump_{recorder}_trace", function, raising=False)

    return write


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "all_reduce #3 float [4]"),
        ({"process_group": ["7", "tensor parallel"]}, "all_reduce #3 of group 'tensor parallel' "),
        ({"process_group": ["c0ffee1234", "undefined"]}, "all_reduce #3 of group c0ffee12 "),
    ],
)
def test_a_collective_is_numbered_by_its_group(
    record: Record, facts: dict[str, Any], text: str
) -> None:
    began = {"collective_seq_id": 3, "time_created_ns": 5_000_000_000}
    record(recorder_entry(record_id=7), recorder_entry(record_id=8, **began, **facts))
    newest = newest_collective()
    assert str(newest.call).startswith(text)
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


def test_entries_of_all_recorders_are_read_by_age_and_numbered_by_each_recorder(
    record: Record,
) -> None:
    record(recorder_entry(record_id=9, time_created_ns=2))
    of_nccl = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 2}
    started = recorder_entry(record_id=1, retired=False, time_created_ns=3, **of_nccl)
    record(started, recorder_entry(record_id=0, time_created_ns=1, **of_nccl), recorder="nccl")
    entries = read_entries()
    assert [record_key(entry) for entry in entries] == [("nccl", 0), ("shared", 9), ("nccl", 1)]
    assert [is_synchronizing(entry) for entry in entries] == [False, True, False]
    newest = newest_collective()
    assert (newest.call.number, newest.backend, newest.is_in_flight) == (2, "nccl", True)


def nccl2_entry(**facts: Any) -> dict[str, Any]:
    """Return an entry of nccl2, written after FlightRecorderHook.hpp of torch 2.15.

    No GPU has recorded it. The hook retires an entry at its completion, with its duration.
    """
    return recorder_entry(
        profiling_name="nccl2:all_reduce", state="completed", duration_ms=1.5, **facts
    )


def test_torch_2_15_has_a_recorder_for_each_backend(record: Record) -> None:
    record(
        backends={
            "gloo": [recorder_entry(record_id=0, time_created_ns=1, state="scheduled")],
            "nccl2": [nccl2_entry(record_id=0, time_created_ns=2, retired=False)],
        }
    )
    assert [record_key(entry) for entry in read_entries()] == [("gloo", 0), ("nccl2", 0)]
    newest = newest_collective()
    assert (newest.call.name, newest.backend, newest.is_in_flight) == ("all_reduce", "nccl2", True)


@pytest.mark.usefixtures("group_of_one")
def test_a_collective_is_recorded_under_the_name_of_its_backend() -> None:
    dist.all_reduce(torch.ones(3))
    newest = read_entries()[-1]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert (newest["backend"], newest["name"]) == (backend.name(), "all_reduce")


class EmptyBackend(torch._C._distributed_c10d.Backend):
    """A backend of one rank, which has nothing to send."""

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        return "empty"

    name = getBackendName

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> dist.Work:
        result = torch.futures.Future()
        result.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(result)  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"),
    reason="torch records custom backends since 2.15",
)
def test_torchs_hook_records_each_backend_under_its_name() -> None:
    def create(_store: object, rank: int, size: int, _timeout: object) -> EmptyBackend:
        return EmptyBackend(rank, size)

    dist.Backend.register_backend("empty", create, devices=["cpu"])
    dist.init_process_group("empty", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        newest = read_entries()[-1]
    finally:
        dist.destroy_process_group()
    assert (newest["recorder"], newest["backend"], newest["name"]) == (
        "empty",
        "empty",
        "all_reduce",
    )
