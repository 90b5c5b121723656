"""Collectives for objects and numbers, and functions that run on rank 0 only or first."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from nbddp.errors import ArgumentError, CheckpointError
from nbddp.extensions.train.call_agreement import (
    CallOutcome,
    Group,
    broadcast_outcome,
    check_member,
    check_same_call,
    format_by_rank,
    gather_by_rank,
    not_collective,
    pickle_outcome,
)
from nbddp.reporting import this_rank

P = ParamSpec("P")
T = TypeVar("T")
Op = Literal["sum", "mean", "min", "max"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_TORCH_OPS: dict[str, Any] = {**_OPS, "mean": dist.ReduceOp.AVG}
_INT64 = range(-(1 << 63), 1 << 63)


def all_gather(value: T, group: Group = None) -> list[T]:
    """Gather one object from each rank, and return all of them on every rank.

    Args:
        value: any object that can be pickled; each rank may have another one. It should be small,
            and its tensors should be on the CPU.
        group: the process group whose ranks call it; None for the group of all ranks.

    Returns:
        One object per rank, ordered by rank.

    Raises:
        ArgumentError: the object of a rank cannot be pickled (raised on every rank), or this rank
            is not in ``group``.
        RequestError: another rank is in a different call, such as :func:`all_reduce`; or this
            rank runs without the others, as in :func:`on_main`.

    >>> all_gather({"loss": 0.5})
    [{'loss': 0.5}]
    """
    check_member("all_gather", group)
    if this_rank.world_size(group) == 1:
        return [value]
    check_same_call("nbddp.all_gather", None, group)
    outcomes = gather_by_rank(pickle_outcome(value), group)
    for rank, outcome in outcomes.items():
        if outcome.failure:
            raise ArgumentError(
                f"nbddp.all_gather: rank {rank} cannot pickle its object: {outcome.failure}"
            )
    return [pickle.loads(each.payload) for each in outcomes.values()]


# ---- rank 0 first, or rank 0 only


def on_main(fn: Callable[P, T]) -> Callable[P, T]:
    """Make a function run on rank 0 only, and return its result on every rank.

    ::

        @nbddp.on_main
        def save(path):
            torch.save(model.state_dict(), path)
            return path.stat().st_size

        size = save(path)  # on every rank: the others wait for rank 0

    Call the function on every rank, like any collective. The other ranks wait until rank 0 has
    finished, at most for the process group's timeout. Do not call it inside ``if rank == 0:``:
    rank 0 would wait for ranks that never arrive, and the cell reports the line after 10 s. The
    function may be a method, and it may call other functions with this decorator.

    Args:
        fn: called on rank 0 with its arguments; the arguments of the other ranks are ignored.

    Returns:
        The function to call. On rank 0 it returns the result of ``fn``, on the other ranks a
        pickled copy. If ``fn`` raises an error, rank 0 raises that error, and the other ranks
        raise RuntimeError with the same text. TypeError means that the result cannot be pickled.

    Raises:
        TypeError: ``fn`` is not a function.

    >>> @on_main
    ... def largest(*numbers):
    ...     return max(numbers)
    >>> largest(3, 5)
    5
    """
    if not callable(fn):
        raise TypeError(
            f"nbddp.on_main takes a function, as in `save = nbddp.on_main(save)`, and not the "
            f"result of a call; got {type(fn).__name__}"
        )
    call_name = f"nbddp.on_main({getattr(fn, '__name__', type(fn).__name__)})"

    @wraps(fn)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> T:
        if not_collective.get().startswith("nbddp.on_main("):
            return fn(*args, **kwargs)  # rank 0 already runs without the other ranks
        check_same_call(call_name, None)
        if this_rank.rank() != 0:
            return cast(T, pickle.loads(_receive_from_rank_0()))
        with _without_other_ranks(call_name):
            result = fn(*args, **kwargs)
            outcome = pickle_outcome(result) if this_rank.world_size() > 1 else CallOutcome()
            if outcome.failure:
                raise TypeError(f"{call_name}: the result cannot be pickled: {outcome.failure}")
        broadcast_outcome(outcome)
        return result

    return on_rank_0


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Let rank 0 run the body first, for a download or a cache; then all other ranks at once.

    Enter it on every rank. The other ranks wait for rank 0, at most for the process group's
    timeout. The ranks do not run the body together, so it must not contain collectives.

    Raises:
        RuntimeError: the body failed on rank 0. The other ranks raise it and do not run the body;
            rank 0 raises its own error.

    >>> with main_rank_first():
    ...     downloaded = True
    """
    call_name = "nbddp.main_rank_first()"
    if not_collective.get():  # inside another main_rank_first() or on_main()
        yield
        return
    check_same_call(call_name, None)
    is_first = this_rank.rank() == 0
    if not is_first:
        _receive_from_rank_0()
    with _without_other_ranks(call_name):
        yield
    if is_first:
        broadcast_outcome(CallOutcome())


