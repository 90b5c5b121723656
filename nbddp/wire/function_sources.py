"""Pickle values with the cells that their functions come from, for tracebacks.

The text of the cells follows the value in the same bytes: ``pickle.load`` reads the value alone.
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

Sources = dict[str, str]  # the text of cells, by the file names that their code has in a rank

_CELL_NAME = re.compile(r"<ipython-input-(\d+)( \(\d+\))?>")
_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def cell_name(number: int, count: int = 1) -> str:
    """Return the file name of a cell's code, by the number of its prompt.

    Numba's cache and line_profiler know a cell by how such a name begins. A cell can run more than
    one source under one number: ``count`` tells them apart.

    >>> cell_name(3), cell_name(3, 2)
    ('<ipython-input-3>', '<ipython-input-3 (2)>')
    """
    return f"<ipython-input-{number}{f' ({count})' if count > 1 else ''}>"


def shown_file(filename: str) -> str:
    """Return a file name as the user reads it: a cell's is its prompt.

    >>> shown_file("<ipython-input-3>"), shown_file("<ipython-input-3 (2)>"), shown_file("train.py")
    ('cell [3]', 'cell [3]', 'train.py')
    """
    return _CELL_NAME.sub(r"cell [\1]", filename)


def _reduce_code_with_file(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """Put the file name back where cloudpickle 3.1.3 writes ``<dynamic-code>`` for it."""
    constructor, arguments = _reduce_code(code)
    return constructor, tuple(
        code.co_filename if each == "<dynamic-code>" else each for each in arguments
    )


class Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """Pickle as cloudpickle does, and keep the file name of code: a traceback shows its line."""

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Pickle a value.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: when it cannot be pickled.
    """
    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def dumps_with_sources(value: Any, numbers: Mapping[str, int]) -> bytes:
    """Pickle a value, and the cells of the functions in it, under the names that ranks use.

    Args:
        value: any.
        numbers: the prompt numbers of cells, by the file names of their code here.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: when it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _SourceCollector(buffer, numbers)
    pickler.dump(value)
    if pickler.sources:
        buffer.write(pickle.dumps(pickler.sources))
    return buffer.getvalue()


def loads_with_sources(data: bytes) -> tuple[Any, Sources]:
    """The value that was pickled, and the cells of its functions."""
    stream = io.BytesIO(data)
    value, rest = pickle.load(stream), stream.read()
    return value, pickle.loads(rest) if rest else {}


class _SourceCollector(Pickler):
    """Pickles functions of cells under the names that ranks use, and keeps the cells' text."""

    def __init__(self, file: io.BytesIO, numbers: Mapping[str, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: Sources = {}
        self._numbers = numbers

    def reducer_override(self, obj: Any) -> Any:
        """As for cloudpickle."""
        if isinstance(obj, CodeType):
            file = obj.co_filename
            name = cell_name(self._numbers[file]) if file in self._numbers else file
            if name not in self.sources and (text := _cell_text(file)):
                self.sources[name] = text
            return _reduce_code_with_file(obj.replace(co_filename=name))
        return super().reducer_override(obj)


def _cell_text(name: str) -> str:
    """Of a cell, which is in no file: what is in a file is found there."""
    return "" if Path(name).is_file() else "".join(linecache.getlines(name))
