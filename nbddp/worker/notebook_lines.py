"""Compiles cells under the line numbers that the editor shows and the number of their prompt."""

from __future__ import annotations

import linecache
import re
from typing import Any

from IPython.core.compilerop import CachingCompiler

from nbddp.wire.sources import Sources

_MAGIC = re.compile(r"get_ipython\(\)\.run_line_magic\('(\w+)', '(.*)'\)")
_SYSTEM = re.compile(r"get_ipython\(\)\.system\('(.*)'\)")


class NotebookLines(CachingCompiler):
    """Compiles a cell so that its line numbers are those of the notebook's editor.

    A ``%%ddp`` cell's first line stays in the kernel, so what a rank compiles begins on line 2;
    what a cell magic such as ``%%capture`` gets to run begins one line below it.
    """

    _cell = ""
    _first_line = 1
    _number = 0
    _timed = ""

    def __init__(self) -> None:
        self.files: set[str] = set()  # the names that cells have in code objects
        super().__init__()

    def begin_cell(self, source: str, first_line: int, number: int) -> None:
        """From now on this cell is compiled, or parts of it."""
        self._cell, self._first_line = source.rstrip("\n"), first_line
        self._number = number

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse as if the lines that stayed behind were there."""
        self._timed = source if filename == "<unknown>" else ""
        return super().ast_parse(self._pad(source), filename, symbol)

    def __call__(self, source: Any, filename: str, symbol: str, *more: Any, **options: Any) -> Any:
        """Compile; what ``%%time`` calls ``<timed exec>`` is a part of the cell, and has lines."""
        is_part = filename.startswith("<timed ") and self._lines_above(self._timed) is not None
        name = self.cache(self._timed, self._number) if is_part else filename
        return super().__call__(source, name, symbol, *more, **options)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Keep the source for tracebacks under the same line numbers, and the prompt's number.

        For a cell within the cell some versions of IPython have the next number here.
        """
        del number
        name = super().cache(self._pad(transformed_code), self._number, raw_code)
        self.files.add(name)
        return name

    def sources(self) -> Sources:
        """The cells that were compiled here, for the tracebacks of another rank."""
        numbers = getattr(self, "_filename_map", {})  # not in IPython 7
        return {
            name: (numbers.get(name, 0), "".join(linecache.getlines(name))) for name in self.files
        }

    def take_sources(self, sources: Sources) -> None:
        """Know cells that were compiled elsewhere, and whose functions have come here."""
        for name, (number, source) in sources.items():
            if name not in self.files:
                self.files.add(name)
                if number:
                    getattr(self, "_filename_map", {})[name] = number
                linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)

    def name_of_cell(self, name: str) -> str:
        """Which cell this code is of, as the notebook numbers it; empty for the one that runs."""
        number = getattr(self, "_filename_map", {}).get(name, 0) if name in self.files else 0
        return f"cell [{number}]" if number not in (0, self._number) else ""

    def _pad(self, source: str) -> str:
        above = self._lines_above(source)
        # of the whole, IPython has stripped the blank lines at the beginning
        skipped = _leading_blank_lines(self._cell) if above is None else above
        return "\n" * (self._first_line - 1 + skipped) + source

    def _lines_above(self, source: str) -> int | None:
        """How much of the cell stands above this, if it is the last part of it as it was typed."""
        part = source.rstrip("\n")
        above = self._cell.removesuffix(part)
        is_part = part and len(above) < len(self._cell) and (not above or above.endswith("\n"))
        return above.count("\n") if is_part else None


def _leading_blank_lines(source: str) -> int:
    """IPython strips these before it compiles."""
    lines = source.splitlines()
    return next((count for count, line in enumerate(lines) if line.strip()), 0)


def as_typed(code: str) -> str:
    """A line as it stands in the notebook, from what IPython makes of a magic or a command.

    >>> as_typed("x = get_ipython().run_line_magic('timeit', '-o f()')")
    'x = %timeit -o f()'
    >>> as_typed("get_ipython().system('ls')")
    '!ls'
    """
    code = _MAGIC.sub(lambda found: f"%{found[1]} {found[2]}".rstrip(), code)
    return _SYSTEM.sub(lambda found: f"!{found[1]}", code)
