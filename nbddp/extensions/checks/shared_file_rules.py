"""Rules about files that several ranks write."""

from __future__ import annotations

import ast
import builtins
import os
import re
from collections.abc import Iterator

from nbddp.extensions.checks.collective_rules import collective_name
from nbddp.extensions.checks.conditions import depends_on_rank, is_called_guarded, with_ranks
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.source import CellSource, cached_per_source
from nbddp.record.heal.cell_syntax import argument, last_name, names_in, plain_names

_RANK_SPECIFIC = re.compile(
    r"(?i)rank|local|uuid|getpid|tempfile|buffer|bytesio|stringio|std(out|err)|devnull|time_ns"
)
# contexts that let one rank at a time write
_IN_TURNS = re.compile(r"(?i)lock|main_process|(local|zero)_first")
_NEW_FILE = re.compile(r"w[bt+]*")  # the mode of open()
_NUMPY = re.compile(r"(?:numpy|np)\.(?:save|savez|savez_compressed|savetxt)")
_IMPORTED_ELSEWHERE = {"Path", "pathlib", "os"}  # the usual imports of another cell
_PATH_OF_METHOD = {
    "to_csv": "path_or_buf",
    "to_json": "path_or_buf",
    "to_parquet": "path",
    "to_pickle": "path",
}


def _saves(source: CellSource) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in source.calls:
        name, path = source.called_name(call), None
        if name == "torch.save":
            path = argument(call, "f", 1)
        elif source.method(call) == "save_pretrained" and argument(call, "is_main_process") is None:
            path = argument(call, "save_directory", 0)
        elif _is_run(source, call):
            path = _written_path(source, call)
        if path is not None:
            yield call, path


def _is_run(source: CellSource, call: ast.Call) -> bool:
    """Return whether the code itself runs a call: another cell may call a function on one rank."""
    function = source.function(call)
    return isinstance(function, ast.Module) or bool(source.calls_of(function.name))


def _written_path(source: CellSource, call: ast.Call) -> ast.expr | None:
    """Return the path that a call of Python, NumPy or pandas writes; None for other calls."""
    name, method = source.called_name(call), source.method(call)
    if name in ("open", "io.open") and _opens_new_file(argument(call, "mode", 1)):
        return argument(call, "file", 0)
    if _NUMPY.fullmatch(name):
        return _path_of(source, argument(call, "fname" if method == "savetxt" else "file", 0))
    if not isinstance(call.func, ast.Attribute) or source.owner(call) in source.aliases:
        return None
    is_new = method == "open" and _opens_new_file(argument(call, "mode", 0))
    if is_new or method in ("write_text", "write_bytes"):
        return call.func.value
    if method in _PATH_OF_METHOD and argument(call, "mode") is None:
        return _path_of(source, argument(call, _PATH_OF_METHOD[method], 0))
    return None


def _opens_new_file(mode: ast.expr | None) -> bool:
    return isinstance(mode, ast.Constant) and bool(_NEW_FILE.fullmatch(str(mode.value)))


def _path_of(source: CellSource, path: ast.expr | None) -> ast.expr | None:
    """Return a path; None for an open file, because ``open`` has the path."""
    values = [] if path is None else [path, *source.values(last_name(path))]
    is_file = any(isinstance(each, ast.Call) and last_name(each.func) == "open" for each in values)
    return None if is_file else path


@rule("ND141")
def _all_save_to_one_path(source: CellSource) -> Iterator[Hit]:
    has_collective = any(collective_name(source, each) for each in source.calls)
    if not (source.is_cell or source.is_distributed or has_collective):
        return
    if any(
        _is_rank_specific(source, path) for call in source.calls_of("chdir") for path in call.args
    ):
        return  # each rank has its own folder
    is_arranged = _uses_training_library(source)
    for call, path in _saves(source):
        if is_arranged and not (source.is_cell and source.function(call) is source.tree):
            continue
        is_alone = is_called_guarded(source, call) or _is_in_turn(source, call)
        if not is_alone and not _is_rank_specific(source, path):
            yield call, f"every rank writes {ast.unparse(path)}, all at the same time."


def _is_in_turn(source: CellSource, call: ast.Call) -> bool:
    """Return whether a context lets only one rank at a time write."""
    contexts = [each for each in source.ancestors(call) if isinstance(each, ast.With)]
    return any(
        _IN_TURNS.search(ast.unparse(item.context_expr))
        for context in contexts
        for item in context.items
    )


def _uses_training_library(source: CellSource) -> bool:
    """Return whether the code uses a library that handles saving for one rank."""
    return any(
        re.search(r"(?i)accelerat|lightning|deepspeed|fabric|master_only|rank_zero|fsdp", target)
        for target in source.aliases.values()
    )


def _is_rank_specific(source: CellSource, path: ast.expr, depth: int = 3) -> bool:
    """Return whether the path differs between ranks."""
    if isinstance(path, ast.Constant):  # the same on all ranks
        return path.value == os.devnull
    path = with_ranks(source, path, may_guess=True)
    if depends_on_rank(path) or _RANK_SPECIFIC.search(ast.unparse(path)):
        return True
    defined = {*source.aliases, *vars(builtins), *source.assigned, *_IMPORTED_ELSEWHERE}
    if not plain_names(path) <= defined:
        return True  # another cell or a ``with`` has assigned it, perhaps with the rank in it
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
