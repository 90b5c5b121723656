"""Pickle values with the cells that their functions come from, for tracebacks.

The text of the cells follows the value in the same bytes: ``pickle.load`` reads the value alone.
"""

from __future__ import annotations

import io
import linecache
import pickle
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle

Sources = dict[str, tuple[int, str]]  # by the name of a cell's code: the prompt's number, the text

_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code_with_file(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """Put the file name back where cloudpickle 3.1.3 writes ``<dynamic-code>`` for it."""
    make, arguments = _reduce_code(code)
    return make, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


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
    written = io.BytesIO()
    Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def dumps_with_sources(value: Any, numbers: Mapping[str, int]) -> bytes:
    """Pickle a value, and the cells of the functions in it.

    Args:
        value: any.
        numbers: of prompts, by the names that cells have in code objects; 0 for those unknown.

    Raises:
        TypeError, AttributeError or pickle.PicklingError: when it cannot be pickled.
    """
    written = io.BytesIO()
    pickler = _Noting(written)
    pickler.dump(value)
    texts = {name: _text_of_cell(name) for name in sorted(pickler.names)}
    sources: Sources = {name: (numbers.get(name, 0), text) for name, text in texts.items() if text}
    if sources:
        written.write(pickle.dumps(sources))
    return written.getvalue()


def loads_with_sources(data: bytes) -> tuple[Any, Sources]:
    """The value that was pickled, and the cells of its functions."""
    stream = io.BytesIO(data)
    value, rest = pickle.load(stream), stream.read()
    return value, pickle.loads(rest) if rest else {}


class _Noting(Pickler):
    """Notes where the functions are from."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.names: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        """As for cloudpickle."""
        if isinstance(thing, FunctionType):
            self.names.add(thing.__code__.co_filename)
        return super().reducer_override(thing)


def _text_of_cell(name: str) -> str:
    """Of a cell, which is in no file: what is in a file is found there."""
    return "" if Path(name).is_file() else "".join(linecache.getlines(name))
