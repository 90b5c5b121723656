"""Rules: each finds its bad example and not its good one, and says what it found."""

from __future__ import annotations

import ast
import gc
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from nbddp.checks.book import (
    BOOK,
    CHECKLIST,
    STATIC,
    checklist,
    explain,
    look_at,
    look_at_ranks,
    may_find,
    rule_of,
)
from nbddp.checks.conditions import depends_on_rank
from nbddp.checks.facts import Facts, Loader, Model, RankFacts
from nbddp.checks.rule import Finding, Rule
from nbddp.checks.source import Source
from nbddp.errors import RequestError
from nbddp.group.checking import check_script
from nbddp.ui.panel.checks import check_html, findings_html
from nbddp.ui.text.checks import findings_text

ROOT = Path(__file__).parents[1]
RULES = list(BOOK.values())


@pytest.mark.parametrize("rule", RULES, ids=lambda each: each.id)
def test_a_rule_finds_its_bad_example_and_not_the_good_one(rule: Rule[Any]) -> None:
    found = list(rule.findings(rule.bad))
    assert found
    assert all(each.rule == rule.id and each.text.endswith(".") for each in found)
    assert list(rule.findings(rule.good)) == []


@pytest.mark.parametrize("rule", STATIC, ids=lambda each: each.id)
def test_no_other_rule_has_anything_against_a_good_example(rule: Rule[Source]) -> None:
    assert look_at(rule.good) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda each: each.id)
def test_a_rule_says_why_and_what_to_do_and_where_it_is_taught(rule: Rule[Any]) -> None:
    assert (ROOT / "notebooks" / rule.notebook).exists()
    assert rule.title[0].islower() or rule.title[0].isupper()
    assert rule.why.endswith(".")
    assert rule.fix.endswith(".")
    text = explain(rule)
    assert rule.why in text
    assert ("wrong:" in text) is rule.id.startswith("ND1")
    assert ("right:" in text) is rule.id.startswith("ND1")


def test_ids_tell_what_a_rule_looks_at_and_stand_in_order() -> None:
    assert [each.id for each in RULES] == sorted(BOOK)
    assert all(each.id.startswith("ND1") for each in STATIC)


def test_the_checklist_names_rules_that_there_are_and_its_text_lists_them_all() -> None:
    named = [each for _, _, rules in CHECKLIST for each in rules]
    assert len(named) == len(set(named))
    assert set(named) <= set(BOOK)
    assert all(f"{each.id}  {each.title}" in checklist() for each in RULES)


def test_a_rule_that_there_is_not_is_said() -> None:
    assert rule_of("nd101") is BOOK["ND101"]
    with pytest.raises(RequestError, match="there is no rule ND999"):
        rule_of("ND999")


@pytest.mark.parametrize(
    ("test", "does"),
    [
        ("rank == 0", True),
        ("not rank", True),
        ("dist.get_rank() == 0", True),
        ("args.local_rank in (-1, 0)", True),
        ("is_distributed and rank == 0", True),
        ("is_main_process()", True),
        ("int(os.environ['RANK']) == 0", True),
        ("rank != -1", False),
        ("args.local_rank >= 0", False),
        ("rank == 0 and world_size == 1", False),
        ("args.world_size <= 1 and is_main", False),
        ("rank == 0 and dist.get_world_size() < 2", False),
        ("rank == 0 and world_size == 2", True),
        ("rank is not None", False),
        ("rank in chosen", False),
        ("step % 10 == 0", False),
        ("frank == 0", False),
        ("self.negative_all_rank", False),
        ("args.lora_rank > 0", False),
        ("per_rank", False),
        ("self.ddp_rank == 0", True),
    ],
)
def test_a_condition_on_the_rank_is_told_from_one_on_something_else(test: str, does: bool) -> None:
    assert depends_on_rank(ast.parse(test, mode="eval").body) is does


def rules_in(text: str, kinds: dict[str, str] | None = None, **options: Any) -> list[str]:
    return [each.rule for each in look_at(Source(text, kinds, **options))]


def under(head: str, *texts: str) -> str:
    return f"{head}:\n" + textwrap.indent("".join(texts), "    ")


COMMON = "import torch\nimport torch.distributed as dist\n"
REDUCES = "dist.all_reduce(t)\n"


