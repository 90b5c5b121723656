"""What all ranks do together: reduce numbers, gather objects, take turns."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from nbddp.train import place

P = ParamSpec("P")
T = TypeVar("T")

Op = Literal["sum", "mean", "min", "max"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_INT64 = range(-(1 << 63), 1 << 63)

# ---- numbers


def reduce(value: Any, op: Op = "sum") -> Any:
    """Put the numbers of all ranks together; every rank gets the result.

    Call it on every rank, also on one that had nothing to count. The ranks first compare what
    kind of value they brought, so that a wrong one is an error on all ranks and not a hang.

    Args:
        value: a number; a tensor of any shape, the same on all ranks; or a dict, list or tuple of
            these, also nested, which travel together. Nothing is changed in place.
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.

    Returns:
        The same kind of thing. An int stays an int (exact while it fits in 64 bits; a bool counts
        as an int), unless another rank brought a float or ``op`` is ``"mean"``. Floats are added
        in double precision, tensors in their own type; the sum of a bool tensor is an int tensor.
        A tensor comes back on its own device and without gradient.

    Raises:
        ValueError: there is no such ``op``, or the ranks brought different kinds of values.
        TypeError: a value is neither a number nor a tensor.

    >>> reduce({"correct": 9, "seen": 10, "loss": 0.5})
    {'correct': 9, 'seen': 10, 'loss': 0.5}
    >>> reduce(3, "mean")
    3.0
    """
    leaves = dict(sorted(_flatten(value).items()))
    kinds = _settle({path: _kind(leaf) for path, leaf in leaves.items()}, op)
    tensors = {path: _to_tensor(leaf, kinds[path]) for path, leaf in leaves.items()}
    results: dict[str, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors.values()):  # in the same order
        alike = {path: each for path, each in tensors.items() if each.dtype == dtype}
        results |= _reduce_together(alike, op)
    return _rebuild(value, {path: _back(results[path], leaves[path], op) for path in leaves})


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


def _kind(leaf: Any) -> str:
    """What it is, in words that are equal on ranks that fit together."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return f"{str(leaf.dtype).removeprefix('torch.')} tensor of shape {list(leaf.shape)}"
    if isinstance(leaf, Integral):
        return "int" if int(leaf) in _INT64 else "int beyond 64 bits"
    if isinstance(leaf, Real):
        return "float"
    return type(leaf).__name__


def _settle(kinds: dict[str, str], op: str) -> dict[str, str]:
    """See that all ranks brought the same; what is an int here and a float there is a float."""
    everyone = _differing({**kinds, "op": op})
    for path in dict.fromkeys(path for theirs in everyone for path in theirs):
        found = [theirs.get(path, "nothing") for theirs in everyone]
        if set(found) == {"int", "float"}:
            kinds[path] = "float"
        elif len(set(found)) > 1:
            raise ValueError(
                f"nbddp.reduce: the ranks do not agree on {_name(path)}: "
                + ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
            )
    if op not in _OPS:
        raise ValueError(f"nbddp.reduce: op must be one of {', '.join(_OPS)}, got {op!r}")
    for path, kind in kinds.items():
        if kind not in ("int", "float") and " tensor of shape " not in kind:
            raise TypeError(
                f"nbddp.reduce: {_name(path)} is of type {kind}; it takes numbers, tensors, and "
                "dicts, lists and tuples of them"
            )
    return kinds


def _name(path: str) -> str:
    return f"value{path}" if path.startswith("[") else path or "the value"


def _differing(mine: T) -> list[T]:
    """What each rank brought, or nothing when all brought the same, which is quickly found out."""
    if place.world_size() == 1:
        return []
    mark = int.from_bytes(blake2b(repr(mine).encode(), digest_size=7).digest(), "big")
    marks = torch.tensor([mark, -mark], device=_meeting_place())
    dist.all_reduce(marks, dist.ReduceOp.MAX)
    highest, lowest = marks.tolist()
    return [] if highest == -lowest else gather(mine)


def _to_tensor(leaf: Any, kind: str) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        dtype = torch.int64 if kind == "int" else torch.float64
        number = int(leaf) if kind == "int" else float(leaf)
        return torch.tensor(number, dtype=dtype, device=_meeting_place())
    dtype = torch.int64 if leaf.dtype is torch.bool else leaf.dtype
    return leaf.detach().to(device=_meeting_place(), dtype=dtype)


