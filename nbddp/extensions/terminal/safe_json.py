"""JSON that any program may read and any terminal may show."""

from __future__ import annotations

import math
from typing import Any

from nbddp.ui.ansi import strip


def safe(value: Any) -> Any:
    r"""Return JSON values without control sequences, NaN and infinity.

    Ranks have written some of the texts. Numbers that are not finite become texts, because JSON has
    no such numbers.

    >>> safe({"loss": [1.0, float("nan")], "line": "\x1b[31mred\x1b[m"})
    {'loss': [1.0, 'nan'], 'line': 'red'}
    """
    match value:
        case str():
            return strip(value)
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {str(key): safe(each) for key, each in value.items()}
        case list() | tuple():
            return [safe(each) for each in value]
        case _:
            return value
