"""Prepared models and reduced numbers, in one process without a process group."""

import gc
from collections import namedtuple
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch import nn

from nbddp import ArgumentError
from nbddp.extensions.train.collectives import all_reduce, main_rank_first, on_main
from nbddp.extensions.train.prepare import prepare
from nbddp.reporting.training_objects import prepared_models

Count = namedtuple("Count", ["correct", "seen"])


def test_prepare_with_one_rank_only_moves_a_model_unless_it_spans_devices() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert prepare(model) is model
    assert prepare(model) is model
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert [each.device.type for each in prepare(model).parameters()] == ["cpu"] * 2 + ["meta"] * 2


def test_prepared_lists_models_only_while_they_are_referenced() -> None:
    model = prepare(nn.Linear(2, 2))
    assert model in prepared_models
    before = len([*prepared_models])
    del model
    gc.collect()
    assert len([*prepared_models]) == before - 1


@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_with_one_rank_all_reduce_returns_the_number_unchanged(op: Any) -> None:
    for value, expected in (
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
    ):
        result = all_reduce(value, op)
        assert result == expected
        assert type(result) is type(expected)
        if isinstance(value, dict):
            assert list(result) == list(value)


def test_a_mean_is_a_float_and_the_sum_of_a_bool_tensor_counts() -> None:
    assert all_reduce([3, 0.5], "mean") == [3.0, 0.5]
    assert isinstance(all_reduce(3, "mean"), float)
    assert all_reduce(torch.tensor([1, 2]), "mean").dtype is torch.float32
    value = torch.tensor([True, False])
    for op, expected, dtype in (("sum", [1, 0], torch.int64), ("max", [1, 0], torch.bool)):
        found = all_reduce(value, op)
        assert (found.tolist(), found.dtype) == (expected, dtype)


def test_all_reduce_returns_a_new_tensor_of_the_same_shape_and_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
        value = torch.ones(2, 3).to(dtype)
        result = all_reduce(value)
        assert (result.dtype, result.shape) == (dtype, value.shape)
        result += 1
        assert torch.equal(value, torch.ones(2, 3).to(dtype))
    assert all_reduce(torch.ones(0, 3)).shape == (0, 3)
    assert not all_reduce(torch.ones(1, requires_grad=True)).requires_grad
    assert torch.equal(all_reduce(torch.arange(6.0).view(2, 3).T), torch.arange(6.0).view(2, 3).T)


@pytest.mark.parametrize("name", ["SUM", "AVG", "MIN", "MAX"])
def test_all_reduce_accepts_torchs_reduce_ops(name: str) -> None:
    ours = {"AVG": "mean"}.get(name, name.lower())
    op = getattr(dist.ReduceOp, name)
    for operator in (op, dist.ReduceOp(op)):
        assert all_reduce([3, 0.5], operator) == all_reduce([3, 0.5], ours)
        assert type(all_reduce(3, operator)) is type(all_reduce(3, ours))
    with pytest.raises(ArgumentError, match="sum, mean, min, max"):
        all_reduce(3, dist.ReduceOp.PRODUCT)


class Trainer:
    def __init__(self) -> None:
        self.saved: list[int] = []

    @on_main
    def save(self, step: int, *, twice: bool = False) -> int:
        """Keep the step."""
        self.saved += [step] * (1 + twice)
        return len(self.saved)


def test_on_main_works_on_any_callable_and_raises_its_exception() -> None:
    trainer = Trainer()
    assert (trainer.save(3), trainer.save(4, twice=True)) == (1, 3)
    assert trainer.saved == [3, 4, 4]
    assert (Trainer.save.__name__, Trainer.save.__doc__) == ("save", "Keep the step.")
    assert on_main(partial(max, 3))(5) == 5
    assert on_main(trainer.save)(5) == 4
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 / 0)()
    with pytest.raises(ZeroDivisionError), main_rank_first():
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")  # torch calls sparse tensors a beta
def test_all_reduce_and_on_main_refuse_invalid_arguments(snapshot: SnapshotAssertion) -> None:
    values = ["low", 1j, {"a": [1, None]}, 2**63, torch.ones(2, 2).to_sparse()]
    assert [
        *(refusal(TypeError, all_reduce, value) for value in values),
        refusal(ArgumentError, all_reduce, 1, "avg"),
        refusal(TypeError, on_main, None),
    ] == snapshot
