"""The project of notebook 3.7: a GPT on a mesh of 2 x 2 ranks, tested on all of them together.

The tests use 64-bit numbers, so that rounding hides no mistake.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from nbddp.extensions.course.grading import judge, require, require_function, require_none
from nbddp.extensions.memory.traffic import Traffic
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

LETTERS, WIDTH, HEADS, BLOCKS, LENGTH = 59, 64, 4, 2, 32
RANKS, BATCH, STEPS, RATE, MAX_NORM = 4, 8, 4, 0.5, 0.1
SMALL_BYTES = 8 * 8 * WIDTH  # eight letters
TIED = ("letter", "head")
SPLIT = (  # weights of a block that tensor parallelism splits
    *(f"attention.{name}.weight" for name in ("query", "key", "value", "out")),
    "mlp.inner.weight",
    "mlp.outer.weight",
)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.outer(gelu(self.inner(x)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = _Attention(), _MLP()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """The GPT of notebook 3.7: a test compares both."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letter.weight
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: Tensor) -> Any:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.letter(numbers) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _make_model() -> GPT:
    torch.manual_seed(0)
    return GPT().double().to(communication_device())


def _batches() -> list[Tensor]:
    """Return texts of random letters, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, BATCH, LENGTH + 1)
    return [*torch.randint(LETTERS, shape, generator=generator).to(communication_device())]


def _loss_of(model: nn.Module, texts: Tensor) -> Tensor:
    return cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


def _losses(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    clips: bool,
    clears: bool = True,
    steps: bool = True,
) -> list[float]:
    """Train with SGD. Return the loss of this rank before each step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for texts in batches:
        if clears:
            optimizer.zero_grad()
        loss = _loss_of(model, texts)
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if steps:
            optimizer.step()
        losses.append(loss.item())
    return losses


def _close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-6)


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's hooks
        yield


def _distribute(parallelize: Any) -> tuple[DeviceMesh, nn.Module]:
    """Return the mesh, and the model that the answer has distributed over it."""
    require(this_rank.world_size() == RANKS, "3.7a needs mesh")
    require_function(parallelize, "model", "mesh")
    kind = communication_device().type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize(_make_model(), mesh)
    require(isinstance(model, nn.Module), "3.7a no model", kind=type(model).__name__)
    return mesh, model


def _require_equal_losses(got: list[float], right: list[float], mistake: str) -> None:
    """Require the losses of one process; the hint gets the first one that differs."""
    wrong = [step for step, pair in enumerate(zip(got, right, strict=True)) if not _close(*pair)]
    at = wrong[0] if wrong else 0
    require(not wrong, mistake, step=at, got=got[at], right=right[at])


# ---- 3.7a: parallelize


@judge("3.7a")
@_without_warnings()
def parallelize(parallelize: Any) -> None:
    mesh, model = _distribute(parallelize)
    _judge_shards(model)
    batches = _batches()
    shares = [texts.chunk(2)[mesh.get_local_rank("data")] for texts in batches]
    with Traffic() as forward:
        loss = _loss_of(model, shares[0])
    with Traffic() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    everyone = all_gather(_losses(model, shares, clips=False))
    got = [sum(each) / len(each) for each in zip(*everyone, strict=True)]
    right = _losses(_make_model(), batches, clips=False)
    confused = _make_model()
    for block in confused.blocks:
        block.get_submodule("attention").heads = 2 * HEADS  # type: ignore[assignment]
    is_confused = _close(got[0], _loss_of(confused, batches[0]).item())
    first = "3.7a heads" if is_confused else "3.7a first loss"
    _require_equal_losses(got[:1], right[:1], first)
    _require_equal_losses(got, right, "3.7a later loss")
    parts = sum("c10d._allgather" in each.name for each in forward.sent)  # by FSDP
    require(parts > BLOCKS, "3.7a one unit", parts=parts)
    is_cheap = _cost(forward) + _cost(backward) <= 8 * BLOCKS + 8
    gathers = _count(forward, "all_gather")
    require(is_cheap or gathers <= 2 * BLOCKS + 2, "3.7a all-gathers", count=gathers)
    require(is_cheap, "3.7a all-reduces", count=_count(backward, "all_reduce"))


def _judge_shards(model: Any) -> None:
    """Require that FSDP and tensor parallelism have sharded the parameters."""
    along = {name: _sharded_along(each) for name, each in model.named_parameters()}
    missing = [name for name, each in along.items() if "data" not in each]
    here = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    share = sum(each.nbytes for each in here) / sum(e.nbytes for e in _make_model().parameters())
    if not any(along.values()):
        mistake = "3.7a nothing sharded"
    elif len(missing) == len(along):
        mistake = "3.7a no data dimension"
    elif missing and along[missing[0]] == along.get("norm.weight") == {"tensor"}:
        mistake = "3.7a swapped dimensions"
    else:
        mistake = "3.7a rest not sharded"
    require_none(missing, mistake, share=share)
    names = [f"blocks.{at}.{name}" for at in range(BLOCKS) for name in SPLIT]
    lost = [name for name in names if "tensor" not in along.get(name, set())]
    require_none(lost, "3.7a block not split", total=len(names), share=share)
    is_split = {name: "tensor" in _sharded_along(getattr(model, name).weight) for name in TIED}
    require_none([name for name in TIED if not is_split[name]], "3.7a tied not split")
    require(model.head.weight is model.letter.weight, "3.7a not tied")
    require(share < 0.27, "3.7a large share", share=share)


