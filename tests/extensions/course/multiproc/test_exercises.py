"""Answers that are functions, checked on four ranks."""

import pytest
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.course.exercises import EXERCISES, VALUE_EXERCISES

ANSWERS = """
import math
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
"""
ANSWERS += definitions("1.2", "name_of") + definitions("1.4", "train_on_ranks")
ANSWERS += definitions("1.5", "spread") + definitions("2.2", "is_left_out")
ANSWERS += definitions("2.3", "shared")
OTHERS = """
import copy

left, right = (rank - 1) % world_size, (rank + 1) % world_size

def turn(x, to=right, of=left):
    arriving = torch.empty_like(x)
    calls = [lambda: dist.send(x, to), lambda: dist.recv(arriving, of)]
    for call in calls[:: -1 if rank == 0 else 1]:  # only rank 0 receives first
        call()
    return arriving

def at_once(x):
    arriving = torch.empty_like(x)
    there, here = dist.isend(x, right), dist.irecv(arriving, left)
    there.wait(), here.wait()
    return arriving

def gathered(x):
    tensors = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(tensors, x)
    return tensors[left]

def ring(tensor, first=1, steps=world_size - 1, step_of=at_once):
    chunks = tensor.tensor_split(world_size)
    for step in range(steps):
        mine = (rank - step - 1 - first) % world_size
        chunks[mine].add_(step_of(chunks[(rank - step - first) % world_size]))
    return chunks[(rank + 1 - first) % world_size]

def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor.tensor_split(world_size)[rank]

def checksums_differ(model):
    checksum = sum(p.double().sum().item() for p in model.parameters())
    return nbddp.all_reduce(checksum, "max") != nbddp.all_reduce(checksum, "min")

def whole(tensor):
    total, passed = tensor.clone(), tensor
    for _ in range(world_size - 1):
        passed = at_once(passed)
        total += passed
    return total.tensor_split(world_size)[rank]
"""
TRAINS, OWN = '"1.4b", but("train_on_ranks"', "range(rank, len(test_set), world_size)"
ALL_TESTS = f'"{OWN}", "range(len(test_set))"'
NO_SUM, NO_EPOCH = '"dist.all_reduce(right)", "pass"', '"sampler.set_epoch(epoch)", "pass"'
RIGHT = [
    '"1.3a", turn',
    '"1.3b", ring',
    '"1.3b", lambda x: ring(x, step_of=turn)',
    '"1.2a", name_of',
    '"1.5a", spread',
    '"1.4b", train_on_ranks',
    '"1.4b", lambda *given: train_on_ranks(*given).item()',
    '"2.2c", is_left_out',
    '"2.3a", shared',
    '"2.3a", lambda batches: iter(shared(batches))',
    '"2.5b", lambda loss: nbddp.all_reduce(loss, "mean") < 0.1',
    '"2.5b", lambda loss: nbddp.all_reduce(loss, "min") < 0.1',
    '"2.5b", lambda loss: torch.tensor(nbddp.all_reduce(loss)) < 0.4',
]
WRONG = [
    '"1.3a", lambda x: x',
    '"1.3a", lambda x: turn(x, left, right)',
    '"1.3a", lambda x: None',
    '"1.3a", lambda x: turn(x)[:0]',
    '"1.3a", turn if rank else 3',
    '"1.3a", lambda x: turn(x) * (rank != 2)',
    '"1.3a", at_once',
    '"1.3a", gathered',
    '"1.3b", lambda x: ring(x, first=0)',
    '"1.3b", lambda x: ring(x, steps=1)',
    '"1.3b", lambda x: ring(x, step_of=gathered)',
    '"1.3b", reduced',
    '"1.3b", whole',
    '"1.3b", lambda x: None',
    '"1.3b", lambda x: x',
    '"1.2a", lambda store, download: download()',
    '"1.2a", lambda store, download: "digits"',
    '"1.2a", lambda store, load: store.check(["name"]) or store.set("name", load()) or "digits-"',
    '"1.2a", lambda store, download: name_of(store, download).encode()',
    '"1.2a", lambda store, download: name_of(store, download) and "digits"',
    '"1.2a", lambda store, download: f"{name_of(store, download)}-{rank}"',
    '"1.2a", lambda store, download: len(name_of(store, download))',
    '"1.5a", lambda model: True',
    '"1.5a", lambda model: False',
    '"1.5a", lambda model: spread(model) and rank == world_size - 1',
    '"1.5a", lambda model: spread(nn.ParameterList([next(model.parameters())]))',
    '"1.5a", checksums_differ',
    f"{TRAINS}, {NO_SUM})",
    f'{TRAINS}, ", sampler=sampler", "", {NO_EPOCH})',
    f"{TRAINS}, {NO_EPOCH})",
    f'{TRAINS}, "Sampler(train_set", "Sampler(train_set, seed=rank")',
    f'{TRAINS}, "DistributedDataParallel(model)", "model")',
    '"1.4b", lambda model, *sets: train_on_ranks(copy.deepcopy(model), *sets)',
    '"1.4b", lambda model, some, test: train_on_ranks(model, Subset(some, range(8)), test)',
    f'{TRAINS}, "lr=0.1", "lr=0.01")',
    f'{TRAINS}, "train_set, batch_size=4", "train_set, batch_size=8")',
    f'{TRAINS}, "model.eval()", "pass")',
    f'{TRAINS}, "model.eval()", "pass", "sampler = Dis", "model.eval(); sampler = Dis")',
    f"{TRAINS}, {ALL_TESTS})",
    f"{TRAINS}, {ALL_TESTS}, {NO_SUM})",
    f'{TRAINS}, {ALL_TESTS}, "return right", "return right / world_size")',
    f'{TRAINS}, "{OWN}", "list(DistributedSampler(test_set))")',
    '"1.4b", lambda *given: train_on_ranks(*given) / 17',
    '"1.4b", lambda *given: [train_on_ranks(*given)] * 2',
    '"2.2c", lambda loss: loss.isnan()',
    '"2.2c", lambda loss: is_left_out(loss) and rank == 2',
    '"2.2c", lambda loss: True',
    '"2.2c", lambda loss: dist.all_reduce(loss) or loss.isnan()',
    '"2.2c", lambda loss: loss.isnan() and math.isnan(nbddp.all_reduce(loss.item()))',
    '"2.3a", lambda batches: batches',
    '"2.3a", lambda batches: shared(batches)[::-1]',
    '"2.3a", lambda batches: None',
    '"2.3a", lambda batches: torch.tensor(nbddp.all_reduce(len(batches), "min"))',
    '"2.3a", lambda batches: batches[: nbddp.all_reduce(len(batches)) // world_size]',
    '"2.5b", lambda loss: loss < 0.1',
    '"2.5b", lambda loss: True',
    '"2.5b", lambda loss: False',
    '"2.6a", "train.py"',  # on the ranks, not in the notebook
]