@pytest.mark.parametrize(
    "text",
    [
        # the first in a machine downloads, the others wait: two barriers, two conditions
        "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n",
        "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n",
        "if rank == 0:\n    dist.send(x, 1)\nelif rank == 1:\n    dist.recv(x, 0)\n",
        "if rank < 2:\n    dist.all_reduce(x, group=pair)\n",
        "if rank == 0:\n    def gather(x):\n        return dist.all_gather_object(x, [])\n",
        "if local_rank != -1:\n    dist.barrier()\n",
        "def mean(x, group):\n    dist.all_reduce(x, group=group)\nif rank == 0:\n    mean(x, g)\n",
        "try:\n    import apex\nexcept ImportError:\n    dist.barrier()\n",
        "def f():\n    if rank == 0:\n        return 1\n    return 2\ndist.barrier()\n",
    ],
)
def test_what_some_ranks_may_do_alone_is_left_alone(text: str) -> None:
    assert rules_in(text) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("match rank:\n  case 0: dist.barrier()", "`case 0` of `match rank`"),
        (
            "match step:\n  case _ if rank == 0: dist.barrier()",
            "`case _ if rank == 0` of `match step`",
        ),
        ("rank == 0 and dist.barrier()", "`rank == 0 and ...`"),
        ("ready and rank == 0 and dist.barrier()", "`ready and rank == 0 and ...`"),
        ("rank or dist.barrier()", "`rank or ...`"),
        ("x = dist.all_reduce(y) if rank == 0 else None", "`if rank == 0`"),
        ("x = None if rank == 0 else dist.all_reduce(y)", "the `else` of `if rank == 0`"),
        ("while rank == 0:\n  dist.barrier()", "`while rank == 0`"),
        ("for _ in range(rank):\n  dist.barrier()", "`for _ in range(rank)`"),
        ("for r in range(rank, world_size): dist.barrier()", "`for r in range(rank, world_size)`"),
        ("[dist.barrier() for _ in range(rank)]", "`range(rank)` of a comprehension"),
        ("{dist.barrier() for x in data if rank == 0}", "`rank == 0` of a comprehension"),
        ("f = lambda: rank == 0 and dist.barrier()", "`rank == 0 and ...`"),
    ],
)
def test_a_condition_on_the_rank_is_one_in_whatever_way_it_is_written(
    text: str, where: str
) -> None:
    (found,) = look_at(Source(text))
    assert found.rule == "ND101"
    assert f" is under {where} (line 1): " in found.text
    ends = "not all ranks come to it as often." if "range" in text else "do not come to it."
    assert found.text.endswith(ends)


@pytest.mark.parametrize(
    "text",
    [
        "match rank:\n  case 0: dist.barrier()\n  case _: dist.barrier()",
        "match rank:\n  case -1: pass\n  case _: dist.barrier()",
        "match kind:\n  case 'mean': dist.all_reduce(x)",
        "x = dist.all_reduce(y) if rank == 0 else dist.all_reduce(z)",
        "while step < 9:\n  dist.barrier()",
        "for i in range(rank, 100, world_size): dist.all_reduce(x)",
        "for i in range(rank * 8, (rank + 1) * 8): dist.all_reduce(x)",
        "for r in range(num_rank): dist.broadcast(x, src=r)",
        "for x in shards[rank]: dist.all_reduce(x)",
        "dist.is_initialized() and dist.barrier()",
        "dist.barrier() or rank == 0",
        "[x for x in dist.all_gather(y) if rank == 0]",
        "for _ in range(2):\n  if rank == 0: pass\n  dist.barrier()",
        "model = ddp(net)\nmatch rank:\n  case 0: torch.save(model.state_dict(), 'a')",
        "while rank == 0:\n  torch.save(x, 'a')\n  break\ndist.barrier()",
    ],
)
def test_what_looks_like_a_condition_on_the_rank_and_keeps_nobody_away_is_left_alone(
    text: str,
) -> None:
    assert look_at(Source(text, {"model": "ddp"})) == []


@pytest.mark.parametrize(
    ("call", "is_of_all"),
    [
        ("dist.all_reduce(t)", True),
        ("dist.all_reduce(t, dist.ReduceOp.MAX)", True),
        ("dist.all_reduce(t, dist.ReduceOp.MAX, pair)", False),
        ("dist.all_reduce(t, group=None)", True),
        ("dist.all_reduce(t, group=dist.group.WORLD)", True),
        ("dist.broadcast(t, 0, pair)", False),
        ("dist.reduce(t, 0, dist.ReduceOp.SUM, pair)", False),
        ("dist.all_gather(ts, t, pair)", False),
        ("dist.barrier(pair)", False),
        ("dist.all_reduce(t, **options)", False),
        ("dist.all_reduce(*args)", False),
        ("dist.new_group([0, 1])", True),
        ("dist.new_group([0, 1], use_local_synchronization=True)", False),
    ],
)
def test_a_collective_of_some_ranks_only_is_told_by_its_arguments(
    call: str, *, is_of_all: bool
) -> None:
    assert rules_in(under("if rank < 2", call)) == (["ND101"] if is_of_all else [])


