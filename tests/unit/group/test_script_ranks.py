"""What extensions do for the ranks of a script."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.controller.session import Session
from nbddp.extension.manifest import Extension
from nbddp.group import script_ranks
from nbddp.group.script_ranks import ScriptHooks, ScriptRanks
from nbddp.record.cell import CellResult
from nbddp.wire.group_spec import GroupSpec


class Odd(ScriptHooks):
    """Adds a variable, and fails after each script."""

    def environment(self, cells: Session) -> Mapping[str, str]:
        return {"ODD": str(cells.life.attempt)}

    def after_script(self, script: Session, cells: Session) -> None:
        raise ValueError(f"{script is cells}")


def test_extensions_add_variables_and_their_errors_do_not_keep_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = {
        name: Extension(name=name, scripts=f"{name}_scripts:Odd") for name in ("gone", "odd")
    }
    monkeypatch.setattr(script_ranks, "installed", lambda: manifests)
    module: Any = ModuleType("odd_scripts")
    module.Odd = Odd
    monkeypatch.setitem(sys.modules, "odd_scripts", module)
    cells = Mock(**{"life.attempt": 3, "life.state.is_busy": False})
    ranks = ScriptRanks(cells)
    script = ranks.open()
    ranks.start(GroupSpec(env={"OWN": "1"}))
    [spec] = script.start.call_args.args  # type: ignore[attr-defined]
    assert spec.env == {"OWN": "1", "ODD": "3"}
    ranks.end(script, Mock(spec=CellResult, verdict=None))
    script.close.assert_called_once_with()  # type: ignore[attr-defined]
    told = [call.args[0] for call in cells.router.notify.call_args_list]
    assert [text.partition("; ")[0] for text in told] == [
        "the extension gone failed in its hook load (ModuleNotFoundError: No module named "
        "'gone_scripts')",
        "the extension odd failed in its hook after_script (ValueError: False)",
    ]
