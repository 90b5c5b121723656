"""Pickle functions together with the source of their cells, so that tracebacks can show it.

The sources follow the value in the same bytes. ``pickle.load`` reads only the value.
"""

from __future__ import annotations

import io
import linecache
import pickle
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

Sources = dict[str, str]  # text of cells, by the file name of their code in a rank

_CELL_NAME = re.compile(r"<ipython-input-(\d+)( \(\d+\))?>")
_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def cell_name(number: int, count: int = 1) -> str:
    """Return the file name of a cell's code, from the number of its prompt.

    Numba's cache and line_profiler recognize cells by the beginning of such names. A cell can run
    several sources under one number; ``count`` tells them apart.

    >>> cell_name(3), cell_name(3, 2)
    ('<ipython-input-3>', '<ipython-input-3 (2)>')
    """
    return f"<ipython-input-{number}{f' ({count})' if count > 1 else ''}>"


def shown_file(filename: str) -> str:
    """Return a file name for display: a cell has the number of its prompt.

    >>> shown_file("<ipython-input-3>"), shown_file("<ipython-input-3 (2)>"), shown_file("train.py")
    ('cell [3]', 'cell [3]', 'train.py')
    """
    return _CELL_NAME.sub(r"cell [\1]", filename)


def _reduce_code_with_file(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """Restore the file name, which cloudpickle 3.1.3 replaces with ``<dynamic-code>``."""
    constructor, arguments = _reduce_code(code)
    return constructor, tuple(
        code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments
    )


class Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """Pickle like cloudpickle, but keep the file names of code, which tracebacks need."""

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Pickle a value.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def dumps_with_sources(value: Any, numbers: Mapping[str, int]) -> bytes:
    """Pickle a value and the sources of its functions' cells, under the file names that ranks use.

    Args:
        value: any value.
        numbers: prompt numbers of cells, by the file names of their code in this process.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _SourceCollector(buffer, numbers)
    pickler.dump(value)
    if pickler.sources:
        buffer.write(pickle.dumps(pickler.sources))
    return buffer.getvalue()


def loads_with_sources(data: bytes) -> tuple[Any, Sources]:
    """Return the pickled value and the sources of its functions' cells."""
    stream = io.BytesIO(data)
    value, rest = pickle.load(stream), stream.read()
    return value, pickle.loads(rest) if rest else {}


class _SourceCollector(Pickler):
    """Pickles functions of cells under the file names that ranks use, and collects the sources."""

    def __init__(self, file: io.BytesIO, numbers: Mapping[str, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: Sources = {}
        self._numbers = numbers

    def reducer_override(self, obj: Any) -> Any:
        """Pickle code objects under the file names that ranks use, and collect the sources."""
        if isinstance(obj, CodeType):
            file = obj.co_filename
            name = cell_name(self._numbers[file]) if file in self._numbers else file
            if name not in self.sources and (text := _cell_text(file)):
                self.sources[name] = text
            return _reduce_code_with_file(obj.replace(co_filename=name))
        return super().reducer_override(obj)


def _cell_text(name: str) -> str:
    """Return the source of a cell; empty for a file, which the other process can read itself."""
    return "" if Path(name).is_file() else "".join(linecache.getlines(name))
