"""The exercises whose answer is code, or two values that depend on each other.

Each function takes the answer and returns a hint, or :data:`RIGHT`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbddp.checks.checker import check_source
from nbddp.checks.source import CellSource
from nbddp.course.grading import NEEDS_FUNCTION, RIGHT, as_python_value, grade_number, needs_ranks
from nbddp.course.mesh_project import parallelize, train, whole_state
from nbddp.course.own_classes import own_adam, own_ddp
from nbddp.course.parallel_classes import column_parallel, my_fsdp, row_parallel
from nbddp.course.survival import survives
from nbddp.course.training_functions import train_on_all_ranks
from nbddp.train import this_rank
from nbddp.train.call_agreement import communication_device
from nbddp.train.collectives import all_gather
from nbddp.train.prepare import prepare


@needs_ranks
def _turn_right(turn: Any) -> str:
    world_size, rank = this_rank.world_size(), this_rank.rank()
    parcels = torch.arange(world_size, device=communication_device()) * 10 + 1
    mine, left, right = (int(parcels[(rank + step) % world_size]) for step in (0, -1, 1))
    got = turn(parcels[rank : rank + 1].clone())
    if not isinstance(got, torch.Tensor) or got.numel() != 1:
        return "The function has to return the tensor that has arrived."
    hints: dict[float, str] = {
        mine: "It returns the tensor that this rank has sent, not the one that has arrived.",
        right: "It returns the right neighbour's tensor: the ring turns to the right.",
    }
    return grade_number(got.item(), left, hints, "That is not the left neighbour's tensor.")


@needs_ranks
def _ring_reduce_scatter(ring: Any) -> str:
    world_size, rank = this_rank.world_size(), this_rank.rank()
    mine = torch.arange(2 * world_size, device=communication_device()) * 10 + rank
    total = torch.arange(2 * world_size) * 10 * world_size + sum(range(world_size))
    got = ring(mine.clone())
    if not isinstance(got, torch.Tensor):
        return "The function has to return this rank's chunk."
    chunks = [chunk.tolist() for chunk in total.tensor_split(world_size)]
    if got.tolist() == chunks[rank]:
        return RIGHT
    if got.tolist() in chunks:
        at = chunks.index(got.tolist())
        return f"The sum is complete, but chunk {at} is not this rank's. Start one chunk earlier."
    return "The chunk is not the sum over all ranks: send each chunk N - 1 times, adding to it."


@needs_ranks
def _download_once(name_of: Any) -> str:
    downloads: list[str] = []

    def download() -> str:
        downloads.append(f"digits-{this_rank.rank()}.zip")
        return downloads[-1]

    served = dist.TCPStore("127.0.0.1", 0, is_master=True) if this_rank.rank() == 0 else None
    port = all_gather(served.port if served else 0)[0]
    got = name_of(served or dist.TCPStore("127.0.0.1", port), download)
    everyone = all_gather((got, len(downloads)))  # keeps the store until all ranks have used it
    count, names = sum(number for _, number in everyone), [name for name, _ in everyone]
    if count != 1:
        return f"It was downloaded {count} times. If all ranks call `add`, only one gets 1."
    if isinstance(got, bytes):
        return "A store returns bytes: decode them."
    if len(set(names)) > 1:
        return "The ranks got different names. `get` waits until a key exists."
    is_name = isinstance(got, str) and got.startswith("digits-")
    return RIGHT if is_name else "Return the name that `download` returns."


def _missing_ranks(missing: Any) -> str:
    if not callable(missing):
        return NEEDS_FUNCTION
    try:
        found = _call_with_absent_ranks(missing, absent=(1, 3), seconds=1.0)
        found += _call_with_absent_ranks(missing, late=2, seconds=20.0)
    except dist.DistStoreError:
        return "The wait ends with an error: catch it, and then look which keys exist."
    for rank, right, given in found:
        if not isinstance(given, Collection) or isinstance(given, str):
            return "The function has to return ranks: a list, also if no rank is missing."
        if rank in given:
            return f"Rank {rank} calls the function, but finds itself missing: set a key first."
        if sorted(given) == right:
            continue
        if 2 in given:
            return "Rank 2 comes 0.3 s later, in time: wait for all keys before you look."
        return "Return the missing ranks: their keys do not exist."
    return RIGHT


def _call_with_absent_ranks(
    missing: Any, *, seconds: float, absent: Sequence[int] = (), late: int = -1
) -> list[tuple[int, list[int], Any]]:
    """Call a function as four ranks with one store. Return each rank, what is right, the result."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))  # of calls without a timeout

    def come(rank: int) -> tuple[int, list[int], Any]:
        time.sleep(0.3 if rank == late else 0)
        return rank, [*absent], missing(store, rank, 4, seconds)

    with ThreadPoolExecutor(4) as pool:
        return [*pool.map(come, (rank for rank in range(4) if rank not in absent))]