SHARDED_MODEL = (
    "import torch.distributed.checkpoint as dcp\n"
    "from torch.distributed.checkpoint.state_dict import (\n"
    "    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict\n)\n"
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"
    "from torch.distributed.tensor import distribute_tensor\n"
    "fully_shard(model)\nfirst = FSDP(net)\n"
)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("dcp.save(state, checkpoint_id='a')", "dcp.save"),
        ("dcp.load(state, checkpoint_id='a')", "dcp.load"),
        ("saving = dcp.async_save(state, checkpoint_id='a')", "dcp.async_save"),
        ("state = get_model_state_dict(model)", "get_model_state_dict"),
        ("state = get_optimizer_state_dict(model, adam)", "get_optimizer_state_dict"),
        ("set_model_state_dict(model, state)", "set_model_state_dict"),
        ("mesh = init_device_mesh('cpu', (2,))", "init_device_mesh"),
        ("mesh = dist.init_device_mesh('cpu', (2,))", "dist.init_device_mesh"),
        ("print(model.weight.full_tensor())", "model.weight.full_tensor()"),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_norm_"),
        ("first.clip_grad_norm_(1.0)", "first.clip_grad_norm_()"),
        ("torch.save(first.state_dict(), 'a.pt')", "first.state_dict()"),
        ("group, _ = dist.new_subgroups(2)", "dist.new_subgroups"),
        ("dist.new_subgroups_by_enumeration(lists)", "dist.new_subgroups_by_enumeration"),
        ("part = distribute_tensor(t, mesh, places)", "distribute_tensor"),
        ("state = FSDP.full_optim_state_dict(first, adam)", "full_optim_state_dict"),
        ("zero.consolidate_state_dict()", "zero.consolidate_state_dict()"),
    ],
)
def test_calls_that_gather_what_ranks_hold_in_parts_are_collectives(call: str, shown: str) -> None:
    head = COMMON + SHARDED_MODEL
    for condition in ("rank == 0", "dist.get_rank() == 0", "is_main_process()"):
        [found] = look_at(Source(head + under(f"if {condition}", call), is_cell=False))
        assert found.rule == "ND101"
        assert found.text.startswith(f"{shown} is under `if {condition}` (line ")
    left = under("def save()", under("if rank != 0", "return\n"), call)
    assert rules_in(head + left, is_cell=False) == ["ND103"]
    assert rules_in(head + call, is_cell=False) == []


@pytest.mark.parametrize(
    "text",
    [
        # the ranks of a mesh's dimension, or of a group, are among themselves
        under("if dp_rank == 0", "print(model.weight.full_tensor())"),
        under("if mesh.get_local_rank('tp') == 0", "print(model.weight.full_tensor())"),
        under("if pair.rank() == 0", "print(model.weight.full_tensor())"),
        under("if dist.get_rank(pair) == 0", "print(model.weight.full_tensor())"),
        under("if rank < 2", "part = distribute_tensor(t, half, places)"),
        # all ranks come to it where the model is cut up
        under("if use_fsdp or rank == 0", "state = get_model_state_dict(model)"),
        under("if rank == 0", "dcp.save(state, checkpoint_id='a', no_dist=True)"),
        under("if rank < 2", "dcp.save(state, checkpoint_id='a', process_group=pair)"),
        under("if rank < 2", "dist.new_subgroups(2, pair)"),
        under("if rank == 0", "torch.save(model.state_dict(), 'a.pt')"),
        under("if rank == 0", "state = plain.state_dict()"),
        under("if rank == 0", "torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)"),
    ],
)
def test_calls_on_parts_that_some_ranks_may_make_are_left_alone(text: str) -> None:
    assert rules_in(COMMON + SHARDED_MODEL + text, is_cell=False) == []


def test_the_state_of_a_ddp_model_is_no_collective() -> None:
    text = "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
    text += under("if rank == 0", "state = get_model_state_dict(model)\n")
    assert rules_in(text, {"model": "ddp"}) == []
    assert rules_in(text, {"model": "fsdp"}) == ["ND101"]
    assert rules_in(text) == []
    assert rules_in("from torch.distributed.fsdp import fully_shard\n" + text) == ["ND101"]


@pytest.mark.parametrize(
    ("function", "is_found"),
    [
        (under("def mean(x)", REDUCES), True),
        (under("def mean(x)", under("if dist.is_initialized()", REDUCES)), True),
        (under("def mean(x, together=True)", under("if together", REDUCES)), False),
        (under("def mean(x, args)", under("if args.is_distributed", REDUCES)), False),
        (under("def mean(x, alone=False)", under("if alone", "return x\n"), REDUCES), False),
        (under("def mean(x, mesh=None)", REDUCES), False),
    ],
)
def test_a_function_that_meets_where_its_caller_wants_may_be_called_alone(
    function: str, *, is_found: bool
) -> None:
    text = function + under("if rank == 0", "mean(x)\n")
    assert rules_in(text) == (["ND101"] if is_found else [])


