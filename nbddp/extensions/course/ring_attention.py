"""The exercise of notebook 4.3: causal attention in a ring, tested on all ranks together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from nbddp.extensions.course.grading import (
    judge,
    require,
    require_double,
    require_function,
    require_value,
)
from nbddp.extensions.memory.traffic import Traffic
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

HEADS, TOKENS, WIDTH = 2, 32, 16  # of a rank; the scores of its tokens are two shares
SHARE = 8 * HEADS * TOKENS * WIDTH  # the bytes of its queries, in 64-bit numbers
NAMES = "query", "key", "value"
attention: Any = scaled_dot_product_attention


class _Watch(Traffic):  # type: ignore[no-untyped-call]
    """Record the messages, the operations, and the sizes of the tensors, in shares."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[Any, float] = {}
        self.counter, self.before_last = FlopCounterMode(display=False), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if ".recv" in str(func):
            self.before_last = self.counter.get_total_flops()
        if isinstance(made, Tensor):
            storage: Any = made.untyped_storage()
            self.sizes[StorageWeakRef(storage)] = storage.nbytes() / SHARE  # type: ignore[no-untyped-call]
        return made


@judge("4.3a", on_ranks=True)
def ring_attention(ring: Any) -> None:
    """Judge ``ring_attention(query, key, value, places)``, with the plain and the zig-zag split."""
    require_function(ring, *NAMES, "places")
    plain = torch.arange(this_rank.world_size() * TOKENS).view(-1, TOKENS // 2)
    zigzag = torch.stack([plain, plain.flip(0)], 1)[: this_rank.world_size()]
    for split, places in {"plain": plain, "zig-zag": zigzag}.items():
        _judge_split(ring, places.reshape(-1, TOKENS).to(communication_device()), split)


def _judge_split(ring: Any, places: Tensor, split: str) -> None:
    ranks, rank = len(places), this_rank.rank()
    torch.manual_seed(0)
    drawn = torch.randn(4, 1, HEADS, ranks * TOKENS, WIDTH).double().to(places.device)
    *whole, gradient = drawn.requires_grad_()
    right = attention(*whole, is_causal=True)

    def share(tensor: Tensor, shift: int = 0) -> Tensor:
        return tensor.detach()[..., places[(rank + shift) % ranks], :]

    *inputs, of_output = (share(each).requires_grad_() for each in drawn)
    forward, backward = _Watch(), _Watch()
    with forward.counter, forward:
        output = ring(*(each.view_as(each) for each in inputs), places)
    in_order = [each[..., places.flatten(), :] for each in whole]
    mistakes = {
        "4.3a by index": attention(*in_order, is_causal=True).chunk(ranks, -2)[rank],
        "4.3a no mask": share(attention(*whole)),
        "4.3a own keys": attention(*inputs, attn_mask=places[rank][:, None] >= places[rank]),
    }
    require_value(output, share(right), mistakes, "4.3a output", split=split)
    require_double(output, share(right), "result")
    require(output.requires_grad, "4.3a no gradient")
    # after messages of the judge: a send keeps its tensor until it has ended
    kept = sum(size for each, size in forward.sizes.items() if not each.expired()) - len(inputs)
    with backward.counter, backward:
        found = torch.autograd.grad(output, inputs, of_output, allow_unused=True)
    expected = torch.autograd.grad(right, whole, gradient)
    for name, got, of in zip(NAMES, found, expected, strict=True):
        mistakes = {"4.3a before home": share(of, 1), "4.3a past home": share(of, -1)}
        require_value(got, share(of), mistakes, f"4.3a gradient of {name}", name=name)
        require_double(got, share(of), f"gradient of the {name}")
    require(kept <= 3.2, "4.3a kept", kept=kept)
    require(ranks == 2 or split == "plain" or forward.before_last, "4.3a all before")
    seen = places.view(ranks, 2, -1).amin(-1) <= places[rank].view(2, 1, 1, -1).amax(-1)
    needed = HEADS * TOKENS**2 * WIDTH * int(seen.sum())
    passes = ("forward", forward, 2 * ranks - 2, 1), ("backward", backward, 4 * ranks - 2, 3)
    for name, watch, shares, most in passes:
        others = {each.name.split(".")[1].strip("_") for each in watch.sent} - {"send", "recv"}
        require(not others, "4.3a collective", names=", ".join(others))
        require((largest := max(watch.sizes.values())) <= 2.1, "4.3a large", largest=largest)
        sent = sum(each.num_bytes for each in watch.sent if ".send" in each.name) // SHARE
        require(sent <= shares, "4.3a messages", name=name, got=sent, right=shares)
        times = watch.counter.get_total_flops() / needed
        require(times < 1.05 * most, "4.3a work", name=name, split=split, times=times, most=most)
