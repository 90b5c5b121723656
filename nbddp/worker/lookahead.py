"""Whether a cell may ask the user something, told from its code before it runs.

Collectives then wait for as long as somebody types. What stands in a module that a cell imports is
not looked at.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from torch import nn

_MAGIC = re.compile(r"^\s*%%?(debug|pdb)\b", re.MULTILINE)
_WORD = re.compile(r"\b[^\W\d]\w*")
_CALLED = {"breakpoint", "input"}  # Python's own, unless the user has something of that name
_ANYWHERE = {"getpass", "post_mortem", "pm", "set_trace"}  # of a module, or imported from it
_NO_CODE = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}


def may_ask(source: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a cell, or what it calls of earlier cells, may ask the user something.

    >>> may_ask("x = input('how many? ')", {})
    True
    >>> may_ask("input = 3; print(input)", {})
    False
    """
    words = set(_WORD.findall(source))
    if _MAGIC.search(source) or (words & (_CALLED | _ANYWHERE) and _asks_itself(source, namespace)):
        return True
    known = (namespace[word] for word in words if word in namespace)
    return _any_asks(known, namespace, seen=set())


def _asks_itself(source: str, namespace: Mapping[str, Any]) -> bool:
    try:
        lines = TransformerManager().transform_cell(source)
        code = compile(
            lines, "<lookahead>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
    except _NO_CODE:  # it will be told when the cell runs
        return False
    stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    return _asks(code, set(namespace) | stored)


def _any_asks(values: Iterator[Any], namespace: Mapping[str, Any], *, seen: set[int]) -> bool:
    """Whether one of these asks, or what it calls."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_of_cell(value) and _asks(value.__code__, namespace):
            return True
        if _any_asks(_called_by(value, namespace), namespace, seen=seen):
            return True
    return False


def _is_of_cell(value: Any) -> bool:
    # its type is asked for, as a proxy's own code may say what it is, and fail
    return issubclass(type(value), FunctionType) and value.__module__ == "__main__"


def _called_by(value: Any, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """What runs when a value is called: what it names, wraps, or has for methods."""
    kind = type(value)
    if _is_of_cell(value):
        names = {name for each in _parts(value.__code__) for name in each.co_names}
        yield from (namespace[name] for name in names if name in namespace)
        yield from _wrapped(value)
    elif issubclass(kind, partial):
        yield value.func
    elif issubclass(kind, MethodType):
        yield from (value.__func__, value.__self__)
    elif issubclass(kind, staticmethod | classmethod):
        yield value.__func__
    elif issubclass(kind, property):
        yield value.fget
    elif not issubclass(kind, FunctionType):
        yield from _methods(value)


def _wrapped(function: FunctionType) -> Iterator[Any]:
    """What a function has from the one that made it, such as what a decorator wraps."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents


def _methods(value: Any) -> Iterator[Any]:
    """The functions of cells that a class has, or that of an object, or a module's parts."""
    kind = type(value)
    kinds = {value} if issubclass(kind, type) else {kind}
    if issubclass(kind, nn.Module):
        kinds = {type(each) for each in _inside(value, {})}
    for each in kinds:
        if each.__module__ == "__main__":
            yield from vars(each).values()


def _inside(module: nn.Module, seen: dict[int, nn.Module]) -> Iterable[nn.Module]:
    """A module and those in it; its own ``modules()`` fails where its ``__init__`` did not end."""
    if id(module) not in seen:
        seen[id(module)] = module
        for part in (vars(module).get("_modules") or {}).values():
            if part is not None:
                _inside(part, seen)
    return seen.values()


def _asks(code: CodeType, taken: Mapping[str, Any] | set[str]) -> bool:
    """Whether a code object, or one within it, calls what asks; ``taken``: names of the user's."""
    return any(
        _is_asking(step, taken)
        for part in _parts(code)
        if {*part.co_names} & (_CALLED | _ANYWHERE)
        for step in dis.get_instructions(part)
    )


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _parts(each)


def _is_asking(step: dis.Instruction, taken: Mapping[str, Any] | set[str]) -> bool:
    name = step.argval
    if not isinstance(name, str):
        return False
    if step.opname in _LOADS:
        return name in _ANYWHERE or (name in _CALLED and name not in taken)
    is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return is_attribute and (name in _ANYWHERE or name == "breakpoint")  # torch.distributed has one