@pytest.mark.parametrize(
    "text",
    [
        # the ranks that do not come to the first one come to the second
        under("for i in range(3)", under("if i + rank < 2", REDUCES, "continue\n"), REDUCES),
        under("for i in range(3)", under("if i + rank < 2", REDUCES, "break\n"), REDUCES),
        under("def f()", under("if rank == 0", REDUCES, "return\n"), REDUCES),
        under("def f()", under("if rank == 0", "return dist.all_reduce(t)\n"), REDUCES),
        under("def f()", under("if rank", "x = 1\n") + under("else", REDUCES, "return\n"), REDUCES),
        under("if rank == 0", REDUCES, "raise ValueError\n") + REDUCES,
        under(
            "for i in range(3)",
            under("if i + rank < 2", under("if not state", REDUCES, "continue\n"), "x = 1\n"),
            REDUCES,
        ),
        # who has an error meets the others, and goes no further
        under("try", "load()\n") + under("except OSError", REDUCES, "raise\n") + REDUCES,
        under(
            "def f()",
            under("try", "load()\n") + under("except OSError", REDUCES, "return\n") + REDUCES,
        ),
        under("try", "load()\n") + under("except OSError", REDUCES) + under("else", REDUCES),
    ],
)
def test_a_collective_that_others_make_below_is_left_alone(text: str) -> None:
    assert rules_in(text) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (under("for i in range(3)", under("if i + rank < 2", REDUCES), REDUCES), "ND101"),
        (under("for i in range(3)", under("if rank", REDUCES, "continue\n")) + REDUCES, "ND101"),
        (under("def f()", REDUCES, under("if rank == 0", REDUCES, "return\n")), "ND101"),
        (under("def f()", under("if rank", REDUCES, "return\n")) + REDUCES, "ND101"),
        (under("if rank == 0", REDUCES, "break\n") + REDUCES, "ND101"),  # no loop to break
        (under("try", "load()\n") + under("except OSError", REDUCES) + REDUCES, "ND104"),
    ],
)
def test_a_collective_that_is_one_too_many_is_found(text: str, rule: str) -> None:
    assert rules_in(text) == [rule]


def leaves(condition: str, *below: str, word: str = "return") -> str:
    """A function that some ranks leave early, and what is below."""
    return under("def f()", under(f"if {condition}", f"{word}\n"), *below)


SHARDED = under("if sharded", REDUCES)


@pytest.mark.parametrize(
    "text",
    [
        leaves("not sharded and rank != 0", SHARDED),
        leaves("not (sharded or rank == 0)", SHARDED),
        leaves("mode == 'whole' and rank", under("if mode != 'whole'", REDUCES)),
        leaves("mode == 'whole' and rank", under("if mode == 'parts'", REDUCES)),
        under("def f()", under("if not sharded", under("if rank", "return\n")), SHARDED),
        under(
            "def f()", under("if not sharded", under("if rank", "return\n"), "return\n"), REDUCES
        ),
        under("for x in a", under("if whole and rank", "continue\n"), SHARDED),
        under(
            "def f()",
            under(
                "match mode",
                under("case 'whole'", under("if rank", "return\n")),
                under("case _", REDUCES),
            ),
        ),
    ],
)
def test_ranks_that_leave_where_there_is_no_collective_are_left_alone(text: str) -> None:
    assert rules_in(text) == []


@pytest.mark.parametrize(
    "text",
    [
        leaves("not sharded and rank != 0", REDUCES),
        leaves("rank != 0", SHARDED),
        leaves("sharded and rank != 0", SHARDED),
        leaves("not sharded and rank != 0", SHARDED, REDUCES),
        under("def f()", under("if sharded", under("if rank", "return\n"), REDUCES)),
    ],
)
def test_ranks_that_leave_before_a_collective_are_found(text: str) -> None:
    assert rules_in(text) == ["ND103"]


def test_a_ddp_model_is_looked_for_under_all_of_them_too() -> None:
    text = "match rank:\n  case 0: y = model(x)\nrank == 0 and model(x)\n"
    found = look_at(Source(text, {"model": "ddp"}))
    assert [(each.rule, each.line) for each in found] == [("ND102", 2), ("ND102", 3)]
    every = "match rank:\n  case 0: y = model(x)\n  case _: y = model(z)\n"
    assert look_at(Source(every, {"model": "ddp"})) == []


WRAPPED = COMMON + "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(net)\n"
UNEVEN = "for i in range(5 + rank):\n    m(x).sum().backward()\n"


@pytest.mark.parametrize("is_cell", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        under("with m.join()", UNEVEN),
        under("with Join([m])", UNEVEN),
        under("with Join([m, optimizer], throw_on_early_termination=True)", UNEVEN),
        under("with torch.autograd.profiler.profile(), m.join()", UNEVEN),
        under("with m.join() if is_uneven else nullcontext()", UNEVEN),
        under("with ExitStack() as stack", "stack.enter_context(m.join())\n", UNEVEN),
        "joined = Join([m])\n" + under("with joined", UNEVEN),
        under("with m.join()", under("if rank == 0", "m(x).sum().backward()\n")),
        under("def fit()", UNEVEN) + under("with m.join()", "fit()\n"),
        under("def fit()", UNEVEN) + under("def main()", under("with m.join()", "fit()\n")),
    ],
)
def test_ranks_under_a_join_may_make_unequal_numbers_of_steps(text: str, is_cell: bool) -> None:
    assert rules_in(WRAPPED + text, is_cell=is_cell) == []


@pytest.mark.parametrize(
    "text",
    [
        UNEVEN,
        under("with m.no_sync()", UNEVEN),
        under("with open(os.path.join('a', 'b'))", UNEVEN),
        under("with m.join(enable=False)", UNEVEN),
        under("with m.join()", "pass\n") + UNEVEN,
        under("if rank == 0", under("with m.join()", "m(x).sum().backward()\n")),
        "process.join()\n" + UNEVEN,
    ],
)
def test_unequal_numbers_of_steps_without_a_join_are_found(text: str) -> None:
    assert rules_in(WRAPPED + text, is_cell=False) == ["ND102"]


