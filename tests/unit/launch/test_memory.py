"""An out-of-memory hint for a rank that got a SIGKILL that nbddp did not send."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.launch.memory import MemoryWatch, memory_limit

GIB = 2**30


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "vmstat"
    path.write_text("pgfault 12\noom_kill 3\noom_kill_other 9\n")
    return path


@pytest.fixture
def limit(tmp_path: Path) -> Path:
    path = tmp_path / "memory.max"
    path.write_text(f"{10 * GIB}\n")
    return path


def test_a_new_oom_kill_of_the_system_is_reported_once(
    counter: Path, limit: Path, snapshot: SnapshotAssertion
) -> None:
    watch = MemoryWatch([counter], [limit])
    assert watch.hint(0) == ""
    counter.write_text("oom_kill 4\n")
    assert watch.hint(0) == snapshot
    assert watch.hint(0) == ""  # that kill was already reported


def test_ranks_that_used_most_of_the_memory_get_an_out_of_memory_hint(
    counter: Path, limit: Path, snapshot: SnapshotAssertion
) -> None:
    watch = MemoryWatch([counter], [limit])
    assert watch.hint(5 * GIB) == ""
    assert watch.hint(7 * GIB) == snapshot


@pytest.mark.parametrize("text", ["", "max\n"], ids=["no file", "a container without a limit"])
def test_without_a_memory_limit_the_memory_of_the_machine_counts(tmp_path: Path, text: str) -> None:
    limit = tmp_path / "memory.max"
    if text:
        limit.write_text(text)
    watch = MemoryWatch([tmp_path / "none"], [limit])
    total = int(psutil.virtual_memory().total)
    assert watch.hint(total // 2) == ""
    assert f"{total / GIB:.1f} of {total / GIB:.1f} GiB" in watch.hint(total)


def test_an_oom_counter_that_appears_later_counts_from_zero(tmp_path: Path, limit: Path) -> None:
    counter = tmp_path / "memory.events"
    watch = MemoryWatch([counter], [limit])
    counter.write_text("low 0\noom_kill 1\n")
    assert watch.hint(0) != ""


@pytest.mark.parametrize(("allotted", "memory"), [("2147483648", 2 * GIB), ("", 10 * GIB)])
def test_the_memory_limit_is_the_smallest_reported_limit(
    limit: Path, monkeypatch: pytest.MonkeyPatch, allotted: str, memory: int
) -> None:
    monkeypatch.setenv("MEM_LIMIT", allotted)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=99 * GIB))
    assert memory_limit([limit]) == memory