@needs_ranks
def _models_differ(differs: Any) -> str:
    same, other = (prepare(torch.nn.Linear(3, 1), sync_batch_norm=False) for _ in range(2))
    last = this_rank.world_size() - 1
    if this_rank.rank() == last:
        with torch.no_grad():
            next(other.parameters())[0, 0] += 1
    if bool(differs(same)):
        return "The models are equal, but your function says that they differ."
    if not bool(differs(other)):
        return f"A weight differs on rank {last}, but your function says no: compare over ranks."
    return RIGHT


def _next_bf16_above_one(number: Any) -> str:
    finest = {
        torch.finfo(torch.float32).eps: "That is the next number in fp32.",
        torch.finfo(torch.float16).eps: "That is the next one in fp16, which has three bits more.",
        torch.finfo(torch.bfloat16).eps / 2: "That is halfway: it is rounded down to 1.",
    }
    otherwise = "`bf16` has 7 bits after the point. Or look at `torch.finfo(torch.bfloat16)`."
    if not isinstance(number, int | float):
        return otherwise
    return grade_number(number - 1, torch.finfo(torch.bfloat16).eps, finest, otherwise)


def _begin_from_saved_state(begin: Any) -> str:
    if not callable(begin):
        return NEEDS_FUNCTION
    dataset = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=False)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    with torch.random.fork_rng(devices=[]):
        saved = torch.manual_seed(7).get_state()
        torch.rand(3)  # random numbers drawn after the save
        batches = begin(loader, saved)
        first = next(batches, None) if hasattr(batches, "__next__") else None
        is_restored = torch.equal(torch.get_rng_state(), saved)
    if not isinstance(first, list) or first[0].tolist() != [0, 1, 2, 3]:
        return "The function has to return the iterator before its first batch."
    if is_restored:
        return RIGHT
    return "The generator is not in the saved state: which call used it after you restored it?"


def _checkpoints_found(steps_as_a_set: Any) -> str:
    steps = steps_as_a_set  # check_answer shows the name of the parameter
    if not isinstance(steps, Collection) or isinstance(steps, str):
        return "Give all steps from which it may resume, as a set."
    given = {str(as_python_value(step)) for step in steps}
    if given == {"1", "2"}:
        return RIGHT
    if given == {"1"}:
        return "And if the thread has renamed its draft before the kill?"
    if given == {"2"}:
        return "The kill does not wait until the thread has finished."
    return "Which names do the complete checkpoints have?"


@needs_ranks
def _leave_nan_out(is_left_out: Any) -> str:
    rank, last = this_rank.rank(), this_rank.world_size() - 1
    cases: dict[str, Collection[int]] = {
        "no loss was NaN": (),
        f"only rank {last}'s loss was NaN": (last,),
        "only rank 0's loss was NaN": (0,),
        "all losses were NaN": range(last + 1),
    }
    answers = {}
    for case, ranks in cases.items():  # run all cases: the function may contain a collective
        value = float("nan") if rank in ranks else 0.5
        loss = torch.tensor(value, device=communication_device())
        answers[case] = bool(is_left_out(loss))
    for case, ranks in cases.items():
        if answers[case] and not ranks:
            return f"When {case}, the function leaves out the step, but it should not."
        if not answers[case] and ranks:
            return f"When {case}, rank {rank} calls `backward()`: either all ranks may, or none."
    return RIGHT


@needs_ranks
def _shorten_to_fewest(shorten: Any) -> str:
    rank, last = this_rank.rank(), this_rank.world_size() - 1
    more = 3 + 2 * (last + 1)  # so many that also the mean over the ranks is more than 3
    mine = [[*range(more if rank == longer else 3)] for longer in (last, 0)]
    given = [shorten([*batches]) for batches in mine]  # run both cases: each is a collective
    try:
        got = [[*each] for each in given]
    except TypeError:  # a number, or a tensor of one
        return "Return this rank's batches themselves, not their number."
    if got == [batches[:3] for batches in mine]:
        return RIGHT
    if got == mine:
        return "This rank would go on alone: all ranks must stop at the smallest number of batches."
    return "Return this rank's first batches, as many as every rank has."


def _costs_more(without_ms: Any, with_ms: Any) -> str:
    for given in (without_ms, with_ms):
        if not isinstance(given, int | float) or isinstance(given, bool) or not given > 0:
            return "Give two times of one call, in milliseconds."
    if with_ms > 1.2 * without_ms:
        return RIGHT
    return "It should cost more. Did you start the ranks with the variable (`--fresh`) and warm up?"


def _silence_one_finding(lines: Any) -> str:
    if not isinstance(lines, str):
        return f"Give the lines as text; this is a {type(lines).__name__}."
    try:
        source = CellSource(lines)
    except SyntaxError as error:
        return f"That is not valid Python: {error.msg}, line {error.lineno}."
    kept = [line.split("#")[0].strip() for line in lines.splitlines() if line.split("#")[0].strip()]
    if kept != ["if rank == 5:", "dist.all_reduce(x)", "dist.all_reduce(y)"]:
        return "Leave the three lines as they are, and add a comment."
    found = {each.line for each in check_source(source) if each.rule == "ND101"}
    calls = [number for number, line in enumerate(lines.splitlines(), 1) if "all_reduce" in line]
    hints = {
        (False, True): RIGHT,
        (False, False): "Both are silenced. A comment on a line of its own holds for all lines.",
        (True, False): "The second call is silenced, but the first one is not.",
        (True, True): "Both are still found. The comment needs `nbddp: ok` and the rule's name.",
    }
    return hints[calls[0] in found, calls[1] in found]


