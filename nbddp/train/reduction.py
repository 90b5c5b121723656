"""Numbers of all ranks put together."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

import torch
import torch.distributed as dist

from nbddp.errors import ArgumentError
from nbddp.train import place
from nbddp.train.meeting import Group, by_rank, check_member, differing, meeting_place

Op = Literal["sum", "mean", "min", "max"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_TORCHS = {**_OPS, "mean": dist.ReduceOp.AVG}
_INT64 = range(-(1 << 63), 1 << 63)


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
    how = _op_name(op)
    leaves = dict(sorted(_flatten(value).items()))
    kinds = _settle({path: _kind(leaf) for path, leaf in leaves.items()}, how, group)
    tensors = {path: _to_tensor(leaf, kinds[path], group) for path, leaf in leaves.items()}
    results: dict[str, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors.values()):  # in the same order
        alike = {path: each for path, each in tensors.items() if each.dtype == dtype}
        results |= _reduce_together(alike, how, group)
    return _rebuild(value, {path: _back(results[path], leaves[path], how) for path in leaves})


def _op_name(op: object) -> str:
    """Ours for one of torch's; what is neither is refused later, on all ranks."""
    return next((name for name, each in _TORCHS.items() if op == each), str(op))


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


def _settle(kinds: dict[str, str], op: str, group: Group) -> dict[str, str]:
    """See that all ranks brought the same; what is an int here and a float there is a float."""
    everyone = differing("nbddp.all_reduce", {**kinds, "op": op}, group)
    for path in dict.fromkeys(path for theirs in everyone.values() for path in theirs):
        found = {rank: theirs.get(path, "nothing") for rank, theirs in everyone.items()}
        if set(found.values()) == {"int", "float"}:
            kinds[path] = "float"
        elif len(set(found.values())) > 1:
            raise ArgumentError(
                f"nbddp.all_reduce: the ranks do not agree on {_name(path)}: {by_rank(found)}"
            )
    if op not in _OPS:
        raise ArgumentError(f"nbddp.all_reduce: op must be one of {', '.join(_OPS)}, got {op!r}")
    for path, kind in kinds.items():
        if kind not in ("int", "float") and " tensor of shape " not in kind:
            raise TypeError(
                f"nbddp.all_reduce: {_name(path)} is of type {kind}; it takes numbers, tensors, "
                "and dicts, lists and tuples of them"
            )
    return kinds


def _name(path: str) -> str:
    return f"value{path}" if path.startswith("[") else path or "the value"


def _to_tensor(leaf: Any, kind: str, group: Group) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        dtype = torch.int64 if kind == "int" else torch.float64
        number = int(leaf) if kind == "int" else float(leaf)
        return torch.tensor(number, dtype=dtype, device=meeting_place(group))
    dtype = torch.int64 if leaf.dtype is torch.bool else leaf.dtype
    return leaf.detach().to(device=meeting_place(group), dtype=dtype)


def _reduce_together(
    tensors: dict[str, torch.Tensor], op: str, group: Group
) -> dict[str, torch.Tensor]:
    """All tensors of one type in one collective."""
    flat = torch.cat([each.reshape(-1) for each in tensors.values()])  # a copy
    world_size = place.world_size(group)
    if world_size > 1 and flat.numel():
        dist.all_reduce(flat, _OPS[op], group)
    if op == "mean":
        flat = flat / world_size
    parts = torch.split(flat, [each.numel() for each in tensors.values()])
    return {path: part.view(tensors[path].shape) for path, part in zip(tensors, parts, strict=True)}


def _back(result: torch.Tensor, leaf: Any, op: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    if leaf.dtype is torch.bool and op in ("min", "max"):
        result = result.bool()
    return result.to(leaf.device)
