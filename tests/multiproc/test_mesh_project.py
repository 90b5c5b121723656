"""The project of notebook 19, checked on four ranks: right answers, and usual mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from answers import assert_verdicts
from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.multiproc
FUNCTIONS = """
from copy import deepcopy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

def plan(**changes):
    whole = Replicate()
    found = {
        "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.inner": ColwiseParallel(),
        "mlp.outer": RowwiseParallel(),
    }
    found |= {name.replace("_", "."): style for name, style in changes.items()}
    return {name: style for name, style in found.items() if style}

gathers = ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())

def parallelize(
    model, mesh, changes={}, heads=2, splits=True, vocabulary=("letter", "head"), ties=True,
    blocks=True, root=True, tensor="tensor", data="data", shards=True, spare=False, divides=None
):
    if splits:
        styles = {
            "letter": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh[tensor], {name: styles[name] for name in vocabulary})
        if ties:
            model.head.weight = model.letter.weight
        for block in model.blocks:
            parallelize_module(block, mesh[tensor], plan(**changes))
            block.attention.heads = heads
    if spare:
        model.blocks[0].spare = nn.Parameter(torch.zeros(64, 64).double())
    if shards:
        for block in model.blocks if blocks else []:
            fully_shard(block, mesh=mesh[data])
        if root:
            fully_shard(model, mesh=mesh[data])
    if divides:
        for each in (model, *model.blocks):
            each.set_gradient_divide_factor(divides)
    return model

def by(**options):
    return lambda model, mesh: parallelize(model, mesh, **options)

def starting_anew(model, mesh):
    nn.init.normal_(model.place.weight)
    return parallelize(model, mesh)

def in_sequence(model, mesh):
    # the norms and the residual sums compute a part of the letters on each rank
    part, whole = Shard(1), Replicate()
    takes_part = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
    styles = {
        "letter": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "place": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    model.place.forward = lambda places, inner=model.place.forward: inner(places[None])
    parallelize_module(model, mesh["tensor"], styles)
    model.head.weight = model.letter.weight
    norms = {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
    inputs = {"attention": takes_part, "mlp": takes_part}
    for block in model.blocks:
        by_rows = RowwiseParallel(output_layouts=part)
        outputs = {"attention.out": by_rows, "mlp.outer": by_rows}
        parallelize_module(block, mesh["tensor"], plan() | norms | inputs | outputs)
        block.attention.heads //= 2
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])

def clip(model):
    parameters = list(model.parameters())
    norms = [each.grad.norm().full_tensor() for each in parameters]
    total = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_(parameters, 0.1, total, foreach=False)

def clip_own(model):
    local = [each.grad.to_local() for each in model.parameters()]
    scale = min(1.0, 0.1 / torch.cat([each.flatten() for each in local]).norm().item())
    for each in local:
        each *= scale

def train(
    model, mesh, batches, clips=clip, clears=True, mean=2, part=None, ranks=False, first=0, lr=0.5
):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for texts in batches:
        place = rank % 2 if ranks else mesh.get_local_rank("data")
        mine = part(texts) if part else texts.chunk(2)[place]
        if clears:
            optimizer.zero_grad()
        scores = model(mine[:, first : texts.shape[1] - 1 + first])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        if clips:
            clips(model)
        optimizer.step()
        loss = loss.detach().clone()
        if mean:
            dist.all_reduce(loss, group=mesh.get_group("data"))
            loss /= mean
        losses.append(loss.item())
    return losses

def trained(**options):
    return lambda model, mesh, batches: train(model, mesh, batches, **options)

def whole_state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

def full(model):
    return {name: each.full_tensor() for name, each in model.state_dict().items()}

def local(model):
    return {name: each.to_local() for name, each in model.state_dict().items()}

def named(model):
    return {name: each.full_tensor() for name, each in model.named_parameters()}

def zeros(model):
    return {name: torch.zeros_like(each) for name, each in full(model).items()}
"""
RIGHT = [
    '"19.1", parallelize',
    '"19.1", in_sequence',
    '"19.2", parallelize, train',
    '"19.2", parallelize, trained(part=lambda texts: texts[mesh_row::2])',
    '"19.3", parallelize, whole_state',
    '"19.3", parallelize, full',
]
WRONG = [
    '"19.1", parallelize if rank else 3',
    '"19.1", nn.Linear(2, 2)',
    '"19.1", lambda model: model',
    '"19.1", lambda model, mesh: None',
    '"19.1", lambda model, mesh: model',
    '"19.1", by(shards=False)',
    '"19.1", by(blocks=True, root=False)',
    '"19.1", by(tensor="data", data="tensor")',
    '"19.1", by(splits=False)',
    '"19.1", by(changes={"mlp_inner": None, "mlp_outer": None})',
    '"19.1", by(vocabulary=("head",), ties=False)',
    '"19.1", by(vocabulary=())',
    '"19.1", by(ties=False)',
    '"19.1", by(spare=True)',
    '"19.1", by(heads=4)',
    '"19.1", starting_anew',
    '"19.1", by(divides=1.0)',
    '"19.1", by(blocks=False)',
    '"19.1", by(changes={"attention_out": gathers, "mlp_outer": gathers})',
    '"19.1", by(changes={"attention": None})',
    '"19.2", by(shards=False), train',
    '"19.2", parallelize, lambda *_: None',
    '"19.2", parallelize, lambda *_: [1.0, 1.0, 1.0, 1.0]',
    '"19.2", parallelize, trained(first=1)',
    '"19.2", parallelize, trained(part=lambda texts: texts)',
    '"19.2", parallelize, trained(ranks=True)',
    '"19.2", parallelize, trained(part=lambda texts: texts[:4])',
    '"19.2", parallelize, trained(part=lambda texts: texts.chunk(4)[mesh_row])',
    '"19.2", parallelize, trained(mean=0)',
    '"19.2", parallelize, trained(mean=1)',
    '"19.2", parallelize, trained(clips=None)',
    '"19.2", parallelize, trained(clears=False)',
    '"19.2", parallelize, trained(clips=clip_own)',
    '"19.2", parallelize, trained(lr=0.1)',
    '"19.3", by(shards=False), full',
    '"19.3", parallelize, lambda model: None',
    '"19.3", parallelize, named',
    '"19.3", parallelize, lambda model: full(model) | {"more": torch.ones(1)}',
    '"19.3", parallelize, lambda model: model.state_dict()',
    '"19.3", parallelize, local',
    '"19.3", parallelize, zeros',
]


def test_a_gpt_on_a_mesh_gets_a_verdict(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion
) -> None:
    code = f"{FUNCTIONS}\nmesh_row = rank // 2"
    assert_verdicts(make_group(4), code, RIGHT, WRONG, snapshot)
