"""The GPU of a rank in words: what the rank uses of it, and the whole GPU."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.errors import say_ranks
from nbddp.formatting import format_bytes
from nbddp.record.snapshot import RankSnapshot

_MAKERS = ("NVIDIA ", "Tesla ", "GeForce ")  # left out in a table


def say_gpu(each: RankSnapshot) -> Iterator[str]:
    """Yield the facts about the GPU, the most important first: a table cuts the end."""
    use = each.gpu_use
    if not each.gpu:
        return
    if use.load >= 0:
        yield f"{use.load:.0f} %"
    if each.gpu_memory:
        yield format_bytes(each.gpu_memory)
    if each.gpu_ranks:
        yield f"shared with {say_ranks(each.gpu_ranks)}"
    if use.others > 0:
        yield f"others {format_bytes(use.others)}"
    yield short_gpu(each.gpu)


def say_whole_gpu(each: RankSnapshot) -> str:
    """Return all facts about the GPU, one on each line."""
    use = each.gpu_use
    tensors, reserved = format_bytes(each.gpu_memory), format_bytes(each.gpu_reserved)
    lines = [each.gpu, f"rank {each.rank}: {tensors} in tensors, {reserved} reserved by torch"]
    if use.others >= 0:
        lines.append(f"processes that are no ranks: {format_bytes(use.others)}")
    if use.total:
        lines.append(f"in use: {format_bytes(use.used)} of {format_bytes(use.total)}")
    if use.load >= 0:
        lines.append(f"busy: {use.load:.0f} % of the last second")
    if each.gpu_ranks:
        lines.append(f"shared with {say_ranks(each.gpu_ranks)}")
    return "\n".join(lines)


def short_gpu(name: str) -> str:
    """Return the name of a GPU without its maker.

    >>> short_gpu("NVIDIA H100 80GB HBM3")
    'H100 80GB HBM3'
    """
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    return name
