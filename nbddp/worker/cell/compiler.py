"""Compile cells with the line numbers of the notebook, as files such as ``<ipython-input-3>``."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

from IPython.core.compilerop import CachingCompiler

from nbddp.wire.function_sources import Sources, cell_name, shown_file


class CellCompiler(CachingCompiler):
    """Compile cells so that line numbers match the notebook's editor.

    The line with ``%%ddp`` stays in the kernel, so the code of a rank begins on line 2. Below
    another cell magic, such as ``%%capture``, the code begins on line 3.

    Attributes:
        sources: the text of each cell, by its file name in code objects.
    """

    def __init__(self) -> None:
        self.sources: Sources = {}
        self._number = 0
        self._cell_text = ""  # as the notebook shows it
        self._cell_file = ""
        self._lines_before = 0  # lines of the cell above the next code to compile
        self._timed_file: str | None = None
        super().__init__()

    def begin_cell(self, source: str, first_line: int, number: int) -> None:
        """Set the cell to compile, as a whole or in parts."""
        self._number = number
        self._cell_text = "\n" * (first_line - 1) + source.rstrip("\n")
        self._cell_file = self._file_for(self._cell_text)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Return the file name of the next code to compile, and keep its text for tracebacks.

        Code that is not part of the cell, such as a string passed to ``exec``, has its own name.
        """
        del number  # for a cell within a cell, some IPython versions pass the next prompt number
        above = self._lines_above(raw_code or transformed_code)
        self._lines_before = above or 0
        return self._file_for(transformed_code) if above is None else self._cell_file

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse code below as many empty lines as the cell has lines above the code."""
        if filename == "<unknown>":  # from %time and %timeit
            above = self._lines_above(source)
            self._lines_before = above or 0
            self._timed_file = None if above is None else self._cell_file
        return super().ast_parse("\n" * self._lines_before + source, filename, symbol)

    def __call__(self, source: Any, filename: str, symbol: str, *more: Any, **options: Any) -> Any:
        """Compile code. Code of ``%%time`` (``<timed exec>``) counts as a part of the cell."""
        timed_file = self._timed_file if filename.startswith("<timed ") else None
        return super().__call__(source, timed_file or filename, symbol, *more, **options)

    def add_sources(self, sources: Sources) -> None:
        """Keep the text of cells for tracebacks, such as cells that another process has sent."""
        for name, text in sources.items():
            if name not in self.sources:
                self.sources[name] = text
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)

    def name_of_cell(self, filename: str) -> str:
        """Return ``cell [3]`` for the file of another cell.

        Return "" for the running cell and for files on disk.
        """
        name = shown_file(filename) if filename in self.sources else ""
        return "" if name in (shown_file(self._cell_file), "cell [0]") else name

    def _file_for(self, text: str) -> str:
        """Return the file name of a text: ``<ipython-input-3 (2)>`` for the second of prompt 3."""
        names = (cell_name(self._number, count) for count in itertools.count(1))
        name = next(each for each in names if self.sources.get(each, text) == text)
        self.add_sources({name: text})
        return name

    def _lines_above(self, source: str) -> int | None:
        """Count the cell's lines above some code. Return None if the cell does not end with it."""
        part = source.strip("\n")  # IPython strips leading blank lines
        above = self._cell_text.removesuffix(part)
        is_part = part and len(above) < len(self._cell_text) and (not above or above.endswith("\n"))
        return above.count("\n") if is_part else None
