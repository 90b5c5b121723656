"""Findings shown below a cell without a request: few, once, and after the output of the cell."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
from typed import Typed

from nbddp.extensions.checks.facts import LoaderFacts, RankFacts
from nbddp.extensions.checks.notebook import Checks, find_new
from nbddp.group.notebook_events import CellShown
from nbddp.group.notebook_half import NotebookHalf
from nbddp.lifecycle.group_state import Life, RankLife
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.ui.report.blocks import Block, note
from nbddp.ui.report.render import text_lines
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
    return Mock(life=Life(ranks=ranks))


def rules(checks: Checks, of: Any, handle: CellHandle) -> list[str]:
    """Return the rules of the findings that are shown below a cell of a session."""
    blocks: list[Block] = []
    checks.on_event(CellShown(session=of, handle=handle, add=blocks.extend))
    return re.findall(r"^  (ND\d+)", "\n".join(text_lines(blocks)), re.MULTILINE)


def test_findings_about_rank_state_are_shown_once_a_session_and_about_code_each_time() -> None:
    checks, notebook, script = Checks(Mock()), session(), session()
    source = "if rank == 0:\n    dist.barrier()\nlen(train)"
    assert rules(checks, notebook, ended(source, 1, 2)) == ["ND101", "ND202"]
    assert rules(checks, script, ended(source, 1, 2)) == ["ND101", "ND202"]
    assert rules(checks, notebook, ended(source, 1, 2)) == ["ND101"]
    assert rules(checks, notebook, ended(source, 1, 3)) == ["ND101", "ND202"]
    assert rules(checks, notebook, ended(source, 1, 2, attempt=2)) == ["ND101", "ND202"]


def test_findings_have_the_line_numbers_of_the_editor() -> None:
    [found] = find_new(ended("\nlen(train)", 1, 2), 2, set())
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
    assert rules(Checks(Mock()), session(world_size), handle) == found


class Garbage(NotebookHalf):
    """Adds a remark below a cell, and then what is no block."""

    def on_event(self, event: Any) -> None:
        event.add([note("a remark")])
        event.add(["garbage"])


def test_what_is_no_block_is_an_error_of_its_extension_and_not_of_the_view(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = typed.notebook
    notebook.extensions._hooks.made["checks"] = Garbage(notebook)
    assert notebook.presenter.remarks(notebook.group.session, Mock()) == [note("a remark")]
    assert "the extension checks failed in its hook on_event" in capsys.readouterr().out
