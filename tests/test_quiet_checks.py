"""What is said under a cell that nobody asked about: little, once, and never instead of it."""

from __future__ import annotations

from typing import Any

import pytest

from nbddp.checks.facts import Loader, RankFacts
from nbddp.group import checking
from nbddp.group.checking import QuietChecks
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.wire.messages import CellEnded


def ended(
    source: str, *seeds: int, attempt: int = 1, ranks: tuple[int, ...] | None = None
) -> CellHandle:
    """A cell that went well on ranks whose samplers have these seeds."""
    request = CellRequest(source=source, first_line=2, ranks=ranks)
    handle = CellHandle(1, request, range(len(seeds)), lambda _parcel: None, attempt=attempt)
    for rank, seed in enumerate(seeds):
        loader = Loader(sampler="dealt", seed=seed, shuffles=True)
        facts: Any = RankFacts(things={"train": loader}).json()
        handle.note_report(rank, CellEnded(cell=1, seconds=0.1, in_group=True, facts=facts))
    handle.finish()
    return handle


def rules(checks: QuietChecks, handle: CellHandle) -> list[str]:
    return [each.rule for each in checks(handle)]


def test_the_ranks_state_is_told_once_and_a_cells_code_each_time() -> None:
    checks = QuietChecks(lambda: 2)
    source = "if rank == 0:\n    dist.barrier()\nlen(train)"
    assert rules(checks, ended(source, 1, 2)) == ["ND101", "ND202"]
    assert rules(checks, ended(source, 1, 2)) == ["ND101"]
    assert rules(checks, ended(source, 1, 3)) == ["ND101", "ND202"]
    assert rules(checks, ended(source, 1, 2, attempt=2)) == ["ND101", "ND202"]


def test_lines_are_those_of_the_editor() -> None:
    [found] = QuietChecks(lambda: 2)(ended("\nlen(train)", 1, 2))
    assert (found.rule, found.line) == ("ND202", 3)


def test_where_a_rank_is_missing_nothing_is_compared() -> None:
    assert rules(QuietChecks(lambda: 3), ended("len(train)", 1, 2)) == []
    assert rules(QuietChecks(lambda: 2), ended("len(train)", 1, 1)) == []


def test_a_comment_silences_what_ranks_say_too() -> None:
    checks = QuietChecks(lambda: 2)
    assert rules(checks, ended("len(train)  # nbddp: ok ND202", 1, 2)) == []
    assert rules(checks, ended("# nbddp: ok ND202\nlen(train)", 1, 2)) == []


def test_code_that_only_ipython_reads_is_left_alone() -> None:
    checks = QuietChecks(lambda: 2)
    assert rules(checks, ended("train )( 1", 1, 2)) == []
    assert rules(checks, ended("x = 1\n" * 10_000 + "len(train)", 1, 2)) == []


def test_a_rule_that_stumbles_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(checking, "check_cell", stumble)
    assert rules(QuietChecks(lambda: 2), ended("len(train)", 1, 2)) == []
    assert "ZeroDivisionError" in caplog.text


def test_what_one_rank_may_do_is_no_mistake_in_its_own_cell() -> None:
    source = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    source += "model = DDP(net)\ntorch.save(model, 'x.pt')"
    checks = QuietChecks(lambda: 2)
    assert rules(checks, ended(source, 1, 1)) == ["ND141"]
    assert rules(checks, ended(source, 1, 1, ranks=(0, 1))) == ["ND141"]
    assert rules(checks, ended(source, 1, ranks=(0,))) == []
    assert rules(QuietChecks(lambda: 1), ended(source, 1)) == []
