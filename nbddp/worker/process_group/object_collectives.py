"""Collectives for objects: JSON values, and the bytes of tensors.

Gloo's connections have no authentication, so nothing that comes over them is unpickled.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbddp.reporting.this_rank import communication_device

LARGE_BYTES = 1 << 20  # bytes; larger tensors are sent alone
BATCH_BYTES = 16 << 20  # bytes of small tensors that are sent together
FRAME_BYTES = 512  # bytes that each rank sends in any case; the rest follows
POLL_INTERVAL = 0.05  # seconds between two checks whether the group is broken
_LENGTH = struct.Struct("<q")
_ROWS = 64
T = TypeVar("T")


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return the JSON values of all ranks of a group, on every rank, in rank order.

    The values go through rank 0. An all_gather goes around a ring, and each of its steps waits for
    the step before. With 64 ranks on two cores it takes half a second; this takes a twentieth of
    that.
    """
    data = json.dumps(value).encode()
    frame = (_LENGTH.pack(len(data)) + data)[:FRAME_BYTES]
    lengths = [FRAME_BYTES] * dist.get_world_size(group)
    frames = _all_gather_bytes(frame.ljust(FRAME_BYTES, b"\0"), lengths, group)
    sizes = [_LENGTH.unpack_from(each)[0] for each in frames]
    space = FRAME_BYTES - _LENGTH.size
    texts = [each[_LENGTH.size :][:size] for each, size in zip(frames, sizes, strict=True)]
    more = [max(0, size - space) for size in sizes]
    if any(more):
        rest = _all_gather_bytes(data[space:].ljust(max(more), b"\0"), more, group)
        texts = [first + last for first, last in zip(texts, rest, strict=True)]
    return [json.loads(each) for each in texts]


def _all_gather_bytes(data: bytes, sizes: Sequence[int], group: Any) -> list[bytes]:
    """Return the first ``sizes[rank]`` bytes of each rank's data, on every rank."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(communication_device())
    parts = [torch.empty_like(sent) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(sent, parts, group=group, group_dst=0)
    if parts is None:
        gathered = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
    else:
        gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    dist.broadcast(gathered, group=group, group_src=0)
    return [each.numpy().tobytes() for each in gathered.cpu().split(list(sizes))]


def split_into_batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split items into batches for sending: large items alone, small ones up to BATCH_BYTES.

    No batch is empty. Joining large items costs more than sending them one by one (measured).
    """
    batch: list[T] = []
    space = BATCH_BYTES
    for item in items:
        size = size_of(item)
        if size >= LARGE_BYTES:
            yield [item]
            continue
        if size > space:
            yield batch
            batch, space = [], BATCH_BYTES
        if size:
            batch.append(item)
            space -= size
    if batch:
        yield batch


def wait_for_message(work: Any, is_broken: Callable[[], bool]) -> None:
    """Wait until a message was sent or received, or until its process group is broken.

    If the other end of a message has died, Gloo may never wake the wait for it; see
    :class:`~nbddp.worker.process_group.connections.Connections`. So on the CPU a separate thread
    waits. If the group is broken, that thread keeps waiting; it ends with the group's timeout.

    Args:
        work: result of ``isend`` or ``irecv``.
        is_broken: returns whether the group is broken.

    Raises:
        RuntimeError: the group is broken, or Gloo reported an error.
    """
    if communication_device().type != "cpu":  # with NCCL, wait() makes this thread's stream wait
        work.wait()
        return
    is_over = threading.Event()
    failed: list[Exception] = []

    def wait() -> None:
        # On the nbddp-message thread.
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            failed.append(error)
        is_over.set()

    threading.Thread(target=wait, name="nbddp-message", daemon=True).start()
    while not is_over.wait(POLL_INTERVAL):
        if is_broken():
            raise RuntimeError("Gloo will not deliver the message: its process group is broken")
    if failed:
        raise failed[0]


def broadcast_tensors(tensors: Sequence[torch.Tensor], source: int, group: Any = None) -> None:
    """Broadcast tensors of any types and layouts from one rank, and fill those of the others.

    Args:
        tensors: as many on each rank, with equal types and shapes.
        source: rank in the group.
        group: the process group; None for the default group.
    """
    for batch in split_into_batches(tensors, lambda tensor: tensor.nbytes):
        # a step count may be on the CPU
        parts = [_tensor_bytes(each).to(communication_device()) for each in batch]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        dist.broadcast(sent, group=group, group_src=source)
        sizes = [each.nbytes for each in batch]
        with torch.no_grad():
            for tensor, part in zip(batch, sent.split(sizes), strict=True):
                is_aligned = part.storage_offset() % tensor.element_size() == 0
                aligned = part if is_aligned else part.clone()
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return numbers that differ for most different values of these tensors."""
    batches = split_into_batches(tensors, lambda tensor: tensor.nbytes)
    # a step count may be on the CPU
    parts = ([_tensor_bytes(each).to(batch[0].device) for each in batch] for batch in batches)
    return [int(_fingerprint(each[0] if len(each) == 1 else torch.cat(each))) for each in parts]


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that depend on the values and on their order."""
    data = _tensor_bytes(tensor)
    if data.storage_offset() % 8:  # int64 views must be aligned
        data = data.clone()
    whole = data.numel() // (8 * _ROWS) * (8 * _ROWS)
    sums = data[:whole].view(torch.int64).view(_ROWS, -1).sum(dim=1)
    odd = torch.arange(1, 2 * _ROWS, 2, device=data.device) * 0x9E3779B97F4A7C1
    return (sums * odd).sum() + zlib.crc32(data[whole:].cpu().numpy().data)
