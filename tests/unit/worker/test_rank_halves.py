"""The halves of extensions on a rank: their options, and what becomes of their errors."""

from collections.abc import Sequence
from typing import Any

import pytest

from nbddp.extension.manifest import Extension
from nbddp.extension.rank_half import EndedCell, RankCell, RankHalf
from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import JsonDict
from nbddp.wire.options.option import flag
from nbddp.worker import rank_halves
from nbddp.worker.rank_halves import RankHalves


class OddOptions(Frozen):
    odd: bool = flag("--odd", "run it oddly")


class Odd(RankHalf):
    """Fails in each cell, after it noted its options, and says what it has noted."""

    noted: list[tuple[bool, bool]]

    def before_cell(self, cell: RankCell) -> None:
        self.noted.append((cell.options.odd, cell.is_again))
        raise ValueError("odd")

    def after_cell(self) -> Sequence[str]:
        return [f"{len(self.noted)} cells"]

    def facts(self, cell: EndedCell) -> JsonDict:
        return {"names": [*cell.names] if cell.source else {*cell.names}}

    def armed(self) -> Sequence[str]:
        return ["odd@rank=1"]


class Garbage(RankHalf):
    """Returns no texts."""

    def after_cell(self) -> Any:
        return [b"\xff", None]

    def armed(self) -> Any:
        return 3


class Broken(RankHalf):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no file")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    noted: list[tuple[bool, bool]] = []
    monkeypatch.setattr(Odd, "noted", noted, raising=False)
    return noted


def test_a_half_gets_its_options_and_its_errors_are_told_once(
    monkeypatch: pytest.MonkeyPatch, noted: list[tuple[bool, bool]]
) -> None:
    manifests = {
        "broken": Extension(name="broken"),
        "garbage": Extension(name="garbage"),
        "odd": Extension(name="odd", options=OddOptions),
    }
    monkeypatch.setattr(rank_halves, "installed", lambda: manifests)
    monkeypatch.setattr(rank_halves, "CLASSES", {"broken": Broken, "garbage": Garbage, "odd": Odd})
    told: list[str] = []
    halves = RankHalves(told.append, attempt=1)
    for given in ({}, {"odd": {"odd": True}}, {"odd": {"unknown": 1}}, {}):
        halves.before_cell(given, is_again=bool(given))
    assert noted == [(False, False), (True, True)]  # after three failures it is off
    assert (halves.after_cell(), halves.armed()) == (
        ["b'\\xff'", "None", "2 cells"],
        ["odd@rank=1"],
    )
    assert halves.facts(EndedCell(names={"x": 1}, source="x = 1")) == {"odd": {"names": ["x"]}}
    assert halves.facts(EndedCell(names={"x": 1})) == {}  # a set is not JSON
    assert [text.partition(" (")[0] for text in told] == [
        "the extension broken failed in its hook Broken",
        "the extension odd failed in its hook before_cell",
        "the extension garbage failed in its hook armed",
        "the extension odd failed in its hook facts",
    ]


def test_the_class_of_a_half_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifests = {"gone": Extension(name="gone", rank="no_such_module:Half")}
    monkeypatch.setattr(rank_halves, "installed", lambda: manifests)
    assert rank_halves._load_classes() == {}
    assert "ranks work without the extension gone" in caplog.text