@contextmanager
def _without_other_ranks(call_name: str) -> Iterator[None]:
    """Make a collective in the body raise an error instead of hanging.

    If the body fails on rank 0, send the failure to the ranks that wait for rank 0.
    """
    before = not_collective.set(call_name)
    try:
        yield
    except KeyboardInterrupt:  # it reaches every rank: perhaps no rank receives any more
        raise
    except BaseException as error:
        if this_rank.rank() == 0:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            broadcast_outcome(CallOutcome(failure=f"rank 0 failed in {call_name}: {reason}"))
        raise
    finally:
        not_collective.reset(before)


def _receive_from_rank_0() -> bytes:
    outcome = broadcast_outcome(CallOutcome())
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    return outcome.payload


# ---- errors on every rank


def run_on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Call a function on every rank, wait for all ranks, and return their results by rank.

    Raises:
        CheckpointError: the function failed on another rank; the error has its text.
        Exception: the function failed on this rank.

    >>> run_on_all_ranks(lambda: 7)
    [7]
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - the other ranks wait and must receive it
        failure = error
    is_ours = failure is None or isinstance(failure, CheckpointError)
    text = str(failure or "") if is_ours else f"{type(failure).__name__}: {failure}"
    outcomes = all_gather((text, result))
    if failure is not None:
        raise failure
    for rank, (error_text, _) in enumerate(outcomes):
        if error_text:
            raise CheckpointError(f"rank {rank}: {error_text}")
    return [each for _, each in outcomes]


# ---- reduce numbers over all ranks


def all_reduce(value: Any, op: Op | dist.ReduceOp = "sum", group: Group = None) -> Any:
    """Reduce numbers or tensors over all ranks, and return the result on every rank.

    Unlike torch's all_reduce, it returns the result and changes nothing in place, and it also
    accepts numbers and containers. Call it on every rank, even if a rank has nothing to count. The
    ranks first compare the kinds of their values, so a wrong value raises an error on all ranks
    and does not hang.

    Args:
        value: a number; a tensor that has the same shape on all ranks; or a dict, list or tuple
            of these, also nested. Values of one type are reduced in one collective.
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, or torch's ``dist.ReduceOp.SUM``,
            ``AVG``, ``MIN`` or ``MAX``.
        group: the process group whose ranks call it; None for the group of all ranks.

    Returns:
        The result, in the structure of ``value``. An int stays an int (exact while it fits in 64
        bits; a bool counts as an int), unless another rank has a float or ``op`` is ``"mean"``.
        Floats are added in double precision, tensors in their own type; the sum of a bool tensor
        is an int tensor. A tensor keeps its shape and device, and has no gradient. Without a
        process group, the result is the value of this process.

    Raises:
        ArgumentError: there is no such ``op``, this rank is not in ``group``, or the ranks have
            different kinds of values.
        TypeError: a value is neither a number nor a tensor.
        RequestError: another rank is in a different call, such as :func:`all_gather`; or this
            rank runs without the others, as in :func:`on_main`.

    >>> all_reduce({"correct": 9, "seen": 10, "loss": 0.5})
    {'correct': 9, 'seen': 10, 'loss': 0.5}
    >>> all_reduce(3, "mean"), all_reduce(torch.ones(2), dist.ReduceOp.MAX)
    (3.0, tensor([1., 1.]))
    """
    check_member("all_reduce", group)
    # torch's ops by name; an unknown op is rejected later, on all ranks
    op_name = next((name for name, each in _TORCH_OPS.items() if op == each), str(op))
    leaves = dict(sorted(_flatten(value).items()))
    kinds = _agree_on_kinds(
        {path: _describe_kind(leaf) for path, leaf in leaves.items()}, op_name, group
    )
    tensors = {path: _to_tensor(leaf, kinds[path], group) for path, leaf in leaves.items()}
    results: dict[str, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors.values()):  # same order on all ranks
        same_dtype = {path: each for path, each in tensors.items() if each.dtype == dtype}
        results |= _reduce_flat(same_dtype, op_name, group)
    return _rebuild(
        value, {path: _restore_type(results[path], leaves[path], op_name) for path in leaves}
    )


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the numbers and tensors in a value by their path, such as ``['a'][0]``."""
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        inner: leaf
        for key, part in items
        for inner, leaf in _flatten(part, f"{path}[{key!r}]").items()
    }


def _rebuild(value: Any, results: Mapping[str, Any], path: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _rebuild(value[key], results, f"{path}[{key!r}]") for key in value}
    if isinstance(value, (list, tuple)):
        items = [_rebuild(each, results, f"{path}[{i}]") for i, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return results[path]


def _describe_kind(leaf: Any) -> str:
    """Describe the kind of a number or tensor; the ranks' descriptions must be equal."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return f"{str(leaf.dtype).removeprefix('torch.')} tensor of shape {list(leaf.shape)}"
    if isinstance(leaf, Integral):
        return "int" if int(leaf) in _INT64 else "int beyond 64 bits"
    if isinstance(leaf, Real):
        return "float"
    return type(leaf).__name__


