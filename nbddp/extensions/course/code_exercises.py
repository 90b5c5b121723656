"""The exercises whose answer is a function, a set, or two values that depend on each other."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from operator import index
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbddp.errors import RequestError
from nbddp.extensions.checks.checker import check_source
from nbddp.extensions.checks.source import CellSource
from nbddp.extensions.course.grading import (
    RIGHT,
    WrongError,
    judge,
    open_store,
    require,
    require_function,
    require_none,
    require_value,
    say,
    stop_if,
)
from nbddp.extensions.course.own_classes import recording_waits
from nbddp.extensions.course.time_limit import LateError
from nbddp.extensions.memory.traffic import Sent, Traffic
from nbddp.extensions.train.collectives import all_gather
from nbddp.extensions.train.prepare import prepare
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

T = TypeVar("T")


@judge("1.3a", on_ranks=True)
def _turn_right(turn: Any) -> None:
    require_function(turn)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    parcels = (torch.arange(world_size) * 10 + 1).to(communication_device())
    own_tensor, from_left, right = (int(parcels[(rank + step) % world_size]) for step in (0, -1, 1))
    got, sent = _exchange(turn, parcels[rank : rank + 1].clone())
    require(isinstance(got, torch.Tensor) and got.numel() == 1, "1.3a no tensor")
    mistakes = {"1.3a own tensor": own_tensor, "1.3a right neighbour": right}
    require_value(got.item(), from_left, mistakes, "1.3a other tensor")
    require_none(_collectives(sent), "1.3a collective")
    # the second message begins after the wait for the first one
    require([each.waits for each in sent] == [0, 1], "1.3a not blocking")


@judge("1.3b", on_ranks=True)
def _ring_reduce_scatter(ring: Any) -> None:
    require_function(ring)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    values = (torch.arange(2 * world_size) * 10 + rank).to(communication_device())
    total = torch.arange(2 * world_size) * 10 * world_size + sum(range(world_size))
    got, sent = _exchange(ring, values.clone())
    require(isinstance(got, torch.Tensor), "1.3b no tensor")
    require(got.numel() == 2, "1.3b other size", got=got.numel(), right=2)
    chunks = [chunk.tolist() for chunk in total.tensor_split(world_size)]
    at = chunks.index(got.tolist()) if got.tolist() in chunks else None
    require(at in (rank, None), "1.3b other chunk", at=at)
    require(at == rank, "1.3b no sum")
    require_none(_collectives(sent), "1.3b collective")
    num_bytes = sum(each.num_bytes for each in sent if each.name.startswith("c10d.send"))
    least = (world_size - 1) * got.nbytes
    require(num_bytes == least, "1.3b bytes", got=num_bytes, right=least)


def _exchange(
    function: Callable[[torch.Tensor], Any], tensor: torch.Tensor
) -> tuple[Any, list[Sent]]:
    """Return the result of a function, and its messages."""
    with recording_waits() as waits, Traffic(waits) as traffic:
        return function(tensor), traffic.sent


def _collectives(sent: Sequence[Sent]) -> list[str]:
    """Return the names of the calls that are not messages between two ranks."""
    names = [each.name.split(".")[1].strip("_") for each in sent]
    return [name for name in names if not name.startswith(("send", "recv"))]


@judge("1.2a", on_ranks=True)
def _download_once(name_of: Any) -> None:
    require_function(name_of)
    downloads: list[str] = []

    def download() -> str:
        time.sleep(0.2)  # long enough for all ranks to look for the name
        downloads.append(f"digits-{this_rank.rank()}.zip")
        return downloads[-1]

    store = open_store()
    all_gather(None)  # all ranks begin together
    got = name_of(store, download)
    everyone = all_gather((got, len(downloads)))  # keeps the store until all ranks have used it
    count, names = sum(number for _, number in everyone), {name for name, _ in everyone}
    require(count == 1, "1.2a downloads", count=count)
    require(not isinstance(got, bytes), "1.2a bytes")
    require(len(names) == 1, "1.2a different names")
    require(isinstance(got, str) and got.startswith("digits-"), "1.2a other name")


@judge("1.2b")
def _missing_ranks(missing: Any) -> None:
    require_function(missing)
    began = time.monotonic()
    try:
        found = _call_with_absent_ranks(missing, ranks=8, absent=(1, 3, 4, 5, 6, 7), seconds=1.0)
        found += _call_with_absent_ranks(missing, ranks=4, late=2, seconds=5.0)
    except dist.DistStoreError:
        found = []
    took = time.monotonic() - began
    require(found, "1.2b error")
    for rank, right, given in found:
        require(isinstance(given, Collection) and not isinstance(given, str), "1.2b no ranks")
        require(rank not in given, "1.2b itself", rank=rank)
        is_right = sorted(given) == right
        require(is_right or 2 not in given, "1.2b impatient")
        require(is_right, "1.2b other ranks")
    require(took < 4, "1.2b too long")


def _call_with_absent_ranks(
    missing: Any, *, ranks: int, seconds: float, absent: Sequence[int] = (), late: int = -1
) -> list[tuple[int, list[int], Any]]:
    """Call a function as ranks with one store. Return each rank, what is right, the result."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))  # of calls without a timeout

    def come(rank: int) -> tuple[int, list[int], Any]:
        time.sleep(0.3 if rank == late else 0)
        return rank, [*absent], missing(store, rank, ranks, seconds)

    return _at_once([partial(come, rank) for rank in range(ranks) if rank not in absent])


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls in threads. If it is too late for their results, end the threads."""
    results: list[Future[T]] = [Future() for _ in calls]

    def run(call: Callable[[], T], result: Future[T]) -> None:
        try:
            result.set_result(call())
        except LateError:
            return  # no thread waits for the result
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            result.set_exception(error)

    threads = [
        Thread(target=run, args=pair, daemon=True) for pair in zip(calls, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        wait(results)
    except LateError:
        raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
        for thread in filter(Thread.is_alive, threads):
            raise_in_thread(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(LateError))
        raise
    return [each.result() for each in results]


@judge("1.5a", on_ranks=True)
def _models_differ(differs: Any) -> None:
    require_function(differs)
    last = this_rank.world_size() - 1
    require(not differs(_prepared()), "1.5a equal")
    cases = (
        ("weight", [1.0, 0.0, 0.0], "1.5a differ"),
        ("bias", [1.0], "1.5a differ"),
        ("weight", [1.0, -1.0, 0.0], "1.5a cancel"),
    )
    for name, added, mistake in cases:
        model = _prepared()
        if this_rank.rank() == last:
            parameter = getattr(model.module, name)
            parameter.data += torch.tensor(added).to(parameter)
        require(differs(model), mistake, last=last)


def _prepared() -> Any:
    model = torch.nn.Linear(3, 1)
    # sums of these have no rounding error, in which +1 and -1 would not cancel
    model.weight.data = torch.tensor([[0.25, -0.5, 0.75]])
    return prepare(model, sync_batch_norm=False)


@judge("3.1c")
def _next_bf16_above_one(number: Any) -> None:
    eps = {kind: torch.finfo(kind).eps for kind in (torch.float32, torch.float16, torch.bfloat16)}
    mistakes = {
        "3.1c fp32": eps[torch.float32],
        "3.1c fp16": eps[torch.float16],
        "3.1c half": eps[torch.bfloat16] / 2,
    }
    distance = number - 1 if isinstance(number, int | float) else 0
    require_value(distance, eps[torch.bfloat16], mistakes, "3.1c other number")


@judge("2.1a")
def _begin_from_saved_state(begin: Any) -> None:
    require_function(begin)
    dataset = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=False)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    saved = torch.manual_seed(7).get_state()
    torch.rand(3)  # random numbers drawn after the save
    batches = begin(loader, saved)
    first = next(batches, None) if hasattr(batches, "__next__") else None
    is_first = isinstance(first, list) and first[0].tolist() == [0, 1, 2, 3]
    require(is_first, "2.1a no iterator")
    require(torch.equal(torch.get_rng_state(), saved), "2.1a other state")


@judge("2.1b")
def _checkpoints_found(steps_as_a_set: Any) -> None:  # check_answer shows this name
    steps = steps_as_a_set
    require(isinstance(steps, Collection) and not isinstance(steps, str), "2.1b no set")
    given = {str(step) for step in steps}
    require(given != {"1"}, "2.1b older")
    require(given != {"2"}, "2.1b newer")
    require(given == {"1", "2"}, "2.1b other steps")


@judge("2.2c", on_ranks=True)
def _leave_nan_out(is_left_out: Any) -> None:
    require_function(is_left_out)
    rank, last = this_rank.rank(), this_rank.world_size() - 1
    cases: dict[str, Collection[int]] = {
        "no loss was NaN": (),
        f"only rank {last}'s loss was NaN": (last,),
        "only rank 0's loss was NaN": (0,),
        "all losses were NaN": range(last + 1),
    }
    hints = []
    try:
        for case, ranks in cases.items():  # run all cases: the function may contain a collective
            value = float("nan") if rank in ranks else 0.5
            loss = torch.tensor(value, device=communication_device())
            before = loss.clone()
            if bool(is_left_out(loss)) is not bool(ranks):
                mistake = "2.2c calls backward" if ranks else "2.2c leaves out"
                hints.append(say(mistake, case=case, rank=rank))
            if not loss.allclose(before, equal_nan=True):
                hints.append(say("2.2c changes loss"))
        stop_if(next(iter(hints), RIGHT))
    except RequestError as error:  # on all ranks: each has found the others in another call
        raise WrongError(say("2.2c different calls")) from error


@judge("2.3a", on_ranks=True)
def _shorten_to_fewest(shorten: Any) -> None:
    require_function(shorten)
    rank, last = this_rank.rank(), this_rank.world_size() - 1
    more = 3 + 2 * (last + 1)  # so many that also the mean over the ranks is more than 3
    lists = [[*range(more if rank == longer else 3)] for longer in (last, 0)]
    given = [shorten([*batches]) for batches in lists]  # run both cases: each is a collective
    try:
        got = [[*each] for each in given]
    except TypeError:  # a number, or a tensor of one
        got = []
    right = [batches[:3] for batches in lists]
    require(got, "2.3a number")
    require(got == right or got != lists, "2.3a alone")
    require(got == right, "2.3a other batches")


@judge("2.3b")
def _costs_more(without_ms: Any, with_ms: Any) -> None:
    for given in (without_ms, with_ms):
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        require(is_number and given > 0, "2.3b no times")
    require(with_ms > 1.2 * without_ms, "2.3b no cost")


@judge("2.5a")
def _silence_one_finding(lines: Any) -> None:
    require(isinstance(lines, str), "2.5a no text", kind=type(lines).__name__)
    hint, found = RIGHT, set()
    try:
        found = {each.line for each in check_source(CellSource(lines)) if each.rule == "ND101"}
    except SyntaxError as error:
        hint = say("any no Python", error=error.msg, line=error.lineno)
    stop_if(hint)
    kept = [line.split("#")[0].strip() for line in lines.splitlines() if line.split("#")[0].strip()]
    require(kept == ["if rank == 5:", "dist.all_reduce(x)", "dist.all_reduce(y)"], "2.5a changed")
    calls = [number for number, line in enumerate(lines.splitlines(), 1) if "all_reduce" in line]
    first, second = (number in found for number in calls)
    require(first or second, "2.5a both silenced")
    require(not first or second, "2.5a second silenced")
    require(not first, "2.5a both found")


@judge("2.5b", on_ranks=True)
def _stop_together(stops: Any) -> None:
    require_function(stops)
    is_last = this_rank.rank() == this_rank.world_size() - 1
    large, small, mixed = (
        all_gather(bool(stops(loss))) for loss in (1.0, 0.01, 0.01 if is_last else 1.0)
    )
    require(not any(large), "2.5b stops")
    require(all(small), "2.5b goes on")
    require(len(set(mixed)) == 1, "2.5b some stop")


@judge("2.5c")
def _five_mistakes(numbers: Any) -> None:
    is_set = isinstance(numbers, Collection) and {*numbers} <= {*range(1, 13)}
    require(is_set, "2.5c no numbers")
    mistakes = (3, 6, 8, 9, 11)
    for number in range(1, 13):
        require(number in mistakes or number not in numbers, f"2.5c {number}")
    for number in mistakes:
        require(number in numbers, f"2.5c {number}")


@judge("3.5c")
def _ranks_of_a_machine(mates: Any) -> None:
    require_function(mates)
    groups = {rank: _members(mates(rank)) for rank in range(64)}
    require_none([rank for rank, group in groups.items() if not group], "3.5c no ranks")
    alone = [rank for rank, group in groups.items() if rank not in group]
    require_none(alone, "3.5c itself")
    wide = [rank for rank, group in groups.items() if len({each // 8 for each in group}) > 1]
    require_none(wide, "3.5c several machines")
    torn = [rank for rank, group in groups.items() if any(groups[each] != group for each in group)]
    require_none(torn, "3.5c other lists")
    sizes = {len(group) for group in groups.values()}
    is_right = len(sizes) == 1 and sizes <= {2, 4, 8}
    require(is_right, "3.5c other sizes", sizes=", ".join(map(str, sorted(sizes))))


def _members(given: Any) -> list[int]:
    try:
        return sorted(map(index, given))
    except TypeError:
        return []


class _BusyLock:
    """A server's lock that another push takes first, each time, and makes an update."""

    def __init__(self, server: Any) -> None:
        self.server, self.lock, self.depth = server, server.lock, 0

    def __enter__(self) -> bool:
        if self.depth == 0:  # an RLock can be taken again, without another push between
            self.server.version += 1
        self.depth += 1
        return bool(self.lock.acquire())

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.lock.release()

    acquire, release = __enter__, __exit__


@judge("A1a")
def _refuse_stale_gradients(server: Any) -> None:
    require(isinstance(server, type), "A1a no class")
    made = server()
    names = ("model", "lock", "version", "history", "push", "close")
    require_none([name for name in names if not hasattr(made, name)], "A1a missing")
    gradients = [torch.ones_like(each) for each in made.model.parameters()]
    weight = next(made.model.parameters()).detach().clone()
    made.version = 10
    answer = made.push(1, 5, gradients, 1.0)
    require(weight.equal(next(made.model.parameters())), "A1a applied")
    require(made.version == 10, "A1a counted")
    require(not made.history, "A1a in history")
    require(answer is True, "A1a no answer")
    made.push(1, 6, gradients, 1.0)
    require(made.version == 11, "A1a refuses four")
    require(not weight.equal(next(made.model.parameters())), "A1a not applied")
    require(made.history == [(1, 4, 1.0)], "A1a other history", history=made.history)
    made.lock = _BusyLock(made)
    for version in (6, 7):
        made.version = 10
        made.push(1, version, gradients, 1.0)
    require({staleness for _, staleness, _ in made.history} == {4}, "A1a two pushes")
    made.close()
    require(made.push(1, 5, gradients, 1.0) is False, "A1a no answer")
