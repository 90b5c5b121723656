"""The error text that the user reads when nbddp refuses a call."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(kind: type[Exception], act: Callable[..., object], /, *args: Any, **named: Any) -> str:
    """Return the text of the error of this kind that a call raises."""
    with pytest.raises(kind) as caught:
        act(*args, **named)
    return str(caught.value)
