"""The project of notebook 19: a GPT on a mesh of 2 x 2 ranks, tested on all of them together.

Each function takes the answer's functions and returns a hint, or :data:`RIGHT`. The tests use
64-bit numbers, so that rounding hides no mistake.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from nbddp.course.grading import RIGHT, WrongError, hint_to_function, stop_if
from nbddp.train import this_rank
from nbddp.train.call_agreement import communication_device
from nbddp.train.collectives import all_gather

LETTERS, WIDTH, HEADS, BLOCKS, LENGTH = 59, 64, 4, 2, 32
RANKS, BATCH, STEPS, RATE, MAX_NORM = 4, 8, 4, 0.5, 0.1
NEEDS_MESH = (
    "The mesh of 2 x 2 needs four ranks: call this in a `%%ddp` cell, after "
    "`%ddp restart --nproc 4`."
)
PARAMETERS = {"parallelize": "model mesh", "train": "model mesh batches", "whole_state": "model"}
SMALL_BYTES = 8 * 8 * WIDTH  # eight letters
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
    """The GPT of notebook 19: a test compares both."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letter.weight
        for each in (self.letter, self.place):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, numbers: Tensor) -> Any:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.letter(numbers) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tests_on_mesh(grade: Callable[..., None]) -> Callable[..., str]:
    """Decorate a grader of functions, which raises its hint."""
    parameters = [PARAMETERS[name].split() for name in inspect.signature(grade).parameters]

    @wraps(grade)
    def graded(*given: Any) -> str:
        if this_rank.world_size() != RANKS:
            return NEEDS_MESH
        try:
            stop_if(next(filter(None, map(hint_to_function, given, parameters)), None))
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")  # of torch's hooks
                grade(*given)
        except WrongError as wrong:
            return str(wrong)
        return RIGHT

    return graded


def _mesh() -> DeviceMesh:
    kind = communication_device().type
    return init_device_mesh(kind, (2, 2), mesh_dim_names=("data", "tensor"))


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
    model: nn.Module, batches: Sequence[Tensor], *, clips: bool, clears: bool = True
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
        optimizer.step()
        losses.append(loss.item())
    return losses


def _close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-6)


def _parallel_model(parallelize: Any, mesh: DeviceMesh) -> nn.Module:
    model = parallelize(_make_model(), mesh)
    kind = type(model).__name__
    is_module = isinstance(model, nn.Module)
    stop_if(None if is_module else f"`parallelize` has to return the model, not a {kind}.")
    result: nn.Module = model
    return result


# ---- 19.1: parallelize


@_tests_on_mesh
def parallelize(parallelize: Any) -> None:
    mesh = _mesh()
    row = mesh.get_local_rank("data")
    model = _parallel_model(parallelize, mesh)
    stop_if(_hint_of_shards(model))
    stop_if(_hint_of_split(model))
    stop_if(_hint_of_tie(model))
    stop_if(_hint_of_bytes(model))
    batches = _batches()
    mine = [texts.chunk(2)[row] for texts in batches]
    with _CollectiveCounts() as forward:
        loss = _loss_of(model, mine[0])
    with _CollectiveCounts() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    got = _mean_over_ranks(_losses(model, mine, clips=False))
    stop_if(_hint_of_losses(got, batches))
    stop_if(_hint_of_collectives(forward, backward))


def _mean_over_ranks(losses: list[float]) -> list[float]:
    everyone = all_gather(losses)
    return [sum(each) / len(each) for each in zip(*everyone, strict=True)]