def test_a_join_takes_part_in_no_collective_of_the_users_own() -> None:
    text = under("with m.join()", UNEVEN + "    dist.all_reduce(y)\n")
    assert rules_in(WRAPPED + text, is_cell=False) == ["ND101"]


def test_a_model_is_no_ddp_model_before_it_is_wrapped() -> None:
    alone = under("if rank == 0", "m(x).sum().backward()\n")
    wrap = WRAPPED.removeprefix(COMMON)
    assert rules_in(COMMON + "m = net()\n" + alone + wrap, is_cell=False) == []
    assert rules_in(COMMON + under("for i in range(2)", alone + wrap), is_cell=False) == ["ND102"]
    assert rules_in(under("def fit()", alone) + WRAPPED + "fit()\n", is_cell=False) == ["ND102"]


TEST = under("with torch.no_grad()", "y = model(x)\n")
NORM = "class Net(nn.Module):\n    def __init__(self):\n        self.norm = nn.BatchNorm2d(8)\n"
WRAPS = "from torch.nn.parallel import DistributedDataParallel as DDP\n"


@pytest.mark.parametrize(
    ("text", "kind", "is_found"),
    [
        ("", "ddp with buffers", True),
        ("", "ddp with buffers in training", True),
        ("", "ddp", False),
        ("", "ddp in training", False),
        (WRAPS + NORM + "model = DDP(Net())\n", "", True),
        (WRAPS + NORM + "net = Net().to(device)\nmodel = DDP(net)\n", "", True),
        (WRAPS + "model = DDP(nn.Sequential(nn.BatchNorm1d(8)))\n", "", True),
        (WRAPS + NORM + "model = DDP(Net(), broadcast_buffers=False)\n", "", False),
        (WRAPS + NORM + "model = DDP(Net(), **options)\n", "", False),
        (WRAPS + NORM + "model = DDP(nn.Linear(4, 2))\n", "", False),
    ],
)
def test_a_test_on_one_rank_is_found_where_ddp_sends_buffers(
    text: str, kind: str, *, is_found: bool
) -> None:
    found = look_at(Source(text + under("if rank == 0", TEST), {"model": kind}))
    assert [each.rule for each in found] == (["ND102"] if is_found else [])
    effect = "the first forward after a training step broadcasts buffers to all ranks."
    assert all(each.text.endswith(effect) for each in found)
    assert rules_in(text + under("if rank == 0", TEST.replace("model(", "model.module("))) == []
    assert rules_in(text + TEST, {"model": kind}) == []


def test_an_fsdp_model_on_one_rank_is_found_with_gradients_and_without() -> None:
    for head in ("model = FSDP(net)\n", "fully_shard(model)\n"):
        text = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"
        text += head
        assert rules_in(text + under("if rank == 0", TEST), is_cell=False) == ["ND102"]
        assert rules_in(text + under("if rank == 0", "model(x)\n"), is_cell=False) == ["ND102"]
        assert rules_in(text + under("if pp_rank == 0", "model(x)\n"), is_cell=False) == []
    assert rules_in(under("if rank == 0", TEST), {"model": "fsdp in training"}) == ["ND102"]


SHAPES = {
    "conditions": "def f{i}(rank, m):\n  if rank == 0:\n    dist.barrier()\n  dist.all_reduce(m)\n",
    "leavers": "def f{i}(rank, m):\n  if rank: return\n  dist.barrier()\n",
    "excepts": "try:\n  x = {i}\nexcept OSError:\n  dist.barrier()\n",
    "saves": "class A{i}:\n  def go(self, m, rank):\n    m = DDP(m)\n    if rank == 0:\n"
    "      self.save(m)\n    self.go(m)\n  def save(self, m):\n    torch.save(m, 'a{i}')\n"
    "    x = torch.load('a{i}')\n",
    "training": "def train{i}(model, loader, opt):\n  model = DDP(model)\n  total = 0\n"
    "  dl = DataLoader(loader, sampler=DistributedSampler(loader))\n  for e in range(3):\n"
    "    for x, y in dl:\n      scaler.scale(model(x).sum()).backward()\n"
    "      clip_grad_norm_(model.parameters(), 1.0)\n      scaler.step(opt)\n"
    "      dist.barrier()\n    model.eval()\n    for x, y in dl:\n"
    "      total += model(x).sum().item()\n    print(total / len(dl))\n"
    "    dist.all_reduce(p.grad)\n    model.to('cuda:0')\n",
}
HEAD = (
    "import torch\nimport torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "from torch.utils.data import DataLoader, DistributedSampler\n"
    "from torch.nn.utils import clip_grad_norm_\n"
)


@pytest.mark.parametrize("shape", SHAPES)
def test_ten_times_as_much_code_takes_about_ten_times_as_long(shape: str) -> None:
    def took(count: int) -> float:
        text = HEAD + "".join(SHAPES[shape].replace("{i}", str(i)) for i in range(count))
        source = Source(text, is_cell=False)
        began = time.thread_time()
        look_at(source)
        return time.thread_time() - began

    took(5)
    gc.collect()
    gc.disable()  # one collection of all that a test run holds takes half a second
    try:
        assert took(600) < 40 * took(60) + 0.1
    finally:
        gc.enable()


