"""Findings shown below a cell without a request: few, once, and after the output of the cell."""

from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.extensions.checks import notebook as checking
from nbddp.extensions.checks.facts import LoaderFacts, RankFacts
from nbddp.extensions.checks.notebook import find_new
from nbddp.lifecycle.group_state import Life, RankLife
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.wire.messages import CellEnded


def ended(
    source: str, *seeds: int, attempt: int = 1, ranks: tuple[int, ...] | None = None
) -> CellHandle:
    request = CellRequest(source=source, first_line=2, ranks=ranks)
    handle = CellHandle(1, request, tuple(range(len(seeds))), lambda _parcel: None, attempt=attempt)
    for rank, seed in enumerate(seeds):
        loader = LoaderFacts(sampler="dealt", seed=seed, shuffles=True)
        facts: Any = {"checks": RankFacts(objects={"train": loader}).to_json()}
        handle.add_report(rank, CellEnded(cell=1, in_group=True, facts=facts))
    handle.finish()
    return handle


def session(world_size: int = 2) -> Any:
    ranks = tuple(RankLife(rank) for rank in range(world_size))
    return Mock(life=Life(ranks=ranks), reported_findings=set())


def rules(of: Any, handle: CellHandle) -> list[str]:
    return [each.rule for each in find_new(of, handle)]


def test_findings_about_rank_state_are_shown_once_a_session_and_about_code_each_time() -> None:
    notebook, script = session(), session()
    source = "if rank == 0:\n    dist.barrier()\nlen(train)"
    assert rules(notebook, ended(source, 1, 2)) == ["ND101", "ND202"]
    assert rules(script, ended(source, 1, 2)) == ["ND101", "ND202"]
    assert rules(notebook, ended(source, 1, 2)) == ["ND101"]
    assert rules(notebook, ended(source, 1, 3)) == ["ND101", "ND202"]
    assert rules(notebook, ended(source, 1, 2, attempt=2)) == ["ND101", "ND202"]


def test_findings_have_the_line_numbers_of_the_editor() -> None:
    [found] = find_new(session(), ended("\nlen(train)", 1, 2))
    assert (found.rule, found.line) == ("ND202", 3)


SAVES = (
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "model = DDP(net)\ntorch.save(model, 'x.pt')"
)
CASES: dict[str, tuple[int, CellHandle, list[str]]] = {
    "one seed": (2, ended("len(train)", 1, 1), []),
    "a rank is missing": (3, ended("len(train)", 1, 2), []),
    "a comment": (2, ended("len(train)  # nbddp: ok ND202", 1, 2), []),
    "not Python": (2, ended("train )( 1", 1, 2), []),
    "very long": (2, ended("x = 1\n" * 10_000 + "len(train)", 1, 2), []),
    "all ranks save": (2, ended(SAVES, 1, 1), ["ND141"]),
    "all named ranks save": (2, ended(SAVES, 1, 1, ranks=(0, 1)), ["ND141"]),
    "one rank saves": (2, ended(SAVES, 1, ranks=(0,)), []),
    "the only rank saves": (1, ended(SAVES, 1), []),
}


@pytest.mark.parametrize(("world_size", "handle", "found"), CASES.values(), ids=CASES)
def test_a_cell_has_findings_only_where_they_apply(
    world_size: int, handle: CellHandle, found: list[str]
) -> None:
    assert rules(session(world_size), handle) == found


def test_an_exception_in_one_rule_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checking, "check_cell", Mock(side_effect=ZeroDivisionError))
    assert rules(session(), ended("len(train)", 1, 2)) == []
    assert "ZeroDivisionError" in caplog.text
