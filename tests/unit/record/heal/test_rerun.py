"""Which cells run again after a heal, so that all ranks have their trainers."""

from collections.abc import Mapping, Sequence

import pytest

from nbddp.record.cell import CellRequest
from nbddp.record.heal.rerun import cells_to_rerun, entries_to_rerun
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import ReplayLog
from nbddp.wire.request_messages import KEEPS_RANK

ARGS, TRAINER = "args = Args('out')", "trainer = Trainer(model, args)"
BOTH = dict.fromkeys(["args", "trainer"], KEEPS_RANK)


def rerun(
    sources: Sequence[str], failed: str | None, reasons: Mapping[str, str] = BOTH
) -> list[int]:
    cells = [CellRequest(source=each, execution_count=n) for n, each in enumerate(sources, start=1)]
    again = entries_to_rerun(cells, reasons, failed)
    return [each.execution_count for each in again if isinstance(each, CellRequest)]


@pytest.mark.parametrize(
    ("define", "use"),
    [
        ("", "trainer.train()"),
        ("def fit(): return trainer.train()", "fit()"),
        ("def fit():\n    def inner(): trainer.train()\n    return inner", "fit()()"),
        ("fit = lambda: trainer.train()", "fit()"),
        ("def inner(): trainer.train()\ndef fit(): inner()", "fit()"),
        ("def inner(): trainer.train()\nfit = partial(inner)", "fit()"),
        ("class Run:\n    def go(self): trainer.train()", "Run().go()"),
        ("class Run:\n    def go(self): trainer.train()\nrun = Run()", "run.go()"),
        ("", "!ls\ntrainer.train()"),
        ("", "async def fit(): trainer.train()\nawait fit()"),
    ],
)
def test_cells_of_a_trainer_and_of_its_arguments_run_again(define: str, use: str) -> None:
    assert rerun([ARGS, TRAINER, define], use) == [1, 2]
    assert rerun([ARGS, TRAINER, define], "x = 1") == []


@pytest.mark.parametrize(
    ("sources", "failed", "expected"),
    [
        ([ARGS, TRAINER, "result = trainer.train()"], "print(result)", []),
        ([ARGS, TRAINER, "def fit(trainer): trainer.train()"], "fit", []),
        ([ARGS, TRAINER, "def fit(): trainer.train()"], "fit = 3", []),
        ([ARGS, TRAINER, "def fit(): trainer.train()"], "def fit(): 3\nfit()", []),
        ([ARGS, TRAINER], "f(trainer=3, args='args')", []),
        ([ARGS, TRAINER], "args.x", [1]),
        ([ARGS, f"{ARGS}\n{TRAINER}"], "trainer", [2]),
        ([ARGS, f"args = more(args)\n{TRAINER}"], "trainer", [1, 2]),
        ([ARGS, "def make():\n    return Trainer(args)", "trainer = make()"], "trainer", [1, 3]),
        ([ARGS, "trainer = Trainer([a for a in args])"], "trainer", [1, 2]),
        ([ARGS, "trainer = Trainer(f=lambda: args)"], "trainer", [1, 2]),
        ([ARGS, f"{TRAINER}\ndef later(): return lock", "lock = 1"], "trainer", [1, 2]),
        ([ARGS, TRAINER, ARGS], None, [1, 2, 3]),
    ],
)
def test_only_cells_that_are_needed_run_again(
    sources: Sequence[str], failed: str | None, expected: list[int]
) -> None:
    assert rerun(sources, failed) == expected


def test_cell_of_a_name_that_was_not_carried_runs_again_if_a_trainer_needs_it() -> None:
    sources = [
        "rows = (n for n in range(3))",
        "loader = Loader()",
        "trainer = Trainer(rows, loader)",
    ]
    reasons = {"trainer": KEEPS_RANK, "rows": "a generator", "loader.lock": "a lock"}
    assert rerun(sources, "trainer", reasons) == [1, 3]
    assert rerun(sources, "rows", reasons) == []


@pytest.mark.parametrize("path", ["box.trainer", "box['trainer']", "a Trainer in box (2)"])
def test_cell_of_an_object_with_a_trainer_runs_again(path: str) -> None:
    assert rerun(["a = 1", "box = Box(make())"], None, {path: KEEPS_RANK}) == [2]


def test_cells_of_deleted_names_run_again_if_a_trainer_needs_them() -> None:
    sources = ["model = Model()", ARGS, f"{TRAINER}\ndel model"]
    assert rerun(sources, "trainer.train()") == [1, 2, 3]
    assert rerun([*sources, "model = 1"], "trainer.train()") == [2, 3]
    renamed = [ARGS, TRAINER, "best = trainer\ndel trainer"]
    assert rerun(renamed, None, dict.fromkeys(["args", "best"], KEEPS_RANK)) == [1, 2, 3]


def test_pushes_that_a_trainer_needs_are_repeated() -> None:
    push = PushRecord(("model",), None, None)
    cell = CellRequest(source=f"{TRAINER}; del model")
    assert entries_to_rerun([push, cell], {"trainer": KEEPS_RANK}) == [push, cell]


def test_cells_that_have_run_again_run_only_once_more() -> None:
    first, second = (CellRequest(source=each) for each in (ARGS, TRAINER))
    assert entries_to_rerun([first, second, first, second], BOTH) == [first, second]


def test_name_that_a_cell_sets_after_the_heal_is_no_longer_missing() -> None:
    log = ReplayLog()
    log.add(CellRequest(source="args = 1", execution_count=2))
    log.not_carried = {**BOTH, "trainer.model": "a reason"}
    assert cells_to_rerun(log) == {2}
    log.add(CellRequest(source="trainer = 1"))
    assert log.not_carried == {"args": KEEPS_RANK}
    log.clear()
    assert log.not_carried == {}
