"""Predict from a cell's code whether it may ask the user for input.

In such a cell, collectives wait as long as the user types. The code of imported modules is not
checked.
"""

from __future__ import annotations

import ast
import dis
import gc
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from torch import nn

_MAGIC = re.compile(r"^\s*%%?(debug|pdb)\b", re.MULTILINE)
_WORD = re.compile(r"\b[^\W\d]\w*")
_BUILTINS = {"breakpoint", "input"}  # builtins, unless the user defines the same name
_ATTRIBUTES = {"getpass", "post_mortem", "pm", "set_trace"}  # in a module, or imported from one
_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)


def may_request_input(source: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether a cell, or a function of earlier cells that it calls, may ask for input.

    >>> may_request_input("x = input('how many? ')", {})
    True
    >>> may_request_input("input = 3; print(input)", {})
    False
    """
    if _MAGIC.search(source):
        return True
    words = set(_WORD.findall(source))
    code = _compile_cell(source) if words & (_BUILTINS | _ATTRIBUTES) else None
    user_names = set(namespace)
    if code:
        steps = dis.get_instructions(code)
        user_names |= {each.argval for each in steps if each.opname == "STORE_NAME"}
    pending: list[Any] = [code, *(namespace[word] for word in words if word in namespace)]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            may_name = type(value) is CodeType and {*value.co_names} & (_BUILTINS | _ATTRIBUTES)
            if may_name and any(
                _requests_input(op, user_names) for op in dis.get_instructions(value)
            ):
                return True
            with suppress(Exception):  # a class or proxy of the user may raise anything
                pending += _objects_called_by(value, namespace)
    return False


def _compile_cell(source: str) -> Any:
    with suppress(*_COMPILE_ERRORS):  # running the cell reports the error
        lines = TransformerManager().transform_cell(source)
        return compile(lines, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return None


def _objects_called_by(value: Any, namespace: Mapping[str, Any]) -> list[Any]:
    """Return the code and objects of cells that running ``value`` may call.

    Those are the objects that it names or wraps, and its methods.
    """
    kind = type(value)  # not isinstance: it runs the code of proxies, which may fail
    if kind is CodeType:
        inner = [each for each in value.co_consts if isinstance(each, CodeType)]
        return inner + [namespace[name] for name in value.co_names if name in namespace]
    if issubclass(kind, FunctionType):
        is_of_cell = value.__module__ == "__main__"
        return [value.__code__, *gc.get_referents(*(value.__closure__ or ()))] if is_of_cell else []
    if issubclass(kind, partial | MethodType | staticmethod | classmethod | property):
        names = ("func", "__func__", "__self__", "fget")
        return [getattr(value, name, None) for name in names]
    owner = value if issubclass(kind, type) else kind
    methods = vars(owner).values() if owner.__module__ == "__main__" else ()
    # nn.Module.children() fails if __init__ did not finish
    parts = (vars(value).get("_modules") or {}) if issubclass(kind, nn.Module) else {}
    return [*methods, *parts.values()]


def _requests_input(step: dis.Instruction, user_names: Set[str]) -> bool:
    """Return whether an instruction names a function that asks for input."""
    name = step.argval
    if not isinstance(name, str):
        return False
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return name in _ATTRIBUTES or (name in _BUILTINS and name not in user_names)
    is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    # torch.distributed has a function breakpoint
    return is_attribute and (name in _ATTRIBUTES or name == "breakpoint")
