"""The judges of notebook 3.8: the memory of a step, and the layout for a cluster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from nbddp.extensions.course import time_limit
from nbddp.extensions.course.grading import all_true, judge, require, require_function
from nbddp.extensions.memory.step_memory import memory_of_step
from nbddp.formatting import format_bytes, format_seconds
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device


class Shape(NamedTuple):
    """The sizes of a GPT."""

    width: int
    blocks: int
    heads: int
    words: int
    length: int


class Cluster(NamedTuple):
    """Equal machines: operations a second of a GPU, its bytes, and bytes a second of its links."""

    machines: int
    gpus: int
    speed: float
    memory: float
    inside: float
    between: float


# ---- 3.8a: peak_bytes


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.size = width // shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3, self.size)).unbind(-2)
        q, k, v = (each.transpose(1, 2) for each in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.outer(gelu(self.inner(self.norm_2(x))))


class GPT(nn.Module):
    """The GPT of notebook 3.8: a test compares both."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.words, shape.width)
        self.place = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, numbers: Tensor) -> Any:
        x = self.word(numbers) + self.place.weight[: numbers.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


CASES = (
    (Shape(width=96, blocks=4, heads=12, words=504, length=96), 6),
    (Shape(width=120, blocks=2, heads=12, words=2400, length=48), 6),
    (Shape(width=96, blocks=8, heads=12, words=120, length=48), 8),
)


def _measured_peak(shape: Shape, texts: int, way: str) -> dict[str, int]:
    """Return the largest memory of a real step on this rank, by kind."""

    def make(mesh: DeviceMesh) -> tuple[nn.Module, Adam]:
        model: nn.Module = GPT(shape).to(communication_device())
        if way == "FSDP":
            for part in (*model.get_submodule("blocks").children(), model):
                fully_shard(part, mesh=mesh)
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, Adam(model.parameters())

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        numbers = torch.randint(shape.words, (texts, shape.length + 1))
        numbers = numbers.to(communication_device())
        optimizer.zero_grad()
        labels = numbers[:, 1:].flatten()
        loss = cross_entropy(model(numbers[:, :-1]).flatten(0, 1), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return memory_of_step(make, step).peak


@judge("3.8a", on_ranks=True)
def peak_bytes(peak_bytes: Any) -> None:
    require_function(peak_bytes, "shape", "tokens", "ranks", "way")
    ranks = this_rank.world_size()
    for (shape, texts), way in product(CASES, ("DDP", "FSDP")):
        tokens = texts * shape.length
        got = peak_bytes(shape, tokens, ranks, way)
        require(_is_number(got), "3.8a no number", kind=type(got).__name__)
        time_limit.restart()
        kinds = _measured_peak(shape, texts, way)
        right = sum(kinds.values())
        facts = {
            "way": way,
            "shape": shape,
            "tokens": tokens,
            "ranks": ranks,
            "got": format_bytes(max(got, 0)),
            "right": format_bytes(right),
            "kinds": ", ".join(f"{kind} {format_bytes(kinds[kind])}" for kind in kinds),
        }
        is_right = all_true(abs(got - right) <= 0.1 * right)
        mistakes = _peak_mistakes(shape, tokens, ranks, way)
        near = [name for name, value in mistakes.items() if abs(got - value) <= 0.005 * value]
        require(is_right, near[0] if near else "3.8a far", **facts)
        if way == "FSDP":
            _judge_shares(shape, ranks, got - peak_bytes(shape, tokens, 2 * ranks, way))


def _judge_shares(shape: Shape, ranks: int, saved: float) -> None:
    """Judge by how many bytes the peak of FSDP shrinks if there are twice as many ranks."""
    right = 6 * number_of_parameters(shape) / ranks  # half of 12 bytes: only the state is divided
    texts = {"saved": format_bytes(max(saved, 0)), "right": format_bytes(right)}
    is_right = abs(saved - right) <= 0.2 * right
    require(is_right, "3.8a gradients", shape=shape, ranks=ranks, double=2 * ranks, **texts)


def _peak_mistakes(shape: Shape, tokens: int, ranks: int, way: str) -> dict[str, float]:
    """Return the values to which known mistakes lead."""
    parameters = number_of_parameters(shape)
    divided = parameters / ranks if way == "FSDP" else parameters
    whole = 4 * (2 * shape.words + shape.length) * shape.width if way == "FSDP" else 0
    state = divided * (12 if way == "FSDP" else 16)
    scores, inside = 12 * shape.words * tokens, 64 * shape.width * tokens * shape.blocks
    return {
        "3.8a only state": state + whole,
        "3.8a no scores": state + whole + inside,
        "3.8a one block": state + whole + scores + inside / shape.blocks,
        "3.8a elements": (state + whole + scores + inside) / 4,
        "3.8a other state": (16 * parameters if way == "FSDP" else state / ranks) + scores + inside,
        "3.8a all tokens": state + whole + ranks * (scores + inside),
        "3.8a shared tokens": state + whole + (scores + inside) / ranks,
        "3.8a no buckets": 12 * parameters + scores + inside,
    }


def _is_number(given: Any) -> bool:
    return all_true(isinstance(given, int | float) and not isinstance(given, bool))


def number_of_parameters(shape: Shape) -> int:
    """Return the number of parameters of a GPT."""
    width = shape.width
    return (
        shape.blocks * (12 * width + 13) * width
        + (2 * shape.words + shape.length) * width
        + 2 * width
    )


# ---- 3.8b: plan

GB = 1e9
_SMALL = Shape(width=4096, blocks=32, heads=32, words=32_000, length=4096)
_MIDDLE = Shape(width=5120, blocks=40, heads=40, words=32_000, length=4096)
_LARGE = Shape(width=8192, blocks=80, heads=64, words=32_000, length=4096)
_WORDS = Shape(width=3072, blocks=28, heads=24, words=128_000, length=4096)
IN_NOTEBOOK = ("one machine", "many machines", "slow links")
PLANS = {
    "one machine": (_SMALL, Cluster(1, 8, 400e12, 80 * GB, 450 * GB, 50 * GB), 64),
    "many machines": (_LARGE, Cluster(64, 8, 400e12, 80 * GB, 450 * GB, 50 * GB), 1024),
    "slow links": (_MIDDLE, Cluster(16, 8, 150e12, 24 * GB, 25 * GB, 1.5 * GB), 512),
    "small memory": (_SMALL, Cluster(2, 8, 150e12, 24 * GB, 25 * GB, 12.5 * GB), 128),
    "few texts": (_LARGE, Cluster(64, 8, 400e12, 80 * GB, 450 * GB, 50 * GB), 128),
    "many words": (_WORDS, Cluster(12, 8, 400e12, 40 * GB, 64 * GB, 1.5 * GB), 96),
    "ten GPUs": (_LARGE, Cluster(8, 10, 400e12, 72 * GB, 64 * GB, 3 * GB), 24),
}


class Layout(NamedTuple):
    """The sizes of a mesh, and the number of micro-batches."""

    data: int
    tensor: int
    pipeline: int
    batches: int


def bytes_of(shape: Shape, layout: Layout, texts: int) -> dict[str, float]:
    """Return the bytes that a layout takes on a GPU, by the formulas of the notebook."""
    data, tensor, pipeline, batches = layout
    block, ends = 12 * shape.width**2, 2 * shape.words * shape.width
    tokens = texts * shape.length / data / batches
    inside = (4 + 12 / tensor) * shape.width * shape.blocks / pipeline * min(pipeline, batches)
    return {
        "state": 16 * (shape.blocks * block + ends) / (data * tensor * pipeline),
        "whole parameters": 2 * (2 * block + ends) / tensor,
        "activations": 2 * inside * tokens,
        "loss": 12 * shape.words / tensor * tokens,
    }


def parts_of_step(shape: Shape, cluster: Cluster, layout: Layout, texts: int) -> dict[str, float]:
    """Return the seconds of each part of a step, by the formulas of the notebook."""
    data, tensor, pipeline, batches = layout
    number = 12 * shape.width**2 * shape.blocks + 2 * shape.words * shape.width
    tokens = texts * shape.length / data  # of a rank's data
    computing = 6 * number * tokens / (tensor * pipeline) / cluster.speed
    computing *= (batches + pipeline - 1) / batches
    gathering = (2 * batches + 1) * 2 * number / (tensor * pipeline) * (data - 1) / data
    gathering /= cluster.inside if data * tensor <= cluster.gpus else cluster.between
    summing = 4 * shape.blocks / pipeline * 2 * (tensor - 1) / tensor * 2 * shape.width * tokens
    passing = 4 * shape.width * tokens if pipeline > 1 else 0
    passing /= cluster.inside if prod(layout[:3]) <= cluster.gpus else cluster.between
    return {
        "computing": computing,
        "gathering": gathering,
        "summing": summing / cluster.inside,
        "passing": passing,
    }


def seconds_of(shape: Shape, cluster: Cluster, layout: Layout, texts: int) -> float:
    """Return the seconds of a step, in which computing and gathering are at the same time."""
    parts = parts_of_step(shape, cluster, layout, texts)
    return max(parts["computing"], parts["gathering"]) + parts["summing"] + parts["passing"]


def _refusal(shape: Shape, cluster: Cluster, layout: Layout, texts: int) -> str:
    """Return the rule that a layout breaks, or an empty text."""
    data, tensor, pipeline, batches = layout
    rules = {
        "3.8b ranks": prod(layout[:3]) == cluster.machines * cluster.gpus,
        "3.8b tensor outside": cluster.gpus % tensor == 0,
        "3.8b heads": shape.heads % tensor == 0,
        "3.8b blocks": shape.blocks % pipeline == 0,
        "3.8b texts": texts % (data * batches) == 0,
        "3.8b memory": sum(bytes_of(shape, layout, texts).values()) <= cluster.memory,
    }
    return next((name for name, is_kept in rules.items() if not is_kept), "")


def best_layout(shape: Shape, cluster: Cluster, texts: int) -> Layout:
    """Return the fastest layout that fits."""
    sizes = [each for each in range(1, texts + 1) if texts % each == 0]
    ranks = cluster.machines * cluster.gpus
    grids = product([d for d in sizes if d <= ranks], range(1, cluster.gpus + 1), sizes)
    layouts = (
        Layout(data, tensor, ranks // (data * tensor), batches)
        for data, tensor, batches in grids
        if ranks % (data * tensor) == 0
    )
    fitting = [each for each in layouts if not _refusal(shape, cluster, each, texts)]
    seconds: Callable[[Layout], float] = lambda each: seconds_of(shape, cluster, each, texts)  # noqa: E731
    return min(fitting, key=seconds)


@judge("3.8b")
def plan(plan: Any) -> None:
    require_function(plan, "shape", "cluster", "texts")
    for label, (shape, cluster, texts) in PLANS.items():
        name = label if label in IN_NOTEBOOK else f"plan({shape}, {cluster}, {texts})"
        got = plan(shape, cluster, texts)
        is_layout = isinstance(got, list | tuple) and len(got) == len(Layout._fields)
        are_counts = is_layout and all(isinstance(n, int) and n > 0 for n in got)
        require(are_counts, "3.8b no layout", name=name, got=got)
        layout = Layout(*got)
        facts = {
            "name": name,
            "layout": layout,
            "shape": shape,
            "texts": texts,
            **cluster._asdict(),
        }
        kinds = bytes_of(shape, layout, texts)
        facts |= {
            "needed": f"{sum(kinds.values()) / GB:.1f} GB",
            "kinds": ", ".join(f"{kind} {kinds[kind] / GB:.1f}" for kind in kinds),
            "there": f"{cluster.memory / GB:.0f} GB",
            "ranks": cluster.machines * cluster.gpus,
        }
        refusal = _refusal(shape, cluster, layout, texts)
        require(not refusal, refusal or "3.8b memory", **facts)
        best = best_layout(shape, cluster, texts)
        took, least = (seconds_of(shape, cluster, each, texts) for each in (layout, best))
        parts = parts_of_step(shape, cluster, layout, texts)
        facts |= {
            "took": format_seconds(took),
            "times": took / least,
            "parts": ", ".join(f"{part} {format_seconds(parts[part])}" for part in parts),
        }
        require(took <= 1.05 * least, _slow_part(layout, best), **facts)


def _slow_part(layout: Layout, best: Layout) -> str:
    """Return which number of a slow layout to think about first."""
    if layout.tensor > best.tensor:
        return "3.8b much tensor"
    if layout.pipeline > best.pipeline:
        return "3.8b much pipeline"
    return "3.8b much data" if layout.data > best.data else "3.8b batches"
