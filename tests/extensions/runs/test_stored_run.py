"""A run can be opened from its folder, complete or torn."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from runs_on_disk import FAILED, UNENDED, WHAT, failed_run, reported

from nbddp.errors import RequestError
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.record.metrics import Curve


def run_of(base: Path, **facts: Any) -> StoredRun:
    return StoredRun(failed_run(base, **facts))


def test_the_cell_with_a_prompt_number_is_the_last_run_of_that_cell(tmp_path: Path) -> None:
    numbers = {1: {"number": 3, "id": 1}, 7: {"number": 3, "id": 7}}
    events = [{**each, **numbers.get(each.get("number", 0), {})} for each in FAILED]
    run = run_of(tmp_path, events=events)
    assert [(each.number, each.outcome) for each in run.cells] == [
        (3, "ok"),
        (3, f"rank 1: {WHAT}"),
    ]
    assert run.cell(3) == run.cells[1]
    assert [run.metrics(each).names() for each in run.cells] == [["loss"], []]


def test_a_cell_is_not_its_replay_unless_the_replay_failed(tmp_path: Path) -> None:
    for outcome, index in (("ok", 0), ("rank 1: OSError", 1)):
        replay = [{"number": 1, "id": 9, "time": 200.0, "again": True, "replay": True}]
        replay += [{"number": 1, "id": 9, "time": 201.0, "outcome": outcome}]
        kinds = [{"kind": "cell", "ranks": [0, 1], "source": "x = 1"}, {"kind": "cell ended"}]
        events = [*FAILED, *(fact | kind for fact, kind in zip(replay, kinds, strict=True))]
        run = run_of(tmp_path / outcome, events=events)
        cells = [cell for cell in run.cells if cell.number == 1]
        assert run.cell(1) == cells[index]
        with pytest.raises(RequestError, match=r"its cells are: 1, 7$"):
            run.cell(99)


def recovered(base: Path, again: list[dict[str, Any]]) -> dict[int, Curve]:
    """The curves after steps 0 to 4, and these rows of the next attempt."""
    recovery = {"attempt": 2, "time": 101.6, "kind": "recovery", "detected": 0.1}
    rows = [*reported(*range(5)), *({**row, "attempt": 2, "time": 101.7} for row in again)]
    return run_of(base, events=[*FAILED, recovery], rows=rows).metrics().curves("loss")


def test_metrics_after_a_recovery_replace_those_of_the_repeated_steps(tmp_path: Path) -> None:
    curve = recovered(tmp_path, reported(3, 4, 5, loss=9.0))[0]
    assert curve.steps == tuple(map(float, range(6)))
    assert curve.mean[2:] == (3.0, 9.0, 9.0, 9.0)
    assert curve.resume_points == (3.0,)


CELLS = {  # (the ranks, their first step) in each cell of three steps; the expected steps by rank
    "one rank after the other": ([((0,), 0), ((1,), 0)], {0: (0, 1, 2), 1: (3, 4, 5)}),
    "one rank, then both": ([((0,), 0), ((0, 1), 0)], {0: (0, 1, 2, 3, 4, 5), 1: (3, 4, 5)}),
    "a count that goes on": ([((0,), 0), ((0, 1), 3)], {0: (0, 1, 2, 3, 4, 5), 1: (3, 4, 5)}),
    "back, then on": (
        [((0, 1), 0), ((1,), 0), ((0, 1), 3)],
        {0: (0, 1, 2, 6, 7, 8), 1: tuple(range(9))},
    ),
    "a rank that joins last": (
        [((0,), 0), ((0,), 0), ((1,), 3)],
        {0: tuple(range(6)), 1: (6, 7, 8)},
    ),
    "without steps": ([((0,), None), ((1,), None)], {0: (0, 1, 2), 1: (3, 4, 5)}),
}


@pytest.mark.parametrize(("cells", "expected"), CELLS.values(), ids=CELLS)
def test_steps_of_a_later_cell_follow_those_of_all_ranks(
    tmp_path: Path, cells: list[tuple[tuple[int, ...], int | None]], expected: dict[int, tuple[int]]
) -> None:
    events, rows = [*FAILED[:2]], []
    for number, (ranks, begin) in enumerate(cells):
        at = 101.0 + 10 * number
        events.append({"number": number, "ranks": ranks, "source": "", "time": at, "kind": "cell"})
        for index, rank in itertools.product(range(3), ranks):
            row = {"time": at + index, "rank": rank, "attempt": 1, "loss": 10.0 * number + index}
            rows.append(row if begin is None else row | {"step": begin + index})
    run = run_of(tmp_path, events=events, rows=rows)
    curves = run.metrics().curves("loss")
    assert {rank: curve.steps for rank, curve in curves.items()} == expected
    of_rank = [each for each in rows if each["rank"] == 0]
    assert curves[0].mean == tuple(each["loss"] for each in of_rank), "no value is merged"


def test_ranks_that_begin_after_a_recovery_keep_their_steps(tmp_path: Path) -> None:
    curves = recovered(tmp_path, reported(3, 4, ranks=4, loss=9.0))
    assert (curves[0].steps, curves[3].steps) == ((0, 1, 2, 3, 4), (3, 4))


def test_a_run_of_a_killed_kernel_is_readable_except_for_torn_lines(tmp_path: Path) -> None:
    run = run_of(tmp_path, events=UNENDED, torn='{"time": 104.3, "ki')
    assert not run.was_stopped
    assert (run.cells[-1].ended_at, run.cells[-1].outcome) == (None, "")
    for _ in range(2):
        assert run.metrics().names() == ["loss"]
        assert run.snapshot().ranks[0].step == 0
    assert run.unreadable == 2, "each once, however often it is drawn"


def test_a_run_needs_only_its_events(tmp_path: Path) -> None:
    path = failed_run(tmp_path)
    (path / "run.json").unlink()
    (path / "metrics.jsonl").unlink()
    run = StoredRun(path)
    assert run.facts == {}
    assert run.metrics().names() == []
    assert len(run.cells) == 2
    with pytest.raises(RequestError, match=f"{tmp_path}: No such file or directory"):
        StoredRun(tmp_path)
