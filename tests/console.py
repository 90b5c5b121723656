"""``%ddp`` typed into a console that has no ranks: what it says, and why it refuses a line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.error import UsageError

from nbddp.magics.line_magic import LineMagics
from nbddp.magics.presenter import Presenter


def ddp(line: str, **desk: Any) -> str:
    """Type ``%ddp`` and the line, and return what it says; ``desk`` is what the notebook has."""
    said: list[str] = []
    views = Presenter(Mock(spec=[]), Mock())
    views.say = said.append  # type: ignore[method-assign]
    known = {
        "views": views,
        "current_run": None,
        "last_run": None,
        "shell": None,
        "group": Mock(),
        **desk,
    }
    LineMagics(SimpleNamespace(**known)).ddp(line)  # type: ignore[arg-type]
    return "\n".join(said)


def refused(line: str, **desk: Any) -> str:
    """Type a line that is refused, and return the reason."""
    with pytest.raises(UsageError) as caught:
        ddp(line, **desk)
    return str(caught.value)
