"""Say how to get a name from the notebook to the ranks, for a cell that does not find it."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_ABSENT = object()


def describe_name(names: Mapping[str, Any], name: str) -> str:
    """Return what the notebook knows about a name, and what to do; "" if it does not have it.

    Args:
        names: the variables of the notebook.
        name: the name that is not defined on a rank.

    >>> describe_name({"Mapping": Mapping}, "Mapping")
    '`Mapping` is imported in the notebook, not on the ranks: import it in a `%%ddp` cell.'
    """
    value = names.get(name, _ABSENT)
    if value is _ABSENT:
        return ""
    kind = type(value)  # isinstance could run code of the user
    is_code = issubclass(kind, type | FunctionType | BuiltinFunctionType)
    what, instead = "defined", f"use `%%ddp --push {name}`"
    if issubclass(kind, ModuleType) or (is_code and value.__module__ != "__main__"):
        what, instead = "imported", "import it in a `%%ddp` cell"
    elif is_code:
        instead = "define it in a `%%ddp` cell"
    return f"`{name}` is {what} in the notebook, not on the ranks: {instead}."
