"""Rules about the state that a rank is in: its batch norm, its cores, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nbddp.checks.between import TRAINS, example
from nbddp.checks.facts import Facts, Loader, Model, Optimizer
from nbddp.checks.rule import Found, Rule
from nbddp.checks.training import backwards

NOTEBOOK = "02_from_one_process_to_ddp.ipynb"
SHOWN = 4  # parameters by name
TINY = 8  # samples: with fewer, batch norm's statistics are mostly noise


def _tiny_batches(facts: Facts) -> Iterator[Found]:
    sizes = {
        name: max(each.batch_size for each in its.values()) for name, its in facts.all_have(Loader)
    }
    if not sizes or not backwards(facts.source):
        return
    used = [size for name, size in sizes.items() if facts.line(name)]
    if not used or not 0 < max(used) < TINY:
        return
    for name, its in facts.all_have(Model):
        first = its[min(its)]
        if first.ranks and first.has_norm and first.is_training and facts.line(name):
            yield Found(
                facts.line(name),
                f"{name}'s batch norm learns from {max(used)} sample"
                f"{'' if max(used) == 1 else 's'} at a time on each rank.",
            )


TINY_BATCHES = Rule(
    id="ND211",
    title="batch norm on tiny batches",
    why="Each rank normalises by its own few samples: noise, and another one on each rank.",
    fix="nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP (on GPUs), a larger batch, or "
    "GroupNorm.",
    notebook=NOTEBOOK,
    find=_tiny_batches,
    bad=example(
        TRAINS, *[{"train": Loader(batch_size=2), "model": Model(ranks=2, has_norm=True)}] * 2
    ),
    good=example(
        TRAINS, *[{"train": Loader(batch_size=32), "model": Model(ranks=2, has_norm=True)}] * 2
    ),
)


def _too_many_threads(facts: Facts) -> Iterator[Found]:
    hosts: dict[str, list[int]] = {}
    for rank, each in facts.ranks.items():
        hosts.setdefault(each.host, []).append(rank)
    for ranks in hosts.values():
        first = facts.ranks[ranks[0]]
        total = sum(facts.ranks[rank].threads for rank in ranks)
        if first.threads > 1 and len(ranks) > 1 and 0 < first.cores < total:
            yield Found(
                facts.source.line_of("set_num_threads"),
                f"{len(ranks)} ranks with {first.threads} threads each want {total} cores, and "
                f"there are {first.cores}.",
            )
            return


TOO_MANY_THREADS = Rule(
    id="ND212",
    title="more threads than cores",
    why="torch's threads then wait for each other's turn: all ranks are slower than with fewer.",
    fix="Leave `--threads` out: nbddp shares the cores out; torchrun wants OMP_NUM_THREADS.",
    notebook=NOTEBOOK,
    find=_too_many_threads,
    bad=example("", {}, {}, threads=8, cores=8),
    good=example("", {}, {}, threads=4, cores=8),
)


def _too_many_workers(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Loader):
        for host in {each.host for each in facts.ranks.values()}:
            here = [rank for rank, each in facts.ranks.items() if each.host == host]
            total, cores = sum(its[rank].workers for rank in here), facts.ranks[here[0]].cores
            if 0 < cores < total and len(here) > 1:
                yield Found(
                    facts.line(name),
                    f"{name} has {total} processes ({len(here)} ranks with "
                    f"{its[here[0]].workers} workers each) on {cores} cores.",
                )
                break


TOO_MANY_WORKERS = Rule(
    id="ND213",
    title="more loader workers than cores",
    why="num_workers counts for each rank: torch warns for one process only, and they take the "
    "cores from each other and from the ranks.",
    fix="Share them out: about `cores // ranks` for each, and often fewer are faster.",
    notebook=NOTEBOOK,
    find=_too_many_workers,
    bad=example("", *[{"train": Loader(workers=8)}] * 2),
    good=example("", *[{"train": Loader(workers=4)}] * 2),
)


def _nested(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Model):
        if all(each.is_nested for each in its.values()):
            yield Found(facts.line(name), f"{name} is a DDP model inside another DDP model.")


NESTED = Rule(
    id="ND214",
    title="DDP around DDP",
    why="Each of them averages the gradients: twice the traffic. A cell that says "
    "`model = DDP(model)` does it when it runs a second time.",
    fix="Give the wrapped model a name of its own, or make the model in the cell that wraps it.",
    notebook=NOTEBOOK,
    find=_nested,
    bad=example("", *[{"model": Model(ranks=2, is_nested=True)}] * 2),
    good=example("", *[{"model": Model(ranks=2)}] * 2),
)


def _of_another_model(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Optimizer):
        lost = its[min(its)].was_of
        steps = re.search(rf"\b{re.escape(name)}\.step\(", facts.source.text)
        if lost and all(each.was_of for each in its.values()) and (steps or facts.is_asked):
            yield Found(
                facts.line(name),
                f"{name} updates a model that is gone: the parameters of {lost} are others.",
            )


OF_ANOTHER_MODEL = Rule(
    id="ND215",
    title="an optimizer with the parameters of an old model",
    why="A cell that makes the model again leaves the optimizer with the old parameters: steps are "
    "made, and the model does not learn.",
    fix="Make the optimizer again after the model.",
    notebook=NOTEBOOK,
    find=_of_another_model,
    bad=example("adam.step()", *[{"adam": Optimizer(was_of="model")}] * 2),
    good=example("adam.step()", *[{"adam": Optimizer()}] * 2),
)


def _unused(facts: Facts) -> Iterator[Found]:
    is_trained = facts.is_ok and bool(backwards(facts.source))
    for name, its in facts.all_have(Model):
        parts = [each for each in its.values() if each.ranks and not each.finds_unused]
        is_so = len(parts) == len(its) and all(each.with_gradient for each in parts)
        seen = [each for each in parts if each.without] if is_trained and is_so else []
        refused = [each for each in its.values() if each.is_refused]
        if not facts.line(name) or not (refused or len(seen) == len(its)):
            continue
        first = (refused or seen)[0]
        count, shown = first.without, ", ".join(first.unused[:SHOWN])
        more = f" and {count - SHOWN} more" if count > SHOWN and shown else ""
        yield Found(
            facts.line(name),
            f"{count} parameter{'' if count == 1 else 's'} of {name} got no gradient from the loss"
            f"{': ' if shown else ''}{shown}{more}.",
        )


UNUSED = Rule(
    id="ND216",
    title="parameters that take no part",
    why="DDP waits for the gradient of every parameter: without them the last bucket is never "
    "averaged, and the next forward pass raises an error.",
    fix="Freeze them (`requires_grad_(False)` before DDP), use them in the loss, or pass "
    "`find_unused_parameters=True` to DDP.",
    notebook=NOTEBOOK,
    find=_unused,
    bad=example(
        "model(x).sum().backward()",
        *[{"model": Model(ranks=2, with_gradient=4, without=2, unused=["b"])}] * 2,
    ),
    good=example("model(x).sum().backward()", *[{"model": Model(ranks=2, with_gradient=6)}] * 2),
)


def _effective_batch(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Loader):
        sizes = {each.batch_size for each in its.values()}
        is_dealt = all(each.sampler == "dealt" and each.shuffles for each in its.values())
        size = max(sizes)
        if facts.has_ddp and is_dealt and len(sizes) == 1 and size > 0 and facts.line(name):
            total = facts.world_size * size
            yield Found(
                facts.line(name), f"{name}: effective batch {facts.world_size} x {size} = {total}."
            )


EFFECTIVE_BATCH = Rule(
    id="ND217",
    title="how large a batch the ranks make together",
    why="An update has the mean gradient of all of it; the learning rate was found for some batch.",
    fix="Compare with that batch: often the rate is scaled with it, and warmed up.",
    notebook=NOTEBOOK,
    find=_effective_batch,
    bad=example(TRAINS, *[{"train": Loader(sampler="dealt", shuffles=True, batch_size=32)}] * 2),
    good=example(TRAINS, *[{"train": Loader(sampler="dealt", batch_size=32)}] * 2),
    is_fact=True,
)

RULES: tuple[Rule[Facts], ...] = (
    TINY_BATCHES,
    TOO_MANY_THREADS,
    TOO_MANY_WORKERS,
    NESTED,
    OF_ANOTHER_MODEL,
    UNUSED,
    EFFECTIVE_BATCH,
)
