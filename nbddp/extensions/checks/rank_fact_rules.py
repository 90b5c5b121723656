"""Rules over the facts of ranks: values that must be equal or differ, and the state of a rank."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nbddp.extensions.checks.collective_rules import collective_name
from nbddp.extensions.checks.facts import GroupFacts, LoaderFacts, ModelFacts, OptimizerFacts
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.training_rules import backward_calls
from nbddp.formatting import format_few, format_ranks, plural, ranks_by_text

SAME = 1e-6  # relative tolerance: larger than rounding errors


def _trains_with(facts: GroupFacts, name: str) -> bool:
    """Return whether the cell has a loop over this loader with a ``backward()``."""
    loops = [each for call in backward_calls(facts.source) for each in facts.source.loops(call)]
    heads = [each.test if isinstance(each, ast.While) else each.iter for each in loops]
    return any(re.search(rf"\b{re.escape(name)}\b", ast.unparse(each)) for each in heads)


def _trains(facts: GroupFacts) -> bool:
    """Return whether all ranks have a DDP model in training mode."""
    return any(
        all(each.ranks and each.is_training for each in by_rank.values())
        for _, by_rank in facts.all_have(ModelFacts)
    )


def describe_by_value(by_rank: Mapping[int, Any]) -> str:
    """Format the values of ranks, grouped by value: ``rank 0 has 1, rank 1 has 2``."""
    by_value = ranks_by_text({rank: str(value) for rank, value in by_rank.items()})
    return ", ".join(
        f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in by_value.items()
    )


def _differ(by_rank: Mapping[int, Any]) -> bool:
    return len(set(map(str, by_rank.values()))) > 1


@rule("ND201")
def _same_samples(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(LoaderFacts) if facts.has_ddp else ():
        loaders = by_rank.values()
        samplers, data = {each.sampler for each in loaders}, {each.data for each in loaders}
        is_stream = samplers == {"stream"}
        is_whole = is_stream or samplers <= {"random", "in order"}
        if not is_whole or len(data) != 1 or min(data)[:1] in ("", "?"):
            continue
        if _trains_with(facts, name) or (all(each.epochs for each in loaders) and _trains(facts)):
            whole = f"all {by_rank[0].samples} samples"
            given = "the same stream of samples" if is_stream else whole
            yield name, f"{name} gives every rank {given}, so all ranks train on the same data."


def _distributed_loaders(facts: GroupFacts) -> Iterator[tuple[str, dict[int, LoaderFacts]]]:
    for name, by_rank in facts.all_have(LoaderFacts):
        if all(each.sampler == "dealt" for each in by_rank.values()):
            yield name, by_rank


@rule("ND202")
def _different_seeds(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in _distributed_loaders(facts):
        seeds = {rank: each.seed for rank, each in by_rank.items()}
        if _differ(seeds) and any(each.shuffles for each in by_rank.values()):
            yield name, f"the samplers of {name} have different seeds: {describe_by_value(seeds)}."


@rule("ND203")
def _overlapping_shares(facts: GroupFacts) -> Iterator[Hit]:
    if any(each.ddp_ranks != [facts.world_size] for each in facts.ranks.values()):
        return  # some ranks have no DDP model, or share it only with some ranks
    for name, by_rank in _distributed_loaders(facts):
        counts = {rank: each.num_replicas for rank, each in by_rank.items()}
        share_counts = Counter(each.sampler_rank for each in by_rank.values())
        if set(counts.values()) != {facts.world_size}:
            wrong = next(each for each in counts.values() if each != facts.world_size)
            split = f"splits the data among {plural(wrong, 'rank')}"
            train = f"{facts.world_size} ranks train with it"
            yield name, f"the sampler of {name} {split}, but {train}."
        elif max(share_counts.values()) > 1:
            ranks = [rank for rank, each in by_rank.items() if share_counts[each.sampler_rank] > 1]
            yield name, f"{format_ranks(ranks)} have the same share of {name}."


@rule("ND210")
def _repeated_epoch(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in _distributed_loaders(facts):
        epochs = by_rank[min(by_rank)].epochs
        repeated = [each for each in epochs if epochs.count(each) > 1]
        if repeated and all(each.shuffles for each in by_rank.values()):
            epoch, count = repeated[0], epochs.count(repeated[0])
            times = f"went through epoch {epoch} {count} times, in the same order"
            yield name, f"{name} {times}: set_epoch() was not called."


@rule("ND205")
def _different_data(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in _distributed_loaders(facts):
        samples = {rank: each.samples for rank, each in by_rank.items()}
        data = {rank: each.data for rank, each in by_rank.items()}
        if _differ(samples):
            problem = f"differs between ranks: {describe_by_value(samples)} samples"
        elif "" not in data.values() and _differ(data):
            problem = "differs between ranks, for example because of a random split without a seed"
        elif _is_in_other_order([each.order for each in by_rank.values()]):
            example = "for example because of random.shuffle without a seed"
            problem = f"has a different order on each rank, {example}"
        else:
            continue
        yield name, f"the dataset of {name} {problem}."


def _is_in_other_order(orders: list[str]) -> bool:
    """Return whether all ranks have the same items, but not in the same order."""
    checksums = [each.partition(" ") for each in orders]
    return "" not in orders and len({each[0] for each in checksums}) == 1 < len(set(orders))


@rule("ND206")
def _unequal_batches(facts: GroupFacts) -> Iterator[Hit]:
    if not facts.has_ddp or "join" in facts.source.text.lower():
        return
    for name, by_rank in facts.all_have(LoaderFacts):
        batches = {rank: each.batches for rank, each in by_rank.items()}
        if _differ(batches) and -1 not in batches.values() and _trains_with(facts, name):
            yield name, f"the ranks have unequal numbers of batches: {describe_by_value(batches)}."


@rule("ND207")
def _different_parameters(facts: GroupFacts) -> Iterator[Hit]:
    if re.search(r"no_sync|comm_hook|LocalSGD|PeriodicModelAverager", facts.source.text):
        return  # the parameters may differ on purpose
    by_hand = any(  # in a subgroup, the ranks may have different stages of a pipeline
        collective_name(facts.source, call) and re.search(r"\.grad\b", ast.unparse(call))
        for call in facts.source.calls_of("all_reduce")
    )
    for name, by_rank in facts.all_have(ModelFacts):
        is_shared = all(each.ranks == facts.world_size for each in by_rank.values())
        is_trained = is_shared or (by_hand and facts.line(name))
        shapes = {each.shapes for each in by_rank.values()}
        others = _ranks_unlike_first({rank: each.sample for rank, each in by_rank.items()})
        if facts.is_ok and is_trained and len(shapes) == 1 and others:
            first = f"those on rank {min(by_rank)}"
            yield name, f"the parameters of {name} on {format_ranks(others)} differ from {first}."


def _ranks_unlike_first(samples: Mapping[int, list[float]]) -> list[int]:
    """Return the ranks whose numbers differ by more than the rounding of different GPUs."""
    first = samples[min(samples)]
    if len({len(each) for each in samples.values()}) > 1:
        return []
    return [
        rank
        for rank, sample in samples.items()
        if any(
            abs(one - other) > SAME * max(abs(one), abs(other), 1e-3)
            for one, other in zip(first, sample, strict=True)
        )
    ]


@rule("ND208")
def _different_learning_rates(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(OptimizerFacts):
        rates = {rank: each.rates for rank, each in by_rank.items()}
        is_same_kind = len({(each.shapes, len(each.rates)) for each in by_rank.values()}) == 1
        if facts.is_ok and facts.has_ddp and is_same_kind and _differ(rates):
            shown = {
                rank: ", ".join(f"{each:g}" for each in rates_of_rank)
                for rank, rates_of_rank in rates.items()
            }
            yield name, f"{name} has different learning rates: {describe_by_value(shown)}."


@rule("ND209")
def _shared_gpu(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(ModelFacts):
        ranks_by_gpu: dict[tuple[str, str], list[int]] = {}
        for rank, model in by_rank.items():
            if model.device and model.ranks:
                ranks_by_gpu.setdefault((facts.ranks[rank].host, model.device), []).append(rank)
        for (host, device), ranks in ranks_by_gpu.items():
            on_host = [each for each in facts.ranks.values() if each.host == host]
            if len(ranks) > 1 and len(on_host) <= on_host[0].gpus:  # else they have to share
                yield name, f"{format_ranks(ranks)} have {name} on one GPU: {device}."


@rule("ND212")
def _too_many_threads(facts: GroupFacts) -> Iterator[Hit]:
    hosts = ranks_by_text({rank: each.host for rank, each in facts.ranks.items()})
    for ranks in hosts.values():
        first = facts.ranks[ranks[0]]
        total = sum(facts.ranks[rank].threads for rank in ranks)
        if first.threads > 1 and len(ranks) > 1 and 0 < first.cores < total:
            threads = f"{len(ranks)} ranks with {first.threads} threads each"
            line = facts.source.line_of("set_num_threads")
            yield line, f"{threads} need {total} cores, but there are {first.cores}."
            return


@rule("ND213")
def _too_many_workers(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(LoaderFacts):
        for host in {each.host for each in facts.ranks.values()}:
            here = [rank for rank, each in facts.ranks.items() if each.host == host]
            total, cores = sum(by_rank[rank].workers for rank in here), facts.ranks[here[0]].cores
            if 0 < cores < total and len(here) > 1:
                workers = f"{len(here)} ranks with {by_rank[here[0]].workers} workers each"
                yield name, f"{name} has {total} processes ({workers}) on {cores} cores."
                break


@rule("ND224")
def _same_random_numbers(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in _distributed_loaders(facts) if facts.has_ddp else ():
        draws = {each.draws for each in by_rank.values()}
        if len(draws) == 1 and "" not in draws and _trains_with(facts, name):
            yield name, f"the workers of {name} draw the same random numbers on every rank."


@rule("ND214")
def _nested_ddp(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(ModelFacts):
        if all(each.is_nested for each in by_rank.values()):
            yield name, f"{name} is a DDP model inside another DDP model."


@rule("ND215")
def _optimizer_of_replaced_model(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(OptimizerFacts):
        lost = by_rank[min(by_rank)].replaced_model
        steps = re.search(rf"\b{re.escape(name)}\.step\(", facts.source.text)
        is_lost = all(each.replaced_model for each in by_rank.values())
        if is_lost and (steps or facts.is_requested):
            yield name, f"{name} updates a model that is gone: {lost} has different parameters."


@rule("ND216")
def _unused_parameters(facts: GroupFacts) -> Iterator[Hit]:
    is_trained = facts.is_ok and bool(backward_calls(facts.source))
    for name, by_rank in facts.all_have(ModelFacts):
        models = list(by_rank.values())
        refused = [each for each in models if each.is_refused]
        are_unused = is_trained and all(
            model.ranks
            and not model.finds_unused
            and model.with_gradient
            and model.without_gradient
            for model in models
        )
        if not facts.line(name) or not (refused or are_unused):
            continue
        first = (refused or models)[0]
        parameters = plural(first.without_gradient, "parameter")
        shown = format_few(first.unused, first.without_gradient)
        names = f": {shown}" if shown else ""
        yield name, f"{parameters} of {name} got no gradient from the loss{names}."


@rule("ND217", is_fact=True)
def _effective_batch(facts: GroupFacts) -> Iterator[Hit]:
    for name, by_rank in facts.all_have(LoaderFacts):
        sizes = {each.batch_size for each in by_rank.values()}
        is_dealt = all(each.sampler == "dealt" and each.shuffles for each in by_rank.values())
        size = max(sizes)
        if facts.has_ddp and is_dealt and len(sizes) == 1 and size > 0 and facts.line(name):
            total = facts.world_size * size
            yield name, f"{name}: effective batch {facts.world_size} x {size} = {total}."


@rule("ND225", is_fact=True)
def _own_backend(facts: GroupFacts) -> Iterator[Hit]:
    for name in sorted({each.own_backend for each in facts.ranks.values()} - {""}):
        yield 0, f"the ranks use the backend {name}, which torchrun does not have."
