"""The form of all judges: a function that tests an answer, and raises the hint to a mistake.

``hints.json`` has the hints of each exercise whose answer is code. In the functions here,
``mistake`` is the exercise and the name of a hint, such as ``"1.3a own tensor"``.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from math import isclose
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbddp.extensions.course import time_limit
from nbddp.extensions.course.time_limit import LateError, line_of_answer, run_limited
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank

RIGHT = ""
F = TypeVar("F", bound=Callable[..., None])

HINTS: dict[str, str] = {
    f"{exercise} {name}": text
    for exercise, hints in json.loads(Path(__file__).with_name("hints.json").read_text()).items()
    for name, text in hints.items()
}
CODE_EXERCISES: dict[str, Callable[..., str]] = {}


class WrongError(Exception):
    """An answer is wrong. The text is the hint; it is empty if only other ranks have one."""


def judge(exercise: str, *, on_ranks: bool = False, limited: bool = True) -> Callable[[F], F]:
    """Register the judge of an exercise.

    Args:
        exercise: the number, such as ``"1.3a"``.
        on_ranks: whether the answer needs two ranks or more.
        limited: whether an answer is wrong that does not end in time.
    """

    def register(test: F) -> F:
        @wraps(test)
        def judged(*given: Any) -> str:
            try:
                require(not on_ranks or this_rank.world_size() > 1, "any needs ranks")
                with torch.random.fork_rng(devices=[]):
                    if not limited:
                        test(*given)
                    elif late := run_limited(lambda: test(*given)):
                        return _say_late(exercise, late)
            except WrongError as wrong:
                return str(wrong)
            except Exception as error:
                error.add_note(f"check_answer({exercise!r}) has called your code: {_call(error)}")
                raise
            return RIGHT

        CODE_EXERCISES[exercise] = judged
        return test

    return register


def _call(error: Exception) -> str:
    """Return the last line of a judge in the traceback of an error."""
    folder = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    return [each.line or "" for each in frames if each.filename.startswith(folder)][-1]


def _say_late(exercise: str, late: LateError) -> str:
    """Return a hint, the same on all ranks, with the first rank whose answer has not ended."""
    lines = all_gather(line_of_answer(late))
    parts = [say("any too late", seconds=time_limit.SECONDS)]
    rank = next((rank for rank, line in enumerate(lines) if line), None)
    if rank is not None:
        subject = "It" if len(lines) == 1 else f"Rank {rank}"
        parts.append(say("any line", subject=subject, line=lines[rank]))
    advice = "" if len(lines) == 1 else HINTS["any wait"]
    return " ".join([*parts, HINTS.get(f"{exercise} hangs", advice)]).rstrip()


def say(mistake: str, **facts: Any) -> str:
    """Return the hint to a mistake.

    >>> say("1.3b other chunk", at=3)
    "The sum is complete, but chunk 3 is not this rank's. Start one chunk earlier."
    """
    return HINTS[mistake].format(**facts)


def stop_if(hint: str) -> None:
    """Stop all ranks if one of them has a hint, as the next test may contain a collective."""
    if any(all_gather(hint)):
        raise WrongError(hint)
    time_limit.restart()


def require(is_right: object, mistake: str, **facts: Any) -> None:
    """Stop all ranks if something is not right on one of them."""
    stop_if(RIGHT if is_right else say(mistake, **facts))


def require_none(found: Sequence[Any], mistake: str, **facts: Any) -> None:
    """Stop all ranks if something was found; the hint gets the ``first`` one and the ``count``."""
    first = found[0] if found else None
    require(not found, mistake, first=first, count=len(found), **facts)


def require_value(
    got: Any, right: Any, wrong: Mapping[str, Any], otherwise: str, **facts: Any
) -> None:
    """Stop all ranks if one has a wrong value.

    Args:
        got: a number or a tensor.
        right: the right value.
        wrong: the values to which known mistakes lead.
        otherwise: the mistake for all other values.
        facts: values in the hints.
    """
    found = (mistake for mistake, value in wrong.items() if is_close(got, value))
    require(is_close(got, right), next(found, otherwise), **facts)


def is_close(got: Any, expected: Any) -> bool:
    """Return whether two numbers or tensors are equal, except for rounding."""
    if not isinstance(expected, Tensor):
        return isclose(got, expected, rel_tol=0.02)
    return (
        isinstance(got, Tensor)
        and got.shape == expected.shape
        and torch.allclose(got.detach().to(expected), expected.detach(), rtol=1e-3, atol=1e-5)
    )


def require_double(got: Tensor, right: Tensor, name: str) -> None:
    """Stop all ranks if one has a value with the error of 32-bit numbers.

    Args:
        got: a tensor that ``is_close`` to the right one.
        right: the right one, in 64-bit numbers.
        name: what it is, for the hint.
    """
    error = max((got.detach() - right.detach()).abs().flatten().tolist(), default=0.0)
    require(error < 1e-9, "any 32 bits", name=name)


def all_true(value: object) -> bool:
    """Return whether a value is true on all ranks, so that all of them take the same branch."""
    return all(all_gather(bool(value)))


def open_store() -> dist.TCPStore:
    """Open a store for all ranks. Rank 0 serves it: keep it until all ranks have used it."""
    limit = timedelta(seconds=time_limit.SECONDS)
    is_first = this_rank.rank() == 0
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit) if is_first else None
    port = all_gather(served.port if served else 0)[0]
    return served or dist.TCPStore("127.0.0.1", port, timeout=limit)


def require_function(given: Any, *parameters: str) -> None:
    """Require a function that can be called with these arguments."""
    require(callable(given) and not isinstance(given, nn.Module), "any no function")
    _require_signature(given, parameters)


def require_class(given: Any, *parameters: str, base: type = object) -> None:
    """Require a class that can be called with these arguments."""
    require(isinstance(given, type), "any no class")
    require(issubclass(given, base), "any no module")
    _require_signature(given, parameters)


def _require_signature(given: Callable[..., Any], parameters: Sequence[str]) -> None:
    hint = RIGHT
    try:
        signature = inspect.signature(given)
        if parameters:
            signature.bind(*parameters)
    except ValueError:  # some functions in C have none
        pass
    except TypeError:
        names = ", ".join(parameters)
        hint = say("any other parameters", parameters=names, signature=signature)
    stop_if(hint)