def _sharded_along(parameter: Tensor) -> set[str]:
    """Return the dimensions of the mesh along which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    pairs = zip(names, parameter.placements, strict=False)
    return {name for name, each in pairs if not each.is_replicate() and not each.is_partial()}


def _bytes_here(model: nn.Module) -> int:
    values = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.nbytes for each in values)


def _share(model: nn.Module) -> str:
    whole = sum(each.nbytes for each in _make_model().parameters())
    return f"{_bytes_here(model) / whole:.0%} of the parameters' bytes"


def _hint_of_shards(model: nn.Module) -> str | None:
    """Check that FSDP has sharded each parameter along ``data``."""
    along = {name: _sharded_along(each) for name, each in model.named_parameters()}
    if not any(along.values()):
        return (
            f"Each rank holds {_share(model)}. Split the layers with `parallelize_module` "
            "(notebook 12), then shard them with `fully_shard` (notebook 07)."
        )
    if not any("data" in each for each in along.values()):
        return (
            "No parameter is sharded along `data`. After `parallelize_module`, call `fully_shard` "
            'with `mesh["data"]` (notebook 12, "Two ways in one mesh").'
        )
    missing = [name for name, each in along.items() if "data" not in each]
    if not missing:
        return None
    if along[missing[0]] == {"tensor"} and along.get("norm.weight") == {"tensor"}:
        return (
            f"`{missing[0]}` is sharded along `tensor` only, and other weights along both. Give "
            '`mesh["tensor"]` to `parallelize_module` and `mesh["data"]` to `fully_shard`.'
        )
    return (
        f"`{missing[0]}` is not sharded along `data` ({len(missing)} parameters are not). After "
        "the blocks, call `fully_shard` on the whole model: it takes the rest (notebook 07)."
    )


def _hint_of_unsolved(model: nn.Module) -> str | None:
    """Check roughly that ``parallelize`` is written, for the exercises that use it."""
    if _hint_of_shards(model) is None:
        return None
    return "`parallelize` does not shard the model yet: check it first, with exercise 19.1."


def _hint_of_split(model: nn.Module) -> str | None:
    """Check that tensor parallelism has split the large weights."""
    along = {name: _sharded_along(each) for name, each in model.named_parameters()}
    names = [f"blocks.{at}.{name}" for at in range(BLOCKS) for name in SPLIT]
    lost = [name for name in names if "tensor" not in along.get(name, set())]
    if lost:
        return (
            f"`{lost[0]}` is not split along `tensor` ({len(lost)} of {len(names)} weights of the "
            f'blocks are not). This rank holds {_share(model)}. See notebook 12, "Cut a layer".'
        )
    whole = [name for name in ("letter", "head") if not _is_split(model, name)]
    if whole:
        return (
            f"`{whole[0]}.weight` is not split along `tensor`: an `nn.Embedding` can be split by "
            "rows, and the head by columns. Both take and return whole tensors here, so give "
            "them `input_layouts` or `output_layouts`."
        )
    return None


def _is_split(model: Any, name: str) -> bool:
    return "tensor" in _sharded_along(getattr(model, name).weight)


def _hint_of_tie(model: Any) -> str | None:
    if model.head.weight is model.letter.weight:
        return None
    return (
        "`head.weight` and `letter.weight` are two parameters now, and will learn different "
        "things: `parallelize_module` has made a new one for each layer. Assign one to the other "
        "again, before `fully_shard` (notebook 13 has one weight for both)."
    )


def _hint_of_bytes(model: nn.Module) -> str | None:
    whole = sum(each.nbytes for each in _make_model().parameters())
    if _bytes_here(model) < 0.27 * whole:
        return None
    return f"This rank holds {_share(model)}. A quarter and some small tensors are 26%."


def _hint_of_losses(got: list[float], batches: Sequence[Tensor]) -> str | None:
    right = _losses(_make_model(), batches, clips=False)
    wrong = [step for step, pair in enumerate(zip(got, right, strict=True)) if not _close(*pair)]
    if not wrong:
        return None
    if wrong[0] > 0:
        return (
            f"The first loss is right. After {wrong[0]} step(s) the loss is {got[wrong[0]]:.6f}, "
            f"and that of one process is {right[wrong[0]]:.6f}: a gradient is wrong. Is each one "
            'the mean over `data`, and added up over `tensor` (notebook 17, "Leave out f, or g")?'
        )
    confused = _make_model()
    for block in confused.blocks:
        block.get_submodule("attention").heads = 2 * HEADS  # type: ignore[assignment]
    if _close(got[0], _loss_of(confused, batches[0]).item()):
        return (
            f"The first loss is {got[0]:.6f}, and that of one process is {right[0]:.6f}. This rank "
            f"has {WIDTH // 2} of {WIDTH} columns, and cuts them into {HEADS} heads of half the "
            'size. Set `heads` to the heads of a rank (notebook 17, "A transformer block").'
        )
    return (
        f"The first loss is {got[0]:.6f}, and that of one process is {right[0]:.6f}. Are the first "
        'layers split by columns and the second ones by rows (notebook 12, "Cut a layer")? Does '
        "the model return the scores of all letters on each rank?"
    )


class _CollectiveCounts(CommDebugMode):
    """Count the collectives of a forward or backward pass.

    Attributes:
        gathered: units that FSDP has gathered.
        all_reduced, all_gathered, scattered: collectives of activations and their gradients. The
            gradients of norms, which sequence parallelism all-reduces, are too small to count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathered = self.all_reduced = self.all_gathered = self.scattered = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the base class is untyped
        name = str(func)
        if func.namespace == "c10d":  # FSDP calls c10d, DTensor the functional collectives
            self.gathered += "allgather" in name
        elif func.namespace == "_c10d_functional" and args[0].nbytes >= SMALL_BYTES:
            self.all_reduced += "all_reduce" in name
            self.all_gathered += "all_gather" in name
            self.scattered += "reduce_scatter" in name
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def cost(self) -> int:
        """The messages of activations; an all-reduce is a reduce-scatter and an all-gather."""
        return 2 * self.all_reduced + self.all_gathered + self.scattered


