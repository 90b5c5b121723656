"""The exercises of notebooks 08 to 14."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from operator import index
from typing import Any

import torch

from nbddp.checks.book import look_at
from nbddp.checks.source import Source
from nbddp.course.judging import FUNCTION, RIGHT, as_plain, first_hint, judge_number, tried_on_ranks
from nbddp.train import place
from nbddp.train.distributed import all_gather

# ---- 08


def _places(local_rank: Any, node_rank: Any, world_size: Any) -> str:
    judged = (
        judge_number(
            local_rank,
            1,
            {9: "That is its rank. Local ranks begin at 0 on each node.", 2: "The first one is 0."},
            "Ranks 0 to 7 are on the first node. The others are counted from 0 again.",
        ),
        judge_number(
            node_rank, 1, {0: "That node has ranks 0 to 7.", 2: "The first one is 0."}, "Two nodes."
        ),
        judge_number(world_size, 12, {16: "The second node has fewer GPUs."}, "All ranks count."),
    )
    return first_hint(*judged)


def _passes(backward_passes: Any) -> str:
    hints: dict[float, str] = {
        4: "The network would be busy for a little longer than the ranks compute.",
        10: "The network would be busy for a third of the time.",
        1: "One average takes several times as long as one backward pass.",
    }
    return judge_number(
        backward_passes, 5, hints, "How long is one average under way? It needs 3 GB of each rank."
    )


def _left_out(agent: Any) -> str:
    if agent == "C":
        return RIGHT
    if agent in ("A", "B"):
        return f"{agent} is told that the world has three nodes. Who waits for an address?"
    return 'Name one of them: "A", "B" or "C".'


# ---- 09


def _ring_sends(by_2: Any, by_8: Any, by_1000: Any) -> str:
    half = "That is one half of the ring: the sums have to go round, too."
    formula = "2 (N - 1) / N times the tensor, from each rank."
    judged = (
        judge_number(by_2, 16, {8: half, 32: "N - 1 of N parts, with N = 2."}, formula),
        judge_number(by_8, 28, {14: half, 224: "That is what all eight send."}, formula),
        judge_number(
            by_1000, 32, {16: half, 16000: "A ring does not send everything to everybody."}, formula
        ),
    )
    return first_hint(*judged)


def _by_turns(step_ms: Any, even_ms: Any) -> str:
    mean = "That is the mean over the ranks. A step is over when its slowest rank is."
    judged = (
        judge_number(step_ms, 80, {35: mean, 20: "In each step one of them is slow."}, mean),
        judge_number(
            even_ms,
            35,
            {
                20: "The extra work is not left out, it is dealt out.",
                40: "The slow one has its own 20 ms within its 80.",
            },
            "Add up what four ranks do in one step, and deal it out.",
        ),
    )
    return first_hint(*judged)


# ---- 10


def _silenced(lines: Any) -> str:
    if not isinstance(lines, str):
        return f"The lines are asked for, as text; this is a {type(lines).__name__}."
    try:
        source = Source(lines)
    except SyntaxError as error:
        return f"That is no Python: {error.msg}, line {error.lineno}."
    kept = [line.split("#")[0].strip() for line in lines.splitlines() if line.split("#")[0].strip()]
    if kept != ["if rank == 5:", "dist.all_reduce(x)", "dist.all_reduce(y)"]:
        return "Leave the three lines as they are, and add a comment."
    found = {each.line for each in look_at(source) if each.rule == "ND101"}
    calls = [number for number, line in enumerate(lines.splitlines(), 1) if "all_reduce" in line]
    hints = {
        (False, True): RIGHT,
        (False, False): "It is silent about both. A comment on a line of its own holds for all.",
        (True, False): "The second one is silent, the first one is not.",
        (True, True): "It still finds both. The comment has `nbddp: ok` and the name of the rule.",
    }
    return hints[calls[0] in found, calls[1] in found]


@tried_on_ranks
def _stops(stops: Any) -> str:
    is_last = place.rank() == place.world_size() - 1
    large, small, mixed = (
        all_gather(bool(stops(loss))) for loss in (1.0, 0.01, 0.01 if is_last else 1.0)
    )
    if any(large):
        return "The loss was 1.0 on all ranks, and it stopped."
    if not all(small):
        return "The loss was 0.01 on all ranks, and it went on."
    if len(set(mixed)) > 1:
        return "The loss was small on one rank: some stop, some go on. They have to decide alike."
    return RIGHT


# ---- 11


def _faster(twice: Any, eight_times: Any) -> str:
    judged = (
        judge_number(
            twice,
            2,
            {
                1.25: "The sending is hidden: it takes no time beside a longer computing.",
                1: "The batch of all stays: each rank computes half of it.",
            },
            "How long does each rank compute? What is longer, that or the sending?",
        ),
        judge_number(
            eight_times,
            100 / 30,
            {8: "A step is no shorter than its sending.", 100 / 42.5: "The computing is hidden."},
            "What is longer then, the computing or the sending?",
        ),
    )
    return first_hint(*judged)


def _unshared(share: Any) -> str:
    hints: dict[float, str] = {
        1.5873: "As a part of 1, not in per cent.",
        1 / 32: "With so much, no number of ranks would be more than 32 times as fast.",
        0.5: "With a half, no number of ranks would be more than twice as fast.",
    }
    return judge_number(share, 1 / 63, hints, "Try shares with the function `amdahl`.")


def _weak(of_all: Any, steps: Any) -> str:
    judged = (
        judge_number(
            of_all,
            256,
            {64: "That is one rank's, or the strong question's.", 16: "That is a strong one's."},
            "Each of four ranks takes 64.",
        ),
        judge_number(
            steps,
            6,
            {23: "That is one rank's alone.", 5: "The last batch counts, though it is not full."},
            "1,437 images are dealt out to four ranks, and each takes 64 at a time.",
        ),
    )
    return first_hint(*judged)


# ---- 12


def _chunks(micro_batches: Any) -> str:
    hints: dict[float, str] = {
        63: "Then it is a tenth, and not below.",
        71: "That is m + p - 1.",
        28: "That is for a fifth.",
        73: "There are p - 1 = 7 that wait.",
    }
    return judge_number(
        micro_batches, 64, hints, "(p - 1) / (m + p - 1) is idle, with p = 8.", within=0
    )


def _gathered(collectives: Any) -> str:
    hints: dict[float, str] = {
        1: "The inner values have to be put together, and the result, too.",
        0: "Each rank has a part of the inner values; the second layer wants all of them.",
        4: "Count the forward pass alone.",
    }
    return judge_number(collectives, 2, hints, "Count with `CommDebugMode`.")


def _mates(mates: Any) -> str:
    if not callable(mates):
        return FUNCTION
    for rank in (0, 19, 63):
        given = as_plain(mates(rank))
        try:
            got = sorted(map(index, given))
        except TypeError:
            return "The function has to return ranks: a list, or a range."
        first = rank - rank % 8
        if got == [*range(first, first + 8)]:
            continue
        if rank not in got:
            return f"Rank {rank} is in its own row, too."
        if len({each // 8 for each in got}) > 1:
            return f"Those of rank {rank} are on several machines: activations would go between."
        return f"Of rank {rank}'s machine, {len(got)} are in it: a machine has eight."
    return RIGHT


# ---- 13


def _trainer(norm: Any, skipped: Any) -> str:
    judged = (
        judge_number(
            norm,
            1 / 65536,
            {1: "That is what the trainer wanted.", 65536: "The scaler divides by the scale."},
            "Clipped to 1, and then divided by the scale.",
        ),
        judge_number(
            skipped,
            6,
            {64: "Each skipped step halves the scale.", 16: "Down to 1,024, not to 1."},
            "From 65,536 down to 1,024, by halves.",
        ),
    )
    return first_hint(*judged)


def _counted(one: Any, two: Any) -> str:
    bits = "That is in bits: take the natural logarithm."
    nothing = {log(59): "That is for letters that are all equally frequent."}
    judged = (
        judge_number(
            one,
            3.106,
            {3.106 / log(2): bits} | nothing,
            "Each letter's share of the seen text; the mean of minus its logarithm, held out.",
        ),
        judge_number(
            two,
            2.39,
            {2.39 / log(2): bits, 3.106: "That is without the letter before."} | nothing,
            "Each pair's share of the pairs that begin with its first letter. Count one more of "
            "each: a pair that was never seen has no share.",
        ),
    )
    return first_hint(*judged)


def _micro_steps(on_one: Any, on_four: Any) -> str:
    same = "Windows of a rank, times ranks, times micro-steps: 32 as before."
    judged = (
        judge_number(on_one, 4, {2: "That would be 16 windows a step."}, same),
        judge_number(on_four, 1, {2: "That would be 64 windows a step."}, same),
    )
    return first_hint(*judged)


# ---- 14


def _strict(server: Any) -> str:
    if not isinstance(server, type):
        return "Give the class itself, without making a server of it: it is tried out here."
    made = server()
    missing = [name for name in ("model", "version", "history", "push") if not hasattr(made, name)]
    if missing:
        return f"It has no `{missing[0]}`: begin with the notebook's server."
    gradients = [torch.ones_like(each) for each in made.model.parameters()]
    weight = next(made.model.parameters()).detach().clone()
    made.version = 10
    answer = made.push(1, 5, gradients, 1.0)
    if made.version != 10 or not weight.equal(next(made.model.parameters())):
        return "A gradient that was stale by five updates has moved the model."
    if made.history:
        return "What was refused is in the history: it counts as a contribution."
    if answer is not True:
        return "A refused trainer is told nothing: it stops, as if the server were closed."
    made.push(1, 6, gradients, 1.0)
    if made.version != 11:
        return "A gradient that is stale by four is not stale by more than four."
    return RIGHT


def _contexts(gradient: Any, moved: Any) -> str:
    judged = (
        judge_number(
            gradient,
            3,
            {6: "A context holds what came through it, and nothing of the other one's."},
            "Three rows of ones, through one context.",
        ),
        judge_number(
            moved,
            0.6,
            {0.3: "Each context has a step of its own.", 6: "A step is lr times the gradient."},
            "Two steps of lr times the gradient.",
        ),
    )
    return first_hint(*judged)


JUDGES: dict[str, Callable[..., str]] = {
    "08.1": _places,
    "08.2": _passes,
    "08.3": _left_out,
    "09.1": _ring_sends,
    "09.2": _by_turns,
    "10.1": _silenced,
    "10.2": _stops,
    "11.1": _faster,
    "11.2": _unshared,
    "11.3": _weak,
    "12.1": _chunks,
    "12.2": _gathered,
    "12.3": _mates,
    "13.1": _trainer,
    "13.2": _counted,
    "13.3": _micro_steps,
    "14.1": _strict,
    "14.2": _contexts,
}
