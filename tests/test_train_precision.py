"""Precision: the one right order, accumulation, clipping, and what a device cannot do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbddp.errors import RequestError
from nbddp.train import place
from nbddp.train.precision import Precision, precision


def model_and_optimizer(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def train(amp: Precision, pieces: int, **final: bool) -> tuple[torch.Tensor, list[bool]]:
    """One big batch in pieces; the parameters, and what each step said."""
    model, optimizer = model_and_optimizer()
    inputs, targets = batch()
    said = []
    for number, (x, y) in enumerate(
        zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True), start=1
    ):
        with amp.autocast(model, final=final.get("final", False) and number == pieces):
            loss = nn.functional.mse_loss(model(x), y)
        said.append(amp.step(loss, optimizer))
    return parameters(model), said


def test_micro_steps_together_equal_one_big_batch() -> None:
    whole, _ = train(precision(), 1)
    parts, said = train(precision(accumulate=3), 3)
    torch.testing.assert_close(parts, whole)
    assert said == [False, False, True]


def test_an_accumulation_that_ends_early_is_the_mean_of_what_there_was() -> None:
    whole, _ = train(precision(), 1)
    amp = precision(accumulate=5)
    parts, said = train(amp, 3, final=True)
    torch.testing.assert_close(parts, whole)
    assert said == [False, False, True]
    assert amp.micro_step == 0


def test_a_final_micro_step_does_not_end_the_next_accumulation_early() -> None:
    amp = precision(accumulate=2)
    model, optimizer = model_and_optimizer()
    said = []
    for is_final in (True, False, False):
        with amp.autocast(model, final=is_final):
            loss = model(batch()[0]).mean()
        said.append(amp.step(loss, optimizer))
    assert said == [True, False, True]


def test_gradients_are_gone_after_a_step_and_stay_in_the_middle() -> None:
    model, optimizer = model_and_optimizer()
    amp = precision(accumulate=2)
    for has_stepped in (False, True):
        with amp.autocast(model):
            loss = model(batch()[0]).mean()
        assert amp.step(loss, optimizer) is has_stepped
        assert all((each.grad is None) is has_stepped for each in model.parameters())


def test_what_is_clipped_is_the_whole_accumulated_gradient() -> None:
    plain, optimizer = model_and_optimizer()
    inputs, targets = batch()
    (100 * nn.functional.mse_loss(plain(inputs), targets)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    model, optimizer = model_and_optimizer()
    amp = precision(accumulate=3, max_norm=0.5)
    for x, y in zip(inputs.chunk(3), targets.chunk(3), strict=True):
        with amp.autocast(model):
            loss = 100 * nn.functional.mse_loss(model(x), y)
        amp.step(loss, optimizer)
    torch.testing.assert_close(parameters(model), parameters(plain))
    torch.testing.assert_close(amp.grad_norm, norm)
    assert norm > 0.5


def test_fp32_is_bit_for_bit_what_a_bare_loop_does() -> None:
    plain, optimizer = model_and_optimizer()
    inputs, targets = batch()
    nn.functional.mse_loss(plain(inputs), targets).backward()
    optimizer.step()
    found, said = train(precision(), 1)
    assert torch.equal(found, parameters(plain))
    assert said == [True]


def test_bf16_trains_on_the_cpu_and_keeps_its_weights_in_full() -> None:
    model, optimizer = model_and_optimizer()
    inputs, targets = batch(64)
    amp = precision("bf16")
    losses = []
    for _ in range(60):
        with amp.autocast(model):
            output = model(inputs)
            loss = nn.functional.mse_loss(output.float(), targets)
        amp.step(loss, optimizer)
        losses.append(loss.item())
    assert output.dtype is torch.bfloat16
    assert losses[-1] < losses[0] / 10
    assert next(model.parameters()).dtype is torch.float32


def test_the_scheduler_goes_on_once_for_each_real_step() -> None:
    model, optimizer = model_and_optimizer(lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp = precision(accumulate=2)
    for _ in range(6):
        with amp.autocast(model):
            loss = model(batch()[0]).mean()
        amp.step(loss, optimizer, scheduler=scheduler)
    assert scheduler.get_last_lr() == [0.125]


def test_a_step_that_the_scaler_skipped_is_no_step() -> None:
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


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    model, optimizer = model_and_optimizer()
    amp = Precision("fp16", "cpu", accumulate=1, max_norm=1e9)
    loss = model(batch()[0]).mean()
    model.zero_grad()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    amp.step(loss, optimizer)
    norm = torch.stack([each.norm() for each in expected]).norm()
    torch.testing.assert_close(amp.grad_norm, norm)


def test_the_scalers_state_comes_back() -> None:
    amp, again = (Precision("fp16", "cpu", accumulate=1, max_norm=None) for _ in range(2))
    model, optimizer = model_and_optimizer()
    amp.step(float("inf") * model(batch()[0]).mean(), optimizer)
    again.load_state_dict(amp.state_dict())
    assert again.scaler.state_dict() == amp.scaler.state_dict()
    assert again.scaler.get_scale() == 2**15


def test_the_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^precision: this is bf16 and the state is of fp32; "):
        precision("bf16").load_state_dict(precision("fp32").state_dict())


def test_the_middle_of_an_accumulation_is_no_place_for_a_checkpoint() -> None:
    model, optimizer = model_and_optimizer()
    amp = precision(accumulate=3)
    amp.step(model(batch()[0]).mean(), optimizer)
    with pytest.raises(RequestError) as caught:
        amp.state_dict()
    assert str(caught.value) == (
        "precision: micro-step 1 of 3: the gradients so far are in no checkpoint; save after a "
        "step() that returned True, or end the accumulation with autocast(model, final=True)"
    )


def test_to_accumulate_over_ranks_it_has_to_know_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "world_size", lambda: 2)
    model, optimizer = model_and_optimizer()
    with pytest.raises(RequestError, match=r"write 'with amp.autocast\(model\):', so that grad"):
        precision(accumulate=2).step(model(batch()[0]).mean(), optimizer)


def test_fsdp_synchronizes_in_the_last_micro_step_only() -> None:
    class Spread(nn.Linear):
        is_on = True
        seen: list[bool]

        def set_requires_gradient_sync(self, requires: bool) -> None:
            self.is_on = requires

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.is_on)
            return super().forward(inputs)

    model = Spread(4, 1)
    model.seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = precision(accumulate=2)
    for _ in range(4):
        with amp.autocast(model):
            loss = model(batch()[0]).mean()
        amp.step(loss, optimizer)
    assert model.seen == [False, True, False, True]
    assert model.is_on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fp8"}, "precision: kind must be 'bf16', 'fp16' or 'fp32', got 'fp8'"),
        ({"accumulate": 0}, "precision: accumulate must be at least 1, got 0"),
        ({"max_norm": 0.0}, "precision: max_norm must be above 0, got 0.0"),
        ({"max_norm": float("nan")}, "precision: max_norm must be above 0, got nan"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"^precision: ") as caught:
        precision(**options)
    assert str(caught.value) == message


def test_fp16_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "device", lambda: torch.device("cpu"))
    with pytest.raises(RequestError) as caught:
        precision("fp16")
    assert str(caught.value) == (
        "precision: fp16 needs a GPU, and this rank is on a CPU; take 'bf16'"
    )


def test_bf16_on_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")  # noqa: ARG005
    with pytest.raises(RequestError) as caught:
        precision("bf16")
    assert str(caught.value) == "precision: Tesla T4 cannot compute in bf16; take 'fp16'"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_gpu_trains_in_it(kind: str) -> None:
    model, _ = model_and_optimizer()
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = (each.cuda() for each in batch(64))
    amp = precision(kind, accumulate=2, max_norm=10.0)
    losses = []
    for _ in range(120):
        with amp.autocast(model):
            output = model(inputs)
            loss = nn.functional.mse_loss(output.float(), targets)
        amp.step(loss, optimizer)
        losses.append(loss.item())
    assert output.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    assert losses[-1] < losses[0] / 10


def test_two_optimizers_may_not_share_an_accumulation() -> None:
    model, first = model_and_optimizer()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = precision(accumulate=2)
    before = parameters(model)
    assert amp.step(model(batch()[0]).mean(), first) is False
    with pytest.raises(RequestError) as caught:
        amp.step(model(batch()[0]).mean(), second)
    assert str(caught.value) == (
        "precision: micro-step 1 of 2 was for another optimizer: make an nbddp.precision() for each"
    )
    assert torch.equal(parameters(model), before)
    assert amp.step(model(batch()[0]).mean(), first) is True  # it was not lost


def test_two_optimizers_may_take_turns_step_by_step() -> None:
    model, first = model_and_optimizer()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = precision()
    assert [amp.step(model(batch()[0]).mean(), each) for each in (first, second)] == [True] * 2


def test_after_a_state_was_loaded_any_optimizer_may_begin() -> None:
    model, first = model_and_optimizer()
    amp = precision(accumulate=2)
    state = amp.state_dict()
    amp.step(model(batch()[0]).mean(), first)
    amp.load_state_dict(state)
    assert amp.step(model(batch()[0]).mean(), torch.optim.SGD(model.parameters())) is False
