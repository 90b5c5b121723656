"""Compile cells under the line numbers of the editor and one name: ``<ipython-input-3>``."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

from IPython.core.compilerop import CachingCompiler

from nbddp.wire.function_sources import Sources, cell_name, shown_file


class CellCompiler(CachingCompiler):
    """Compiles a cell so that its line numbers are those of the notebook's editor.

    The first line of a ``%%ddp`` cell stays in the kernel: a rank's code begins on line 2. The code
    below a cell magic such as ``%%capture`` begins one line further down.

    Attributes:
        files: the text of each cell, by its file name in code objects.
    """

    def __init__(self) -> None:
        self.sources: Sources = {}
        self._number = 0
        self._cell_text = ""  # as the editor shows it
        self._cell_file = ""
        self._lines_before = 0  # lines above the code that is compiled next
        self._timed_source = ""
        super().__init__()

    def begin_cell(self, source: str, first_line: int, number: int) -> None:
        """Compile this cell, or parts of it, from now on."""
        self._number = number
        self._cell_text = "\n" * (first_line - 1) + source.rstrip("\n")
        self._cell_file = self._file_for(self._cell_text)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Return the file name of code that is compiled next, and keep its text for tracebacks.

        Code that is no part of the cell, such as a string that the cell runs, has its own name.
        """
        del number  # some versions of IPython pass the next prompt number for a cell within a cell
        above = self._lines_above(raw_code or transformed_code)
        self._lines_before = above or 0
        return self._file_for(transformed_code) if above is None else self._cell_file

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse code below as many empty lines as the cell has lines above it."""
        if filename == "<unknown>":  # of %time and %timeit
            self._timed_source = source
            self._lines_before = self._lines_above(source) or 0
        return super().ast_parse("\n" * self._lines_before + source, filename, symbol)

    def __call__(self, source: Any, filename: str, symbol: str, *more: Any, **options: Any) -> Any:
        """Compile code, and that of ``%%time``, ``<timed exec>``, as a part of the cell."""
        is_part = (
            filename.startswith("<timed ") and self._lines_above(self._timed_source) is not None
        )
        name = self.cache(self._timed_source) if is_part else filename
        return super().__call__(source, name, symbol, *more, **options)

    def add_sources(self, sources: Sources) -> None:
        """Keep the text of cells, such as those of functions that another process has sent."""
        for name, text in sources.items():
            if name not in self.sources:
                self.sources[name] = text
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)

    def name_of_cell(self, filename: str) -> str:
        """Return ``cell [3]`` for code of another cell; empty for the running one and for files."""
        name = shown_file(filename) if filename in self.sources else ""
        return "" if name in (shown_file(self._cell_file), "cell [0]") else name

    def _file_for(self, text: str) -> str:
        """Name a text by the prompt number; ``<ipython-input-3 (2)>`` is the second text of 3."""
        names = (cell_name(self._number, count) for count in itertools.count(1))
        name = next(each for each in names if self.sources.get(each, text) == text)
        self.add_sources({name: text})
        return name

    def _lines_above(self, source: str) -> int | None:
        """Count the cell's lines above code of the cell; None if the cell does not end with it."""
        part = source.strip("\n")  # IPython strips leading blank lines
        above = self._cell_text.removesuffix(part)
        is_part = part and len(above) < len(self._cell_text) and (not above or above.endswith("\n"))
        return above.count("\n") if is_part else None
