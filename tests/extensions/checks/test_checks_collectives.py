"""Collectives that only some ranks call are found in every form."""

import ast

import pytest
from checked_code import COMMON, ON_FIRST, assert_found, assert_no_findings, under
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.checks.checker import check_source
from nbddp.extensions.checks.conditions import depends_on_rank
from nbddp.extensions.checks.facts import RankFacts, kinds_by_name
from nbddp.extensions.checks.source import CellSource

REDUCES = "dist.all_reduce(t)\n"
IN_PART = "if i + rank < 2"

# ---- conditions on the rank


@pytest.mark.parametrize("does", [True, False])
def test_a_rank_condition_is_distinguished_from_other_conditions(does: bool) -> None:
    on_rank = (
        *("rank == 0", "not rank", "dist.get_rank() == 0", "args.local_rank in (-1, 0)"),
        *("is_distributed and rank == 0", "is_main_process()", "int(os.environ['RANK']) == 0"),
        *("rank == 0 and world_size == 2", "self.ddp_rank == 0"),
    )
    on_else = (
        *("rank != -1", "args.local_rank >= 0", "rank == 0 and world_size == 1"),
        *("args.world_size <= 1 and is_main", "rank == 0 and dist.get_world_size() < 2"),
        *("rank is not None", "rank in chosen", "step % 10 == 0", "frank == 0"),
        *("self.negative_all_rank", "args.lora_rank > 0", "per_rank"),
    )
    for text in on_rank if does else on_else:
        assert depends_on_rank(ast.parse(text, mode="eval").body) is does, text


def test_collectives_that_only_some_ranks_need_to_call_are_accepted() -> None:
    assert_no_findings(
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
    )


def test_every_form_of_a_rank_condition_is_found(snapshot: SnapshotAssertion) -> None:
    texts = [
        "rank == 0 and dist.barrier()",
        "ready and rank == 0 and dist.barrier()",
        "rank or dist.barrier()",
        "x = dist.all_reduce(y) if rank == 0 else None",
        "x = None if rank == 0 else dist.all_reduce(y)",
        "while rank == 0:\n  dist.barrier()",
        "f = lambda: rank == 0 and dist.barrier()",
    ]
    assert_found("ND101", *texts)
    assert {text: check_source(CellSource(text))[0].headline for text in texts} == snapshot


def test_code_that_mentions_the_rank_but_excludes_no_rank_is_accepted() -> None:
    assert_no_findings(
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
        "while rank == 0:\n  torch.save(x, 'a')\n  break\ndist.barrier()",
        kinds={"model": "ddp"},
    )


def test_a_collective_of_a_subgroup_is_recognized_by_its_arguments() -> None:
    of_all = (
        *("all_reduce(t)", "all_reduce(t, dist.ReduceOp.MAX)", "all_reduce(t, group=None)"),
        *("all_reduce(t, group=dist.group.WORLD)", "new_group([0, 1])"),
    )
    of_some = (
        *("all_reduce(t, dist.ReduceOp.MAX, pair)", "broadcast(t, 0, pair)", "barrier(pair)"),
        *("reduce(t, 0, dist.ReduceOp.SUM, pair)", "all_gather(ts, t, pair)"),
        *("all_reduce(t, **options)", "all_reduce(*args)"),
        "new_group([0, 1], use_local_synchronization=True)",
    )
    assert_found("ND101", *(under("if rank < 2", f"dist.{call}") for call in of_all))
    assert_no_findings(*(under("if rank < 2", f"dist.{call}") for call in of_some))


def test_a_collective_is_found_in_a_called_function_and_under_an_alias() -> None:
    text = (
        "def mean(x):\n    dist.all_reduce(x)\n    return x\n\nif rank == 0:\n    print(mean(x))\n"
    )
    [found] = check_source(CellSource(text, first_line=2))
    assert (found.rule, found.line) == ("ND101", 7)
    assert "mean()" in found.text
    assert "(line 6)" in found.text
    text = "if rank == 1:\n    add(x)\n"
    assert_found("ND101", "from torch.distributed import all_reduce as add\n" + text, is_cell=False)
    assert_no_findings(text, is_cell=False)


# ---- values of names

