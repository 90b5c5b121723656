"""Which names a program uses that nobody defines."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from types import CodeType

_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})
_OF_MODULES = frozenset(
    ["__name__", "__file__", "__doc__", "__annotations__", "__builtins__", "__spec__"]
)

OF_IPYTHON = frozenset({"display", "get_ipython", "In"})  # some of them among its builtins
BUILTINS = frozenset(vars(builtins)) - OF_IPYTHON - {"_", "__IPYTHON__"}


def undefined_names(program: str) -> list[str]:
    """Global names that it reads and nothing in it binds, in the order of the alphabet.

    >>> undefined_names("f = lambda: a + len(b); b = 1")
    ['a']

    Raises:
        SyntaxError: it does not compile.
    """
    codes = list(_codes(compile(program, "export", "exec", dont_inherit=True)))
    bound = {name for code in codes for name in _names(code, _STORES)}
    used = {name for code in codes for name in _names(code, _LOADS)}
    return sorted(used - bound - BUILTINS - _OF_MODULES)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _names(code: CodeType, operations: frozenset[str]) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in operations:
            yield str(step.argval)
