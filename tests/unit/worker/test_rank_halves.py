"""The halves of extensions on a rank: their options, and what becomes of their errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nbddp.errors import RequestError
from nbddp.extension import guard
from nbddp.extension.manifest import Extension
from nbddp.extension.rank_half import EndedCell, RankAnswer, RankCell, RankHalf
from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import JsonDict, RunCell
from nbddp.wire.options.option import flag
from nbddp.worker import rank_halves
from nbddp.worker.rank_halves import RankHalves


class OddOptions(Frozen):
    odd: bool = flag("--odd", "run it oddly")


class Odd(RankHalf):
    """Fails in each cell, after it noted its options, and says what it has noted."""

    noted: list[tuple[Any, ...]]
    halves: RankHalves

    def before_cell(self, cell: RankCell) -> None:
        assert self.halves.is_in_hook(rank_halves.__file__)
        self.noted.append((cell.options.odd, cell.number, cell.is_again, cell.is_replay))
        raise ValueError("odd")

    def after_cell(self, error: BaseException | None) -> Sequence[str]:
        return [f"{len(self.noted)} cells, {error}"]

    def answer(self, content: Mapping[str, Any]) -> RankAnswer:
        assert not self.halves.is_in_hook(rank_halves.__file__)
        return RankAnswer(content={"noted": content["most"] and {*self.noted}})

    def facts(self, cell: EndedCell) -> JsonDict:
        return {"names": [*cell.names] if cell.source else {*cell.names}}

    def armed(self) -> Sequence[str]:
        return ["odd@rank=1"]


class Garbage(RankHalf):
    """Returns no texts."""

    def after_cell(self, error: BaseException | None) -> Any:  # noqa: ARG002
        return [b"\xff", None]

    def armed(self) -> Any:
        return 3


class Broken(RankHalf):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no file")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Odd, "noted", noted, raising=False)
    return noted


def test_a_half_gets_its_options_and_its_errors_are_told_once(
    monkeypatch: pytest.MonkeyPatch, noted: list[tuple[Any, ...]]
) -> None:
    manifests = {
        "broken": Extension(name="broken", rank=f"{__name__}:Broken"),
        "garbage": Extension(name="garbage", rank=f"{__name__}:Garbage"),
        "gone": Extension(name="gone", rank="no_such_module:Half"),
        "odd": Extension(name="odd", rank=f"{__name__}:Odd", options=OddOptions),
        "options": Extension(name="options", options=OddOptions),
    }
    for module in (guard, rank_halves):
        monkeypatch.setattr(module, "installed", lambda: manifests)
    told: list[str] = []
    halves = RankHalves(told.append, attempt=1, was_interrupted=lambda: False)
    monkeypatch.setattr(Odd, "halves", halves, raising=False)
    for number, options in enumerate(({}, {"odd": {"odd": True}}, {"odd": {"unknown": 1}}, {})):
        is_last = bool(options)
        cell = RunCell(cell=number, source="", options=options, is_again=True, is_replay=is_last)
        halves.before_cell(cell)
    # after three failures it is off
    assert noted == [(False, 0, True, False), (True, 1, True, True)]
    assert halves.after_cell(OSError("full")) == ["b'\\xff'", "None", "2 cells, full"]
    assert halves.armed() == ["odd@rank=1"]
    assert halves.facts(EndedCell(names={"x": 1}, source="x = 1")) == {"odd": {"names": ["x"]}}
    assert halves.facts(EndedCell(names={"x": 1})) == {}  # a set is not JSON
    assert halves.answer("odd", {"most": 0}).content == {"noted": 0}
    for name, content in (("odd", {}), ("odd", {"most": 9}), ("broken", {}), ("none", {})):
        with pytest.raises(RequestError, match=f"the extension {name} failed there"):
            halves.answer(name, content)
    assert [text.partition(" (")[0] for text in told] == [
        "the extension broken failed in its hook load",
        "the extension gone failed in its hook load",
        "the extension odd failed in its hook before_cell",
        "the extension garbage failed in its hook armed",
        "the extension odd failed in its hook facts",
        "the extension odd failed in its hook answer",
    ]
