"""Collectives that are called on every rank: gather objects, reduce numbers, rank 0 first."""

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
from nbddp.train import this_rank
from nbddp.train.call_agreement import (
    CallOutcome,
    Group,
    broadcast_outcome,
    check_member,
    check_same_call,
    communication_device,
    format_by_rank,
    gather_by_rank,
    not_collective,
    pickle_outcome,
)

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
    """Every rank's object, on every rank, in order of rank.

    Args:
        value: anything that can be pickled, not the same on all ranks. It should be small, and
            tensors on the CPU.
        group: the process group whose ranks call it; None for that of all ranks.

    Returns:
        As many objects as there are ranks.

    Raises:
        ArgumentError: on every rank, when the object of one of them cannot be pickled; or this
            rank is not in ``group``.
        RequestError: another rank is in something else than this, such as :func:`all_reduce`; or
            it is called where the ranks are not together, as in :func:`on_main`.

    >>> all_gather({"loss": 0.5})
    [{'loss': 0.5}]
    """
    check_member("all_gather", group)
    if this_rank.world_size(group) == 1:
        return [value]
    check_same_call("nbddp.all_gather", None, group)
    outcomes = gather_by_rank(pickle_outcome(value), group)
    for rank, each in outcomes.items():
        if each.failure:
            raise ArgumentError(f"nbddp.all_gather: rank {rank} cannot pickle it: {each.failure}")
    return [pickle.loads(each.payload) for each in outcomes.values()]


# ---- rank 0 first, or alone


def on_main(fn: Callable[P, T]) -> Callable[P, T]:
    """Make a function run on rank 0 only, and return its result on every rank.

    ::

        @nbddp.on_main
        def save(path):
            torch.save(model.state_dict(), path)
            return path.stat().st_size

        size = save(path)  # on every rank: the others wait for rank 0

    Call the function on every rank, as any collective: the ranks first meet, and then the others
    wait until rank 0 is done, at most as long as the process group's timeout. Inside of
    ``if rank == 0:`` rank 0 would wait for the others, which never come; a cell says so after 10 s,
    with the line. The function may call others that are decorated so, and it may be a method.

    Args:
        fn: called with its arguments on rank 0; those of the other ranks are not looked at.

    Returns:
        The function to call. It returns what ``fn`` returned, on the other ranks a pickled copy.
        It raises what ``fn`` raised on rank 0, and RuntimeError with these words on the others;
        TypeError, if the result cannot be pickled.

    Raises:
        TypeError: ``fn`` is no function.

    >>> @on_main
    ... def largest(*numbers):
    ...     return max(numbers)
    >>> largest(3, 5)
    5
    """
    if not callable(fn):
        raise TypeError(
            f"nbddp.on_main takes a function and is called with its arguments later, as in "
            f"`save = nbddp.on_main(save)`; got {type(fn).__name__}"
        )
    call_name = f"nbddp.on_main({getattr(fn, '__name__', type(fn).__name__)})"

    @wraps(fn)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> T:
        if not_collective.get().startswith("nbddp.on_main("):
            return fn(*args, **kwargs)  # of the ranks, only this one is here already
        check_same_call(call_name, None)
        if this_rank.rank() != 0:
            return cast(T, pickle.loads(_receive_from_rank_0()))
        with _failure_broadcast(call_name), _marked_not_collective(call_name):
            result = fn(*args, **kwargs)
            outcome = pickle_outcome(result) if this_rank.world_size() > 1 else CallOutcome()
            if outcome.failure:
                raise TypeError(f"{call_name}: the result cannot be pickled: {outcome.failure}")
        broadcast_outcome(outcome)
        return result

    return on_rank_0


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Let rank 0 run the body first, for a download or a cache; then all others at once.

    Enter it on every rank: the others wait for rank 0, as long as the process group's timeout.
    In the body the ranks are not together: it has no place for collectives.

    Raises:
        RuntimeError: on the other ranks, when the body failed on rank 0, which raises its own
            error. They do not run the body then.

    >>> with main_rank_first():
    ...     downloaded = True
    """
    call_name = "nbddp.main_rank_first()"
    if not_collective.get():  # in turns already, or rank 0 alone
        yield
        return
    check_same_call(call_name, None)
    if this_rank.rank() != 0:
        _receive_from_rank_0()
        with _marked_not_collective(call_name):
            yield
        return
    with _failure_broadcast(call_name), _marked_not_collective(call_name):
        yield
    broadcast_outcome(CallOutcome())


@contextmanager
def _marked_not_collective(call_name: str) -> Iterator[None]:
    """The ranks do not run this together: nothing in it may wait for all of them."""
    before = not_collective.set(call_name)
    try:
        yield
    finally:
        not_collective.reset(before)


@contextmanager
def _failure_broadcast(call_name: str) -> Iterator[None]:
    """When the body fails on rank 0, tell the ranks that wait for it."""
    try:
        yield
    except KeyboardInterrupt:  # it goes to every rank, so that nobody may be there to hear
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        broadcast_outcome(CallOutcome(failure=f"rank 0 failed in {call_name}: {reason}"))
        raise


def _receive_from_rank_0() -> bytes:
    outcome = broadcast_outcome(CallOutcome())
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    return outcome.payload


# ---- errors on every rank


def run_on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Act on every rank and meet; what came of it, in order of rank.

    Raises:
        CheckpointError: it failed on another rank, whose words it has.
        Exception: it failed on this rank; whatever that was.

    >>> run_on_all_ranks(lambda: 7)
    [7]
    """
    if this_rank.world_size() == 1:
        return [function()]
    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - the others wait, and are to hear of it
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


