"""The replay log: which variables new ranks lack."""

from __future__ import annotations

from nbddp.record.cell import CellRequest
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import ReplayLog


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
