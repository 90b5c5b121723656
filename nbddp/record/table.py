"""All numbers of a run as a table: of pandas where that is installed, else a plain one."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

FIRST = ("time", "rank", "attempt", "step")
SHOWN = 10  # rows of a table that is printed

Number = float | int


class Table:
    """Columns of numbers, all of one length; NaN where a row has none.

    >>> table = Table({"step": [0, 1], "loss": [2.0, 1.5]})
    >>> table.columns, len(table), table["loss"]
    (('step', 'loss'), 2, [2.0, 1.5])
    >>> table.rows()[1]
    {'step': 1, 'loss': 1.5}
    """

    def __init__(self, columns: Mapping[str, Sequence[Number]]) -> None:
        self._columns = {name: list(values) for name, values in columns.items()}

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> list[Number]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return max(map(len, self._columns.values()), default=0)

    def rows(self) -> list[dict[str, Number]]:
        """Row by row, as dicts."""
        values = zip(*self._columns.values(), strict=True)
        return [dict(zip(self._columns, row, strict=True)) for row in values]

    def __repr__(self) -> str:
        rows = [self.columns, *(map(_said, row.values()) for row in self.rows()[:SHOWN])]
        lines = [[str(each) for each in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in lines
        ]
        left = len(self) - SHOWN
        return "\n".join([*shown, f"... and {left:,} rows more"] if left > 0 else shown)


def _said(value: Number) -> str:
    return f"{value:.3f}" if isinstance(value, float) and value > 1e9 else f"{value:.6g}"


def as_table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Rows as a ``pandas.DataFrame``, or as a :class:`Table`."""
    known = list(rows)
    names = dict.fromkeys((*FIRST, *(name for row in known for name in row)))
    columns = {name: [row.get(name, math.nan) for row in known] for name in names}
    if importlib.util.find_spec("pandas") is None:
        return Table(columns)
    return importlib.import_module("pandas").DataFrame(columns)
