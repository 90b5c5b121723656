"""The project of notebook 19, checked on four ranks: right answers, and usual mistakes."""

from __future__ import annotations

from collections.abc import Callable

from answers import assert_verdicts
from drivers.ranks import Ranks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

IMPORTS = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
from torch.nn.functional import cross_entropy
"""
ANSWERS = IMPORTS + definitions("19", "loss_of", "parallelize", "clip", "train", "whole_state")
OTHERS = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

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
    names = ("attention.query", "attention.key", "attention.value", "mlp.inner")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: SequenceParallel() for name in ("norm_1", "norm_2")}
    plan |= {"attention": takes_part, "mlp": takes_part}
    for block in model.blocks:
        by_rows = RowwiseParallel(output_layouts=part)
        outputs = {"attention.out": by_rows, "mlp.outer": by_rows}
        parallelize_module(block, mesh["tensor"], plan | outputs)
        block.attention.heads //= 2
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])

def turned(model, mesh):
    return parallelize(model, {"tensor": mesh["data"], "data": mesh["tensor"]})

def only_sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])

def add_spare(model):
    model.blocks[0].spare = nn.Parameter(torch.zeros(64, 64).double())

def summed(model, mesh):
    parallelize(model, mesh)
    for each in (model, *model.blocks):
        each.set_gradient_divide_factor(1.0)
    return model

def clip_own(parameters, max_norm):
    local = [each.grad.to_local() for each in parameters]
    scale = min(1.0, max_norm / torch.cat([each.flatten() for each in local]).norm().item())
    for each in local:
        each *= scale

def GatheringwiseParallel():
    return ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())

def of_torch(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

def local(model):
    return {name: each.to_local() for name, each in model.state_dict().items()}

def named(model):
    return {name: each.full_tensor() for name, each in model.named_parameters()}

def zeros(model):
    return {name: torch.zeros_like(each) for name, each in whole_state(model).items()}
"""
MESH, TRAIN = '"19.1", but("parallelize"', '"19.2", parallelize, but("train"'
MINE = 'texts.chunk(2)[mesh.get_local_rank(\\"data\\")]'
RIGHT = [
    '"19.1", parallelize',
    '"19.1", in_sequence',
    '"19.2", parallelize, train',
    f'{TRAIN}, "{MINE}", "texts[rank // 2 :: 2]")',
    '"19.3", parallelize, of_torch',
    '"19.3", parallelize, whole_state',
]
TIE = '"model.head.weight = model.letter.weight", "pass"'
NOT_SHARDED = (
    'but("parallelize", "        fully_shard(block, mesh=mesh[\\"data\\"])\\n", "",'
    ' "return fully_shard(model, mesh=mesh[\\"data\\"])", "return model")'
)
WRONG = [
    '"19.1", parallelize if rank else 3',
    '"19.1", nn.Linear(2, 2)',
    '"19.1", lambda model: model',
    '"19.1", lambda model, mesh: None',
    '"19.1", lambda model, mesh: model',
    f'"19.1", {NOT_SHARDED}',
    f'{MESH}, "return fully_shard(model, mesh=mesh[\\"data\\"])", "return model")',
    '"19.1", turned',
    '"19.1", only_sharded',
    f'{MESH}, "\\"mlp.inner\\"", "#", "\\"mlp.outer\\"", "#")',
    f'{MESH}, "\\"letter\\"", "#", {TIE})',
    f'{MESH}, "parallelize_module(model, mesh[\\"tensor\\"], ends)", "pass")',
    f"{MESH}, {TIE})",
    f'{MESH}, "whole = Repl", "add_spare(model); whole = Repl")',
    f'{MESH}, "block.attention.heads //= mesh[\\"tensor\\"].size()", "pass")',
    f'{MESH}, "whole = Repl", "nn.init.normal_(model.place.weight); whole = Repl")',
    '"19.1", summed',
    f'{MESH}, "        fully_shard(block, mesh=mesh[\\"data\\"])\\n", "")',
    f'{MESH}, "out\\": Row", "out\\": Gathering", "outer\\": Row", "outer\\": Gathering")',
    f'{MESH}, "\\"attention\\"", "#")',
    f'"19.2", {NOT_SHARDED}, train',
    '"19.2", parallelize, lambda *_: None',
    '"19.2", parallelize, lambda *_: [1.0, 1.0, 1.0, 1.0]',
    f'{TRAIN}, "model(texts[:, :-1])", "model(texts[:, 1:])")',
    f'{TRAIN}, "{MINE}", "texts")',
    f'{TRAIN}, "mesh.get_local_rank(\\"data\\")", "rank % 2")',
    f'{TRAIN}, "{MINE}", "texts[:4]")',
    f'{TRAIN}, "{MINE}", "texts.chunk(4)[rank // 2]")',
    f'{TRAIN}, "dist.all_reduce(mean, group=mesh.get_group(\\"data\\"))", "mean *= 2")',
    f'{TRAIN}, "mean.item() / 2", "mean.item()")',
    f'{TRAIN}, "clip(parameters, 0.1)", "pass")',
    f'{TRAIN}, "optimizer.zero_grad()", "pass")',
    f'{TRAIN}, "clip(parameters, 0.1)", "clip_own(parameters, 0.1)")',
    f'{TRAIN}, "lr=0.5", "lr=0.1")',
    f'"19.3", {NOT_SHARDED}, whole_state',
    '"19.3", parallelize, lambda model: None',
    '"19.3", parallelize, named',
    '"19.3", parallelize, lambda model: whole_state(model) | {"more": torch.ones(1)}',
    '"19.3", parallelize, lambda model: model.state_dict()',
    '"19.3", parallelize, local',
    '"19.3", parallelize, zeros',
]


def test_a_gpt_on_a_mesh_gets_a_verdict(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(4), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