def _hint_of_collectives(forward: _CollectiveCounts, backward: _CollectiveCounts) -> str | None:
    if forward.gathered <= BLOCKS:
        return (
            f"The forward pass gathers the model in {forward.gathered} part(s), and a rank holds a "
            "part at a time. Call `fully_shard` on each block, then on the model (notebook 07)."
        )
    if forward.cost + backward.cost <= 8 * BLOCKS + 8:
        return None
    if forward.all_gathered > 2 * BLOCKS + 2:
        return (
            f"The forward pass has {forward.all_gathered} all-gathers of activations. Split `out` "
            "and `outer` by rows: they take a rank's own columns (notebook 12, exercise 2)."
        )
    return (
        f"The backward pass has {backward.all_reduced} all-reduces, and needs two for each block "
        "and one for the head. Queries, keys and values all-reduce the gradient of one input, each "
        "on its own (notebook 17, exercise 4): prepare the input of `attention` once, with "
        "`PrepareModuleInput`."
    )


# ---- 19.2: train


@_tests_on_mesh
def train(parallelize: Any, train: Any) -> None:
    mesh = _mesh()
    model = _parallel_model(parallelize, mesh)
    stop_if(_hint_of_unsolved(model))
    batches, seen = _batches(), list[Tensor]()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].detach().clone())

    model.register_forward_pre_hook(note, prepend=True)
    losses = train(model, mesh, [texts.clone() for texts in batches])
    stop_if(_hint_of_list(losses))
    stop_if(_hint_of_data(seen, batches, mesh))
    stop_if(_hint_of_training([float(each) for each in losses], batches))


def _hint_of_list(losses: Any) -> str | None:
    if isinstance(losses, list | tuple) and len(losses) == STEPS:
        return None
    return f"`train` has to return a list of {STEPS} losses, one for each batch."


def _places(inputs: Tensor, texts: Tensor) -> list[int] | None:
    """Return which texts of a batch a rank has used as input; None if it has used others."""
    rows = [each.tolist() for each in texts[:, :-1]]
    used = inputs.tolist()
    return [rows.index(each) for each in used] if all(each in rows for each in used) else None


