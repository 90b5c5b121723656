"""What extensions do for the ranks of a script."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from nbddp.controller.session import Session
from nbddp.extension import guard
from nbddp.extension.manifest import Extension
from nbddp.group.script_ranks import ScriptHooks, ScriptRanks
from nbddp.record.cell import CellResult
from nbddp.wire.group_spec import GroupSpec


class Odd(ScriptHooks):
    """Adds a variable that is no text, and fails after each script."""

    def environment(self, cells: Session) -> Mapping[str, Any]:
        return {"ODD": cells.life.attempt}

    def after_script(self, script: Session, cells: Session) -> None:
        raise ValueError(f"{script is cells}")


class Garbage(ScriptHooks):
    """Adds no variables."""

    def environment(self, *_: Session) -> Any:
        return 3


class Broken(ScriptHooks):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no file")


def test_extensions_add_variables_and_their_errors_do_not_keep_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = {
        "gone": Extension(name="gone", scripts="gone_scripts:Gone"),
        "odd": Extension(name="odd", scripts=f"{__name__}:Odd"),
        "garbage": Extension(name="garbage", scripts=f"{__name__}:Garbage"),
        "broken": Extension(name="broken", scripts=f"{__name__}:Broken"),
    }
    monkeypatch.setattr(guard, "installed", lambda: manifests)
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
        "the extension garbage failed in its hook environment (AttributeError: 'int' object has no "
        "attribute 'items')",
        "the extension broken failed in its hook load (OSError: no file)",
        "the extension odd failed in its hook after_script (ValueError: False)",
    ]
