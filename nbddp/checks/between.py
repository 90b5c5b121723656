"""Rules about what ranks must have in common, or must not: data, models, devices, cores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nbddp.checks.facts import Facts, Loader, Model, Optimizer, RankFacts
from nbddp.checks.rule import Found, Rule
from nbddp.checks.source import Source
from nbddp.checks.training import backwards
from nbddp.errors import say_ranks

DATA = "02_from_one_process_to_ddp.ipynb"
MODEL = "02_from_one_process_to_ddp.ipynb"
SAME = 1e-6  # of a number: more than rounding


def example(text: str = "", *things: dict[str, Any], threads: int = 1, cores: int = 8) -> Facts:
    """Ranks that have these things, one dict for each."""
    ranks = {
        rank: RankFacts(things=each, ddp=[len(things)], host="here", cores=cores, threads=threads)
        for rank, each in enumerate(things)
    }
    return Facts(ranks=ranks, world_size=len(things), source=Source(text))


def _trains_with(facts: Facts, name: str) -> bool:
    """Whether the cell has a loop over this loader in which something goes backward."""
    loops = [each for call in backwards(facts.source) for each in facts.source.loops(call)]
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(word.search(facts.source.head(each)) for each in loops)


def _parted(values: Mapping[int, Any]) -> str:
    """Who has what, of few words: ``rank 0 has 1, rank 1 has 2``."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    return ", ".join(
        f"{say_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in by_value.items()
    )


def _differ(values: Mapping[int, Any]) -> bool:
    return len(set(map(str, values.values()))) > 1


def _same_samples(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Loader):
        known = {each.data for each in its.values()}
        is_stream = all(each.sampler == "stream" for each in its.values())
        is_whole = all(each.sampler in ("random", "in order") for each in its.values()) or is_stream
        if not facts.has_ddp or not is_whole or len(known) != 1 or min(known)[:1] in ("", "?"):
            continue
        is_told = facts.source.maker(name) is not None and its[0].sampler == "random"
        if not is_told and _trains_with(facts, name):
            given = "the same stream of samples" if is_stream else f"all {its[0].samples} samples"
            yield Found(
                facts.line(name),
                f"{name} gives every rank {given}, so all ranks train on the same data.",
            )


TRAINS: str = "for x, y in train:\n    model(x).sum().backward()\n"
SAME_SAMPLES = Rule(
    id="ND201",
    title="ranks that train on the same samples",
    why="Each rank goes through all of the data: N ranks do N times the work of one.",
    fix="Give the loader a DistributedSampler, or use `nbddp.loader`; let an IterableDataset yield "
    "only this rank's samples, with `itertools.islice(samples, rank, None, world_size)`.",
    notebook=DATA,
    find=_same_samples,
    bad=example(TRAINS, *[{"train": Loader(sampler="random", data="a", samples=64)}] * 2),
    good=example(TRAINS, *[{"train": Loader(sampler="dealt", data="a", replicas=2)}] * 2),
)


def _dealt(facts: Facts) -> Iterator[tuple[str, dict[int, Loader]]]:
    for name, its in facts.all_have(Loader):
        if all(each.sampler == "dealt" for each in its.values()):
            yield name, its


def _other_seeds(facts: Facts) -> Iterator[Found]:
    for name, its in _dealt(facts):
        seeds = {rank: each.seed for rank, each in its.items()}
        if _differ(seeds) and any(each.shuffles for each in its.values()):
            yield Found(
                facts.line(name),
                f"the samplers of {name} have other seeds: {_parted(seeds)}.",
            )


OTHER_SEEDS = Rule(
    id="ND202",
    title="samplers with another seed on each rank",
    why="All ranks must shuffle in the same order, because each takes every N-th sample of it.",
    fix="Give all ranks the same seed.",
    notebook=DATA,
    find=_other_seeds,
    bad=example("", *[{"a": Loader(sampler="dealt", seed=n, shuffles=True)} for n in (1, 2)]),
    good=example("", *[{"a": Loader(sampler="dealt", seed=1, shuffles=True)} for n in (1, 2)]),
)


def _wrong_shares(facts: Facts) -> Iterator[Found]:
    if any(each.ddp != [facts.world_size] for each in facts.ranks.values()):
        return  # some have no such model, or share it with a part of the ranks
    for name, its in _dealt(facts):
        counts = {rank: each.replicas for rank, each in its.items()}
        places = Counter(each.place for each in its.values())
        if set(counts.values()) != {facts.world_size}:
            wrong = next(each for each in counts.values() if each != facts.world_size)
            yield Found(
                facts.line(name),
                f"the sampler of {name} splits the data among {wrong} rank"
                f"{'' if wrong == 1 else 's'}, but {facts.world_size} ranks train with it.",
            )
        elif max(places.values()) > 1:
            twice = [rank for rank, each in its.items() if places[each.place] > 1]
            yield Found(facts.line(name), f"{say_ranks(twice)} have the same share of {name}.")


