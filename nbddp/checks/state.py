"""Rules about the state that a rank is in: its batch norm, its cores, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nbddp.checks.facts import Facts, Loader, Model, Optimizer
from nbddp.checks.registry import Hit, rule
from nbddp.checks.training import backwards
from nbddp.formatting import format_few, plural


@rule("ND212")
def _too_many_threads(facts: Facts) -> Iterator[Hit]:
    hosts: dict[str, list[int]] = {}
    for rank, each in facts.ranks.items():
        hosts.setdefault(each.host, []).append(rank)
    for ranks in hosts.values():
        first = facts.ranks[ranks[0]]
        total = sum(facts.ranks[rank].threads for rank in ranks)
        if first.threads > 1 and len(ranks) > 1 and 0 < first.cores < total:
            yield Hit(
                facts.source.line_of("set_num_threads"),
                f"{len(ranks)} ranks with {first.threads} threads each want {total} cores, and "
                f"there are {first.cores}.",
            )
            return


@rule("ND213")
def _too_many_workers(facts: Facts) -> Iterator[Hit]:
    for name, its in facts.all_have(Loader):
        for host in {each.host for each in facts.ranks.values()}:
            here = [rank for rank, each in facts.ranks.items() if each.host == host]
            total, cores = sum(its[rank].workers for rank in here), facts.ranks[here[0]].cores
            if 0 < cores < total and len(here) > 1:
                yield Hit(
                    facts.line(name),
                    f"{name} has {total} processes ({len(here)} ranks with "
                    f"{its[here[0]].workers} workers each) on {cores} cores.",
                )
                break


@rule("ND214")
def _nested(facts: Facts) -> Iterator[Hit]:
    for name, its in facts.all_have(Model):
        if all(each.is_nested for each in its.values()):
            yield Hit(facts.line(name), f"{name} is a DDP model inside another DDP model.")


@rule("ND215")
def _of_another_model(facts: Facts) -> Iterator[Hit]:
    for name, its in facts.all_have(Optimizer):
        lost = its[min(its)].was_of
        steps = re.search(rf"\b{re.escape(name)}\.step\(", facts.source.text)
        if lost and all(each.was_of for each in its.values()) and (steps or facts.is_asked):
            yield Hit(
                facts.line(name),
                f"{name} updates a model that is gone: the parameters of {lost} are others.",
            )


@rule("ND216")
def _unused(facts: Facts) -> Iterator[Hit]:
    is_trained = facts.is_ok and bool(backwards(facts.source))
    for name, its in facts.all_have(Model):
        parts = [each for each in its.values() if each.ranks and not each.finds_unused]
        is_so = len(parts) == len(its) and all(each.with_gradient for each in parts)
        seen = [each for each in parts if each.without] if is_trained and is_so else []
        refused = [each for each in its.values() if each.is_refused]
        if not facts.line(name) or not (refused or len(seen) == len(its)):
            continue
        first = (refused or seen)[0]
        count, shown = first.without, format_few(first.unused, first.without)
        yield Hit(
            facts.line(name),
            f"{plural(count, 'parameter')} of {name} got no gradient from the loss"
            f"{': ' if shown else ''}{shown}.",
        )


@rule("ND217", is_fact=True)
def _effective_batch(facts: Facts) -> Iterator[Hit]:
    for name, its in facts.all_have(Loader):
        sizes = {each.batch_size for each in its.values()}
        is_dealt = all(each.sampler == "dealt" and each.shuffles for each in its.values())
        size = max(sizes)
        if facts.has_ddp and is_dealt and len(sizes) == 1 and size > 0 and facts.line(name):
            total = facts.world_size * size
            yield Hit(
                facts.line(name), f"{name}: effective batch {facts.world_size} x {size} = {total}."
            )
