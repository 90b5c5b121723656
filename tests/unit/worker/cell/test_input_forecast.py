"""Whether a cell may ask: collectives wait longer in it, and in no other."""

from types import ModuleType
from typing import Any

import pytest
from torch import nn

from nbddp.worker.cell.input_forecast import may_request_input

EARLIER = """
import functools
import torch
from torch import nn
def quiet(input): return input * 2
def asks(): return int(input('?'))
def calls(): return [asks() for _ in range(2)]
def recursive(n): return recursive(n - 1) if n else 0
def inner():
    def deep(): breakpoint()
    return deep
class Looks(nn.Module):
    def forward(self, x):
        import pdb
        pdb.set_trace()
        return x
class Plain(nn.Module):
    def forward(self, input): return input
bound, halfway, table = Looks().forward, functools.partial(asks), [quiet]
def twice(function):
    def both(): return function(), function()
    return both
@functools.wraps(asks)
def wrapped(): return 1
decorated = twice(asks)
@torch.no_grad()
def evaluate(): breakpoint()
itself = twice(quiet)
def around():
    def later(): return later
    return later
goes_round = around()
class Property:
    @property
    def name(self): return input()
    @staticmethod
    def other(): return 1
net = nn.Sequential(nn.Linear(2, 2), Looks())
plain = nn.Sequential(Plain())
"""


@pytest.fixture
def namespace() -> dict[str, Any]:
    module = ModuleType("__main__")
    exec(EARLIER, vars(module))
    return vars(module)


@pytest.mark.parametrize(
    "source",
    [
        "name = input('name? ')",
        "for _ in range(3):\n    breakpoint()",
        "import pdb; pdb.set_trace()",
        "from pdb import set_trace\nset_trace()",
        "dist.breakpoint(1)",
        "from getpass import getpass\ntoken = getpass()",
        "def f(): return input()\nf()",
        "1 / 0\n%debug",
        "%%time\n%debug",
        "!ls\nx = %timeit -o 1\nbreakpoint()",
        "asks()",
        "calls()",
        "inner()()",
        "Looks()(x)",
        "y = net(x)",
        "bound(x)",
        "halfway()",
        "decorated()",
        "evaluate()",
        "Property().name",
        "await asyncio.sleep(0)\ninput()",
    ],
)
def test_code_that_may_request_input_is_recognized(source: str, namespace: dict[str, Any]) -> None:
    assert may_request_input(source, namespace)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "for input, target in loader:\n    loss = model(input)",
        "input = batch[0]\nmodel(input)",
        "def train(input): return input\ntrain(3)",
        "quiet(3)",
        "recursive(3)",
        "plain(x)",
        "itself()",
        "goes_round()",
        "wrapped()",
        "inputs = model.input",
        "# input(), breakpoint()\nprint('input()')",
        "this is no python: input(",
    ],
)
def test_code_that_requests_no_input_is_recognized(source: str, namespace: dict[str, Any]) -> None:
    assert not may_request_input(source, namespace)


class Begun(nn.Module):
    """A class without ``super().__init__()`` must give a failing cell, not a dead rank."""

    def __init__(self) -> None: ...


class Unbound:
    """A proxy that cannot return its class."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("working outside of a context")


def test_unusual_objects_and_sources_are_assumed_to_request_no_input(
    namespace: dict[str, Any],
) -> None:
    assert not may_request_input("print(input)", {**namespace, "input": 3})
    # the code of libraries is not searched
    assert not may_request_input("model(x)", {"model": nn.LSTM(2, 2)})
    assert not may_request_input("net(x)", {"net": Begun()})
    assert not may_request_input("net(x)", {"net": nn.Sequential(Begun())})
    assert not may_request_input("current.user", {"current": Unbound()})
    for source in ("input()\0", "input(" + "(" * 5000, "x = '\ud800'; input()"):
        assert not may_request_input(source, {}), "it is told when it runs"
