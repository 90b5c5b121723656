"""The facts about training data: equal on all ranks for equal data, and no facts if unsure."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from nbddp.extensions.trainers.training_data import MAX_ROWS, column_checksums, data_facts

NUMBERS = list(range(100))


class Rows(torch.utils.data.Dataset[int]):
    """A data set of the user's own class, of which no item may be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        raise AssertionError


def test_loader_that_gives_shares_is_described() -> None:
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1)
    loader = DataLoader(NUMBERS, sampler=sampler)
    expected: dict[str, Any] = {"samples": 100, "columns": column_checksums(NUMBERS)}
    assert data_facts(loader) == expected
    assert list(expected["columns"]) == [""]


@pytest.mark.parametrize(
    "loader",
    [DataLoader(NUMBERS), None, [], iter([])],
    ids=["of one rank", "none", "list", "iterator"],
)
def test_other_loaders_have_no_facts(loader: Any) -> None:
    assert data_facts(loader) == {}


class BatchSamplerShard(torch.utils.data.BatchSampler):
    """The batch sampler of Accelerate."""


def test_data_set_of_a_users_class_is_described_by_its_length() -> None:
    loader = DataLoader(Rows(), batch_sampler=BatchSamplerShard(range(100), 4, drop_last=False))
    assert data_facts(loader) == {"samples": 100, "columns": {}}


TENSORS = TensorDataset(torch.arange(100), torch.zeros(100))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NUMBERS, NUMBERS[::-1]),
        ([[each] for each in NUMBERS], [[each + 1] for each in NUMBERS]),
        (Subset(TENSORS, NUMBERS[:50]), Subset(TENSORS, NUMBERS[50:])),
        (TENSORS, TensorDataset(torch.arange(100).flip(0), torch.zeros(100))),
        ([{"ids": torch.arange(3) + each} for each in NUMBERS], [{"ids": torch.arange(3)}] * 100),
    ],
    ids=["list", "lists", "subset", "tensors", "dicts of tensors"],
)
def test_other_rows_have_other_checksums(one: Any, other: Any) -> None:
    assert len(column_checksums(one)) == 1  # a column of zeros tells nothing
    assert column_checksums(one) != column_checksums(other)


def test_values_whose_text_may_differ_for_equal_values_are_left_out() -> None:
    rows = [{"text": str(each), "object": object(), "set": {each}} for each in NUMBERS]
    assert list(column_checksums(rows)) == ["text"]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33, 10_000])
def test_at_most_a_few_rows_are_read(count: int) -> None:
    read = []

    class Tensor(torch.Tensor):
        def __getitem__(self, row: Any) -> Any:
            read.append(row)
            return row

    dataset = TensorDataset(torch.zeros(count).as_subclass(Tensor))
    column_checksums(dataset)
    assert min(count, 8) <= len(read) <= MAX_ROWS