def _reduce_together(tensors: dict[str, torch.Tensor], op: str) -> dict[str, torch.Tensor]:
    """All tensors of one type in one collective."""
    flat = torch.cat([each.reshape(-1) for each in tensors.values()])  # a copy
    if place.world_size() > 1 and flat.numel():
        dist.all_reduce(flat, _OPS[op])
    if op == "mean":
        flat = flat / place.world_size()
    parts = torch.split(flat, [each.numel() for each in tensors.values()])
    return {path: part.view(tensors[path].shape) for path, part in zip(tensors, parts, strict=True)}


def _back(result: torch.Tensor, leaf: Any, op: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    if leaf.dtype is torch.bool and op in ("min", "max"):
        result = result.bool()
    return result.to(leaf.device)


# ---- objects


class _Said(NamedTuple):
    """What a rank sends: why it failed, or something pickled."""

    failure: str = ""
    payload: bytes = b""


def gather(value: T) -> list[T]:
    """Every rank's object, on every rank, in order of rank.

    Args:
        value: anything that can be pickled. It should be small, and tensors on the CPU.

    Returns:
        As many objects as there are ranks.

    Raises:
        ValueError: on every rank, when the object of one of them cannot be pickled.

    >>> gather({"loss": 0.5})
    [{'loss': 0.5}]
    """
    if place.world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * place.world_size()
    with _on_device():
        dist.all_gather_object(everyone, _packed(value))
    for rank, said in enumerate(everyone):
        if said.failure:
            raise ValueError(f"nbddp.gather: rank {rank} cannot pickle it: {said.failure}")
    return [pickle.loads(said.payload) for said in everyone]


def on_main(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call something on rank 0 only, and return its result on every rank.

    Call it on every rank: the others wait for rank 0, as long as the process group's timeout.

    Returns:
        What ``fn`` returned; a pickled copy of it on the other ranks.

    Raises:
        RuntimeError: on the other ranks, when ``fn`` failed on rank 0, which raises its own error.
        TypeError: on rank 0, when the result cannot be pickled.

    >>> on_main(max, [3, 5])
    5
    """
    what = f"on_main({getattr(fn, '__name__', type(fn).__name__)})"
    if place.rank() != 0:
        return cast(T, pickle.loads(_hear_main()))
    with _failing_together(what):
        result = fn(*args, **kwargs)
        said = _packed(result) if place.world_size() > 1 else _Said()
        if said.failure:
            raise TypeError(f"nbddp.{what}: the result cannot be pickled: {said.failure}")
    _broadcast(said)
    return result


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Let rank 0 run the body first, for a download or a cache; then all others at once.

    Enter it on every rank: the others wait for rank 0, as long as the process group's timeout.

    Raises:
        RuntimeError: on the other ranks, when the body failed on rank 0, which raises its own
            error. They do not run the body then.

    >>> with main_rank_first():
    ...     downloaded = True
    """
    if place.rank() != 0:
        _hear_main()
        yield
        return
    with _failing_together("main_rank_first()"):
        yield
    _broadcast(_Said())


@contextmanager
def _failing_together(what: str) -> Iterator[None]:
    """When the body fails on rank 0, tell the ranks that wait for it."""
    try:
        yield
    except KeyboardInterrupt:  # it goes to every rank, so that nobody may be there to hear
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        _broadcast(_Said(failure=f"rank 0 failed in nbddp.{what}: {reason}"))
        raise


def _hear_main() -> bytes:
    said = _broadcast(_Said())
    if said.failure:
        raise RuntimeError(said.failure)
    return said.payload


def _broadcast(said: _Said) -> _Said:
    """Rank 0's words, on every rank."""
    if place.world_size() == 1:
        return said
    box: list[Any] = [said]
    with _on_device():
        dist.broadcast_object_list(box, src=0)
    return cast(_Said, box[0])


def _packed(value: object) -> _Said:
    try:
        return _Said(payload=pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises is told
        return _Said(failure=str(error))


def _meeting_place() -> torch.device:
    """Where tensors must be for the process group to send them; NCCL knows GPUs only."""
    meets_on_gpus = dist.is_initialized() and dist.get_backend() == "nccl"
    return place.device() if meets_on_gpus else torch.device("cpu")


def _on_device() -> AbstractContextManager[Any]:
    """Objects travel over the current GPU, which a script may not have set."""
    device = _meeting_place()
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
