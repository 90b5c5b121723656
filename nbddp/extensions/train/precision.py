"""``nbddp.precision()``: mixed precision, gradient accumulation and clipping in one object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nbddp import accelerator
from nbddp.errors import ArgumentError, RequestError
from nbddp.reporting import state_providers, this_rank
from nbddp.reporting.state_providers import StateProvider

Kind = Literal["bf16", "fp16", "fp32"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def precision(
    kind: Kind = "fp32", *, accumulate: int = 1, max_norm: float | None = None
) -> Precision:
    """Create an object for mixed precision training; the loop is the same on a CPU and on a GPU.

    ::

        amp = nbddp.precision("bf16", accumulate=4, max_norm=1.0)
        for inputs, targets in loader:
            with amp.autocast(model):
                loss = loss_of(model(inputs), targets)
            if amp.step(loss, optimizer):
                step += 1

    Args:
        kind: ``fp32`` for no mixed precision; ``bf16``, on CPUs too; ``fp16`` with a GradScaler,
            on GPUs only.
        accumulate: micro-steps in one step; the loss is divided by this number.
        max_norm: clip the gradients of a step to this 2-norm over all of the optimizer's
            parameters; None for no clipping.

    Returns:
        An object for the forward pass and the step, which checkpoints can save. Each optimizer
        needs its own.

    Raises:
        ArgumentError: a value is invalid.
        RequestError: this rank's device does not support the precision.

    >>> amp = precision("bf16", accumulate=2)
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for inputs in torch.ones(2, 8, 4):
    ...     with amp.autocast(model):
    ...         loss = model(inputs).mean()
    ...     print(amp.step(loss, optimizer))
    False
    True
    """
    if kind not in _DTYPES:
        raise ArgumentError(f"precision: kind must be 'bf16', 'fp16' or 'fp32', got {kind!r}")
    if accumulate < 1:
        raise ArgumentError(f"precision: accumulate must be at least 1, got {accumulate}")
    if max_norm is not None and not max_norm > 0:
        raise ArgumentError(f"precision: max_norm must be above 0, got {max_norm}")
    device = this_rank.device()
    if kind == "fp16" and device.type == "cpu":
        raise RequestError("precision: fp16 needs a GPU, and this rank is on a CPU; take 'bf16'")
    is_bf16 = kind == "bf16" and device.type != "cpu"
    module = accelerator.current().module
    # slow on a GPU for which torch only emulates bf16
    if is_bf16 and not module.is_bf16_supported(including_emulation=False):
        name = module.get_device_name(device)
        raise RequestError(f"precision: {name} cannot compute in bf16; take 'fp16'")
    return Precision(kind, device.type, accumulate=accumulate, max_norm=max_norm)


class Precision:
    """Autocast, GradScaler, accumulation and clipping for one optimizer; see :func:`precision`.

    Attributes:
        kind: ``bf16``, ``fp16`` or ``fp32``.
        accumulate: micro-steps in one step.
        max_norm: the maximum norm of the gradients; None for no clipping.
        micro_step: completed micro-steps of the current accumulation.
        grad_norm: the norm before the last clipping, a tensor with one element; None without
            clipping.
        scaler: torch's GradScaler; it does nothing unless ``kind`` is ``fp16``.
    """

    def __init__(
        self, kind: Kind, device_type: str, *, accumulate: int, max_norm: float | None
    ) -> None:
        self.kind = kind
        self.accumulate = accumulate
        self.max_norm = max_norm
        self.micro_step = 0
        self.grad_norm: torch.Tensor | None = None
        self.scaler = torch.amp.GradScaler(device_type, enabled=kind == "fp16")
        self._device_type = device_type
        self._models: tuple[nn.Module, ...] = ()
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_final = False

    def __repr__(self) -> str:
        return f"precision({self.kind!r}, accumulate={self.accumulate}, max_norm={self.max_norm})"

    @contextmanager
    def autocast(self, *models: nn.Module, final: bool = False) -> Iterator[None]:
        """Run the forward pass and the loss in the body in this precision.

        Args:
            models: the trained models, for an accumulation on several ranks. Only the last
                micro-step synchronizes gradients, and DDP decides that in the forward pass.
            final: whether this micro-step ends the accumulation early, as for an epoch's last
                batch. The gradients are then the mean over the completed micro-steps.
        """
        self._models, self._is_final = models, final
        with (
            self._without_gradient_sync(),
            torch.autocast(
                self._device_type, dtype=_DTYPES[self.kind], enabled=self.kind != "fp32"
            ),
        ):
            yield

    def step(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: LRScheduler | None = None,
    ) -> bool:
        """Backpropagate; at the end of an accumulation, clip, update and clear the gradients.

        Args:
            loss: one element, the mean over this rank's (micro-)batch.
            optimizer: the same optimizer until the accumulation ends. If two optimizers alternate,
                as in a GAN, each needs its own Precision.
            scheduler: steps whenever the optimizer steps.

        Returns:
            Whether the optimizer stepped. It does not step in the middle of an accumulation, nor
            if the scaler found an infinite or NaN gradient.

        Raises:
            RequestError: autocast() got no model for an accumulation on several ranks, or this
                accumulation was started for another optimizer.
        """
        if self.micro_step and optimizer is not self._optimizer:
            # both would share one count of micro-steps: one optimizer would never step
            raise RequestError(
                f"precision: micro-step {self.micro_step} of {self.accumulate} was for another "
                "optimizer: make an nbddp.precision() for each"
            )
        if self.accumulate > 1 and this_rank.world_size() > 1 and not self._models:
            raise RequestError(
                "precision: to accumulate over several ranks write 'with amp.autocast(model):', "
                "so that gradients are synchronized once per step"
            )
        is_last = self._is_last
        with self._without_gradient_sync():
            scaled: Any = self.scaler.scale(loss / self.accumulate)
            scaled.backward()
        self.micro_step += 1
        self._models = ()
        self._optimizer = optimizer
        if not is_last:
            return False
        try:
            has_stepped = self._update(optimizer)
        finally:  # also after an interrupt: the next micro-step is the first one
            optimizer.zero_grad(set_to_none=True)
            self._drop_accumulation()
        if has_stepped and scheduler is not None:
            scheduler.step()
        return has_stepped

    @property
    def _is_last(self) -> bool:
        return self._is_final or self.micro_step + 1 == self.accumulate

    def _update(self, optimizer: torch.optim.Optimizer) -> bool:
        self.scaler.unscale_(optimizer)  # clip true gradients, not scaled ones
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]
        if gradients and self.micro_step < self.accumulate:
            torch._foreach_mul_(gradients, self.accumulate / self.micro_step)
        if self.max_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, self.max_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale  # a skipped step lowers the scale

    @contextmanager
    def _without_gradient_sync(self) -> Iterator[None]:
        """Prevent DDP and FSDP2 from synchronizing, except in the last micro-step."""
        models: tuple[Any, ...] = () if self._is_last else self._models
        with ExitStack() as stack:
            for model in models:
                if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
                    model.set_requires_gradient_sync(False)
                    stack.callback(model.set_requires_gradient_sync, requires_gradient_sync=True)
                elif hasattr(model, "no_sync"):  # DDP, also inside torch.compile's wrapper
                    stack.enter_context(model.no_sync())
            yield

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, for a checkpoint.

        Raises:
            RequestError: an accumulation is running; a checkpoint does not contain gradients.
        """
        if self.micro_step:
            raise RequestError(
                f"precision: micro-step {self.micro_step} of {self.accumulate}: a checkpoint does "
                "not contain the gradients so far; save after a step() that returned True, or end "
                "the accumulation with autocast(model, final=True)"
            )
        return {"kind": self.kind, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; a running accumulation is dropped.

        Raises:
            ArgumentError: the state is for another kind of precision.
        """
        if state["kind"] != self.kind:
            raise ArgumentError(
                f"precision: this is {self.kind}, but the state is for {state['kind']}; resume "
                "without it to start with a new scaler"
            )
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self._drop_accumulation()

    def _drop_accumulation(self) -> None:
        """Forget the micro-steps of an accumulation that has ended, or has lost its gradients."""
        self.micro_step, self._models, self._is_final = 0, (), False
        self._optimizer = None


state_providers.register(
    StateProvider(
        "accumulations",
        Precision,
        take=lambda _: None,  # none is running after an optimizer's step
        restore=lambda obj, _: obj._drop_accumulation(),
    )
)
