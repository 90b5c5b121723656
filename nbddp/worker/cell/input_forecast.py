"""Tell from a cell's code, before it runs, whether it may ask the user something.

Collectives then wait for as long as somebody types. Code in modules that a cell imports is not
looked at.
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
_BUILTINS = {"breakpoint", "input"}  # Python's own, unless the user has something of that name
_ATTRIBUTES = {"getpass", "post_mortem", "pm", "set_trace"}  # of a module, or imported from it
_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)


def may_request_input(source: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a cell, or what it calls of earlier cells, may ask the user something.

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
        user_names |= {
            each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"
        }
    pending: list[Any] = [code, *(namespace[word] for word in words if word in namespace)]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            may_name = type(value) is CodeType and {*value.co_names} & (_BUILTINS | _ATTRIBUTES)
            if may_name and any(
                _requests_input(each, user_names) for each in dis.get_instructions(value)
            ):
                return True
            pending += _objects_called_by(value, namespace)
    return False


def _compile_cell(source: str) -> Any:
    with suppress(*_COMPILE_ERRORS):  # the error is reported when the cell runs
        lines = TransformerManager().transform_cell(source)
        return compile(lines, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return None


def _objects_called_by(value: Any, namespace: Mapping[str, Any]) -> list[Any]:
    """What may run when this runs: what it names, wraps, or has for methods, if cells made it."""
    kind = type(value)  # a proxy's own code may say what it is, and fail
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
    # a module's own children() fails where its __init__ did not end
    parts = (vars(value).get("_modules") or {}) if issubclass(kind, nn.Module) else {}
    return [*methods, *parts.values()]


def _requests_input(step: dis.Instruction, user_names: Set[str]) -> bool:
    """Whether an instruction names what asks; ``taken``: names of the user's."""
    name = step.argval
    if not isinstance(name, str):
        return False
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return name in _ATTRIBUTES or (name in _BUILTINS and name not in user_names)
    is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return is_attribute and (
        name in _ATTRIBUTES or name == "breakpoint"
    )  # torch.distributed has one
