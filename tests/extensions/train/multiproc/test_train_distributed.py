"""The training kit on real ranks: one process's numbers, and failures that all ranks hear of."""

import re
from typing import Any

import pytest
import torch
from conditions import output_of_hang
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from syrupy.assertion import SnapshotAssertion

from nbddp.reporting import training_objects

KIT = (
    imported(training_objects)
    + """
import torch, warnings
from torch import nn
from torch.utils.data import TensorDataset
from torch.nn.parallel import DistributedDataParallel
from nbddp import all_gather, all_reduce, loader, main_rank_first, on_main, prepare

def outcome(act, *values):
    try:
        return act(*values)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
)

TRAINING = """
torch.manual_seed(0)
digits = TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(5, (96,)))
model = prepare(nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 5)
))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = loader(digits, 24 // all_reduce(1), seed=3)
losses = []
for epoch in range(3):
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(all_reduce(loss.item(), "mean"))
parameters = [each.detach() for each in model.parameters()]
"""

EVALUATION = """
torch.manual_seed(1)
classifier = prepare(nn.Linear(6, 3))
counts = {}
for samples in (1, 2, 3, 7, 10, 101):
    torch.manual_seed(2)
    tests = TensorDataset(torch.randn(samples, 6), torch.randint(3, (samples,)))
    correct = seen = 0
    with torch.no_grad():
        for features, labels in loader(tests, 4, evaluation=True):
            correct += (classifier(features).argmax(1) == labels).sum().item()
            seen += len(labels)
    counts[samples] = all_reduce((correct, seen))
"""


def run_here(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(KIT + source, names)
    return names


@pytest.fixture
def kit(shared_group: Ranks) -> Ranks:
    shared_group.run(KIT, quiet=True)
    return shared_group


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_distributed_training_matches_training_in_one_process(
    make_group: MakeRanks, world_size: int
) -> None:
    group = make_group(world_size)
    group.run(KIT + TRAINING + EVALUATION)
    alone = run_here(TRAINING + EVALUATION)
    losses, *others = group.pull("losses")
    assert all(each == losses for each in others)
    assert losses == pytest.approx(alone["losses"], abs=1e-5)
    assert losses[-1] < losses[0]
    for parameters in group.pull("parameters"):
        for ours, theirs in zip(parameters, alone["parameters"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    counts = alone["counts"]
    assert {samples: seen for samples, (_, seen) in counts.items()} == {n: n for n in counts}
    assert group.pull("counts") == [counts] * world_size


# ---- prepare


def test_prepare_wraps_a_model_once(kit: Ranks) -> None:
    kit.run(
        "torch.manual_seed(rank)\nplain = nn.Linear(2, 2)\nmodel = prepare(plain)\n"
        "by_hand = DistributedDataParallel(nn.Linear(2, 2))\n"
        "compiled = torch.compile(by_hand)\n"
        "frozen = nn.Linear(2, 2).requires_grad_(False)\nempty = nn.ReLU()\n"
        "options = prepare(nn.Linear(2, 2), find_unused_parameters=True, bucket_cap_mb=1)"
    )
    for claim in (
        "isinstance(model, DistributedDataParallel) and model.device_ids is None",
        "model.module is plain",
        *(f"prepare({each}) is {each}" for each in ("model", "by_hand", "compiled", "frozen")),
        "prepare(empty) is empty",
        "{by_hand, frozen} <= {*training_objects.prepared_models}",
        "options.find_unused_parameters and options.bucket_bytes_cap >> 20 == 1",
    ):
        assert kit.pull(claim) == [True] * 2, claim
    first, second = kit.pull("model.module.weight.tolist()")
    assert first == second


def test_prepare_refuses_models_that_ddp_cannot_wrap(
    kit: Ranks, snapshot: SnapshotAssertion
) -> None:
    kit.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor import distribute_module\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
    )
    first, second = kit.evaluate(
        "[outcome(prepare, model) for model in (\n"
        "    fully_shard(nn.Linear(2, 2), mesh=mesh),\n"
        "    distribute_module(nn.Linear(2, 2), mesh),\n"
        "    nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2))),\n"
        "    [nn.Linear(2, 2)],\n)]"
    )
    assert first == second == snapshot


def test_sync_batch_norm_is_skipped_on_the_cpu_with_a_warning_on_rank_0(kit: Ranks) -> None:
    kit.run(
        "def said(model, **options):\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        warnings.simplefilter('always')\n"
        "        model = prepare(model, **options)\n"
        "        prepare(model)\n"
        "    assert {each.filename for each in caught} <= {said.__code__.co_filename}\n"
        "    return [str(each.message) for each in caught]\n"
        "net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))\n"
        "with_norm, kind = said(net), type(net[1])\n"
        "meant = said(net, sync_batch_norm=False)\n"
        "without = said(nn.Sequential(nn.Linear(2, 2)))\n"
    )
    [words], none = kit.pull("with_norm")
    assert "sync_batch_norm=False" in words
    assert none == []
    assert kit.pull("kind is nn.BatchNorm1d, meant, without") == [(True, [], [])] * 2


# ---- all_reduce and all_gather


def test_all_reduce_combines_numbers(kit: Ranks) -> None:
    kit.run(
        "big = 2**53 + 1\n"
        "ops = {op: all_reduce((rank + 1, rank + 0.5), op)\n"
        "       for op in ('sum', 'mean', 'min', 'max')}\n"
        "exact = all_reduce(big)\n"
        "mixed = all_reduce(1 if rank else 0.5)\n"
        "orders = all_reduce({'a': 1, 'b': 10} if rank else {'b': 10, 'a': 1})\n"
        "flags = all_reduce([rank == 0, True], 'min')\n"
    )
    ops = {"sum": (3, 2.0), "mean": (1.5, 1.0), "min": (1, 0.5), "max": (2, 1.5)}
    assert kit.pull("ops") == [ops] * 2
    assert kit.pull("exact, mixed, flags") == [(2**54 + 2, 1.5, [0, 1])] * 2
    assert kit.pull("orders == {'a': 2, 'b': 20}") == [True] * 2


def test_all_reduce_combines_tensors(kit: Ranks) -> None:
    kit.run(
        "mine = [torch.arange(6.0).view(2, 3).T + rank, torch.tensor([rank == 0, True]),\n"
        "        torch.tensor(rank, dtype=torch.bfloat16), torch.ones(0)]\n"
        "total, most = all_reduce(mine), all_reduce(mine, 'max')\n"
    )
    for total, most in kit.pull("(total, most)"):
        assert torch.equal(total[0], torch.arange(6.0).view(2, 3).T * 2 + 1)
        assert total[1].tolist() == [1, 2]
        assert most[1].tolist() == [True, True]
        assert (total[2].item(), total[2].dtype) == (1.0, torch.bfloat16)
        assert total[3].shape == (0,)


def test_all_reduce_of_mismatched_values_fails_on_all_ranks(
    kit: Ranks, snapshot: SnapshotAssertion
) -> None:
    first, second = kit.evaluate(
        "[outcome(all_reduce, *values) for values in (\n"
        "    [torch.ones(2 + rank)],\n"
        "    [{'correct': torch.tensor(1.0) if rank else 0}],\n"
        "    [{'a': 1} if rank else {}],\n"
        "    [1, 'min' if rank else 'max'],\n"
        "    [None if rank else 1],\n"
        "    [None],\n)]"
    )
    assert first == second == snapshot
    assert kit.evaluate("all_reduce(1)") == [2, 2]


def test_all_gather_returns_the_objects_of_all_ranks(kit: Ranks) -> None:
    kit.run(
        "all_of_them = all_gather({'rank': rank, 'text': 'x' * rank * 1000})\n"
        "bad = outcome(all_gather, (lambda: 1) if rank else 1)\n"
        "after = all_gather(rank)"
    )
    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]
    assert kit.pull("all_of_them") == [expected] * 2
    for words in kit.pull("bad"):
        assert words.startswith("ArgumentError: nbddp.all_gather: rank 1 ")
        assert "lambda" in words
    assert kit.pull("after") == [[0, 1]] * 2


# ---- rank 0 first, or alone


def test_on_main_runs_once_and_returns_the_result_on_all_ranks(kit: Ranks) -> None:
    kit.run(
        "calls = []\n"
        "def load(name, *, size):\n    calls.append(rank)\n    return {name: [rank] * size}\n"
        "loaded = on_main(load)('mnist', size=2)"
    )
    assert kit.pull("loaded") == [{"mnist": [0, 0]}] * 2
    assert kit.pull("calls") == [[0], []]


def test_error_on_rank_0_in_on_main_fails_all_ranks(
    kit: Ranks, snapshot: SnapshotAssertion
) -> None:
    kit.run(
        "import sys\n"
        "def load():\n    raise FileNotFoundError('no digits')\n"
        "def first():\n    with main_rank_first():\n        ran.append(rank)\n        load()\n"
        "def leave():\n    sys.exit(3)\n"
        "ran = []\n"
        "alone, ahead = outcome(on_main(load)), outcome(first)\n"
        "unsendable = outcome(on_main(lambda: (each for each in ())))\n"
        "try:\n    on_main(leave)()\nexcept (SystemExit, RuntimeError) as error:\n"
        "    left = f'{type(error).__name__}: {error}'\n"
        "after = all_reduce(1)"
    )
    reasons, others = kit.pull("[alone, ahead, left]")
    assert reasons == ["FileNotFoundError: no digits"] * 2 + ["SystemExit: 3"]
    assert others == snapshot
    for words in kit.pull("unsendable"):
        assert "TypeError: nbddp.on_main(<lambda>)" in words
        assert "pickle" in words
    assert kit.pull("ran") == [[0], []]
    assert kit.pull("after") == [2, 2]


def test_on_main_functions_can_be_nested(kit: Ranks) -> None:
    kit.run(
        "@on_main\ndef inner():\n    return rank\n"
        "@on_main\ndef outer():\n    with main_rank_first():\n        return [inner(), rank]\n"
        "both = outer()\nafter = all_reduce(1)"
    )
    assert kit.pull("both, after") == [([0, 0], 2)] * 2


def test_collectives_inside_on_main_are_refused_on_all_ranks(
    kit: Ranks, snapshot: SnapshotAssertion
) -> None:
    kit.run(
        "count = on_main(lambda: all_reduce(1))\n"
        "alone = outcome(count)\n"
        "def first():\n    with main_rank_first():\n        all_gather(1)\n"
        "in_turns = outcome(first)\n"
        "after = all_reduce(1)"
    )
    assert kit.pull("[alone, in_turns]") == snapshot
    assert kit.pull("after") == [2, 2]


def test_different_calls_on_different_ranks_fail_on_all_ranks(
    kit: Ranks, snapshot: SnapshotAssertion
) -> None:
    kit.run(
        "def save():\n    ran.append(rank)\nran = []\n"
        "apart = outcome(on_main(save)) if rank == 0 else outcome(all_reduce, 1)\n"
        "more = outcome(all_gather, 1) if rank == 0 else outcome(on_main(save))\n"
        "after = all_reduce(1)"
    )
    first, second = kit.pull("[apart, more]")
    assert first == second == snapshot
    assert kit.pull("ran, after") == [([], 2)] * 2


def test_on_main_called_only_on_rank_0_is_explained_as_a_hang(
    group: Ranks, capsys: Capture
) -> None:
    source = "ran = []\nsave = nbddp.on_main(lambda: ran.append(1))\nif rank == 0:\n    save()"
    output = output_of_hang(group, source, capsys)
    assert re.search(r"rank 0 .*\ball_gather #1\b.*, line 4$", output, re.MULTILINE)
    assert re.search(r"rank 1 .*\bdone\b", output)
    group.run("save()")
    assert group.pull("ran") == [[1], []]


def test_on_main_waits_for_a_rank_in_backward_and_aborts_no_rank(
    group: Ranks, capsys: Capture
) -> None:
    group.run(
        f"{KIT}save = on_main(lambda: 1)\nmodel = prepare(nn.Linear(50, 50))\nkept = 1\n"
        "def backward():\n    model(torch.ones(1, 50)).sum().backward()"
    )
    text = output_of_hang(group, "if rank == 0:\n    save()\nelse:\n    backward()", capsys)
    for rank, collective in enumerate(("all_gather", "all_reduce")):
        assert re.search(rf"rank {rank} .*\b{collective} #", text)
    assert group.pull("kept") == [1, 1]


def test_collectives_accept_a_subgroup(make_group: MakeRanks) -> None:
    group = make_group(3)
    group.run(
        f"{KIT}pair = dist.new_group([0, 2])\n"
        "total = outcome(lambda: all_reduce(rank + 0.5, 'mean', pair))\n"
        "names = outcome(lambda: all_gather(f'rank {rank}', pair))\n"
        "wrong = outcome(lambda: all_reduce(rank or 0.5 if rank else 'x', group=pair))\n"
        "after = all_reduce(1)"
    )
    names = ["rank 0", "rank 2"]
    for found, expected in (("total", 1.5), ("names", names)):
        first, outside, last = group.pull(found)
        assert first == last == expected
        assert outside.startswith("ArgumentError: nbddp.all_")
        assert "rank 1" in outside
    wrong = group.pull("wrong", rank=2)
    assert all(words in wrong for words in ("nbddp.all_reduce", "rank 0: str", "rank 2: int"))
    assert group.pull("after") == [3, 3, 3]


def test_main_rank_first_runs_the_other_ranks_after_rank_0(make_group: MakeRanks) -> None:
    group = make_group(4)
    group.run(
        KIT + "import os, time\n"
        "with main_rank_first():\n"
        "    found = os.path.exists('digits')\n"
        "    if not found:\n"
        "        time.sleep(0.2)\n"
        "        open('digits', 'w').close()\n"
    )
    assert group.pull("found") == [False, True, True, True]