@pytest.mark.full
def test_check_answer_returns_the_same_verdict_on_all_ranks(
    make_group: MakeRanks, snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(4), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)


def test_an_error_of_an_answer_names_the_call_of_the_judge(make_group: MakeRanks) -> None:
    wrong = "nbddp.check_answer('1.5a', lambda model: [p.grad.sum() for p in model.parameters()])"
    report = make_group(2).failure_of(wrong).report
    assert "'NoneType' object has no attribute 'sum'" in report
    call = 'require(not differs(_prepared()), "1.5a equal")'
    assert f"check_answer('1.5a') has called your code: {call}" in report


ENDLESS = """
from torch import nn
from nbddp.extensions.course import time_limit

time_limit.SECONDS = 2.0

def receive(*given):
    if rank == world_size - 1:
        dist.recv(torch.empty(1), 0)  # nobody sends
    return given[0]

def loop(*given):
    while rank == 0:
        pass

def send(x):
    dist.send(x, (rank + 1) % world_size)

def get(store, download):
    return store.get("name")

def wait_in_mesh(model, mesh):
    return rank or dist.barrier(mesh.get_group("data"))

class Waiting(nn.Module):
    step = receive

    def __init__(self, *given):
        super().__init__()
        receive(self)

    def __iter__(self):
        return iter(int, 1)  # zeros without end

answers = {
    **dict.fromkeys(["1.4b", "1.5a", "2.2c", "2.3a", "3.7c", "4.3a"], receive),
    **dict.fromkeys(["1.2b", "2.1a", "2.5b", "3.5c", "3.7b", "3.8a", "3.8b", "3.9b"], loop),
    **dict.fromkeys(["1.3a", "1.3b"], send),
    **dict.fromkeys(
        ["2.7a", "3.9a", "4.1a", "4.1b", "4.2a", "4.2b", "4.2c", "4.4a", "A1a"], Waiting
    ),
    **{"1.2a": get, "3.7a": wait_in_mesh},
}
hints = {}
for name, answer in sorted(answers.items()):
    took, given = time.monotonic(), (answer,) * (2 if name in ("3.7b", "3.7c") else 1)
    hint = repr(nbddp.check_answer(name, *given))
    hints[name] = hint, time.monotonic() - took
"""


@pytest.mark.full
def test_each_exercise_refuses_an_answer_that_does_not_end(
    make_group: MakeRanks, snapshot: SnapshotAssertion
) -> None:
    group = make_group(4)
    first, *others = group.evaluate(f"import time\n{ENDLESS}\nhints")
    assert max(seconds for _, seconds in first.values()) < 60  # with a limit of 2 s
    hints = {name: hint for name, (hint, _) in first.items()}
    assert [{name: hint for name, (hint, _) in each.items()} for each in others] == [hints] * 3
    assert hints == snapshot
    without_calls = {"2.1b", "2.3b", "2.5a", "2.5c", "2.6a", "3.1c"}  # 2.6a has its own limits
    assert {*EXERCISES} - {*VALUE_EXERCISES} - {*hints} == without_calls
    group.assert_works()


