"""When the notebook's half of an extension is made, and when its hooks are called."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.extension import guard
from nbddp.extension.manifest import Command, Extension
from nbddp.group import notebook_half
from nbddp.group.notebook_events import NotebookEvent, PushAsked, ValuePulled
from nbddp.group.notebook_half import (
    CellToRun,
    CellWithResult,
    Notebook,
    NotebookHalf,
    NotebookHalves,
    UnstartedCell,
)
from nbddp.record.cell import CellRequest
from nbddp.ui.report.blocks import Report
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag


class OddOptions(Frozen):
    odd: bool = flag("--odd", "run it oddly")
    even: bool = flag("--even", "run it evenly")


class RankOptions(Frozen):
    quick: bool = flag("--quick", "an option that only ranks read")


class OddArguments(Command, example="odd"):
    """Be odd."""


class Odd(NotebookHalf):
    """Notes what it is asked to do."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self.cells: list[bool] = []
        self.pulled = ""

    def before_cell(self, cell: CellToRun) -> OddOptions:
        self.cells.append(cell.options(OddOptions).odd)
        if cell.options(OddOptions).even:
            return OddOptions(odd=True)
        raise ValueError("odd")

    def after_cell(self, cell: CellWithResult) -> Sequence[Report]:
        if cell.result.number == 3:
            raise ValueError("three")
        return [Report(f"cell {cell.result.number} {cell.options(OddOptions).odd}")]

    def run_cell(self, cell: UnstartedCell) -> bool:
        return cell.fresh

    def on_event(self, event: NotebookEvent) -> None:
        assert isinstance(event, ValuePulled)
        self.pulled = event.expression
        raise ValueError("odd")

    def odd(self, args: OddArguments) -> str:
        return f"{args.example} {self.cells} {self.pulled}".strip()


PLAIN, WITH_OPTION = CellToRun(given={}), CellToRun(given={OddOptions: OddOptions(odd=True)})
OF_RANKS = CellToRun(given={RankOptions: RankOptions(quick=True)})


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> NotebookHalves:
    """The halves of a notebook with one extension, whose module is not imported yet."""
    manifest = Extension(
        name="odd",
        options=OddOptions,
        commands=(OddArguments,),
        events=(ValuePulled,),
        notebook="odd_half:Odd",
    )
    of_ranks = Extension(name="of_ranks", options=RankOptions)
    manifests = {"odd": manifest, "of_ranks": of_ranks}
    for module_with_list in (guard, notebook_half):
        monkeypatch.setattr(module_with_list, "installed", lambda: manifests)
    module: Any = ModuleType("odd_half")
    module.Odd = Odd
    monkeypatch.setitem(sys.modules, "odd_half", module)
    return NotebookHalves(Mock(notifier=lambda: told.append, **{"group.life.attempt": 1}))


def test_a_half_is_made_for_the_first_cell_with_its_option_and_stays(
    halves: NotebookHalves, told: list[str]
) -> None:
    for cell in (PLAIN, OF_RANKS, WITH_OPTION, PLAIN):
        halves.before_cell(cell)
    assert halves.command("odd")(OddArguments()) == "odd [True, False]"
    assert ["ValueError: odd" in text for text in told] == [True]


def test_a_half_may_replace_the_options_of_a_cell(halves: NotebookHalves) -> None:
    even = CellToRun(given={**OF_RANKS.given, OddOptions: OddOptions(even=True)})
    assert halves.before_cell(even) == {**OF_RANKS.given, OddOptions: OddOptions(odd=True)}
    assert halves.before_cell(WITH_OPTION) == WITH_OPTION.given


def test_reports_below_a_cell_are_of_extensions_whose_options_it_had(
    halves: NotebookHalves, told: list[str]
) -> None:
    show: Mock = halves._notebook.show  # type: ignore[assignment]
    for number, cell in enumerate((PLAIN, OF_RANKS, WITH_OPTION, WITH_OPTION)):
        request = CellRequest(source="", given=cell.given)
        reports = halves.after_cell(request, Mock(), Mock(number=number))
        assert [report.title for report in reports] == ["cell 2 True"] * (number == 2)
        assert [call.args[0] for call in show.call_args_list] == [*reports]
        show.reset_mock()
    assert ["in its hook after_cell (ValueError: three)" in text for text in told] == [True]


def test_a_cell_is_taken_over_only_by_an_extension_whose_options_it_has(
    halves: NotebookHalves,
) -> None:
    more = dict.fromkeys(("request", "spec", "values", "display", "run"), Mock())
    for given, fresh, is_done in (
        ({}, True, False),
        (OF_RANKS.given, True, False),
        (WITH_OPTION.given, True, True),
    ):
        assert halves.run_cell(UnstartedCell(given=given, fresh=fresh, **more)) == is_done
    assert not halves.run_cell(UnstartedCell(given=WITH_OPTION.given, fresh=False, **more))


def test_an_event_that_the_extension_hears_of_makes_the_half(
    halves: NotebookHalves, told: list[str]
) -> None:
    halves.tell(PushAsked(names={}))
    assert halves._hooks.made == {}
    halves.tell(ValuePulled(expression="x", rank=None))
    assert halves.command("odd")(OddArguments()) == "odd [] x"
    assert ["in its hook on_event" in text for text in told] == [True]


def test_a_command_makes_the_half(halves: NotebookHalves) -> None:
    assert halves.command("odd")(OddArguments()) == "odd []"


def test_a_half_that_cannot_be_imported_is_told_and_the_cell_goes_on(
    halves: NotebookHalves, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "odd_half")
    for _ in range(2):
        halves.before_cell(WITH_OPTION)
    [text] = told
    assert "the extension odd failed in its hook load (ModuleNotFoundError" in text
