"""The exercises of notebooks 04 to 07."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbddp.course.judging import (
    FUNCTION,
    RIGHT,
    as_plain,
    first_hint,
    judge_number,
    tried_on_ranks,
)
from nbddp.train import place
from nbddp.train.meeting import meeting_place

# ---- 04


def _begun(begin: Any) -> str:
    if not callable(begin):
        return FUNCTION
    dataset = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=1, rank=0, shuffle=False
    )
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    with torch.random.fork_rng(devices=[]):
        saved = torch.manual_seed(7).get_state()
        torch.rand(3)  # what happened since
        batches = begin(loader, saved)
        first = next(batches, None) if hasattr(batches, "__next__") else None
        is_restored = torch.equal(torch.get_rng_state(), saved)
    if not isinstance(first, list) or first[0].tolist() != [0, 1, 2, 3]:
        return "The function has to return the iterator, with all batches still to come."
    if is_restored:
        return RIGHT
    return "The generator is not in the saved state: what has drawn from it after it was restored?"


def _found(steps: Any) -> str:
    if not isinstance(steps, Collection) or isinstance(steps, str):
        return "Give all steps from which it may resume, as a set."
    given = {str(as_plain(step)) for step in steps}
    if given == {"1", "2"}:
        return RIGHT
    if given == {"1"}:
        return "And if the thread has renamed its draft before the kill?"
    if given == {"2"}:
        return "Nothing holds the kill back until the thread is through."
    return "Under which names do whole checkpoints lie there?"


def _orders(ranks: Any) -> str:
    hints: dict[float, str] = {
        2: "a + b = b + a, in floats too: two values have but one order.",
        4: "It was seen with four. Does it take so many?",
    }
    return judge_number(ranks, 3, hints, "How many floats must be added for the order to matter?")


def _intervals(minutes: Any, share: Any, minutes_later: Any, share_later: Any) -> str:
    in_seconds = "The interval is asked for in minutes."
    both = "Saves cost cost / interval, failures half an interval in the time between two of them."
    share_hints = {0.043: both, 8.6: "A share is between 0 and 1."}
    judged = (
        judge_number(minutes, 15.5, {930: in_seconds}, "sqrt(2 * cost * time between failures)"),
        judge_number(share, 0.086, share_hints, both),
        judge_number(
            minutes_later,
            3.46,
            {208: in_seconds, 15.1: "The loop waits for 2 of the 40 seconds."},
            "The formula is the same, with what still holds the loop.",
            within=0.03,
        ),
        judge_number(share_later, 0.0192, {1.92: share_hints[8.6]}, both, within=0.03),
    )
    return first_hint(*judged)


# ---- 05


def _named(rank: Any) -> str:
    if rank == 1:
        return RIGHT
    return "That rank waited and lost patience. Which one was elsewhere meanwhile?"


def _often(on_one: Any, on_1000: Any) -> str:
    in_seconds = "The interval is asked for in minutes."
    formula = "sqrt(2 * s * m): how long is m, of the whole job, in seconds?"
    hints: dict[float, str] = {
        588: in_seconds,
        310: "A thousand machines fail a thousand times as often.",
        0.31: "The interval goes with the root of the time between failures.",
    }
    return first_hint(
        judge_number(on_one, 310, {18590: in_seconds}, formula),
        judge_number(on_1000, 9.8, hints, formula, within=0.03),
    )


@tried_on_ranks
def _left_out(is_left_out: Any) -> str:
    rank, last = place.rank(), place.world_size() - 1
    cases: dict[str, Collection[int]] = {
        "no loss was NaN": (),
        f"only rank {last}'s loss was NaN": (last,),
        "only rank 0's loss was NaN": (0,),
        "all losses were NaN": range(last + 1),
    }
    said = {}
    for case, ranks in cases.items():  # all of them, as a collective may be in there
        loss = torch.tensor(float("nan") if rank in ranks else 0.5, device=meeting_place(None))
        said[case] = bool(is_left_out(loss))
    for case, ranks in cases.items():
        if said[case] and not ranks:
            return f"When {case}, it leaves the step out."
        if not said[case] and ranks:
            return f"When {case}, rank {rank} goes on into `backward()`: nobody may, or all."
    return RIGHT


def _struck(named_first: Any, keeps_names: Any) -> str:
    if (named_first, keeps_names) == (0, 1):
        return RIGHT
    if named_first != 0:
        return "Which process got the signal? What the other one says is a consequence."
    return "Names die with their process. Which process is alive?"


# ---- 06


@tried_on_ranks
def _shortened(shorten: Any) -> str:
    rank, last = place.rank(), place.world_size() - 1
    mine = [[*range(4 if rank == longer else 3)] for longer in (last, 0)]
    given = [shorten([*batches]) for batches in mine]  # all of them, as each is a collective
    got = [[*each] if isinstance(each, Iterable) else [] for each in given]
    fewest = 3 if last else 4
    if got == [batches[:fewest] for batches in mine]:
        return RIGHT
    if got == mine:
        return "This rank would go on alone: all have to take as many as the one with fewest."
    return "It has to give this rank's batches from the first on, as many as each rank has."


def _dearer(without_ms: Any, with_ms: Any) -> str:
    for given in (without_ms, with_ms):
        if not isinstance(given, int | float) or isinstance(given, bool) or not given > 0:
            return "Two times of one call are asked for, in milliseconds."
    if with_ms > 1.2 * without_ms:
        return RIGHT
    return "It should cost more: were the ranks started with the variable (`--fresh`), and warm?"


def _slow_steps(with_4: Any, with_1000: Any) -> str:
    share = "A share is between 0 and 1."
    hints = {
        0.01: "That is one rank's. A step is fast only if it is on all of them.",
        0.961: "That many are fast.",
        3.94: share,
    }
    return first_hint(
        judge_number(with_4, 0.0394, hints, "When is a step of four ranks fast?"),
        judge_number(
            with_1000,
            1,
            {
                10: "More than all steps cannot be slow: multiply the chances of fast ones.",
                100: share,
            },
            "How likely is it that each of a thousand ranks is fast?",
        ),
    )


# ---- 07


def _fits(stage: Any, gigabytes: Any) -> str:
    earlier = "It fits. Does an earlier stage, too?"
    stages: dict[float, str] = {0: "That is DDP: 16 bytes each.", 2: earlier, 3: earlier}
    hints: dict[float, str] = {
        112: "That is what a rank holds without any stage.",
        70: "That is with four ranks; here are eight.",
        91: "The gradients are views of the buckets: they count once.",
    }
    each = "Seven billion times: 4 for itself, 4 for its gradient, and?"
    return first_hint(
        judge_number(stage, 1, stages, "The stages are 0, which is DDP, to 3."),
        judge_number(gigabytes, 63, hints, each),
    )


def _parts(gathers: Any, scatters: Any) -> str:
    if (gathers, scatters) == (10, 5):
        return "So many there are with each block a part of its own."
    judged = (
        judge_number(
            gathers,
            2,
            {1: "The parameters are freed after the forward pass. What does the backward need?"},
            "One part is one gathering in each pass that needs it.",
        ),
        judge_number(scatters, 1, {2: "There are gradients in one pass only."}, "One part."),
    )
    return first_hint(*judged)


def _learnt(changed: Any) -> str:
    return judge_number(
        changed,
        0,
        {18: "So it should be. Which tensors does the optimizer hold, and which the model?"},
        "Either the optimizer has the model's parameters, or it has others.",
    )


JUDGES: dict[str, Callable[..., str]] = {
    "04.1": _begun,
    "04.2": _found,
    "04.3": _orders,
    "04.4": _intervals,
    "05.1": _named,
    "05.2": _often,
    "05.3": _left_out,
    "05.4": _struck,
    "06.1": _shortened,
    "06.2": _dearer,
    "06.3": _slow_steps,
    "07.1": _fits,
    "07.2": _parts,
    "07.3": _learnt,
}