def _hint_of_data(seen: list[Tensor], batches: list[Tensor], mesh: DeviceMesh) -> str | None:
    if len(seen) != STEPS:
        return f"The model was called {len(seen)} times for {STEPS} batches: call it once for each."
    grid = mesh.mesh.tolist()
    for inputs, texts in zip(seen, batches, strict=True):
        everyone = all_gather(_places(inputs, texts))
        used = [each for each in everyone if each is not None]
        if len(used) < len(everyone):
            return "The inputs are not texts of the batch without their last letter."
        if all(len(each) == BATCH for each in used):
            return (
                f"Each rank computed all {BATCH} texts of a batch: the same work four times. A row "
                'of the mesh takes its part (notebook 12, "Two ways in one mesh").'
            )
        for first, second in grid:
            if used[first] != used[second]:
                return (
                    f"Ranks {first} and {second} are in one row of the mesh. They compute one "
                    f"model together, and got different texts: {used[first]} and {used[second]}. "
                    "Use the coordinate in the mesh, not the rank (notebook 12)."
                )
        top, bottom = (set(used[row[0]]) for row in grid)
        if top & bottom:
            return f"Both rows of the mesh computed texts {sorted(top & bottom)} of a batch."
        if len(top | bottom) < BATCH:
            return f"Texts {sorted(set(range(BATCH)) - top - bottom)} of a batch are left out."
    return None


def _hint_of_training(got: list[float], batches: list[Tensor]) -> str | None:
    right = _losses(_make_model(), batches, clips=True)
    if all(map(_close, got, right)):
        return None
    facts = f"{got[0]:.6f}, and that of one process is {right[0]:.6f}"
    if not _close(got[0], right[0]):
        if _close(got[0], 2 * right[0]):
            return f"The first loss is {facts}: the mean over the rows of the mesh is half of it."
        return (
            f"The first loss is {facts}. Is it that of this row's texts? Average it over `data`, "
            "or over all ranks."
        )
    hints = {
        f"The gradients are not clipped to a norm of {MAX_NORM}.": {"clips": False},
        "The gradients add up from step to step: clear them.": {"clips": True, "clears": False},
    }
    for hint, options in hints.items():
        if all(map(_close, got, _losses(_make_model(), batches, **options))):
            return f"The first loss is right, the second is not. {hint}"
    return (
        f"The first loss is right. The second is {got[1]:.6f}, and that of one process is "
        f"{right[1]:.6f}. Is it SGD with `lr={RATE}`? Is the norm that of the gradients of all "
        "ranks, over both dimensions of the mesh (notebook 07, In the wild)?"
    )


# ---- 19.3: whole_state


@_tests_on_mesh
def whole_state(parallelize: Any, whole_state: Any) -> None:
    mesh = _mesh()
    model, alone, texts = _parallel_model(parallelize, mesh), _make_model(), _batches()[0]
    stop_if(_hint_of_unsolved(model))
    _losses(model, [texts.chunk(2)[mesh.get_local_rank("data")]], clips=False)
    _losses(alone, [texts], clips=False)
    state = whole_state(model)
    stop_if(_hint_of_state(state, alone.state_dict()))
    loaded = _make_model()
    loaded.load_state_dict(state)
    is_right = _close(_loss_of(loaded, texts).item(), _loss_of(alone, texts).item())
    hint = "A GPT with these values is not the trained one. Are they the values of now?"
    stop_if(None if is_right else hint)


def _hint_of_state(state: Any, expected: dict[str, Tensor]) -> str | None:
    if not isinstance(state, dict) or not state:
        return "`whole_state` has to return a dictionary on every rank."
    missing = [name for name in expected if name not in state]
    if missing:
        return (
            f"`{missing[0]}` is missing: `named_parameters()` has a tied weight once, "
            "`state_dict()` has it under both names."
        )
    spare = [name for name in state if name not in expected]
    if spare:
        return f"`{spare[0]}` is no name of the GPT's `state_dict()`."
    for name, value in expected.items():
        if isinstance(state[name], DTensor):
            return f"`{name}` is still a DTensor: `full_tensor()` gathers it (notebook 07)."
        if state[name].shape != value.shape:
            return (
                f"`{name}` is {tuple(state[name].shape)}, not {tuple(value.shape)}: that is this "
                "rank's part. `full_tensor()` gathers the whole (notebook 07)."
            )
    return None
