"""The exercises of notebooks 00 to 03."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

import torch
import torch.distributed as dist

from nbddp.course.judging import RIGHT, first_hint, judge_number, tried_on_ranks
from nbddp.train import place
from nbddp.train.distributed import all_gather
from nbddp.train.meeting import meeting_place
from nbddp.train.models import prepare

IMAGES = "scikit-learn has 1,437 images to train on"

# ---- 00


def _updates(updates: Any) -> str:
    hints: dict[float, str] = {
        11: "The last batch of an epoch is smaller than the others, and is an update, too.",
        23: "So many have two ranks.",
        45: "That is one rank's: four take 32 images each.",
    }
    return judge_number(
        updates, 12, hints, f"{IMAGES}. How many does one update take, of all ranks?"
    )


def _waiting(rank: Any) -> str:
    if rank == 0:
        return RIGHT
    return "A rank waits in a call that it has made. Which one makes it, and who should come?"


# ---- 01


@tried_on_ranks
def _turned(turn: Any) -> str:
    world_size, rank = place.world_size(), place.rank()
    parcels = torch.arange(world_size, device=meeting_place(None)) * 10 + 1
    mine, left, right = (int(parcels[(rank + step) % world_size]) for step in (0, -1, 1))
    got = turn(parcels[rank : rank + 1].clone())
    if not isinstance(got, torch.Tensor) or got.numel() != 1:
        return "The function has to return the tensor that has arrived."
    hints: dict[float, str] = {
        mine: "It returns what this rank has sent, not what has arrived.",
        right: "It returns what the right neighbour has sent: the ring turns to the right.",
    }
    return judge_number(got.item(), left, hints, "That is not what the left one has sent.")


@tried_on_ranks
def _scattered(ring: Any) -> str:
    world_size, rank = place.world_size(), place.rank()
    mine = torch.arange(2 * world_size, device=meeting_place(None)) * 10 + rank
    total = torch.arange(2 * world_size) * 10 * world_size + sum(range(world_size))
    got = ring(mine.clone())
    if not isinstance(got, torch.Tensor):
        return "The function has to return this rank's chunk."
    chunks = [chunk.tolist() for chunk in total.tensor_split(world_size)]
    if got.tolist() == chunks[rank]:
        return RIGHT
    if got.tolist() in chunks:
        at = chunks.index(got.tolist())
        return (
            f"It is complete, but chunk {at} is not this rank's. Begin the ring one chunk before."
        )
    return "The chunk is not the sum over all ranks: each passes N - 1 times, and is added to."


def _sent(ring_mb: Any, naive_mb: Any, apart_s: Any, together_s: Any) -> str:
    steps = "Count the steps of one ring of eight: there are two halves."
    judged = (
        judge_number(
            ring_mb,
            175,
            {
                87.5: "That is one half of the ring; the sums have to go round, too.",
                200: "A rank keeps one chunk in each half: it passes seven of eight on.",
            },
            "A chunk is an eighth. How many does each rank pass on, in both halves?",
        ),
        judge_number(
            naive_mb,
            700,
            {100: "Rank 0 sends the sum to everybody.", 800: "Rank 0 sends nothing to itself."},
            "The naive way: all send to rank 0, which adds up and sends the sum back.",
        ),
        judge_number(
            apart_s, 0.7, {0.05: steps}, f"A thousand rings, one after the other. {steps}"
        ),
        judge_number(together_s, 0.7e-3, {5e-5: steps}, f"One ring for all. {steps}"),
    )
    return first_hint(*judged)


@tried_on_ranks
def _fetched(name_of: Any) -> str:
    downloads: list[str] = []

    def download() -> str:
        downloads.append(f"digits-{place.rank()}.zip")
        return downloads[-1]

    served = dist.TCPStore("127.0.0.1", 0, is_master=True) if place.rank() == 0 else None
    port = all_gather(served.port if served else 0)[0]
    got = name_of(served or dist.TCPStore("127.0.0.1", port), download)
    everyone = all_gather((got, len(downloads)))  # the store is there until all have what they want
    count, names = sum(number for _, number in everyone), [name for name, _ in everyone]
    if count != 1:
        return f"It was downloaded {count} times. Of those who count with `add`, one gets 1."
    if isinstance(got, bytes):
        return "A store gives bytes: decode them."
    if len(set(names)) > 1:
        return "The ranks came to know different names. `get` waits until a key is there."
    is_name = isinstance(got, str) and got.startswith("digits-")
    return RIGHT if is_name else "The name is what `download` returns."


# ---- 02


def _rate(lr: Any) -> str:
    if isinstance(lr, int | float) and isclose(lr, 2e-4, rel_tol=0.25):
        return RIGHT
    hints = {
        1e-4: "With the same rate two ranks make half as many updates, each as long as before.",
        2**0.5 * 1e-4: "The square root is the better guess for Adam; here it is SGD.",
        5e-5: "Half as many updates: should each be shorter, or longer?",
    }
    return judge_number(lr, 2e-4, hints, "What does the part on batch size say of twice the batch?")


@tried_on_ranks
def _noticed(differs: Any) -> str:
    same, other = (prepare(torch.nn.Linear(3, 1), sync_batch_norm=False) for _ in range(2))
    last = place.world_size() - 1
    if place.rank() == last:
        with torch.no_grad():
            next(other.parameters())[0, 0] += 1
    if bool(differs(same)):
        return "It says that models differ which are equal."
    if not bool(differs(other)):
        return f"A weight was another on rank {last}, and it was not noticed: compare over ranks."
    return RIGHT


def _epoch(steps: Any, last_batch: Any, twice: Any, steps_drop_last: Any) -> str:
    per_rank = "Each rank gets 1,437 / 4 images, rounded up."
    judged = (
        judge_number(
            steps, 12, {45: "That is without ranks.", 11: "The last batch counts."}, per_rank
        ),
        judge_number(last_batch, 8, {7: "That is with `drop_last` in the sampler."}, per_rank),
        judge_number(twice, 3, {1: "That many are left out with `drop_last`."}, per_rank),
        judge_number(steps_drop_last, 11, {12: "A batch that is not full is left out."}, per_rank),
    )
    return first_hint(*judged)


def _buckets(large: Any, small: Any) -> str:
    judged = (
        judge_number(
            large, 1, {}, "All gradients together are 6 MiB: how many buckets of 100 MiB?"
        ),
        judge_number(
            small,
            12,
            {6: "A layer has a weight and a bias."},
            "No two parameters share so small a bucket: how many parameters are there?",
        ),
    )
    return first_hint(*judged)


# ---- 03


def _gradients(rank_0: Any, rank_1: Any) -> str:
    names = {str(each).removeprefix("torch.") for each in (rank_0, rank_1)}
    if names == {"float32"}:
        return RIGHT
    if "bfloat16" in names:
        return "Logits are of that type under autocast. Gradients have the type of their weights."
    return "Ask a parameter for `.grad.dtype`, on each rank."


def _scale(after_40: Any) -> str:
    hints = {
        65536: "That is the scale at the beginning: what does a skipped step do to it?",
        65536 * 2.0**40: "It falls when a step is skipped.",
    }
    return judge_number(
        after_40, 65536 / 2**40, hints, "It begins at 65536; each skipped step halves it."
    )


def _next_above_one(number: Any) -> str:
    finest = {
        torch.finfo(torch.float32).eps: "That is the next one of fp32.",
        torch.finfo(torch.float16).eps: "That is the next one of fp16, which has three bits more.",
        torch.finfo(torch.bfloat16).eps / 2: "That much is rounded away: it is halfway.",
    }
    otherwise = "`bf16` has 7 bits behind the point. Or ask: `torch.finfo(torch.bfloat16)`."
    if not isinstance(number, int | float):
        return otherwise
    return judge_number(number - 1, torch.finfo(torch.bfloat16).eps, finest, otherwise)


JUDGES: dict[str, Callable[..., str]] = {
    "00.1": _updates,
    "00.2": _waiting,
    "01.1": _turned,
    "01.2": _scattered,
    "01.3": _sent,
    "01.4": _fetched,
    "02.1": _rate,
    "02.2": _noticed,
    "02.3": _epoch,
    "02.4": _buckets,
    "03.1": _gradients,
    "03.2": _scale,
    "03.3": _next_above_one,
}