def _sharded_along(parameter: Tensor) -> set[str]:
    """Return the dimensions of the mesh along which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    pairs = zip(names, parameter.placements, strict=False)
    return {name for name, each in pairs if not each.is_replicate() and not each.is_partial()}


def _require_solved(model: nn.Module) -> None:
    """Require roughly that ``parallelize`` is written, for the exercises that use it."""
    is_sharded = all("data" in _sharded_along(each) for each in model.parameters())
    require(is_sharded, "3.7a unsolved")


def _count(traffic: Traffic, name: str) -> int:
    """Count collectives of activations and their gradients; DTensor calls functional ones.

    The gradients of norms, which sequence parallelism all-reduces, are too small to count.
    """
    large = [each.name for each in traffic.sent if each.num_bytes >= SMALL_BYTES]
    return sum(each.startswith(f"_c10d_functional.{name}") for each in large)


def _cost(traffic: Traffic) -> int:
    """Count messages; an all-reduce is a reduce-scatter and an all-gather."""
    scattered, gathered = (_count(traffic, name) for name in ("reduce_scatter", "all_gather"))
    return 2 * _count(traffic, "all_reduce") + scattered + gathered


# ---- 3.7b: train


@judge("3.7b")
@_without_warnings()
def train(parallelize: Any, train: Any) -> None:
    require_function(train, "model", "mesh", "batches")
    mesh, model = _distribute(parallelize)
    _require_solved(model)
    batches, seen = _batches(), list[Tensor]()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].detach().clone())

    model.register_forward_pre_hook(note, prepend=True)
    losses = train(model, mesh, [texts.clone() for texts in batches])
    is_list = isinstance(losses, list | tuple) and len(losses) == STEPS
    require(is_list, "3.7b no list", steps=STEPS)
    _judge_data(seen, batches, mesh)
    _judge_training([float(each) for each in losses], batches)


def _places(inputs: Tensor, texts: Tensor) -> list[int] | None:
    """Return which texts of a batch a rank has used as input; None if it has used others."""
    rows = [each.tolist() for each in texts[:, :-1]]
    used = inputs.tolist()
    return [rows.index(each) for each in used] if all(each in rows for each in used) else None


def _judge_data(seen: list[Tensor], batches: list[Tensor], mesh: DeviceMesh) -> None:
    """Judge which texts of each batch the ranks have used."""
    require(len(seen) == STEPS, "3.7b calls", count=len(seen), steps=STEPS)
    grid = mesh.mesh.tolist()
    for inputs, texts in zip(seen, batches, strict=True):
        used = all_gather(_places(inputs, texts))
        require(None not in used, "3.7b other inputs")
        is_shared = all(len(each or ()) == BATCH for each in used)
        require(not is_shared, "3.7b all texts", texts=BATCH)
        for one, other in grid:
            ranks = {"one": one, "other": other, "ours": used[one], "theirs": used[other]}
            require(used[one] == used[other], "3.7b differing row", **ranks)
        top, bottom = ({*(used[row[0]] or ())} for row in grid)
        require(not top & bottom, "3.7b both rows", texts=sorted(top & bottom))
        left_out = sorted(set(range(BATCH)) - top - bottom)
        require(not left_out, "3.7b left out", texts=left_out)


def _judge_training(got: list[float], batches: list[Tensor]) -> None:
    """Judge the losses of a training with clipped gradients."""
    right = _losses(_make_model(), batches, clips=True)
    first = "3.7b sum of losses" if _close(got[0], 2 * right[0]) else "3.7b first loss"
    _require_equal_losses(got[:1], right[:1], first)
    variants = {
        "3.7b not clipped": {"clips": False},
        "3.7b not cleared": {"clips": True, "clears": False},
        "3.7b no step": {"clips": False, "steps": False},
    }
    found = (
        name
        for name, options in variants.items()
        if all(map(_close, got, _losses(_make_model(), batches, **options)))
    )
    is_right = all(map(_close, got, right))
    mistake = "3.7b later loss" if is_right else next(found, "3.7b later loss")
    require(is_right, mistake, got=got[1], right=right[1], norm=MAX_NORM, rate=RATE)


# ---- 3.7c: whole_state


@judge("3.7c")
@_without_warnings()
def whole_state(parallelize: Any, whole_state: Any) -> None:
    require_function(whole_state, "model")
    mesh, model = _distribute(parallelize)
    alone, texts = _make_model(), _batches()[0]
    _require_solved(model)
    _losses(model, [texts.chunk(2)[mesh.get_local_rank("data")]], clips=False)
    _losses(alone, [texts], clips=False)
    state = whole_state(model)
    _judge_state(state, alone.state_dict())
    loaded = _make_model()
    loaded.load_state_dict(state)
    is_right = _close(_loss_of(loaded, texts).item(), _loss_of(alone, texts).item())
    require(is_right, "3.7c other values")


def _judge_state(state: Any, expected: dict[str, Tensor]) -> None:
    require(isinstance(state, dict), "3.7c no dictionary")
    require(state, "3.7c empty")
    require_none([name for name in expected if name not in state], "3.7c missing")
    require_none([name for name in state if name not in expected], "3.7c spare")
    for name, value in expected.items():
        require(not isinstance(state[name], DTensor), "3.7c sharded", name=name)
        shapes = {"got": tuple(state[name].shape), "right": tuple(value.shape)}
        require(shapes["got"] == shapes["right"], "3.7c part", name=name, **shapes)
        types = {"got": state[name].dtype, "right": value.dtype}
        require(types["got"] == types["right"], "3.7c other dtype", name=name, **types)
