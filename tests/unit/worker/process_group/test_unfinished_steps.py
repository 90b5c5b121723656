"""A model in the middle of a step is reset as a whole, or named."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from nbddp.worker.process_group import unfinished_steps
from nbddp.worker.process_group.bound_objects import BoundObjects
from nbddp.worker.process_group.unfinished_steps import StepCounts, describe_uneven, reset


@pytest.fixture
def unfinished() -> Iterator[nn.Module]:
    """Return an FSDP2 model whose forward pass has failed."""
    gc.collect()  # models of other tests would be reset, too
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model)
    model(torch.ones(1, 2))
    handle = model[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2))
    handle.remove()
    yield model
    dist.destroy_process_group()


def test_a_model_is_not_reset_without_a_private_name(
    unfinished: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = unfinished._get_fsdp_state()._fsdp_param_group
    with monkeypatch.context() as patch:
        patch.delattr(group, "_sharded_state")
        [(model, reason)] = reset(BoundObjects())
    assert model is unfinished
    assert "_sharded_state" in reason
    assert unfinished_steps.is_unfinished()
    assert reset(BoundObjects()) == []
    assert not unfinished_steps.is_unfinished()
    unfinished(torch.ones(1, 2)).sum().backward()


class Interrupting(torch.optim.SGD):
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        raise KeyboardInterrupt


def test_a_step_that_an_interrupt_ends_is_counted_as_begun() -> None:
    counts, parameters = StepCounts(), [nn.Parameter(torch.ones(1))]
    whole, interrupted = torch.optim.SGD(parameters), Interrupting(parameters)
    whole.step()
    with pytest.raises(KeyboardInterrupt):
        interrupted.step()
    assert (counts.of(whole), counts.of(interrupted)) == ([1, 1], [1, 0])
    line = "optimizer: rank 1 stopped inside a step, and may have updated only some parameters"
    assert describe_uneven([{"optimizer": [1, 1, 1]}, {"optimizer": [1, 0, 1]}]) == [
        f"{line}; load a checkpoint"
    ]
    counts.clear()
    assert counts.of(whole) == [0, 0]


@pytest.mark.parametrize(
    ("steps", "stepped", "others"),
    [
        ("ababa", "a", "b"),
        ("abcabcab", "ab", "c"),
        ("abab", "", ""),
        ("aba", "", ""),  # one iteration is no pattern
        ("aabaabaa", "", ""),  # the loop steps one of them more often
        ("ababb", "", ""),
        ("aaaaa", "", ""),
        ("", "", ""),
    ],
)
def test_an_iteration_is_unfinished_only_if_each_one_before_had_the_same_steps(
    steps: str, stepped: str, others: str
) -> None:
    optimizers = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))]) for name in "abc"}
    counts = StepCounts()
    for name in "ababa":
        optimizers[name].step()
    counts.end_cell(None)
    assert counts.unfinished_iteration() == ([], [])
    for name in steps:
        optimizers[name].step()
    wanted = [[optimizers[name] for name in names] for names in (stepped, others)]
    counts.end_cell(KeyboardInterrupt())
    assert [*counts.unfinished_iteration()] == wanted
    optimizers["a"].step()
    assert counts.unfinished_iteration() == ([], [])
