"""Prepared models and reduced numbers, in one process without a process group."""

from __future__ import annotations

import gc
import re
import warnings
from collections import namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nbddp.train.distributed import (
    gather,
    main_rank_first,
    on_main,
    reduce,
)
from nbddp.train.models import prepare, prepared

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
    result = reduce(value, op)
    assert result == expected
    assert type(result) is type(expected)
    if isinstance(result, dict):
        assert list(result) == list(value)


def test_alone_a_mean_is_a_float() -> None:
    assert reduce([3, 0.5], "mean") == [3.0, 0.5]
    assert isinstance(reduce(3, "mean"), float)
    assert reduce(torch.tensor([1, 2]), "mean").dtype is torch.float32


def test_a_tensor_keeps_its_shape_and_type_and_is_not_touched() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
        value = torch.ones(2, 3).to(dtype)
        result = reduce(value)
        assert (result.dtype, result.shape) == (dtype, value.shape)
        result += 1
        assert torch.equal(value, torch.ones(2, 3).to(dtype))
    assert reduce(torch.ones(0, 3)).shape == (0, 3)
    assert not reduce(torch.ones(1, requires_grad=True)).requires_grad
    assert torch.equal(reduce(torch.arange(6.0).view(2, 3).T), torch.arange(6.0).view(2, 3).T)


def test_a_bool_tensor_is_counted_but_its_smallest_is_a_bool() -> None:
    value = torch.tensor([True, False])
    assert reduce(value).tolist() == [1, 0]
    assert reduce(value).dtype is torch.int64
    assert reduce(value, "max").tolist() == [True, False]
    assert reduce(value, "max").dtype is torch.bool


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
    words = f"nbddp.reduce: {words}; it takes numbers, tensors, and dicts, lists and tuples of them"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls sparse tensors a beta
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            reduce(value)


def test_a_wrong_op_shows_the_right_ones() -> None:
    words = r"^nbddp.reduce: op must be one of sum, mean, min, max, got 'avg'$"
    with pytest.raises(ValueError, match=words):
        reduce(1, "avg")  # type: ignore[arg-type]


def test_alone_there_is_one_object_and_everything_runs_here() -> None:
    thing = object()
    assert gather(thing) == [thing]
    assert on_main(lambda a, b: a - b, 5, b=3) == 2
    with main_rank_first():
        ran = True
    assert ran


def test_alone_errors_fly_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), main_rank_first():
        raise ZeroDivisionError