WRONG_SHARES = Rule(
    id="ND203",
    title="shares that overlap",
    why="A sampler that was made for another number of ranks, or for another rank, gives some "
    "samples to several of them, and perhaps others to none.",
    fix="Leave num_replicas and rank out: the sampler asks the process group.",
    notebook=DATA,
    find=_wrong_shares,
    bad=example("", *[{"a": Loader(sampler="dealt", replicas=2, place=0)} for n in (0, 1)]),
    good=example("", *[{"a": Loader(sampler="dealt", replicas=2, place=n)} for n in (0, 1)]),
)


def _other_epochs(facts: Facts) -> Iterator[Found]:
    for name, its in _dealt(facts):
        epochs = {rank: each.epoch for rank, each in its.items()}
        if facts.is_ok and _differ(epochs) and any(each.shuffles for each in its.values()):
            yield Found(
                facts.line(name), f"the samplers of {name} are in other epochs: {_parted(epochs)}."
            )


OTHER_EPOCHS = Rule(
    id="ND204",
    title="samplers that were told different epochs",
    why="The order depends on the epoch: in different ones the ranks' shares overlap.",
    fix="Call `set_epoch(epoch)` on all ranks, with the same number.",
    notebook=DATA,
    find=_other_epochs,
    bad=example("", *[{"a": Loader(sampler="dealt", epoch=n, shuffles=True)} for n in (0, 1)]),
    good=example("", *[{"a": Loader(sampler="dealt", epoch=3, shuffles=True)} for n in (0, 1)]),
)


def _other_data(facts: Facts) -> Iterator[Found]:
    for name, its in _dealt(facts):
        samples = {rank: each.samples for rank, each in its.items()}
        data = {rank: each.data for rank, each in its.items()}
        if _differ(samples):
            yield Found(
                facts.line(name),
                f"the dataset of {name} differs between ranks: {_parted(samples)} samples.",
            )
        elif "" not in data.values() and _differ(data):
            yield Found(
                facts.line(name),
                f"the dataset of {name} differs between ranks, for example because of a random "
                "split without a seed.",
            )
        elif _is_in_other_order([each.order for each in its.values()]):
            yield Found(
                facts.line(name),
                f"the dataset of {name} has a different order on each rank, for example because of "
                "random.shuffle without a seed.",
            )


def _is_in_other_order(orders: list[str]) -> bool:
    """Return whether all ranks have the same items, but not in the same order."""
    parts = [each.partition(" ") for each in orders]
    return "" not in orders and len({each[0] for each in parts}) == 1 < len(set(orders))


OTHER_DATA = Rule(
    id="ND205",
    title="a sampler over data that differs between ranks",
    why="Each rank takes its share of its own dataset: some samples are never used, and some are "
    "trained on although another rank keeps them for its test.",
    fix="Make the dataset the same on all ranks: give a random split a generator with a fixed "
    "seed; sort a list, or shuffle it with `random.Random(0).shuffle(files)`.",
    notebook=DATA,
    find=_other_data,
    bad=example("", *[{"a": Loader(sampler="dealt", data=n, samples=9)} for n in "ab"]),
    good=example("", *[{"a": Loader(sampler="dealt", data="a", samples=9)} for n in "ab"]),
)


def _uneven(facts: Facts) -> Iterator[Found]:
    if not facts.has_ddp or "join" in facts.source.text.lower():
        return
    for name, its in facts.all_have(Loader):
        batches = {rank: each.batches for rank, each in its.items()}
        if _differ(batches) and -1 not in batches.values() and _trains_with(facts, name):
            yield Found(
                facts.line(name), f"the ranks have unequal numbers of batches: {_parted(batches)}."
            )


UNEVEN = Rule(
    id="ND206",
    title="ranks with unequal numbers of batches",
    why="Every backward() of DDP is a meeting of all ranks: the one with more batches waits for "
    "those that are through.",
    fix="Deal out equal shares (DistributedSampler does), or train under "
    "`with torch.distributed.algorithms.join.Join([model]):`.",
    notebook="06_hangs_and_stragglers.ipynb",
    find=_uneven,
    bad=example(TRAINS, *[{"train": Loader(batches=n)} for n in (4, 5)]),
    good=example(TRAINS, *[{"train": Loader(batches=n)} for n in (4, 4)]),
)