def test_a_collective_in_a_function_of_the_cell_is_found_where_it_is_called() -> None:
    text = (
        "def mean(x):\n    dist.all_reduce(x)\n    return x\n\nif rank == 0:\n    print(mean(x))\n"
    )
    [found] = look_at(Source(text, first_line=2))
    assert found.headline == (
        "ND101 line 7: mean() is under `if rank == 0` (line 6): the other ranks do not come to it."
    )


def test_imports_are_followed() -> None:
    text = "from torch.distributed import all_reduce as add\nif rank == 1:\n    add(x)\n"
    assert rules_in(text, is_cell=False) == ["ND101"]
    assert rules_in("if rank == 1:\n    add(x)\n", is_cell=False) == []


def test_a_comment_silences_a_rule_on_its_line_or_in_all_of_the_cell() -> None:
    text = "if rank == 0:\n    dist.barrier(){}\n    dist.barrier()\n"
    assert rules_in(text.format("")) == ["ND101", "ND101"]
    assert rules_in(text.format("  # nbddp: ok ND101")) == ["ND101"]
    assert rules_in(text.format("  # nbddp: ok ND102")) == ["ND101", "ND101"]
    assert rules_in("# nbddp: ok ND102, ND101\n" + text.format("")) == []


def test_gradients_in_a_context_of_rpcs_autograd_are_gone_with_it() -> None:
    text = (
        "import torch.distributed.autograd as dist_autograd\n"
        "for x, y in train:\n"
        "    with dist_autograd.context() as context:\n"
        "        {}\n"
        "        optimizer.step(context)\n"
    )
    assert rules_in(text.format("dist_autograd.backward(context, [loss])")) == []
    assert rules_in(text.format("loss.backward()")) == ["ND122"]


def test_ipythons_own_lines_are_no_error() -> None:
    text = (
        "%time x = 1\n!ls\ny = !ls\nx?\nawait z\nif rank == 0:\n    %time x\n    dist.barrier()\n"
    )
    [found] = look_at(Source(text))
    assert (found.rule, found.line) == ("ND101", 8)
    assert look_at(Source("%%bash\nif [ x ]; then\n")) == []


def test_what_a_sampler_is_told_elsewhere_is_not_missed() -> None:
    loop = "for epoch in range(9):\n    for x in train:\n        step(x)\n"
    made = (
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "sampler = DistributedSampler(data{})\ntrain = DataLoader(data, sampler=sampler)\n"
    )
    assert rules_in(made.format("") + loop) == ["ND112"]
    assert rules_in(made.format(", shuffle=False") + loop) == []
    assert rules_in(made.format("") + "for x in train:\n    step(x)\n") == []
    assert rules_in(loop, {"train": "loader dealt"}) == []
    told = loop.replace("    for", "    begin(epoch)\n    for")
    assert rules_in(told, {"train": "loader shuffled"}) == []
    said = loop.replace("    for", "    print(epoch)\n    for")
    assert rules_in(said, {"train": "loader shuffled"}) == ["ND112"]
    assert rules_in(loop, {"train": "nbddp loader"}) == []


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("    dist.barrier()\n", True),
        ("    with record():\n        dist.barrier()\n", True),
        ("    if loss > 9:\n        break\n    dist.barrier()\n", True),
        ("    if step % 10 == 0:\n        save()\n        dist.barrier()\n", False),
        ("    if args.profile:\n        dist.barrier()\n", False),
        ("    if step % 10:\n        pass\n    else:\n        dist.barrier()\n", False),
        ("    step % 10 or dist.barrier()\n", False),
        ("    if step % 10:\n        continue\n    dist.barrier()\n", False),
        ("else:\n    dist.barrier()\n", False),
    ],
)
def test_a_barrier_of_some_steps_only_is_left_alone(body: str, is_found: bool) -> None:
    loop = "for step, x in enumerate(train):\n    loss = model(x).sum()\n    loss.backward()\n"
    assert ("ND106" in rules_in(loop + body, {"model": "ddp"})) is is_found


def test_a_barrier_before_the_last_steps_return_is_left_alone() -> None:
    text = (
        "def fit(model, train):\n    for step, x in enumerate(train):\n"
        "        model(x).sum().backward()\n        if step >= max_steps:\n"
        "            dist.barrier()\n            return\n"
    )
    assert "ND106" not in rules_in(text, {"model": "ddp"})


@pytest.mark.parametrize(
    ("other", "is_found"), [("optimizers[1].step()\n", False), ("print(i)\n", True)]
)
def test_micro_steps_that_each_update_something_are_not_accumulated(
    other: str, *, is_found: bool
) -> None:
    step = under("if i % 2 == 0", other) + under("else", "optimizer.step()\nzero_grad()\n")
    text = under("for i, x in enumerate(train)", "model(x).sum().backward()\n", step)
    assert ("ND121" in rules_in(text)) is is_found