@needs_ranks
def _stop_together(stops: Any) -> str:
    is_last = this_rank.rank() == this_rank.world_size() - 1
    large, small, mixed = (
        all_gather(bool(stops(loss))) for loss in (1.0, 0.01, 0.01 if is_last else 1.0)
    )
    if any(large):
        return "The loss was 1.0 on all ranks, but your function says stop."
    if not all(small):
        return "The loss was 0.01 on all ranks, but your function says go on."
    if len(set(mixed)) > 1:
        return "The loss was small on one rank: some stop, some go on. All must decide the same."
    return RIGHT


_FIVE_MISTAKES = {
    3: "Does the second epoch have another order than the first?",
    6: "Compare the gradient of four batches with that of one.",
    8: "In which mode does the script test?",
    9: "Which ranks' images does the printed accuracy count?",
    11: "Which ranks write the file?",
}
_OTHER_MISTAKES = {
    1: "All ranks call each collective of the script, also those in `backward()`.",
    2: "A sampler divides the training data.",
    4: "The sampler has the same seed on all ranks.",
    5: "The training calls the wrapper. For saving, `model.module` is right.",
    7: "The clipping is not too early, because there is no scaler.",
    10: "The script counts images. It reports no mean of means.",
    12: "The optimizer has the parameters of this model.",
}


def _five_mistakes(numbers: Any) -> str:
    given = as_python_value(numbers)
    if not isinstance(given, Collection) or not {*given} <= {*range(1, 13)}:
        return "Give the numbers of the headings, from 1 to 12, as a set."
    too_many = [hint for number, hint in _OTHER_MISTAKES.items() if number in given]
    missing = [hint for number, hint in _FIVE_MISTAKES.items() if number not in given]
    return next(iter([*too_many, *missing]), RIGHT)


def _ranks_of_a_machine(mates: Any) -> str:
    if not callable(mates):
        return NEEDS_FUNCTION
    for rank in (0, 19, 63):
        given = as_python_value(mates(rank))
        try:
            got = sorted(map(index, given))
        except TypeError:
            return "The function has to return ranks: a list, or a range."
        first = rank - rank % 8
        if got == [*range(first, first + 8)]:
            continue
        if rank not in got:
            return f"Rank {rank} itself belongs to the list, too."
        if len({each // 8 for each in got}) > 1:
            return f"Your ranks for rank {rank} are on several machines, so activations cross them."
        return f"Your answer has {len(got)} of the eight ranks on rank {rank}'s machine."
    return RIGHT


def _refuse_stale_gradients(server: Any) -> str:
    if not isinstance(server, type):
        return "Give the class itself, without creating a server: it is tested here."
    made = server()
    missing = [name for name in ("model", "version", "history", "push") if not hasattr(made, name)]
    if missing:
        return f"It has no `{missing[0]}`: start from the notebook's server."
    gradients = [torch.ones_like(each) for each in made.model.parameters()]
    weight = next(made.model.parameters()).detach().clone()
    made.version = 10
    answer = made.push(1, 5, gradients, 1.0)
    if made.version != 10 or not weight.equal(next(made.model.parameters())):
        return "A gradient that was stale by five updates has changed the model."
    if made.history:
        return "The history has a refused gradient: it would count as a contribution."
    if answer is not True:
        return "A refused trainer gets no answer: it stops, as if the server were closed."
    made.push(1, 6, gradients, 1.0)
    if made.version != 11:
        return "A gradient that is stale by four is not stale by more than four."
    return RIGHT


CODE_EXERCISES: dict[str, Callable[..., str]] = {
    "01.1": _turn_right,
    "01.2": _ring_reduce_scatter,
    "01.4": _download_once,
    "01.5": _missing_ranks,
    "02.2": _models_differ,
    "02.5": train_on_all_ranks,
    "03.3": _next_bf16_above_one,
    "04.1": _begin_from_saved_state,
    "04.2": _checkpoints_found,
    "05.3": _leave_nan_out,
    "06.1": _shorten_to_fewest,
    "06.2": _costs_more,
    "10.1": _silence_one_finding,
    "10.2": _stop_together,
    "10.3": _five_mistakes,
    "12.3": _ranks_of_a_machine,
    "14.1": _refuse_stale_gradients,
    "16.1": own_ddp,
    "16.2": own_adam,
    "17.1": my_fsdp,
    "17.2": column_parallel,
    "17.3": row_parallel,
    "18.1": survives,
    "19.1": parallelize,
    "19.2": train,
    "19.3": whole_state,
}
