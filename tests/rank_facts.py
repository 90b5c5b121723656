"""What ranks report, with a mistake and without it, for each rule that looks at that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbddp.checks.facts import Facts, Loader, Model, Optimizer, RankFacts
from nbddp.checks.source import Source

TRAINS = "for x, y in train:\n    model(x).sum().backward()\n"


def ranks_with(
    *things: dict[str, Any], text: str = "", threads: int = 1, cores: int = 8, **options: Any
) -> Facts:
    """Ranks that have these things, one dict for each."""
    ranks = {
        rank: RankFacts(things=each, ddp=[len(things)], host="here", cores=cores, threads=threads)
        for rank, each in enumerate(things)
    }
    return Facts(ranks=ranks, world_size=len(things), source=Source(text), **options)


def of_each(name: str, kind: type[Any], each: Iterable[dict[str, Any]], text: str = "") -> Facts:
    """Ranks that have such a thing under one name, with these facts."""
    return ranks_with(*[{name: kind(**facts)} for facts in each], text=text)


def divided(**facts: Any) -> dict[str, Any]:
    """A loader with a DistributedSampler."""
    return {"sampler": "dealt", **facts}


STEP = "model(x).sum().backward()"
EXAMPLES: dict[str, tuple[Facts, Facts]] = {
    "ND201": (
        of_each("train", Loader, [{"sampler": "random", "data": "a", "samples": 64}] * 2, TRAINS),
        of_each("train", Loader, [divided(data="a", replicas=2)] * 2, TRAINS),
    ),
    "ND202": (
        of_each("a", Loader, [divided(seed=seed, shuffles=True) for seed in (1, 2)]),
        of_each("a", Loader, [divided(seed=1, shuffles=True)] * 2),
    ),
    "ND203": (
        of_each("a", Loader, [divided(replicas=2, place=0)] * 2),
        of_each("a", Loader, [divided(replicas=2, place=place) for place in (0, 1)]),
    ),
    "ND205": (
        of_each("a", Loader, [divided(data=data, samples=9) for data in "ab"]),
        of_each("a", Loader, [divided(data="a", samples=9)] * 2),
    ),
    "ND206": (
        of_each("train", Loader, [{"batches": batches} for batches in (4, 5)], TRAINS),
        of_each("train", Loader, [{"batches": 4}] * 2, TRAINS),
    ),
    "ND207": (
        of_each("m", Model, [{"ranks": 2, "sample": [n], "shapes": "s"} for n in (0.5, 0.6)]),
        of_each("m", Model, [{"ranks": 2, "sample": [0.5], "shapes": "s"}] * 2),
    ),
    "ND208": (
        of_each("sgd", Optimizer, [{"rates": [rate]} for rate in (0.1, 0.2)]),
        of_each("sgd", Optimizer, [{"rates": [0.1]}] * 2),
    ),
    "ND209": (
        of_each("m", Model, [{"ranks": 2, "device": "GPU-1"}] * 2),
        of_each("m", Model, [{"ranks": 2, "device": f"GPU-{n}"} for n in "ab"]),
    ),
    "ND210": (
        of_each("a", Loader, [divided(shuffles=True, epochs=[0, 0])] * 2),
        of_each("a", Loader, [divided(shuffles=True)] * 2),
    ),
    "ND212": (ranks_with({}, {}, threads=8), ranks_with({}, {}, threads=4)),
    "ND213": (
        of_each("train", Loader, [{"workers": 8}] * 2),
        of_each("train", Loader, [{"workers": 4}] * 2),
    ),
    "ND214": (
        of_each("model", Model, [{"ranks": 2, "is_nested": True}] * 2),
        of_each("model", Model, [{"ranks": 2}] * 2),
    ),
    "ND215": (
        of_each("adam", Optimizer, [{"was_of": "model"}] * 2, "adam.step()"),
        of_each("adam", Optimizer, [{}] * 2, "adam.step()"),
    ),
    "ND216": (
        of_each(
            "model",
            Model,
            [{"ranks": 2, "with_gradient": 4, "without": 2, "unused": ["b"]}] * 2,
            STEP,
        ),
        of_each("model", Model, [{"ranks": 2, "with_gradient": 6}] * 2, STEP),
    ),
    "ND217": (
        of_each("train", Loader, [divided(shuffles=True, batch_size=32)] * 2, TRAINS),
        of_each("train", Loader, [divided(batch_size=32)] * 2, TRAINS),
    ),
}
