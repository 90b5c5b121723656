"""Rules about files that several ranks write."""

from __future__ import annotations

import ast
import builtins
import os
import re
from collections.abc import Iterator

from nbddp.checks.collective_rules import collective_name
from nbddp.checks.conditions import depends_on_rank, is_called_guarded
from nbddp.checks.registry import Hit, rule
from nbddp.checks.source import CellSource, cached_per_source
from nbddp.checks.syntax import argument, names_in, plain_names

_RANK_SPECIFIC = re.compile(r"(?i)rank|local|uuid|getpid|tempfile|buffer|bytesio")


def _saves(source: CellSource) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in source.calls:
        name, path = source.called_name(call), None
        if name == "torch.save":
            path = argument(call, "f", 1)
        elif source.method(call) == "save_pretrained" and argument(call, "is_main_process") is None:
            path = argument(call, "save_directory", 0)
        if path is not None:
            yield call, path


@rule("ND141")
def _all_save_to_one_path(source: CellSource) -> Iterator[Hit]:
    has_collective = any(collective_name(source, each) for each in source.calls)
    if not (source.is_cell or source.is_distributed or has_collective):
        return
    is_arranged = _uses_training_library(source)
    for call, path in _saves(source):
        if is_arranged and not (source.is_cell and source.function(call) is source.tree):
            continue
        if not is_called_guarded(source, call) and not _is_rank_specific(source, path):
            yield call, f"every rank writes {ast.unparse(path)}, all at the same time."


def _uses_training_library(source: CellSource) -> bool:
    """Return whether the code uses a library that handles saving for one rank."""
    return any(
        re.search(r"(?i)accelerat|lightning|deepspeed|fabric|master_only|rank_zero|fsdp", each)
        for each in source.aliases.values()
    )


def _is_rank_specific(source: CellSource, path: ast.expr, depth: int = 3) -> bool:
    """Return whether the path differs between ranks."""
    if isinstance(path, ast.Constant):  # the same on all ranks
        return path.value == os.devnull
    if depends_on_rank(path) or _RANK_SPECIFIC.search(ast.unparse(path)):
        return True
    known = {*source.aliases, *vars(builtins), *source.assigned}
    if source.is_cell and not plain_names(path) <= known:
        return True  # another cell has assigned it, perhaps with the rank in it
    function = source.function(path)
    if isinstance(function, ast.FunctionDef):
        parameters = {each.arg for each in function.args.args}
        if parameters & plain_names(path):
            return True  # the caller decides
    return depth > 0 and any(_is_rank_specific_name(source, name, depth) for name in names_in(path))


@cached_per_source
def _is_rank_specific_name(source: CellSource, name: str, depth: int) -> bool:
    """Return whether any value assigned to the name differs between ranks."""
    return any(_is_rank_specific(source, each, depth - 1) for each in source.values(name))
