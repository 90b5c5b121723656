"""The replay log: which variables new ranks lack, and what the next replay runs."""

from nbddp.record.cell import CellRequest
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import ReplayLog
from nbddp.wire.request_messages import KEEPS_RANK


def test_variables_of_cells_and_pushes_are_lost_when_new_ranks_start() -> None:
    log = ReplayLog()
    log.clear()  # the first start
    log.add(CellRequest(source="x = 1\ndef f(): inner = 2", execution_count=3))
    log.add(CellRequest(source="x = 2", execution_count=4))
    log.add(CellRequest(source="!ls", execution_count=5))
    log.add(PushRecord(("words",), None, None))
    assert log.lost == {}
    log.clear()
    assert log.lost == {"x": 4, "f": 3, "words": 0}


def test_variable_that_a_cell_sets_again_is_no_longer_lost() -> None:
    log = ReplayLog()
    log.add(CellRequest(source="x = y = 1", execution_count=3))
    log.clear()
    log.add(CellRequest(source="x = 2; del x", execution_count=4))
    assert log.lost == {"y": 3}
    log.clear()
    assert log.lost == {"x": 4, "y": 3}


def test_variables_are_lost_if_a_restart_ends_before_new_ranks_start() -> None:
    log = ReplayLog()
    log.add(CellRequest(source="x = 1", execution_count=3))
    log.set_pending(log.all_entries, clears_entries=True)
    assert log.lost == {"x": 3}


def test_name_that_a_heal_did_not_carry_is_described_until_a_cell_sets_it() -> None:
    log = ReplayLog()
    log.add(CellRequest(source="gate = x = 1", execution_count=3))
    log.not_carried = {"gate": "a lock", "other": "a lock", "trainer": KEEPS_RANK}
    texts = [log.describe_not_carried(name) for name in ("gate", "other", "trainer", "x")]
    assert texts == [
        "The heal did not carry `gate` (a lock): run the line of cell [3] that makes it again on "
        "each rank that does not have it.",
        "The heal did not carry `other` (a lock): make it again on each rank that does not have "
        "it.",
        f"The heal did not carry `trainer` ({KEEPS_RANK}): make it again on all ranks.",
        "",
    ]
    log.add(CellRequest(source="gate = 2", execution_count=4))
    assert log.describe_not_carried("gate") == ""


def log_with_pending(*sources: str) -> ReplayLog:
    log = ReplayLog()
    log.add(CellRequest(source="first"))
    log.set_pending([CellRequest(source=source) for source in sources])
    return log


def sources(log: ReplayLog) -> list[str]:
    return [each.source for each in log.all_entries if isinstance(each, CellRequest)]


def test_new_entry_comes_after_the_entries_that_a_replay_did_not_reach() -> None:
    log = log_with_pending("second", "third")
    log.add(CellRequest(source="new"))
    assert sources(log) == ["first", "second", "third", "new"]
    log.clear()
    assert sources(log) == []
    log.add(CellRequest(source="newest"))
    log.set_pending([CellRequest(source="later")])
    assert sources(log) == ["newest", "later"]


def test_pending_cell_that_is_run_by_hand_is_replayed_once() -> None:
    log = log_with_pending("second", "second", "third")
    log.add(CellRequest(source="second"))
    assert sources(log) == ["first", "second", "second", "third"]
    log.add(CellRequest(source="third"))
    assert sources(log) == ["first", "second", "second", "third"]
    assert len(log.pending) == 1
    log.add(CellRequest(source="second", ranks=(0,)))
    assert len(log.pending) == 1


def test_pending_push_is_replaced_by_a_new_push_at_its_place() -> None:
    log = log_with_pending()
    log.set_pending([PushRecord(("x",), None, None, "too large"), CellRequest(source="uses x")])
    log.add(PushRecord(("x",), None, None))
    assert [each for each in log.all_entries if isinstance(each, PushRecord)] == [
        PushRecord(("x",), None, None)
    ]
    assert log.all_entries[-1] == CellRequest(source="uses x")
