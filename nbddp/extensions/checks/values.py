"""Follow the names of a cell or a script to the values that they hold; find sets."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict

from nbddp.extensions.checks.source import CellSource, Function, cached_per_source
from nbddp.record.heal.cell_syntax import argument, last_name

MAX_DEPTH = 4  # names that are followed, one after the other
ITEM = ast.Constant("an item")  # the value of a loop's variable
Binding = ast.expr | None  # None: the value is not in the code


@cached_per_source
def _all_bindings(source: CellSource) -> dict[tuple[ast.AST | None, str], list[Binding]]:
    """Return the values of each name by function; an attribute has no function."""
    found: dict[tuple[ast.AST | None, str], list[Binding]] = defaultdict(list)
    names: list[ast.Name | ast.Attribute] = [*source.nodes_of(ast.Name)]
    for node in names + source.nodes_of(ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            scope = source.function(node) if isinstance(node, ast.Name) else None
            found[scope, last_name(node)].append(assigned_value(source, node))
    counts = Counter(each.name for each in source.functions)
    for function in source.functions:
        is_unique = function.name == "__init__" or counts[function.name] == 1
        for parameter in ast.walk(function.args):
            if isinstance(parameter, ast.arg):
                given = _given_values(source, function, parameter) if is_unique else [None]
                found[function, parameter.arg] += given
    return found


def assigned_value(source: CellSource, target: ast.expr) -> Binding:
    """Return the value that a statement assigns to a name or an attribute."""
    outer = source.parents[target]
    match outer:
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.NamedExpr(value=value):
            return value
        case ast.AugAssign(op=operator, value=value):
            return ast.BinOp(ast.Name(last_name(target)), operator, value)
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return ITEM
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            whole = assigned_value(source, outer)
            if isinstance(whole, ast.Tuple) and len(whole.elts) == len(targets):
                return whole.elts[targets.index(target)]
            return whole if whole is ITEM else None
    return None


def _given_values(source: CellSource, function: Function, parameter: ast.arg) -> list[Binding]:
    """Return the arguments for a parameter in all calls of its function."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    position = parameters.index(parameter) if parameter in parameters else None
    outer, name = source.parents[function], function.name
    if isinstance(outer, ast.ClassDef):
        name = outer.name if name == "__init__" else name
        position = position - 1 if position else None  # without ``self``
    spawned = [argument(each, "fn", 0) for each in source.calls_of("spawn")]
    if position == 0 and any(isinstance(e, ast.Name) and e.id == name for e in spawned):
        return [ast.Name("rank")]  # torch.multiprocessing.spawn passes the rank first
    given = [argument(each, parameter.arg, position) for each in source.calls_of(name)]
    return given or [None]


def bindings(source: CellSource, node: ast.AST, function: ast.AST) -> list[Binding]:
    """Return all values that the code gives to a name or an attribute that a function uses."""
    bindings = _all_bindings(source)
    if isinstance(node, ast.Attribute):
        return bindings.get((None, node.attr), [])
    name = last_name(node)
    while (function, name) not in bindings and function is not source.tree:
        function = source.function(function)
    return bindings.get((function, name), [])


# ---- sets

_KEEPS_ORDER = frozenset({"list", "tuple", "iter", "enumerate", "reversed", "zip", "tqdm"})
_SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
# the code of numbers, or of objects that hold numbers
_NUMBERS = re.compile(
    r"(?i)^\W*\d|\b(?:range|arange|int|len)\(|(?:\b|_)(?:[ijn]|(?:rank|id|idx|index|num|number|size"
    r"|step|seed|epoch|src|dst|peer|root)(?:e?s)?|indices)\W*$"
)


def is_in_set_order(
    source: CellSource, value: Binding, function: ast.AST, depth: int = MAX_DEPTH
) -> bool:
    """Return whether the order of a value's items depends on the hash seed, as in a set of texts.

    The order of a set of numbers does not depend on it.
    """

    def is_set(binding: Binding) -> bool:
        return depth > 0 and is_in_set_order(source, binding, function, depth - 1)

    match value:
        case ast.Set() | ast.SetComp():
            return not are_numbers(value)
        case ast.Call(func=ast.Name("set" | "frozenset"), args=[items]):
            return not any(map(are_numbers, [items, *bindings(source, items, function)]))
        case ast.Call(func=ast.Name(name), args=items) if name in _KEEPS_ORDER:
            return any(map(is_set, items))
        case ast.Call(func=ast.Attribute(value=owner, attr=method)):
            return method in _SET_METHODS and is_set(owner)
        case ast.BinOp(left, ast.Sub() | ast.BitOr() | ast.BitAnd() | ast.BitXor(), right):
            sides = (left, right)
            of_keys = any(isinstance(e, ast.Call) and last_name(e.func) == "keys" for e in sides)
            return of_keys or any(map(is_set, sides))
        case ast.Name() | ast.Attribute():
            values = bindings(source, value, function)
            is_given = source.given_kinds.get(last_name(value)) == "set"
            return all(map(is_set, values)) if values else is_given
    return False


def are_numbers(value: Binding) -> bool:
    """Return whether a value is a number or holds numbers, judging by its code."""
    return value is not None and bool(_NUMBERS.search(ast.unparse(value)))
