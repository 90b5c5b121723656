"""Short texts of plain values, to compare them between ranks and to restore them.

The text of a plain value is an expression for it. The text of any other value is a fingerprint:
different fingerprints mean different values, but different values may have equal fingerprints.
"""

from __future__ import annotations

import ast
import cmath
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

MAX_LENGTH = 200  # characters of a plain value's text
MAX_ITEMS, DEPTH = 20, 2  # items of a plain list, tuple or set, and levels of nesting
# Prefixes of texts that are not expressions
DEVICE, NAMED_TUPLE, FINGERPRINT = "device ", "namedtuple ", "other "
ATOMS = frozenset({bool, int, str, float, type(None), complex, bytes})
_ITEMS: dict[type, str] = {list: "[{}]", tuple: "({},)", set: "{{{}}}"}
# Arguments that create an equal value
_ARGUMENTS: dict[type, Callable[[Any], tuple[object, ...]]] = {
    frozenset: lambda value: (set(value),),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    type(Path()): lambda value: (str(value),),
    type(PurePath()): lambda value: (str(value),),
}
_KINDS = {kind.__name__: kind for kind in _ARGUMENTS}
PLAIN = ATOMS.union(_ITEMS, _ARGUMENTS)  # types of plain values, in addition to NumPy's numbers


def plain_text(value: object, depth: int = DEPTH) -> str:
    """Return an expression for a plain value; empty for all other values.

    Plain values are bool, int, str, float, None, complex, bytes, NumPy's numbers, paths, ranges,
    slices, and lists, tuples, sets and frozensets of a few plain values. No code of the user runs.

    >>> plain_text(True), plain_text("a"), plain_text([1, ("b", None)]), plain_text({2, 10})
    ('True', "'a'", "[1, ('b', None,)]", '{10, 2}')
    >>> plain_text(range(3)), plain_text(frozenset({1})), plain_text(set())
    ('range(0, 3, 1)', 'frozenset({1})', 'set()')
    >>> plain_text("a" * 1000), plain_text(1 << 10_000), plain_text(float("nan")), plain_text({})
    ('', '', '', '')
    """
    kind = type(value)
    if kind in ATOMS:
        return repr(value) if _is_short(kind, value) else ""
    if kind in _ITEMS:
        return _items_text(kind, value, depth - 1) if depth else ""
    name = kind.__name__
    arguments: tuple[object, ...] = ()
    if kind in _ARGUMENTS and not (kind is frozenset and len(value) > MAX_ITEMS):  # type: ignore[arg-type]
        arguments = _ARGUMENTS[kind](value)
    elif kind.__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic):
        name, item = f"np.{name}", value.item()
        arguments = (item,) if type(item) in ATOMS else ()
    parts = [plain_text(each, depth) for each in arguments]
    return f"{name}({', '.join(parts)})" if parts and all(parts) else ""


def _is_short(kind: type, value: Any) -> bool:
    """Return whether the ``repr`` of a value is short and a valid expression."""
    if kind is str or kind is bytes:
        return len(value) <= MAX_LENGTH
    if kind is int:
        return value.bit_length() <= MAX_LENGTH  # type: ignore[no-any-return]
    return value is None or cmath.isfinite(value)


def _items_text(kind: type, value: Any, depth: int) -> str:
    if not 0 < len(value) <= MAX_ITEMS:
        return "" if value else repr(value)
    space, parts = MAX_LENGTH, []
    for item in [*value]:  # another thread may change the value
        part = plain_text(item, depth)
        space -= len(part) + 2
        if not part or space < 0:
            return ""
        parts.append(part)
    if kind is set:
        parts.sort()  # equal sets may have different orders
    return _ITEMS[kind].format(", ".join(parts))


def is_fingerprint(text: str) -> bool:
    """Return whether a text is a fingerprint, from which the value cannot be restored."""
    return text.startswith(FINGERPRINT)


def read_plain(text: str) -> Any:
    """Return the value of a plain value's text.

    >>> read_plain(plain_text("cuda:1")), read_plain(plain_text((slice(1, None), {2})))
    ('cuda:1', (slice(1, None, None), {2}))

    Raises:
        ValueError: it is not the text of a plain value, or its type is unknown in this process.
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(text) from error


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments) if name in _KINDS:
            return _KINDS[name](*map(_evaluate, arguments))
        case ast.Call(func=ast.Attribute(attr=name), args=[argument]) if "numpy" in sys.modules:
            return getattr(sys.modules["numpy"], name)(_evaluate(argument))
        case ast.List(elts=items):
            return [*map(_evaluate, items)]
        case ast.Tuple(elts=items):
            return (*map(_evaluate, items),)
        case ast.Set(elts=items):
            return {*map(_evaluate, items)}
    return ast.literal_eval(node)
