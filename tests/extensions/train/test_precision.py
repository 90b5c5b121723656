"""Precision: the right order of calls, accumulation, clipping, and limits of a device."""

from typing import Any

import pytest
import torch
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbddp.errors import RequestError
from nbddp.extensions.train.precision import Precision, precision
from nbddp.reporting import this_rank

mse = nn.functional.mse_loss


def model_and_optimizer(lr: float = 0.1) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def step(
    amp: Precision, model: nn.Module, optimizer: Optimizer, *, final: bool = False, **options: Any
) -> bool:
    """A micro-step with the mean of the outputs as the loss."""
    with amp.autocast(model, final=final):
        loss = model(batch()[0]).float().mean()
    return amp.step(loss, optimizer, **options)


def train(
    amp: Precision, pieces: int, *, final: bool = False, factor: float = 1.0
) -> tuple[torch.Tensor, list[bool]]:
    """One big batch in micro-batches; the parameters, and the result of each step."""
    model, optimizer = model_and_optimizer()
    inputs, targets = batch()
    chunks = zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)
    stepped = []
    for number, (x, y) in enumerate(chunks, start=1):
        with amp.autocast(model, final=final and number == pieces):
            loss = factor * mse(model(x), y)
        stepped.append(amp.step(loss, optimizer))
    return parameters(model), stepped


