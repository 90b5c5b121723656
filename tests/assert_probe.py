"""Evaluate the asserts of cells again with changed variables, in the ranks and in the notebook."""

import ast
import os
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH = 200  # so many elements of a list or dictionary are changed, one at a time
_CAN_FAIL: set[str] = set()  # in this process


def with_probes(source: str, tree: ast.Module) -> str:
    """Return the source of a cell with a probe after each assert, on the same line."""
    first = 1 if source.startswith("%%ddp") else 0  # the tree begins after it
    lines = [line.encode() for line in source.split("\n")]  # offsets are in bytes
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    for node in sorted(asserts, key=lambda node: node.lineno, reverse=True):
        assert node.end_lineno is not None
        test = ast.unparse(node.test)
        call = f'; __import__("assert_probe").probe({test!r}, globals() | locals())'
        at, end = node.end_lineno - 1 + first, node.end_col_offset
        lines[at] = lines[at][:end] + call.encode() + lines[at][end:]
    return b"\n".join(lines).decode()


def probe(test: str, scope: dict[str, Any]) -> None:
    """Write to the file ``PROBED`` whether a change of a variable makes the test fail."""
    if test in _CAN_FAIL:
        return
    names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    code = compile(test, "<assert>", "eval")
    can_fail = any(
        not _holds(code, scope | {name: changed})
        for name in sorted(names & scope.keys())
        for changed in _changes(scope[name])
    )
    if can_fail:
        _CAN_FAIL.add(test)
    with Path(os.environ["PROBED"]).open("a") as file:
        file.write(f"{'can fail' if can_fail else 'holds'}\t{test}\n")


def _holds(code: Any, scope: dict[str, Any]) -> bool:
    try:
        return bool(eval(code, scope))
    except Exception:  # noqa: BLE001 - an error ends the cell, as a failed assert does
        return False


def _changes(value: Any) -> Iterator[Any]:
    """Yield the value with another sign, plus one, and with a change of one of its elements."""
    if isinstance(value, bool | np.bool_):
        yield not value
    elif isinstance(value, int | float | np.number):
        yield from (-value, value + 1, value - 1)
    elif isinstance(value, str | bytes):
        yield from (value[:0], value * 2, value[1:])
    elif isinstance(value, torch.Tensor | np.ndarray):
        for changed in _changes_of_tensor(torch.as_tensor(value).detach()):
            yield changed if isinstance(value, torch.Tensor) else changed.numpy()
    elif isinstance(value, Mapping | list | tuple):
        yield from _changes_of_elements(value)
    elif isinstance(value, set | frozenset):
        yield from ({*value} - {each} for each in value)
        yield {*value, "more"}
    elif isinstance(value, Path):
        yield value / "absent"
    elif value is None or isinstance(value, Exception):
        yield 1
    else:
        yield from _changes_of_attributes(value)


def _changes_of_elements(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in [*value][:LENGTH]:
            yield {each: value[each] for each in value if each != key}
            yield from ({**value, key: changed} for changed in _changes(value[key]))
        return
    make = getattr(value, "_make", type(value))  # a named tuple has it
    for index in range(len(value))[:LENGTH]:
        for changed in (value[index - 1], *_changes(value[index])):
            yield make([*value[:index], changed, *value[index + 1 :]])
    yield value[:-1]


def _changes_of_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.is_meta or tensor.untyped_storage().nbytes() == 0:  # without numbers, or freed
        yield torch.ones(tensor.shape, dtype=tensor.dtype)
        return
    if tensor.dtype == torch.bool:
        yield ~tensor
        return
    yield from (-tensor, tensor + 1)
    for index in (0, -1) if tensor.numel() else ():
        one = tensor.clone(memory_format=torch.contiguous_format)
        one.view(-1)[index] += 1
        yield one


def _changes_of_attributes(value: Any) -> Iterator[Any]:
    """Yield copies of an object of the notebook, with one changed attribute each."""
    if type(value).__module__ == "__main__" and not isinstance(value, torch.nn.Module):
        for name, attribute in getattr(value, "__dict__", {}).items():
            for changed in _changes(attribute):
                other = copy(value)
                setattr(other, name, changed)
                yield other
