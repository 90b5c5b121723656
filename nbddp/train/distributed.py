"""What all ranks do together: gather objects, take turns."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from nbddp.errors import ArgumentError
from nbddp.train import place
from nbddp.train.meeting import (
    Group,
    Outcome,
    apart,
    broadcast_outcome,
    check_member,
    differing,
    gathered,
    packed,
)

P = ParamSpec("P")
T = TypeVar("T")


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
    if place.world_size(group) == 1:
        return [value]
    differing("nbddp.all_gather", None, group)
    everyone = gathered(packed(value), group)
    for rank, told in everyone.items():
        if told.failure:
            raise ArgumentError(f"nbddp.all_gather: rank {rank} cannot pickle it: {told.failure}")
    return [pickle.loads(said.payload) for said in everyone.values()]


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
    what = f"nbddp.on_main({_function_name(fn)})"

    @wraps(fn)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> T:
        if apart.get().startswith("nbddp.on_main("):
            return fn(*args, **kwargs)  # of the ranks, only this one is here already
        differing(what, None)
        if place.rank() != 0:
            return cast(T, pickle.loads(_hear_main()))
        with _failing_together(what), _being_apart(what):
            result = fn(*args, **kwargs)
            outcome = packed(result) if place.world_size() > 1 else Outcome()
            if outcome.failure:
                raise TypeError(f"{what}: the result cannot be pickled: {outcome.failure}")
        broadcast_outcome(outcome)
        return result

    return on_rank_0


def _function_name(fn: object) -> str:
    """What to call it in errors.

    Raises:
        TypeError: it is none.
    """
    if not callable(fn):
        raise TypeError(
            f"nbddp.on_main takes a function and is called with its arguments later, as in "
            f"`save = nbddp.on_main(save)`; got {type(fn).__name__}"
        )
    return str(getattr(fn, "__name__", type(fn).__name__))


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
    what = "nbddp.main_rank_first()"
    if apart.get():  # in turns already, or rank 0 alone
        yield
        return
    differing(what, None)
    if place.rank() != 0:
        _hear_main()
        with _being_apart(what):
            yield
        return
    with _failing_together(what), _being_apart(what):
        yield
    broadcast_outcome(Outcome())


@contextmanager
def _being_apart(what: str) -> Iterator[None]:
    """The ranks do not run this together: nothing in it may wait for all of them."""
    before = apart.set(what)
    try:
        yield
    finally:
        apart.reset(before)


@contextmanager
def _failing_together(what: str) -> Iterator[None]:
    """When the body fails on rank 0, tell the ranks that wait for it."""
    try:
        yield
    except KeyboardInterrupt:  # it goes to every rank, so that nobody may be there to hear
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        broadcast_outcome(Outcome(failure=f"rank 0 failed in {what}: {reason}"))
        raise


def _hear_main() -> bytes:
    outcome = broadcast_outcome(Outcome())
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    return outcome.payload
