"""Prepared models and reduced numbers, in one process without a process group."""

from __future__ import annotations

import gc
import re
import warnings
from collections import namedtuple
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbddp import ArgumentError, NbddpError, WorkerGroup
from nbddp.train.distributed import all_gather, main_rank_first, on_main
from nbddp.train.models import prepare, prepared
from nbddp.train.reduction import all_reduce

Count = namedtuple("Count", ["correct", "seen"])


def test_alone_a_model_is_only_moved_and_nothing_is_said_of_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert prepare(model) is model
    assert prepare(model) is model


def test_a_model_that_spans_devices_is_not_moved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert [each.device.type for each in prepare(model).parameters()] == ["cpu"] * 2 + ["meta"] * 2


def test_prepared_models_are_known_as_long_as_somebody_holds_them() -> None:
    model = prepare(nn.Linear(2, 2))
    assert sum(each is model for each in prepared()) == 1
    before = len(prepared())
    del model
    gc.collect()
    assert len(prepared()) == before - 1


@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (2**62 + 1, 2**62 + 1),
        (True, 1),
        (0.1, 0.1),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        ({"a": 1, "b": [2.5, (3,)]}, {"a": 1, "b": [2.5, (3,)]}),
        (Count(3, 4), Count(3, 4)),
        ([], []),
    ],
)
def test_alone_a_number_comes_back_as_it_is(value: Any, expected: Any, op: Any) -> None:
    result = all_reduce(value, op)
    assert result == expected
    assert type(result) is type(expected)
    if isinstance(result, dict):
        assert list(result) == list(value)


def test_alone_a_mean_is_a_float() -> None:
    assert all_reduce([3, 0.5], "mean") == [3.0, 0.5]
    assert isinstance(all_reduce(3, "mean"), float)
    assert all_reduce(torch.tensor([1, 2]), "mean").dtype is torch.float32


def test_a_tensor_keeps_its_shape_and_type_and_is_not_touched() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
        value = torch.ones(2, 3).to(dtype)
        result = all_reduce(value)
        assert (result.dtype, result.shape) == (dtype, value.shape)
        result += 1
        assert torch.equal(value, torch.ones(2, 3).to(dtype))
    assert all_reduce(torch.ones(0, 3)).shape == (0, 3)
    assert not all_reduce(torch.ones(1, requires_grad=True)).requires_grad
    assert torch.equal(all_reduce(torch.arange(6.0).view(2, 3).T), torch.arange(6.0).view(2, 3).T)


def test_a_bool_tensor_is_counted_but_its_smallest_is_a_bool() -> None:
    value = torch.tensor([True, False])
    assert all_reduce(value).tolist() == [1, 0]
    assert all_reduce(value).dtype is torch.int64
    assert all_reduce(value, "max").tolist() == [True, False]
    assert all_reduce(value, "max").dtype is torch.bool


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("low", "the value is of type str"),
        (1j, "the value is of type complex"),
        ({"a": [1, None]}, "value['a'][1] is of type NoneType"),
        (2**63, "the value is of type int beyond 64 bits"),
        (torch.ones(2, 2).to_sparse(), "the value is of type Tensor"),
    ],
)
def test_what_is_no_number_is_named(value: Any, words: str) -> None:
    words = (
        f"nbddp.all_reduce: {words}; it takes numbers, tensors, and dicts, lists and tuples of them"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls sparse tensors a beta
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            all_reduce(value)


def test_a_wrong_op_shows_the_right_ones() -> None:
    words = r"^nbddp.all_reduce: op must be one of sum, mean, min, max, got 'avg'$"
    with pytest.raises(ValueError, match=words):
        all_reduce(1, "avg")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["SUM", "AVG", "MIN", "MAX"])
def test_torchs_own_ops_are_understood(name: str) -> None:
    ours = {"AVG": "mean"}.get(name, name.lower())
    op = getattr(dist.ReduceOp, name)
    for each in (op, dist.ReduceOp(op)):
        assert all_reduce([3, 0.5], each) == all_reduce([3, 0.5], ours)
        assert type(all_reduce(3, each)) is type(all_reduce(3, ours))
    with pytest.raises(ArgumentError, match=r"^nbddp.all_reduce: op must be one of sum, mean, "):
        all_reduce(3, dist.ReduceOp.PRODUCT)


def test_a_bad_argument_is_a_value_error_and_one_of_ours() -> None:
    for kind in (ValueError, NbddpError):
        with pytest.raises(kind):
            all_reduce(1, "avg")  # type: ignore[arg-type]
        with pytest.raises(kind):
            WorkerGroup(nproc=0)


class Trainer:
    """Has a method for rank 0."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    @on_main
    def save(self, step: int, *, twice: bool = False) -> int:
        """Keep the step."""
        self.saved += [step] * (1 + twice)
        return len(self.saved)


def test_a_method_of_rank_0_is_a_method_still() -> None:
    trainer = Trainer()
    assert (trainer.save(3), trainer.save(4, twice=True)) == (1, 3)
    assert trainer.saved == [3, 4, 4]
    assert (Trainer.save.__name__, Trainer.save.__doc__) == ("save", "Keep the step.")
    assert on_main(partial(max, 3))(5) == 5
    assert on_main(trainer.save)(5) == 4


async def fetch() -> None:
    """A coroutine function."""


def items() -> Iterator[int]:
    """A generator function."""
    yield 1


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            fetch,
            "nbddp.on_main: fetch is a coroutine function: await it on rank 0, and hand the result "
            "to a function that returns it",
        ),
        (
            items,
            "nbddp.on_main: items is a generator function, which cannot be sent: return a list",
        ),
        (
            None,
            "nbddp.on_main takes a function and is called with its arguments later, as in `save = "
            "nbddp.on_main(save)`; got NoneType",
        ),
    ],
)
def test_what_rank_0_cannot_run_for_all_is_refused_at_once(fn: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        on_main(fn)


def test_alone_there_is_one_object_and_everything_runs_here() -> None:
    thing = object()
    assert all_gather(thing) == [thing]
    assert on_main(lambda a, b: a - b)(5, b=3) == 2
    with main_rank_first():
        ran = True
    assert ran


def test_alone_errors_fly_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 / 0)()
    with pytest.raises(ZeroDivisionError), main_rank_first():
        raise ZeroDivisionError