# ---- numbers of all ranks put together


def all_reduce(value: Any, op: Op | dist.ReduceOp = "sum", group: Group = None) -> Any:
    """Put the numbers of all ranks together; every rank gets the result.

    Unlike torch's, it returns the result and changes nothing in place, and takes more than
    tensors. Call it on every rank, also on one that had nothing to count. The ranks first compare
    what they brought, so that a wrong value is an error on all ranks and not a hang.

    Args:
        value: a number; a tensor of any shape, the same on all ranks; or a dict, list or tuple of
            these, also nested, which travel together.
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, or torch's ``dist.ReduceOp.SUM``,
            ``AVG``, ``MIN`` or ``MAX``.
        group: the process group whose ranks call it; None for that of all ranks.

    Returns:
        The same kind of thing. An int stays an int (exact while it fits in 64 bits; a bool counts
        as an int), unless another rank brought a float or ``op`` is ``"mean"``. Floats are added
        in double precision, tensors in their own type; the sum of a bool tensor is an int tensor.
        A tensor comes back with its shape, on its own device and without gradient. Without a
        process group it is this process's own.

    Raises:
        ArgumentError: there is no such ``op``, this rank is not in ``group``, or the ranks brought
            different kinds of values.
        TypeError: a value is neither a number nor a tensor.
        RequestError: another rank is in something else than this, such as :func:`all_gather`; or
            it is called where the ranks are not together, as in :func:`on_main`.

    >>> all_reduce({"correct": 9, "seen": 10, "loss": 0.5})
    {'correct': 9, 'seen': 10, 'loss': 0.5}
    >>> all_reduce(3, "mean"), all_reduce(torch.ones(2), dist.ReduceOp.MAX)
    (3.0, tensor([1., 1.]))
    """
    check_member("all_reduce", group)
    # the name of one of torch's; what is neither is refused later, on all ranks
    op_name = next((name for name, each in _TORCH_OPS.items() if op == each), str(op))
    leaves = dict(sorted(_flatten(value).items()))
    kinds = _agree_on_kinds(
        {path: _describe_kind(leaf) for path, leaf in leaves.items()}, op_name, group
    )
    tensors = {path: _to_tensor(leaf, kinds[path], group) for path, leaf in leaves.items()}
    results: dict[str, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors.values()):  # in the same order
        same_dtype = {path: each for path, each in tensors.items() if each.dtype == dtype}
        results |= _reduce_flat(same_dtype, op_name, group)
    return _rebuild(
        value, {path: _restore_type(results[path], leaves[path], op_name) for path in leaves}
    )


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """The numbers and tensors in a value, by their place in it, such as ``['a'][0]``."""
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        inner: leaf
        for key, each in items
        for inner, leaf in _flatten(each, f"{path}[{key!r}]").items()
    }


def _rebuild(value: Any, results: Mapping[str, Any], path: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _rebuild(value[key], results, f"{path}[{key!r}]") for key in value}
    if isinstance(value, (list, tuple)):
        items = [_rebuild(each, results, f"{path}[{i}]") for i, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return results[path]


def _describe_kind(leaf: Any) -> str:
    """What it is, in words that are equal on ranks that fit together."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return f"{str(leaf.dtype).removeprefix('torch.')} tensor of shape {list(leaf.shape)}"
    if isinstance(leaf, Integral):
        return "int" if int(leaf) in _INT64 else "int beyond 64 bits"
    if isinstance(leaf, Real):
        return "float"
    return type(leaf).__name__


def _agree_on_kinds(kinds: dict[str, str], op: str, group: Group) -> dict[str, str]:
    """See that all ranks brought the same; what is an int here and a float there is a float."""
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
        return torch.tensor(number, dtype=dtype, device=communication_device(group))
    dtype = torch.int64 if leaf.dtype is torch.bool else leaf.dtype
    return leaf.detach().to(device=communication_device(group), dtype=dtype)


def _reduce_flat(
    tensors: dict[str, torch.Tensor], op: str, group: Group
) -> dict[str, torch.Tensor]:
    """All tensors of one type in one collective."""
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
