"""Values, and behind them the text of the cells that their functions come from: for tracebacks.

What reads the value alone does not see what stands behind it.
"""

from __future__ import annotations

import io
import linecache
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

Sources = dict[str, tuple[int, str]]  # by the name of a cell's code: the prompt's number, the text


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


class _Noting(cloudpickle.Pickler):  # type: ignore[misc]
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