WAITS = "    dist.barrier()\n"
SPAWNED = "def work(i, n):\n  if i == 0:\n    {}\nmp.spawn(work, nprocs=2, args=(2,))\n"
HELD_RANKS = {  # code that gives the rank to another name, and a condition on that name
    "r = dist.get_rank()": "if r == 0",
    "pid: int = dist.get_rank()": "if not pid",
    "me = rank\nyou = me": "if you == 1",
    "r, w = dist.get_rank(), dist.get_world_size()": "if r == w - 1",
    "r = 0\nif wide: r = int(os.environ['RANK'])": "while r",
    "r = dist.get_rank() if dist.is_initialized() else 0": "if r < 1",
    "self.me = int(os.environ.get('LOCAL_RANK', 0))": "if self.me == 0 and step",
    "first = dist.get_rank() == 0": "if first",
    "first = not rank": "if ready and first",
    "stage = rank // 2": "if stage == 0",
    "(r := dist.get_rank())": "if r",
}


@pytest.mark.parametrize("head", [None, COMMON + "import os\n"])
def test_the_rank_is_found_under_another_name(head: str | None) -> None:
    for given, condition in HELD_RANKS.items():
        text = f"{head or ''}{given}\n"
        assert_found("ND101", text + under(condition, "dist.barrier()\n"), is_cell=not head)
        save = under(condition, "torch.save(t, 'a.pt')\n")
        assert_no_findings(text + save + REDUCES, is_cell=not head)
    assert_found("ND101", SPAWNED.format("dist.barrier()"), head=head or "")
    assert_no_findings(SPAWNED.format("torch.save(t, 'a.pt')") + REDUCES, head=head or "")
    train = "def fit(me):\n" + under("    if me", "  return\n") + WAITS
    assert_found("ND103", f"{train}fit(dist.get_rank())\n", head=head or "")
    assert_no_findings(f"{train}fit(3)\n", f"{train}fit(rank)\nfit(size)\n", head=head or "")
    part = "m.full_tensor()"
    assert_found("ND101", f"me = dist.get_rank()\nif me == 0: {part}", head=head or "")
    assert_no_findings(f"me = dist.get_rank(tp)\nif me == 0: {part}", head=head or "")


def test_a_name_that_may_hold_something_else_than_the_rank_is_accepted() -> None:
    assert_no_findings(
        under("for rank in range(4)", "if rank == 2: dist.barrier()\n"),
        "rank = torch.linalg.matrix_rank(t)\nif rank > 3: dist.barrier()\n",
        "r = dist.get_rank()\nfor r in range(3): pass\nif r == 0: dist.barrier()\n",
        "r = dist.get_rank()\nr = load()\nif r == 0: dist.barrier()\n",
        "n = count(rank)\nif n == 0: dist.barrier()\n",
        "r = dist.get_rank()\ndef f(r):\n  if r == 0: dist.barrier()\n",
        "r, w = dist.get_rank(), dist.get_world_size()\ntorch.save(t, f'{r}.pt')\n",
        "wide = rank != -1\nif wide: dist.barrier()\n",
    )


def test_a_name_of_another_cell_that_holds_the_rank_is_followed() -> None:
    ranks = {rank: RankFacts(kinds={"r": "rank", "names": "set"}) for rank in (0, 1)}
    stops, saves = under("if r == 0", "dist.barrier()\n"), under("if r", "torch.save(t, 'a')\n")
    assert_found("ND101", stops, kinds=kinds_by_name(ranks))
    assert_found("ND108", under("for name in names", REDUCES), kinds=kinds_by_name(ranks))
    assert_no_findings(saves, kinds=kinds_by_name(ranks))
    assert_no_findings(f"r = load()\n{stops}", kinds=kinds_by_name(ranks))
    for others in ({}, {1: RankFacts()}):
        assert_no_findings(stops, kinds=kinds_by_name({0: ranks[0], **others}))


