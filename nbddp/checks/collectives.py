"""Rules about calls that all ranks must make together."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

from nbddp.checks.branches import Condition, has_rank_condition, rank_conditions
from nbddp.checks.collective_calls import (
    COLLECTIVES,
    all_meetings,
    meetings_of_shards,
    short,
)
from nbddp.checks.conditions import (
    early_leavers,
    left_after,
    may_exclude,
    picks_one_of_all,
)
from nbddp.checks.registry import Hit, rule
from nbddp.checks.source import Source, once
from nbddp.checks.syntax import argument, is_true


@rule("ND101")
def _of_some_ranks(source: Source) -> Iterator[Hit]:
    of_shards = meetings_of_shards(source)
    meetings = all_meetings(source) + list(of_shards.items())
    conditions = [
        [
            each
            for each in rank_conditions(source, call)
            if call not in of_shards or all(map(picks_one_of_all, each.tests))
        ]
        for call, _ in meetings
    ]
    partners = _Partners(source, [each for of_call in conditions for each in of_call])
    for (call, name), of_call in zip(meetings, conditions, strict=True):
        alone = next(
            (
                each
                for each in of_call
                if not partners.has(each) and not _others_meet_below(source, call, each.node)
            ),
            None,
        )
        if alone is not None:
            yield Hit(
                source.line(call),
                f"{short(name)} is under {alone} (line {source.line(alone.node)}): the other "
                "ranks do not come to it.",
            )


def _others_meet_below(source: Source, call: ast.Call, outer: ast.AST) -> bool:
    """Return whether the other ranks make a collective after ``outer``.

    The ranks that make ``call`` leave before it, by ``return``, ``raise``, ``break`` or
    ``continue``.
    """
    left = left_after(source, call, outer)
    if left is None:
        return False
    first, last = source.last_line(outer), source.last_line(left)
    here = _lines_of_meetings(source).get(source.function(call), [])
    place = bisect_right(here, first)
    return place < len(here) and here[place] <= last


@once
def _lines_of_meetings(source: Source) -> dict[ast.AST, list[int]]:
    found: dict[ast.AST, list[int]] = {}
    for call, _ in all_meetings(source):
        found.setdefault(source.function(call), []).append(source.line(call))
    return {function: sorted(lines) for function, lines in found.items()}


class _Partners:
    """Under which conditions ranks meet, and whether the others then meet under another one."""

    def __init__(self, source: Source, conditions: list[Condition]) -> None:
        self._branches: dict[ast.AST, set[int]] = {}
        self._keys: dict[ast.AST, str] = {}
        for each in conditions:
            self._branches.setdefault(each.node, set()).add(each.branch)
            if each.node not in self._keys:
                self._keys[each.node] = each.key
        self._alike = Counter(self._keys.values())
        self._related: Counter[ast.AST] = Counter()  # around it or in it, and asking another thing
        for inner, key in self._keys.items():
            for outer in source.above(inner):
                if self._keys.get(outer, key) != key:
                    self._related.update((inner, outer))

    def has(self, condition: Condition) -> bool:
        """Whether the other ranks meet too: in another branch, or under another condition."""
        node = condition.node
        others = len(self._keys) - self._alike[self._keys[node]] - self._related[node]
        return others > 0 or len(self._branches[node]) > 1


@rule("ND103")
def _behind_a_leaver(source: Source) -> Iterator[Hit]:
    of_shards = meetings_of_shards(source)
    meetings = all_meetings(source) + list(of_shards.items())
    around = _around(source, meetings)
    of_all: dict[ast.AST, list[tuple[int, str, ast.Call]]] = {}
    for call, name in meetings:
        if not has_rank_condition(source, call):
            of_all.setdefault(source.function(call), []).append((source.line(call), name, call))
    for each in of_all.values():
        each.sort(key=lambda place: place[:2])
    for condition, left in early_leavers(source):
        last = max(source.line(each) for each in condition.body)
        here = of_all.get(source.function(condition), [])
        behind = here[bisect_right(here, last, key=lambda place: place[0]) :]
        met = next(
            (
                (line, name)
                for line, name, call in behind
                if line <= source.last_line(left)
                and (call not in of_shards or picks_one_of_all(condition.test))
                and not may_exclude(source, condition.body[-1], call)
            ),
            None,
        )
        if met is not None and condition not in around:
            line, name = met
            word = type(condition.body[-1]).__name__.lower()
            yield Hit(
                line,
                f"{short(name)} comes after `if {ast.unparse(condition.test)}: {word}` (line "
                f"{source.line(condition)}): the ranks that have left do not come to it.",
            )


def _around(source: Source, meetings: list[tuple[ast.Call, str]]) -> set[ast.AST]:
    """All that any of them stands in."""
    return {outer for call, _ in meetings for outer in source.above(call)}


@rule("ND104")
def _in_except(source: Source) -> Iterator[Hit]:
    meetings = all_meetings(source)
    around = _around(source, meetings)
    for call, name in meetings:
        for outer in source.above(call):
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(outer, ast.ExceptHandler):
                attempt = source.parents[outer]
                tried = isinstance(attempt, ast.Try) and any(
                    each in around for each in (*attempt.body, *attempt.orelse)
                )
                tried = tried or _others_meet_below(source, call, attempt)
                catches_import = outer.type is not None and "Import" in ast.unparse(outer.type)
                if not tried and not catches_import:
                    yield Hit(
                        source.line(call),
                        f"{short(name)} is in an `except`: only the ranks that had the error come "
                        "to it.",
                    )
                break


@rule("ND105")
def _not_waited_for(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        name = source.called(call)
        is_alone = isinstance(source.parents.get(call), ast.Expr)
        starts = name in COLLECTIVES and is_true(argument(call, "async_op"))
        if is_alone and (starts or name in ("torch.distributed.isend", "torch.distributed.irecv")):
            yield Hit(
                source.line(call),
                f"the handle of this {short(name)} is dropped, so no code can wait for it.",
            )


@rule("ND107")
def _summed_gradients(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if source.called(call) != "torch.distributed.all_reduce" or not call.args:
            continue
        text = ast.unparse(call.args[0])
        operation = argument(call, "op", 1)
        is_sum = operation is None or ast.unparse(operation).endswith("SUM")
        is_of_gradients = text.endswith((".grad", ".grad.data"))
        if is_of_gradients and is_sum and not _makes_mean(source, source.function(call)):
            yield Hit(
                source.line(call),
                f"the ranks' gradients in {text} are added up, and divided by nothing.",
            )


@once
def _makes_mean(_source: Source, function: ast.AST) -> bool:
    """Return whether anything in a function divides."""
    return any(
        isinstance(each, ast.Div)
        or getattr(each, "attr", "") in ("div_", "div", "mul_", "true_divide_")
        for each in ast.walk(function)
    )
