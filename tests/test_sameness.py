"""What is the same in two kernels, and what only looks like it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from drivers.inside import imported
from torch import nn

from nbddp.archive import sameness
from nbddp.archive.sameness import digest_of, digest_or_bytes_of

PROGRAM = (
    imported(digest_of)
    + """
import sys
for name, width, seed in [each.split(",") for each in sys.argv[1:]]:
    source = f'''
import abc, dataclasses, enum, typing
import torch
from torch import nn

WIDTH = {width}

class Net(nn.Module):
    "A network."
    depth: int = 3

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    @property
    def size(self):
        return WIDTH

    def forward(self, x):
        return [each for each in self.layer(x)]

class Trainer(abc.ABC):
    @abc.abstractmethod
    def fit(self): ...

    @abc.abstractmethod
    def stop(self): ...

class Mode(enum.Enum):
    FAST, SLOW = 1, WIDTH

class HasName(typing.Protocol):
    name: str

@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    lr: float = 0.1
    mode: Mode = Mode.SLOW

def make():
    return Net()

def train(lr=0.1, *, kinds=("a", "b")):
    return make(), [lambda x: x + WIDTH for _ in range(2)], lr in {{"x", "y", "z"}}

torch.manual_seed({seed})
model = make()
batch = torch.randn(3)
'''
    exec(compile(source, name, "exec"), globals())
    values = dict(train=train, Net=Net, model=model.state_dict(), batch=batch)
    parts = [Trainer, Mode, HasName, Config, Config(), Mode.FAST]
    print(digest_of(values), *map(digest_of, parts))
"""
)


def told(*notebooks: str) -> list[list[str]]:
    """Digests in a new kernel, of several notebooks."""
    words = [sys.executable, "-c", PROGRAM, *notebooks]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_what_a_notebook_defines_is_the_same_in_its_next_kernel() -> None:
    name = "/tmp/ipykernel_1/10.py"
    first, wider, other = told(f"{name},3,0", f"{name},4,0", f"{name},3,1")
    assert told("/tmp/ipykernel_2/20.py,3,0") == [first]
    differ = [one != other for one, other in zip(first, wider, strict=True)]
    # what the functions use, and the enum
    assert differ == [True, False, True, False, True, True, True]
    assert other != first  # what the tensors hold


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, requires_grad=True),
        torch.randn(3).bfloat16(),
        torch.tensor(3),
        torch.zeros(0),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True]),
        torch.empty(2, device="meta"),
        torch.eye(3).to_sparse(),
        nn.Linear(2, 2),
        {"a": [1, 2.5, None, ("x", b"y")], 3: {"b": range(4)}},
        len,
        nn.Linear,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_is_the_same(value: Any) -> None:
    assert digest_of(copy.deepcopy(value)) == digest_of(value)


def test_what_differs_is_told_apart() -> None:
    values: list[Any] = [
        *(torch.zeros(4), torch.zeros(2, 2), torch.zeros(4).double(), torch.ones(4)),
        *(lambda x: x + 1, lambda x: x + 2, lambda x, y=1: x + y),
        *(1, 1.5, "1", nn.Linear, nn.Conv2d),
    ]
    assert len({digest_of(each) for each in values}) == len(values)


@pytest.mark.parametrize("digest", [digest_of, digest_or_bytes_of])
def test_what_cannot_be_pickled_is_refused(digest: Callable[[Any], str]) -> None:
    with pytest.raises(TypeError, match="generator"):
        digest(each for each in "ab")


def test_what_cannot_be_looked_into_can_be_pushed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sameness, "digest_of", Mock(side_effect=pickle.PicklingError))
    assert digest_or_bytes_of({"x": 1}) == digest_or_bytes_of({"x": 1}) != digest_or_bytes_of(1)
