"""Each storage is counted once, for the model, optimizer, variable or error that holds it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbddp.extensions.memory.holders import Holder, count_holders

BEGIN = "import torch\nimport numpy as np\nfrom torch import nn\n"
NET = "nn.Linear(10, 10, bias=False)"  # 400 bytes
TRAINED = f"""
class Trainer:
    def __init__(self):
        self.net = {NET}
        self.optimizer = torch.optim.AdamW(self.net.parameters())

trainer = Trainer()
trainer.net(torch.ones(1, 10)).sum().backward()
trainer.optimizer.step()
"""
SHARDED = f"""
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
mesh = torch.distributed.init_device_mesh("cpu", (1,))
tensor = distribute_tensor(torch.zeros(1000), mesh, [Shard(0)])
part = tensor.to_local()
model = fully_shard({NET})
"""
ERROR = """
def forward(hidden):
    saved = hidden + 1
    raise ValueError

try:
    forward(torch.zeros(500))
except ValueError as error:
    last_error.append(error)
"""
CASES = {
    "views of one storage": (
        "x = torch.zeros(1000)\ny, z = x[:10], x.view(10, 100)",
        {("x", "tensors"): 4000},
    ),
    "an array and its tensor": (
        "array = np.zeros(1000)\npart, tensor = array[5:], torch.from_numpy(array)",
        {("array", "tensors"): 8000},
    ),
    "tied weights": (
        f"model = nn.ModuleList([{NET}, {NET}])\nmodel[0].weight = model[1].weight",
        {("model", "parameters"): 400},
    ),
    "a model and its part": (
        f"all_of_it = nn.Sequential({NET}, nn.BatchNorm1d(10))\npart = all_of_it[0]",
        {("all_of_it", "parameters"): 480, ("all_of_it", "buffers"): 88},
    ),
    "a fake tensor": (
        "from torch._subclasses import FakeTensorMode\n"
        "with FakeTensorMode():\n    fake = torch.zeros(10)\nx = torch.zeros(10)",
        {("x", "tensors"): 40},
    ),
    "a lazy model": ("model = nn.LazyLinear(10)\nx = torch.zeros(10)", {("x", "tensors"): 40}),
    "a model in a dict": (
        f"runs = {{'a': [{NET}]}}",
        {("runs['a'][0]", "parameters"): 400},
    ),
    "a model and an optimizer in an object": (
        TRAINED,
        {
            ("trainer.net", "parameters"): 400,
            ("trainer.net", "gradients"): 400,
            ("trainer.optimizer", "optimizer state"): 804,
        },
    ),
    "shards": (SHARDED, {("model", "parameters"): 400, ("part", "tensors"): 4000}),
    "the graph of a loss": (
        "w = torch.zeros(1000, requires_grad=True)\nlosses = [w.exp().square().sum()]",
        {("losses", "autograd graph"): 4000, ("w", "tensors"): 4000},
    ),
    "a closure": (
        "def make():\n    x = torch.zeros(1000)\n    return lambda: x\n\nf = make()",
        {("f", "tensors"): 4000},
    ),
    "outputs": (
        "x = torch.zeros(1000)\nOut[3], Out[4] = x[:1], torch.zeros(500)\n_ = _4 = Out[4]",
        {("x", "tensors"): 4000, ("Out[4]", "output"): 2000},
    ),
    "the frames of the last error": (
        ERROR,
        {("hidden in forward()", "last error"): 2000, ("saved in forward()", "last error"): 2000},
    ),
    "the frames of an error that a variable holds": (
        f"{ERROR}kept = last_error[0]",
        {("kept", "tensors"): 4000},
    ),
}


def holders_of(source: str) -> dict[tuple[str, str], int]:
    """Run a cell, and return its holders; without numbers, and tensors without a name."""
    hidden: dict[str, Any] = {"last_error": [], "Out": {}}
    names = {"__name__": "__main__", **hidden}
    exec(BEGIN + source, names)
    shell = SimpleNamespace(user_ns=names, user_ns_hidden=hidden)
    found = count_holders(shell, *hidden["last_error"] or [None]).bytes
    assert {each.place for each in found} == {"process"}
    return {(name, kind): size for (_, name, kind), size in found.items() if name and size > 9}


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", CASES)
def test_each_storage_is_counted_for_its_first_holder(case: str) -> None:
    source, expected = CASES[case]
    assert holders_of(source) == expected


def test_a_tensor_that_no_variable_holds_has_no_name() -> None:
    tensor = torch.zeros(1 << 20)
    found = count_holders(SimpleNamespace(user_ns={}, user_ns_hidden={}), None).bytes
    assert found[Holder("process", "", "tensors without a name")] >= tensor.nbytes