def _agree_on_kinds(kinds: dict[str, str], op: str, group: Group) -> dict[str, str]:
    """Check that all ranks have the same kinds; an int becomes a float if a rank has a float."""
    kinds_by_rank = check_same_call("nbddp.all_reduce", {**kinds, "op": op}, group)
    for path in dict.fromkeys(path for each in kinds_by_rank.values() for path in each):
        found = {rank: each.get(path, "nothing") for rank, each in kinds_by_rank.items()}
        if set(found.values()) == {"int", "float"}:
            kinds[path] = "float"
        elif len(set(found.values())) > 1:
            raise ArgumentError(
                f"nbddp.all_reduce: the ranks do not agree on {_path_name(path)}: "
                f"{format_by_rank(found)}"
            )
    if op not in _OPS:
        raise ArgumentError(f"nbddp.all_reduce: op must be one of {', '.join(_OPS)}, got {op!r}")
    for path, kind in kinds.items():
        if kind not in ("int", "float") and " tensor of shape " not in kind:
            raise TypeError(
                f"nbddp.all_reduce: {_path_name(path)} is of type {kind}; it takes numbers, "
                "tensors, and dicts, lists and tuples of them"
            )
    return kinds


def _path_name(path: str) -> str:
    return f"value{path}" if path.startswith("[") else path or "the value"


def _to_tensor(leaf: Any, kind: str, group: Group) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        dtype = torch.int64 if kind == "int" else torch.float64
        number = int(leaf) if kind == "int" else float(leaf)
        return torch.tensor(number, dtype=dtype, device=this_rank.communication_device(group))
    dtype = torch.int64 if leaf.dtype is torch.bool else leaf.dtype
    return leaf.detach().to(device=this_rank.communication_device(group), dtype=dtype)


def _reduce_flat(
    tensors: dict[str, torch.Tensor], op: str, group: Group
) -> dict[str, torch.Tensor]:
    """Reduce all tensors of one type in one collective."""
    flat = torch.cat([each.reshape(-1) for each in tensors.values()])  # a copy
    world_size = this_rank.world_size(group)
    if world_size > 1 and flat.numel():
        dist.all_reduce(flat, _OPS[op], group)
    if op == "mean":
        flat = flat / world_size
    parts = torch.split(flat, [each.numel() for each in tensors.values()])
    return {path: part.view(tensors[path].shape) for path, part in zip(tensors, parts, strict=True)}


def _restore_type(result: torch.Tensor, leaf: Any, op: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    if leaf.dtype is torch.bool and op in ("min", "max"):
        result = result.bool()
    return result.to(leaf.device)
