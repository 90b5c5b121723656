"""The memory of a step is what torch allocates, on fake ranks too; exercise 3.8a has its hints."""

import re
from typing import Any

import pytest
import torch
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.course import plan_project

IMPORTS = """
import gc, json, tempfile
from pathlib import Path
from typing import NamedTuple
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
"""
LESSON = IMPORTS + definitions(
    "3.8", "Shape", "Block", "GPT", "sharded", "copied", "step_of", "number_of_parameters"
)
SIZES = "Shape(width=96, blocks=3, heads=12, words=480, length=48), 8"
ALLOCATED = """
from torch.distributed.device_mesh import init_device_mesh

def train(model, optimizer, steps):
    for _ in range(steps):
        step(model, optimizer)

shape, texts = {sizes}
step, mesh = step_of(shape, texts), init_device_mesh("cpu", (world_size,))
found = {{}}
for way in (sharded, copied):
    make = lambda: way(shape)(mesh)
    # a thread that looks at the stack may keep a tensor for a moment longer
    allocated = min(peak_of(make), peak_of(make))
    measured = [nbddp.memory_of_step(way(shape), step) for _ in range(2)]
    found[way.__name__] = min(measured, key=lambda each: sum(each.peak.values())), allocated
found
"""

FAKE = f"""
shape, texts = {SIZES}
memory = nbddp.memory_of_step(sharded(shape), step_of(shape, texts), fake_ranks=2)
memory, dist.is_initialized()
"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def make(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.SGD(model.parameters())

try:
    nbddp.memory_of_step(make, print, fake_ranks=4)
except ValueError as error:
    refused = str(error)
refused, dist.is_initialized()
"""


def without_group(make_group: MakeRanks, source: str) -> list[Any]:
    """Return the value of a cell on one rank without a process group.

    torch's tracker keeps the model: in this process, other tests would find it.
    """
    result = make_group(1).run_cell(source, needs_group=False, wants_value=True)
    return result.values()


def test_the_peak_of_a_step_is_what_torch_allocates(make_group: MakeRanks) -> None:
    group = make_group(2)
    code = LESSON + definitions("4.2", "peak_of") + ALLOCATED.format(sizes=SIZES)
    for found in group.evaluate(code):
        for memory, allocated in found.values():
            assert sum(memory.peak.values()) == pytest.approx(allocated, rel=0.03)
    real, [(fake, is_left)] = found["sharded"][0], without_group(make_group, f"{LESSON}\n{FAKE}")
    assert (fake.peak, fake.sent) == (real.peak, real.sent)
    assert not is_left


def test_fake_ranks_refuse_a_mesh_of_two_dimensions_and_real_ranks(make_group: MakeRanks) -> None:
    [(error, is_left)] = without_group(make_group, MESH)
    assert re.search("values of a tensor.*Use real ranks", error)
    assert not is_left
    call = "nbddp.memory_of_step(print, print, fake_ranks=4)"
    for text in make_group(2).evaluate(
        f"try:\n    {call}\nexcept ValueError as e:\n    said = str(e)\nsaid"
    ):
        assert "in the notebook, without %%ddp" in text


def test_the_gpt_of_exercise_3_8a_is_that_of_the_notebook() -> None:
    names: dict[str, Any] = {}
    exec(LESSON, names)
    shape, _ = plan_project.CASES[0]
    torch.manual_seed(0)
    theirs = names["GPT"](shape)
    torch.manual_seed(0)
    ours = plan_project.GPT(shape)
    numbers = torch.arange(2 * shape.length).view(2, -1) % shape.words
    assert torch.equal(ours(numbers), theirs(numbers))
    parameters = sum(each.numel() for each in ours.parameters())
    assert parameters == plan_project.number_of_parameters(shape)
    assert parameters == names["number_of_parameters"](shape)


ANSWER = definitions("3.8", "peak_bytes")
PEAK = '"3.8a", but("peak_bytes"'
RIGHT = ['"3.8a", peak_bytes', '"3.8a", lambda *given: int(1.04 * peak_bytes(*given))']
WRONG = [
    '"3.8a", 3',
    '"3.8a", lambda shape: 0',
    '"3.8a", lambda *given: None',
    '"3.8a", lambda *given: -peak_bytes(*given)',
    '"3.8a", lambda *given: 1.2 * peak_bytes(*given)',
    '"3.8a", peak_bytes if rank else lambda *given: 0',
    f'{PEAK}, "return 4 *", "return")',
    f'{PEAK}, " + activations", "")',
    f'{PEAK}, " + activations + scores", "")',
    f'{PEAK}, "activations + scores", "activations")',
    f'{PEAK}, " * shape.blocks * tokens", " * tokens")',
    f'{PEAK}, "state = 4 * parameters", "state = 4 * parameters / ranks")',
    f'{PEAK}, "3 * parameters / ranks", "4 * parameters")',
    f'{PEAK}, "3 * parameters / ranks", "4 * parameters / ranks")',
    f'{PEAK}, "state = 4 * parameters", "state = 3 * parameters")',
    f'{PEAK}, "/ ranks + ends", "/ ranks")',
    f'{PEAK}, "(state + activations + scores)", "(state + (activations + scores) / ranks)")',
    f'{PEAK}, "(state + activations + scores)", "(state + (activations + scores) * ranks)")',
]


@pytest.mark.full
def test_a_prediction_of_the_peak_gets_a_verdict(
    make_group: MakeRanks, snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(2), "", RIGHT, WRONG, snapshot, answers=ANSWER)
