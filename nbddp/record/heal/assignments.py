"""Evaluate the assignments of a cell that depend only on the rank and on plain values."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbddp.record.heal.cell_syntax import without_ipython
from nbddp.topology import Topology

_NODES = (
    *(ast.Constant, ast.Name, ast.Load, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div),
    *(ast.FloorDiv, ast.Mod, ast.IfExp, ast.JoinedStr, ast.FormattedValue),
    *(ast.Call, ast.Attribute, ast.Subscript, ast.Tuple),
)
_CALLS = frozenset(
    {
        *("int", "str", "bool", "os.getenv", "getenv", "os.environ.get", "environ.get"),
        *("dist.get_rank", "torch.distributed.get_rank", "get_rank"),
        *("dist.get_world_size", "torch.distributed.get_world_size", "get_world_size"),
        *("torch.device", "Path", "pathlib.Path"),
    }
)
_ATTRIBUTES = _CALLS | {"os.environ", "torch.distributed"}


class Device(str):
    """The name of a ``torch.device``; this module does not import torch."""


def evaluate_assignments(
    source: str, topology: Topology, names: Mapping[str, Any]
) -> dict[str, Any]:
    r"""Return the values that the plain assignments of a cell give to variables on one rank.

    An assignment counts if its expression reads only the rank, torchrun's environment variables,
    and plain values.

    Args:
        source: the cell.
        topology: the rank's topology.
        names: plain values of the rank's variables before the cell.

    >>> place = Topology.local(2)[1]
    >>> code = "r = int(os.environ['RANK'])\nif r >= 0:\n    main, seed = r == 0, 7 + r\nx = f()"
    >>> evaluate_assignments(code, place, {})
    {'r': 1, 'main': False, 'seed': 8}
    """
    results: dict[str, Any] = {}
    env = topology.to_env()
    dist = SimpleNamespace(
        get_rank=lambda: topology.rank, get_world_size=lambda: topology.world_size
    )
    values: dict[str, Any] = {
        "__builtins__": {},
        "int": int,
        "str": str,
        "bool": bool,
        "__name__": "__main__",
        "os": SimpleNamespace(environ=env, getenv=env.get),
        "environ": env,
        "getenv": env.get,
        "dist": dist,
        "torch": SimpleNamespace(distributed=dist, device=_device),
        "Path": Path,
        "pathlib": SimpleNamespace(Path=Path),
        **vars(dist),
        **{name: getattr(topology, name) for name in ("rank", "local_rank", "world_size")},
        **names,
    }
    _execute(_parse(source), values, results)
    return results


@lru_cache(maxsize=1)
def _parse(source: str) -> list[ast.stmt]:
    """Parse a cell once for all ranks."""
    try:
        return ast.parse(without_ipython(source)).body
    except SyntaxError:
        return []


def _device(kind: str | int, index: int | None = None) -> Device:
    if isinstance(kind, int):
        return Device(f"cuda:{kind}")
    return Device(kind if index is None else f"{kind}:{index}")


def _execute(body: Sequence[ast.stmt], values: dict[str, Any], results: dict[str, Any]) -> None:
    for statement in body:
        if isinstance(statement, ast.If) and (test := _evaluate(statement.test, values)):
            _execute(statement.body if test[0] else statement.orelse, values, results)
            continue
        for name in _names_bound_by(statement):
            values.pop(name, None)
            results.pop(name, None)
        for target, value in _plain_assignments(statement):
            if result := _evaluate(value, values):
                values[target] = results[target] = result[0]


def _names_bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the variables that a statement may set."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _plain_assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables that a plain assignment sets, each with its expression."""
    pairs: Iterable[tuple[ast.expr, ast.expr]] = ()
    match statement:
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pairs = [(target, value)]
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            pairs = zip(names, values, strict=False)
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
    yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def _evaluate(expression: ast.expr, values: dict[str, Any]) -> tuple[()] | tuple[Any]:
    """Return the value of an expression in a tuple; an empty tuple if it is unknown."""
    if not _is_plain(expression, values):
        return ()
    try:
        return (eval(compile(ast.Expression(expression), "cell", "eval"), dict(values)),)
    except Exception:  # noqa: BLE001 - the user's expression may raise any exception
        return ()


def _is_plain(expression: ast.expr, values: Mapping[str, Any]) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, _NODES):
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in _CALLS:
            return False
        if isinstance(node, ast.Attribute) and ast.unparse(node) not in _ATTRIBUTES:
            return False
        if isinstance(node, ast.Name) and node.id not in values:
            return False
    return True