def test_a_collective_in_a_loop_over_a_set_is_found() -> None:
    loops = {
        "": (
            *("{'a', 'b'}", "set(names)", "list(set(names))", "frozenset(model.parameters())"),
            *("one.keys() & two.keys()", "set(a).union(b)"),
        ),
        "names = set(x)\n": ("names", "enumerate(list(names))", "names - done", "names.copy()"),
        "names = {k for k in x}\nnames -= {'a'}\n": ("names", "tuple(names | {'b'})"),
        "names, n = set(old) - set(new), 3\n": ("names",),
    }
    for given, iterables in loops.items():
        for iterable in iterables:
            assert_found("ND108", f"{given}for name in {iterable}:\n{WAITS}")
    assert_found("ND108", "[dist.all_gather(x[k], y) for k in set(x)]")
    assert_found("ND108", f"def mean(x):\n{WAITS}for x in set(xs):\n    mean(x)\n")


def test_loops_with_an_order_that_all_ranks_share_are_accepted() -> None:
    orders = (
        *("sorted(set(x))", "dict.fromkeys(x)", "x.keys()", "[*x]", "{1, 2}", "set(range(4))"),
        *("set(ranks)", "x.difference(y)", "a - b"),
    )
    assert_no_findings(
        *(f"for name in {each}:\n{WAITS}" for each in orders),
        f"for src in set(x):\n{WAITS}",
        f"names = set(x)\nnames = sorted(names)\nfor n in names:\n{WAITS}",
        f"for name in set(x):\n    print(name)\n{REDUCES}",
        "for name in gather(dist.all_reduce(x)): pass",
        "for name in set(dist.all_gather(x, y)): pass",
    )


# ---- models and tensors in parts

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
def test_calls_that_gather_shards_count_as_collectives(call: str, shown: str) -> None:
    head = COMMON + SHARDED_MODEL
    for condition in ("rank == 0", "dist.get_rank() == 0", "is_main_process()"):
        [found] = check_source(CellSource(head + under(f"if {condition}", call), is_cell=False))
        assert found.rule == "ND101"
        assert found.text.startswith(shown)
        assert condition in found.text
    assert_found("ND103", under("def save()", under("if rank != 0", "return\n"), call), head=head)
    assert_no_findings(call, head=head)


def test_trainer_of_all_ranks_that_only_one_rank_calls_is_found() -> None:
    for library, method in (("transformers", "evaluate"), ("lightning", "fit")):
        given = {"aliases": {"trainer": f"{library}.Trainer"}, "is_cell": True}
        call = f"print(trainer.{method}(data))"
        source = CellSource(under(ON_FIRST, call), **given)
        [found] = check_source(source)
        assert (found.rule, found.line) == ("ND101", 2)
        assert found.text.startswith(f"trainer.{method}() is under `if rank == 0`")
        assert_found("ND103", under("def f()", under("if rank", "return\n"), call), **given)
        assert_no_findings(call, under(ON_FIRST, "trainer.save_model('out')"), **given)
        assert_no_findings(under(ON_FIRST, call))  # of another class


def test_calls_on_shards_that_a_subset_of_ranks_may_make_are_accepted() -> None:
    print_whole = "print(model.weight.full_tensor())"
    assert_no_findings(
        # the ranks of a mesh's dimension, or of a group, are among themselves
        under("if dp_rank == 0", print_whole),
        under("if mesh.get_local_rank('tp') == 0", print_whole),
        under("if pair.rank() == 0", print_whole),
        under("if dist.get_rank(pair) == 0", print_whole),
        under("if rank < 2", "part = distribute_tensor(t, half, places)"),
        # all ranks come to it where the model is cut up
        under("if use_fsdp or rank == 0", "state = get_model_state_dict(model)"),
        under(ON_FIRST, "dcp.save(state, checkpoint_id='a', no_dist=True)"),
        under("if rank < 2", "dcp.save(state, checkpoint_id='a', process_group=pair)"),
        under("if rank < 2", "dist.new_subgroups(2, pair)"),
        under(ON_FIRST, "torch.save(model.state_dict(), 'a.pt')"),
        under(ON_FIRST, "state = plain.state_dict()"),
        under(ON_FIRST, "torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)"),
        head=COMMON + SHARDED_MODEL,
    )


def test_reading_the_state_of_a_ddp_model_does_not_count_as_a_collective() -> None:
    text = "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
    text += under(ON_FIRST, "state = get_model_state_dict(model)\n")
    assert_no_findings(text)
    assert_no_findings(text, kinds={"model": "ddp"})
    assert_found("ND101", text, kinds={"model": "fsdp"})
    assert_found("ND101", "from torch.distributed.fsdp import fully_shard\n" + text)