def _drifted(facts: Facts) -> Iterator[Found]:
    if re.search(r"no_sync|comm_hook|LocalSGD|PeriodicModelAverager", facts.source.text):
        return  # they may differ on purpose
    by_hand = re.search(r"all_reduce\([\w.]*\.grad\b", facts.source.text)
    for name, its in facts.all_have(Model):
        is_shared = all(each.ranks == facts.world_size for each in its.values())
        is_trained = is_shared or (by_hand and facts.line(name))
        shapes = {each.shapes for each in its.values()}
        others = _unlike_the_first({rank: each.sample for rank, each in its.items()})
        if facts.is_ok and is_trained and len(shapes) == 1 and others:
            yield Found(
                facts.line(name),
                f"{name} has other parameters on {say_ranks(others)} than on rank {min(its)}.",
            )


def _unlike_the_first(samples: Mapping[int, list[float]]) -> list[int]:
    """The ranks whose numbers are others than rounding makes them, on GPUs of two kinds."""
    first = samples[min(samples)]
    if len({len(each) for each in samples.values()}) > 1:
        return []
    return [
        rank
        for rank, each in samples.items()
        if any(
            abs(one - other) > SAME * max(abs(one), abs(other), 1e-3)
            for one, other in zip(first, each, strict=True)
        )
    ]


DRIFTED = Rule(
    id="ND207",
    title="models that have drifted apart",
    why="Ranks average gradients, not parameters: models that differ stay different, and what one "
    "rank saves is not what the others have trained.",
    fix="Change parameters on all ranks alike: load on all, step on all, train through the DDP "
    "model. Wrapping the model in DDP again copies rank 0's parameters to all ranks.",
    notebook=MODEL,
    find=_drifted,
    bad=example("", *[{"model": Model(ranks=2, sample=[n], shapes="s")} for n in (0.5, 0.6)]),
    good=example("", *[{"model": Model(ranks=2, sample=[0.5], shapes="s")}] * 2),
)


def _other_rates(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Optimizer):
        rates = {rank: each.rates for rank, each in its.items()}
        is_one = len({(each.shapes, len(each.rates)) for each in its.values()}) == 1
        if facts.is_ok and facts.has_ddp and is_one and _differ(rates):
            shown = {rank: ", ".join(f"{each:g}" for each in its) for rank, its in rates.items()}
            yield Found(facts.line(name), f"{name} has other learning rates: {_parted(shown)}.")


OTHER_RATES = Rule(
    id="ND208",
    title="learning rates that differ between ranks",
    why="Equal gradients and unequal steps: the models drift apart.",
    fix="Set it from numbers that all ranks have; a scheduler that looks at a metric needs the "
    "metric of all ranks (`nbddp.all_reduce(loss, 'mean')`).",
    notebook=MODEL,
    find=_other_rates,
    bad=example("", *[{"sgd": Optimizer(rates=[n])} for n in (0.1, 0.2)]),
    good=example("", *[{"sgd": Optimizer(rates=[0.1])} for n in (0.1, 0.2)]),
)


def _one_gpu(facts: Facts) -> Iterator[Found]:
    for name, its in facts.all_have(Model):
        where: dict[tuple[str, str], list[int]] = {}
        for rank, each in its.items():
            if each.device and each.ranks:
                where.setdefault((facts.ranks[rank].host, each.device), []).append(rank)
        for (_host, device), ranks in where.items():
            if len(ranks) > 1:
                yield Found(
                    facts.line(name), f"{say_ranks(ranks)} have {name} on one GPU: {device}."
                )


ONE_GPU = Rule(
    id="ND209",
    title="two ranks on one GPU",
    why="They share its memory and its time, and NCCL refuses them.",
    fix="Use the cell's `device`; `torch.cuda.set_device(local_rank)` in a script.",
    notebook=MODEL,
    find=_one_gpu,
    bad=example("", *[{"m": Model(ranks=2, device="GPU-1")} for n in "ab"]),
    good=example("", *[{"m": Model(ranks=2, device=f"GPU-{n}")} for n in "ab"]),
)

RULES: tuple[Rule[Facts], ...] = (
    SAME_SAMPLES,
    OTHER_SEEDS,
    WRONG_SHARES,
    OTHER_EPOCHS,
    OTHER_DATA,
    UNEVEN,
    DRIFTED,
    OTHER_RATES,
    ONE_GPU,
)