SCALED = "scaler.scale(loss).backward()\n"
UPDATED = "scaler.step(optimizer)\nscaler.update()\n"
CLIPPED = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
PLAIN = CLIPPED + "optimizer.step()\n"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (under("if scaler is not None", SCALED, UPDATED) + under("else", PLAIN), False),
        (under("if scaler is None", PLAIN) + under("else", SCALED, UPDATED), False),
        (
            under("if scaler is not None", SCALED)
            + under("else", "loss.backward()\n")
            + under("if scaler", UPDATED)
            + under("else", PLAIN),
            False,
        ),
        (
            under("if amp", SCALED)
            + under("if scaler is not None", UPDATED)
            + under("else", PLAIN),
            False,
        ),
        (under("def update()", under("if scaler", SCALED, UPDATED, "return\n"), PLAIN), False),
        (under("if not amp", PLAIN) + under("if amp", SCALED, UPDATED), False),
        (SCALED + under("if limit", CLIPPED) + UPDATED, True),
        (SCALED + under("if limit", CLIPPED, UPDATED) + under("else", UPDATED), True),
        (under("if scaler is not None", SCALED, CLIPPED, UPDATED) + under("else", PLAIN), True),
        (under("if amp", SCALED) + CLIPPED + under("if amp", UPDATED), True),
    ],
)
def test_what_is_clipped_where_the_scaler_is_not_used_is_left_alone(
    text: str, is_found: bool
) -> None:
    assert ("ND123" in rules_in(text)) is is_found


def test_saving_under_a_guard_of_any_kind_is_one_ranks() -> None:
    save = "def save(path):\n    torch.save(model.state_dict(), 'x.pt')\n"
    known = {"model": "ddp"}
    assert rules_in(save + "save(1)\n", known) == ["ND141"]
    assert rules_in(save + "if rank == 0:\n    save(1)\n", known) == []
    assert rules_in(save + "if args.is_master:\n    save(1)\n", known) == []
    assert rules_in("torch.save(model.state_dict(), f'{rank}.pt')\n", known) == []
    assert rules_in("path = f'{rank}.pt'\ntorch.save(model, path)\n", known) == []
    assert rules_in("torch.save(1, 'x.pt')\n") == []
    assert rules_in("torch.save(model, folder / 'x.pt')\n", known) == []  # of another cell
    assert rules_in("for i in range(3):\n    torch.save(model, f'{i}.pt')\n", known) == ["ND141"]
    assert rules_in("with open(path, 'wb') as f:\n    torch.save(model, f)\n", known) == []


def found(*rules: str) -> list[Finding]:
    return [
        Finding(rule=each, line=3, text="<b> hangs.", why="Why.", fix="Mend it.", notebook="")
        for each in rules
    ]


def test_findings_as_text_are_a_few_with_their_remedies() -> None:
    assert findings_text([]) == ""
    assert findings_text([], what="cell [3]") == "nbddp: nothing to find fault with in cell [3]"
    assert findings_text(found("ND101")).splitlines() == [
        "nbddp: 1 thing to look at",
        "  ND101 line 3: <b> hangs.",
        "      Mend it.",
        "  `%ddp check --explain ND101` tells more",
    ]
    many = findings_text(found("ND101", "ND102", "ND103", "ND104"))
    assert "4 things to look at" in many
    assert "ND104" not in many
    assert many.endswith("and 1 more: `%ddp check` shows them all")


def test_findings_as_html_are_folded_and_escaped() -> None:
    assert findings_html([]) == ""
    html = findings_html(found("ND101", "ND102", "ND103", "ND104"))
    assert html.startswith('<details class="nbddp-checks"><summary>')
    assert "4 things to look at" in html
    assert "&lt;b&gt; hangs." in html
    assert "ND104" not in html
    assert "and 1 more" in html
    assert '<details class="nbddp-checks" open>' in check_html(found("ND101"), "a.py")
    assert "nothing to find fault with in a.py" in check_html([], "a.py")


def test_a_script_is_read_as_python_would_read_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(
        b"# coding: latin-1\nimport torch.distributed as dist\n# \xe4\n"
        b"rank = dist.get_rank()\nif rank == 0:\n    dist.barrier()\n"
    )
    assert [each.line for each in check_script(str(script))] == [6]
    with pytest.raises(RequestError, match=r"nothing\.py cannot be read: No such file"):
        check_script(str(tmp_path / "nothing.py"))
    script.write_text("for x in\n")
    with pytest.raises(RequestError, match="syntax error in line 1"):
        check_script(str(script))
    script.write_bytes(b"x = 1\0")
    with pytest.raises(RequestError, match=r"train\.py"):
        check_script(str(script))
    for deep in ("1 +" * 9000 + " 1", "-" * 50_000 + "1"):
        script.write_text(f"x = {deep}\n")
        with pytest.raises(RequestError, match=r"train\.py is nested too deeply for Python"):
            check_script(str(script))


def test_what_is_no_file_is_not_read_as_a_script(tmp_path: Path) -> None:
    """It may have no end, or never begin."""
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("/dev/zero", str(tmp_path / "pipe.py")):
        with pytest.raises(RequestError) as refused:
            check_script(name)
        assert str(refused.value) == f"{name} is no Python script: it is no file"