# ---- collectives that other ranks make elsewhere


def test_a_function_whose_collective_depends_on_an_argument_may_be_called_on_one_rank() -> None:
    call = under(ON_FIRST, "mean(x)\n")
    for meets in (REDUCES, under("if dist.is_initialized()", REDUCES)):
        assert_found("ND101", under("def mean(x)", meets) + call)
    assert_no_findings(
        under("def mean(x, together=True)", under("if together", REDUCES)) + call,
        under("def mean(x, args)", under("if args.is_distributed", REDUCES)) + call,
        under("def mean(x, alone=False)", under("if alone", "return x\n"), REDUCES) + call,
        under("def mean(x, mesh=None)", REDUCES) + call,
    )


def test_a_collective_that_the_other_ranks_call_below_is_accepted() -> None:
    loads, fails = under("try", "load()\n"), "except OSError"
    assert_no_findings(
        # the ranks that do not come to the first one come to the second
        under("for i in range(3)", under(IN_PART, REDUCES, "continue\n"), REDUCES),
        under("for i in range(3)", under(IN_PART, REDUCES, "break\n"), REDUCES),
        under("def f()", under(ON_FIRST, REDUCES, "return\n"), REDUCES),
        under("def f()", under(ON_FIRST, "return dist.all_reduce(t)\n"), REDUCES),
        under("def f()", under("if rank", "x = 1\n") + under("else", REDUCES, "return\n"), REDUCES),
        under(ON_FIRST, REDUCES, "raise ValueError\n") + REDUCES,
        under(
            "for i in range(3)",
            under(IN_PART, under("if not state", REDUCES, "continue\n"), "x = 1\n"),
            REDUCES,
        ),
        # a rank with an error meets the others, and goes no further
        loads + under(fails, REDUCES, "raise\n") + REDUCES,
        under("def f()", loads + under(fails, REDUCES, "return\n") + REDUCES),
        loads + under(fails, REDUCES) + under("else", REDUCES),
    )
    assert_found("ND104", loads + under(fails, REDUCES) + REDUCES)


def test_an_extra_collective_on_some_ranks_is_found() -> None:
    assert_found(
        "ND101",
        under("for i in range(3)", under(IN_PART, REDUCES), REDUCES),
        under("for i in range(3)", under("if rank", REDUCES, "continue\n")) + REDUCES,
        under("def f()", REDUCES, under(ON_FIRST, REDUCES, "return\n")),
        under("def f()", under("if rank", REDUCES, "return\n")) + REDUCES,
        under(ON_FIRST, REDUCES, "break\n") + REDUCES,  # no loop to break
    )


def leaves(condition: str, *below: str) -> str:
    """A function that some ranks leave early, and the code below it."""
    return under("def f()", under(f"if {condition}", "return\n"), *below)


SHARDED = under("if sharded", REDUCES)


def test_ranks_that_leave_where_no_collective_follows_are_accepted() -> None:
    returns = under("if rank", "return\n")
    assert_no_findings(
        leaves("not sharded and rank != 0", SHARDED),
        leaves("not (sharded or rank == 0)", SHARDED),
        leaves("mode == 'whole' and rank", under("if mode != 'whole'", REDUCES)),
        leaves("mode == 'whole' and rank", under("if mode == 'parts'", REDUCES)),
        under("def f()", under("if not sharded", returns), SHARDED),
        under("def f()", under("if not sharded", returns, "return\n"), REDUCES),
        under("for x in a", under("if whole and rank", "continue\n"), SHARDED),
        under(
            "def f()", under("match mode", under("case 'whole'", returns), under("case _", REDUCES))
        ),
    )


def test_ranks_that_leave_before_a_collective_are_found() -> None:
    assert_found(
        "ND103",
        leaves("not sharded and rank != 0", REDUCES),
        leaves("rank != 0", SHARDED),
        leaves("sharded and rank != 0", SHARDED),
        leaves("not sharded and rank != 0", SHARDED, REDUCES),
        under("def f()", under("if sharded", under("if rank", "return\n"), REDUCES)),
    )