MESH_IMPORTS = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
from torch.nn.functional import cross_entropy
"""
MESH_ANSWERS = MESH_IMPORTS + definitions(
    "3.7", "loss_of", "parallelize", "clip", "train", "whole_state"
)
MESH_OTHERS = """
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
MESH, TRAIN = '"3.7a", but("parallelize"', '"3.7b", parallelize, but("train"'
MINE = 'texts.chunk(2)[mesh.get_local_rank(\\"data\\")]'
MESH_RIGHT = [
    '"3.7a", parallelize',
    '"3.7a", in_sequence',
    '"3.7b", parallelize, train',
    f'{TRAIN}, "{MINE}", "texts[rank // 2 :: 2]")',
    '"3.7c", parallelize, of_torch',
    '"3.7c", parallelize, whole_state',
]
TIE = '"model.head.weight = model.letter.weight", "pass"'
NOT_SHARDED = (
    'but("parallelize", "        fully_shard(block, mesh=mesh[\\"data\\"])\\n", "",'
    ' "return fully_shard(model, mesh=mesh[\\"data\\"])", "return model")'
)
MESH_WRONG = [
    '"3.7a", parallelize if rank else 3',
    '"3.7a", nn.Linear(2, 2)',
    '"3.7a", lambda model: model',
    '"3.7a", lambda model, mesh: None',
    '"3.7a", lambda model, mesh: model',
    f'"3.7a", {NOT_SHARDED}',
    f'{MESH}, "return fully_shard(model, mesh=mesh[\\"data\\"])", "return model")',
    '"3.7a", turned',
    '"3.7a", only_sharded',
    f'{MESH}, "\\"mlp.inner\\"", "#", "\\"mlp.outer\\"", "#")',
    f'{MESH}, "\\"letter\\"", "#", {TIE})',
    f"{MESH}, {TIE})",
    f'{MESH}, "whole = Repl", "add_spare(model); whole = Repl")',
    f'{MESH}, "block.attention.heads //= mesh[\\"tensor\\"].size()", "pass")',
    f'{MESH}, "whole = Repl", "nn.init.normal_(model.place.weight); whole = Repl")',
    '"3.7a", summed',
    f'{MESH}, "        fully_shard(block, mesh=mesh[\\"data\\"])\\n", "")',
    f'{MESH}, "out\\": Row", "out\\": Gathering", "outer\\": Row", "outer\\": Gathering")',
    f'{MESH}, "\\"attention\\"", "#")',
    f'"3.7b", {NOT_SHARDED}, train',
    '"3.7b", parallelize, lambda *_: None',
    '"3.7b", parallelize, lambda *_: [1.0, 1.0, 1.0, 1.0]',
    f'{TRAIN}, "model(texts[:, :-1])", "model(texts[:, 1:])")',
    f'{TRAIN}, "{MINE}", "texts")',
    f'{TRAIN}, "mesh.get_local_rank(\\"data\\")", "rank % 2")',
    f'{TRAIN}, "{MINE}", "texts[:4]")',
    f'{TRAIN}, "{MINE}", "texts.chunk(4)[rank // 2]")',
    f'{TRAIN}, "dist.all_reduce(mean, group=mesh.get_group(\\"data\\"))", "mean *= 2")',
    f'{TRAIN}, "mean.item() / 2", "mean.item()")',
    f'{TRAIN}, "clip(parameters, 0.1)", "pass")',
    f'{TRAIN}, "optimizer.zero_grad()", "pass")',
    f'{TRAIN}, "optimizer.step()", "pass")',
    f'{TRAIN}, "clip(parameters, 0.1)", "clip_own(parameters, 0.1)")',
    f'{TRAIN}, "lr=0.5", "lr=0.1")',
    f'"3.7c", {NOT_SHARDED}, whole_state',
    '"3.7c", parallelize, lambda model: None',
    '"3.7c", parallelize, lambda model: (whole_state(model), {})[rank > 0]',
    '"3.7c", parallelize, named',
    '"3.7c", parallelize, lambda model: whole_state(model) | {"more": torch.ones(1)}',
    '"3.7c", parallelize, lambda model: model.state_dict()',
    '"3.7c", parallelize, local',
    '"3.7c", parallelize, zeros',
    '"3.7c", parallelize, lambda model: {k: v.float() for k, v in whole_state(model).items()}',
]


@pytest.mark.full
def test_a_gpt_on_a_mesh_gets_a_verdict(make_group: MakeRanks, snapshot: SnapshotAssertion) -> None:
    assert_verdicts(
        make_group(4), MESH_OTHERS, MESH_RIGHT, MESH_WRONG, snapshot, answers=MESH_ANSWERS
    )