@pytest.mark.parametrize(
    ("name", "instead"),
    [("lesson.ipynb", "open it, and run its cells with %%ddp"), ("job.sh", "run it with !bash")],
)
def test_what_is_no_script_is_not_checked_as_one(tmp_path: Path, name: str, instead: str) -> None:
    (tmp_path / name).write_text('{"cells": []}')  # is Python, too
    with pytest.raises(RequestError) as refused:
        check_script(str(tmp_path / name))
    assert str(refused.value) == f"{tmp_path / name} is not checked as a script: {instead}"


def test_names_of_functions_are_not_those_of_the_ranks() -> None:
    text = (
        "def fit(model, *rest, **more):\n    optimizer = make(model, rest, more)\n"
        "    def step():\n        optimizer.step(scaler)\n    return step\n\nfit(net)\n"
    )
    assert Source(text).shared_names == {"make": 2, "scaler": 4, "fit": 7, "net": 7}


@pytest.mark.parametrize(
    ("text", "model", "is_found"),
    [
        ("fit(model)", {"without": 2, "unused": ["a", "b"], "is_refused": True}, True),
        ("fit(model)", {"without": 2, "unused": ["a", "b"]}, False),
        ("fit(other)", {"without": 2, "unused": ["a", "b"], "is_refused": True}, False),
    ],
)
def test_in_the_cell_that_fails_only_ddps_own_word_counts(
    text: str, model: dict[str, Any], *, is_found: bool
) -> None:
    things = {"model": Model(ranks=2, with_gradient=2, **model)}
    ranks = {rank: RankFacts(things=things, ddp=[2]) for rank in range(2)}
    found = look_at_ranks(Facts(ranks=ranks, world_size=2, source=Source(text), is_ok=False))
    assert [each.rule for each in found] == (["ND216"] if is_found else [])
    assert all(
        each.text == "2 parameters of model got no gradient from the loss: a, b." for each in found
    )


SHUFFLES = (
    "import random\nimport numpy as np\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "from torch.utils.data import DistributedSampler\nmodel = DDP(net)\nfiles = glob('*.pt')\n"
)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("random.shuffle(files)\ndata = Files(files)\ns = DistributedSampler(data)\n", True),
        ("np.random.shuffle(files)\ns = DistributedSampler(Files(files))\n", True),
        ("random.shuffle(files)\ntrain = files[9:]\ns = DistributedSampler(train)\n", True),
        ("random.seed(0)\nrandom.shuffle(files)\ns = DistributedSampler(files)\n", False),
        ("random.Random(0).shuffle(files)\ns = DistributedSampler(files)\n", False),
        ("random.shuffle(files)\ns = DistributedSampler(data)\n", False),
        ("s = DistributedSampler(files)\nrandom.shuffle(files)\n", False),
        ("random.shuffle(files)\nmine = files[rank::size]\n", False),
    ],
)
def test_a_list_that_is_shuffled_without_a_seed_is_found_before_a_sampler(
    text: str, *, is_found: bool
) -> None:
    assert rules_in(SHUFFLES + text, is_cell=False) == (["ND114"] if is_found else [])


TRAINS = "for x in train:\n    model(x).sum().backward()\n"


@pytest.mark.parametrize(
    ("loaders", "rule", "said"),
    [
        (
            [{"sampler": "stream", "data": "A 1"}] * 2,
            "ND201",
            "train gives every rank the same stream of samples, so all ranks train on the same "
            "data.",
        ),
        ([{"sampler": "stream", "data": "A 1"}, {"sampler": "stream", "data": "A 2"}], "", ""),
        ([{"sampler": "stream"}] * 2, "", ""),
        (
            [{"sampler": "dealt", "order": "1 2"}, {"sampler": "dealt", "order": "1 3"}],
            "ND205",
            "the dataset of train has a different order on each rank, for example because of "
            "random.shuffle without a seed.",
        ),
        ([{"sampler": "dealt", "order": "1 2"}] * 2, "", ""),
        ([{"sampler": "dealt", "order": "1 2"}, {"sampler": "dealt", "order": "4 3"}], "", ""),
    ],
)
def test_streams_and_orders_of_ranks_are_compared(
    loaders: list[dict[str, Any]], rule: str, said: str
) -> None:
    ranks = {
        rank: RankFacts(things={"train": Loader(replicas=2, place=rank, **each)}, ddp=[2])
        for rank, each in enumerate(loaders)
    }
    found = look_at_ranks(Facts(ranks=ranks, world_size=2, source=Source(TRAINS)))
    assert [(each.rule, each.text) for each in found] == ([(rule, said)] if rule else [])


@pytest.mark.parametrize("rule", STATIC, ids=lambda each: each.id)
def test_code_in_which_a_rule_finds_something_is_worth_to_be_read(rule: Rule[Source]) -> None:
    assert may_find(rule.bad.text) or rule.bad.kinds  # then ranks have said so


def test_a_count_that_says_whose_it_is_speaks_for_nobody_else() -> None:
    text = "right = 0\nfor x, y in test:\n    right += 1\nprint({}right)\n"
    known = {"test": "loader dealt"}
    assert rules_in(text.format(""), known) == ["ND133"]
    assert rules_in(text.format("rank, "), known) == []
