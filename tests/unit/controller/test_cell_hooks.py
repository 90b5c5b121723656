"""What becomes of what extensions know of cells, and of their errors."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.controller.cell_hooks import CellHooks, hang_causes, run_facts
from nbddp.extension import guard
from nbddp.extension.guard import Guard, Hooks
from nbddp.extension.manifest import Extension
from nbddp.record.cell import CellRequest, CellResult


class Odd(CellHooks):
    """Knows why a cell hangs; its facts are JSON if the cell is an even one."""

    def hang_causes(self, cell: CellRequest) -> Sequence[str]:
        return [f"{cell.source} waits"]

    def run_facts(self, cell: CellResult) -> Mapping[str, Any]:
        return {"odd": {1} if cell.number % 2 else cell.number}


class Broken(CellHooks):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no file")


def test_what_extensions_know_is_used_if_they_have_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = {"broken": "Broken", "none": "CellHooks", "odd": "Odd"}
    manifests = {
        name: Extension(name=name, cells=f"{__name__}:{kind}") for name, kind in cells.items()
    }
    manifests["gone"] = Extension(name="gone", cells="gone_cells:Gone")
    monkeypatch.setattr(guard, "installed", lambda: manifests)
    told: list[str] = []
    hooks = Hooks[CellHooks]("cells", Guard(told.append, lambda: 1))
    assert hang_causes(hooks, CellRequest(source="x")) == ["x waits"]
    found = [run_facts(hooks, Mock(spec=CellResult, number=number)) for number in (1, 2)]
    assert found == [{}, {"odd": 2}]
    assert [text.partition(":")[0] for text in told] == [
        "the extension broken failed in its hook load (OSError",
        "the extension gone failed in its hook load (ModuleNotFoundError",
        "the extension odd failed in its hook run_facts (TypeError",
    ]
