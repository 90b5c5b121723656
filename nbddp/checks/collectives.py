"""Rules about calls that all ranks must make together."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import partial

from nbddp.checks import forwards
from nbddp.checks.branches import Condition, has_rank_condition, rank_conditions
from nbddp.checks.collective_calls import (
    COLLECTIVES,
    all_meetings,
    collective,
    meetings_of_shards,
    short,
)
from nbddp.checks.conditions import (
    early_leavers,
    is_in_each_step,
    left_after,
    may_exclude,
    picks_one_of_all,
)
from nbddp.checks.rule import Found, Rule
from nbddp.checks.source import Loop, Source
from nbddp.checks.syntax import argument, is_true
from nbddp.checks.training import training_loops


def _of_some_ranks(source: Source) -> Iterator[Found]:
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
            yield Found(
                source.line(call),
                f"{short(name)} is under {alone} (line {source.line(alone.node)}): {alone.effect}.",
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
    lines = source.once("lines of meetings", lambda: _lines_of_meetings(source))
    here = lines.get(source.function(call), [])
    place = bisect_right(here, first)
    return place < len(here) and here[place] <= last


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


OF_SOME_RANKS = Rule(
    id="ND101",
    title="a collective under a condition on the rank",
    why="All ranks must make the same collectives in the same order: those that make it wait for "
    "the others until the timeout.",
    fix="Move it out of the `if`, so that every rank makes it; print or save the result on one.",
    notebook=forwards.HANGS,
    find=_of_some_ranks,
    bad=Source("total = torch.ones(1)\nif rank == 0:\n    dist.all_reduce(total)\n"),
    good=Source("total = torch.ones(1)\ndist.all_reduce(total)\nif rank == 0:\n    print(total)\n"),
)


def _behind_a_leaver(source: Source) -> Iterator[Found]:
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
            yield Found(
                line,
                f"{short(name)} comes after `if {ast.unparse(condition.test)}: {word}` (line "
                f"{source.line(condition)}): the ranks that have left do not come to it.",
            )


def _around(source: Source, meetings: list[tuple[ast.Call, str]]) -> set[ast.AST]:
    """All that any of them stands in."""
    return {outer for call, _ in meetings for outer in source.above(call)}


BEHIND_A_LEAVER = Rule(
    id="ND103",
    title="a collective after some ranks have left",
    why="An early `return`, `break` or `continue` on some ranks keeps them from a collective that "
    "the others wait in.",
    fix="Make the collective first, or let all ranks leave at the same place.",
    notebook=forwards.HANGS,
    find=_behind_a_leaver,
    bad=Source("def report(x):\n    if rank != 0:\n        return\n    dist.all_reduce(x)\n"),
    good=Source("def report(x):\n    dist.all_reduce(x)\n    if rank != 0:\n        return\n"),
)


def _in_except(source: Source) -> Iterator[Found]:
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
                    yield Found(
                        source.line(call),
                        f"{short(name)} is in an `except`: only the ranks that had the error come "
                        "to it.",
                    )
                break


IN_EXCEPT = Rule(
    id="ND104",
    title="a collective in an except block",
    why="An error on one rank is rarely an error on all: the rank that handles it waits for the "
    "ranks without an error.",
    fix="Note the error in a tensor, all_reduce that on every rank behind the `try`, then decide.",
    notebook=forwards.HANGS,
    find=_in_except,
    bad=Source("try:\n    x = load()\nexcept OSError:\n    dist.barrier()\n"),
    good=Source("try:\n    x = load()\nexcept OSError:\n    x = None\ndist.barrier()\n"),
)


def _not_waited_for(source: Source) -> Iterator[Found]:
    for call in source.calls:
        name = source.called(call)
        is_alone = isinstance(source.parents.get(call), ast.Expr)
        starts = name in COLLECTIVES and is_true(argument(call, "async_op"))
        if is_alone and (starts or name in ("torch.distributed.isend", "torch.distributed.irecv")):
            yield Found(
                source.line(call),
                f"the handle of this {short(name)} is dropped, so no code can wait for it.",
            )


NOT_WAITED_FOR = Rule(
    id="ND105",
    title="an asynchronous collective without a wait()",
    why="The tensor may be read before the result is in it, or be changed while it is being sent.",
    fix="Keep the handle and call its `wait()` before you touch the tensor.",
    notebook="01_ranks_stores_and_collectives.ipynb",
    find=_not_waited_for,
    bad=Source("dist.all_reduce(x, async_op=True)\nprint(x)\n"),
    good=Source("work = dist.all_reduce(x, async_op=True)\nwork.wait()\nprint(x)\n"),
)


def _barrier_in_a_loop(source: Source) -> Iterator[Found]:
    training = training_loops(source)
    for call in source.calls:
        if collective(source, call) != "torch.distributed.barrier":
            continue
        loops = source.loops(call)
        trains = bool(loops) and loops[0] in training
        is_timed = bool(loops) and source.once(("timed", loops[0]), partial(_is_timed, loops[0]))
        if trains and source.has_ddp and not is_timed and _is_each_time(source, call, loops[0]):
            yield Found(source.line(call), "a barrier in each step, beside DDP's own meeting.")


def _is_timed(loop: Loop) -> bool:
    """Whether it may be for a clock that they are to begin together."""
    return re.search(r"time|perf_counter|Event", ast.unparse(loop)) is not None


def _is_each_time(source: Source, call: ast.Call, loop: Loop) -> bool:
    """Whether every step that has a backward() comes to it."""
    first = min(each.lineno for each in source.within(loop) if source.method(each) == "backward")
    is_passed_by = any(
        first < each.lineno < call.lineno and source.loops(each)[:1] == [loop]
        for each in source.every(ast.Continue)
    )
    return is_in_each_step(source, call, loop) and not is_passed_by


BARRIER_IN_A_LOOP = Rule(
    id="ND106",
    title="a barrier in every training step",
    why="DDP's backward() lets no rank go ahead already; a barrier that seems to mend something "
    "hides a race, and makes every step as slow as the slowest rank twice.",
    fix="Leave it out; if the result then changes, look for what is read before it is written.",
    notebook=forwards.HANGS,
    find=_barrier_in_a_loop,
    bad=Source(
        "for x, y in loader:\n    model(x).sum().backward()\n    dist.barrier()\n",
        {"model": "ddp"},
    ),
    good=Source(
        "for x, y in loader:\n    model(x).sum().backward()\ndist.barrier()\n", {"model": "ddp"}
    ),
)


def _summed_gradients(source: Source) -> Iterator[Found]:
    for call in source.calls:
        if source.called(call) != "torch.distributed.all_reduce" or not call.args:
            continue
        text = ast.unparse(call.args[0])
        operation = argument(call, "op", 1)
        is_sum = operation is None or ast.unparse(operation).endswith("SUM")
        if text.endswith((".grad", ".grad.data")) and is_sum and not _divides(source, call):
            yield Found(
                source.line(call),
                f"the ranks' gradients in {text} are added up, and divided by nothing.",
            )


def _divides(source: Source, call: ast.Call) -> bool:
    """Whether anything in the function makes a mean of the sum."""
    function = source.function(call)
    return source.once(("divides", function), lambda: _makes_mean(function))


def _makes_mean(function: ast.AST) -> bool:
    for each in ast.walk(function):
        if isinstance(each, ast.Div):
            return True
        if isinstance(each, ast.Attribute) and each.attr in ("div_", "div", "mul_", "true_divide_"):
            return True
    return False


SUMMED_GRADIENTS = Rule(
    id="ND107",
    title="gradients that are added up and not averaged",
    why="all_reduce adds: with N ranks each update is N times as large as the mean gradient's.",
    fix="Divide by the world size, or use `op=dist.ReduceOp.AVG` where the backend has it.",
    notebook="02_from_one_process_to_ddp.ipynb",
    find=_summed_gradients,
    bad=Source("for p in model.parameters():\n    dist.all_reduce(p.grad)\n"),
    good=Source(
        "for p in model.parameters():\n    dist.all_reduce(p.grad)\n    p.grad /= world_size\n"
    ),
)

RULES: tuple[Rule[Source], ...] = (
    OF_SOME_RANKS,
    forwards.DDP_OF_SOME_RANKS,
    BEHIND_A_LEAVER,
    IN_EXCEPT,
    NOT_WAITED_FOR,
    BARRIER_IN_A_LOOP,
    SUMMED_GRADIENTS,
)