def train_plain(factor: float = 1.0, max_norm: float = float("inf")) -> tuple[torch.Tensor, Any]:
    """The same in a bare loop; the parameters, and the norm of the gradient."""
    model, optimizer = model_and_optimizer()
    inputs, targets = batch()
    (factor * mse(model(inputs), targets)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return parameters(model), norm


def assert_learns(amp: Precision, device: str, steps: int) -> None:
    model = model_and_optimizer()[0].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = (each.to(device) for each in batch(64))
    losses = []
    for _ in range(steps):
        with amp.autocast(model):
            output = model(inputs)
            loss = mse(output.float(), targets)
        amp.step(loss, optimizer)
        losses.append(loss.item())
    assert output.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[amp.kind]
    assert losses[-1] < losses[0] / 10
    assert next(model.parameters()).dtype is torch.float32


def test_fp32_gives_exactly_the_result_of_a_plain_loop() -> None:
    found, stepped = train(precision(), 1)
    assert torch.equal(found, train_plain()[0])
    assert stepped == [True]


@pytest.mark.parametrize(("accumulate", "final"), [(3, False), (5, True)])
def test_accumulated_micro_steps_equal_one_large_batch(accumulate: int, final: bool) -> None:
    amp = precision(accumulate=accumulate)
    parts, stepped = train(amp, 3, final=final)
    torch.testing.assert_close(parts, train_plain()[0])
    assert stepped == [False, False, True]
    assert amp.micro_step == 0


def test_clipping_applies_to_the_whole_accumulated_gradient() -> None:
    amp = precision(accumulate=3, max_norm=0.5)
    parts, _ = train(amp, 3, factor=100)
    plain, norm = train_plain(factor=100, max_norm=0.5)
    torch.testing.assert_close(parts, plain)
    torch.testing.assert_close(amp.grad_norm, norm)
    assert norm > 0.5


def test_bf16_trains_on_the_cpu_with_fp32_weights() -> None:
    assert_learns(precision("bf16"), "cpu", steps=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_gpu_trains_with_mixed_precision(kind: str) -> None:
    assert_learns(precision(kind, accumulate=2, max_norm=10.0), "cuda", steps=120)


def test_the_scheduler_advances_once_per_step_and_a_final_micro_step_ends_one() -> None:
    model, optimizer = model_and_optimizer(lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp = precision(accumulate=2)
    for _ in range(6):
        step(amp, model, optimizer, scheduler=scheduler)
    assert scheduler.get_last_lr() == [0.125]
    amp, made = precision(accumulate=2), model_and_optimizer()
    assert [step(amp, *made, final=each) for each in (True, False, False)] == [True, False, True]


def test_a_step_skipped_by_the_scaler_does_not_count_as_a_step() -> None:
    """torch's scaler works on the CPU too, though fp16 training there makes no sense."""
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp = Precision("fp16", "cpu", accumulate=1, max_norm=1.0)
    before = parameters(model)
    for factor, has_stepped in ((float("inf"), False), (1.0, True)):
        with amp.autocast(model):
            loss = factor * model(batch()[0]).float().mean()
        assert amp.step(loss, optimizer, scheduler=scheduler) is has_stepped
        assert torch.equal(parameters(model), before) is not has_stepped
        assert all(each.grad is None for each in model.parameters())
    assert amp.scaler.get_scale() == 2**15
    assert scheduler.get_last_lr() == [0.05]
    again = Precision("fp16", "cpu", accumulate=1, max_norm=None)
    again.load_state_dict(amp.state_dict())
    assert again.scaler.state_dict() == amp.scaler.state_dict()
    assert again.scaler.get_scale() == 2**15


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    model, optimizer = model_and_optimizer()
    amp = Precision("fp16", "cpu", accumulate=1, max_norm=1e9)
    loss = model(batch()[0]).mean()
    model.zero_grad()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    amp.step(loss, optimizer)
    norm = torch.stack([each.norm() for each in expected]).norm()
    torch.testing.assert_close(amp.grad_norm, norm)


class Spread(nn.Linear):
    """Has the switch of FSDP's models, under the name of DDP's."""

    require_backward_grad_sync = True

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        self.require_backward_grad_sync = requires_gradient_sync


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("is_spread", [True, False])
def test_gradients_are_averaged_in_the_last_micro_step_only(is_spread: bool) -> None:
    model: Any = Spread(4, 1) if is_spread else DistributedDataParallel(nn.Linear(4, 1))
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.require_backward_grad_sync))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = precision(accumulate=2)
    for _ in range(4):
        step(amp, model, optimizer)
    assert seen == [False, True, False, True]
    assert model.require_backward_grad_sync


def test_optimizers_take_turns_but_share_no_accumulation(snapshot: SnapshotAssertion) -> None:
    model, first = model_and_optimizer()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = precision()
    assert [step(alone, model, each) for each in (first, second)] == [True] * 2
    amp = precision(accumulate=2)
    state, before = amp.state_dict(), parameters(model)
    assert step(amp, model, first) is False
    assert refusal(RequestError, step, amp, model, second) == snapshot
    assert torch.equal(parameters(model), before)
    assert step(amp, model, first) is True  # it was not lost
    assert step(amp, model, first) is False
    amp.load_state_dict(state)
    assert step(amp, model, second) is False


def test_invalid_precision_arguments_are_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    senseless: list[dict[str, Any]] = [
        {"kind": "fp8"},
        {"accumulate": 0},
        {"max_norm": 0.0},
        {"max_norm": float("nan")},
    ]
    reasons = [refusal(ValueError, precision, **each) for each in senseless]
    of_another = precision("fp32").state_dict()
    reasons.append(refusal(ValueError, precision("bf16").load_state_dict, of_another))
    model, optimizer = model_and_optimizer()
    amp = precision(accumulate=3)
    step(amp, model, optimizer)
    reasons.append(refusal(RequestError, amp.state_dict))  # the middle is no place to save
    monkeypatch.setattr(this_rank, "world_size", lambda: 2)
    loss = model(batch()[0]).mean()
    reasons.append(refusal(RequestError, precision(accumulate=2).step, loss, optimizer))
    monkeypatch.setattr(this_rank, "device", lambda: torch.device("cpu"))
    reasons.append(refusal(RequestError, precision, "fp16"))
    monkeypatch.setattr(this_rank, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")  # noqa: ARG005
    reasons.append(refusal(RequestError, precision, "bf16"))
    assert reasons == snapshot


def test_a_step_that_an_interrupt_ends_is_the_last_one_of_its_accumulation() -> None:
    model, optimizer = model_and_optimizer()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    amp = precision("fp32", accumulate=2)
    assert not step(amp, model, optimizer)
    handle = optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(amp, model, optimizer)
    handle.remove()
    assert all(each.grad is None for each in model.parameters())
    assert [step(amp, model, optimizer) for _ in range(2)] == [False, True]
