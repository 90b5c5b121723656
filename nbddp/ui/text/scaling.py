"""A cell on several world sizes, as a table and as what has to be said of it."""

from __future__ import annotations

from nbddp.archive.scaling import NOISY, Scaling, Size
from nbddp.charts.sparkline import BLOCKS
from nbddp.formatting import format_bytes, plural
from nbddp.ui.words import aligned, say_rate, say_seconds

STRONG = (
    "strong scaling: the same work is shared out, so that N ranks should do as many times the "
    "steps, or samples, a second (in the cell, divide the batch size by world_size)"
)
WEAK = (
    "weak scaling: each rank has the same work, so that N ranks should do N times as much in the "
    "same time (in the cell, leave the batch size as it is)"
)
WIDE = 24  # letters of a bar for linear


def scaling_text(scaling: Scaling) -> str:
    """The table, a bar for each efficiency, and the notes."""
    if not scaling.sizes:
        return "no world size has come to its end: there is nothing to compare"
    rows = [
        [*row, _bar(scaling.efficiency(size))]
        for row, size in zip(rows_of(scaling), scaling.sizes, strict=True)
    ]
    return "\n".join([*aligned([[*head_of(scaling), ""], *rows]), *notes(scaling)])


def _bar(efficiency: float) -> str:
    """As long as linear would be, filled as far as it came.

    >>> _bar(0.5)
    '████████████············'
    """
    filled = round(min(1.0, efficiency) * WIDE)
    return BLOCKS[-1] * filled + "·" * (WIDE - filled)


def head_of(scaling: Scaling) -> list[str]:
    """The titles of the columns."""
    pace = ["steps/s"] if scaling.counts_steps else ["time"]
    samples = ["samples/s"] if scaling.has_samples else []
    ends = ["waiting", "for data", "sending", "memory", "rounds apart"]
    return ["ranks", *pace, *samples, "speed-up", "efficiency", *ends]


def rows_of(scaling: Scaling) -> list[list[str]]:
    """A row for each world size."""
    return [_row(scaling, size) for size in scaling.sizes]


def _row(scaling: Scaling, size: Size) -> list[str]:
    pace = say_rate(size.pace) if scaling.counts_steps else say_seconds(1 / size.pace)
    samples = [f"{size.samples:,.0f}"] if scaling.has_samples and size.samples else []
    return [
        str(size.ranks),
        pace,
        *samples,
        f"{scaling.speed_up(size):.2f}",
        say_share(scaling.efficiency(size)),
        *(say_share(size.share(name)) for name in ("waiting", "loading")),
        _sending(size),
        _memory(size),
        f"{say_share(size.spread)} of {len(size.rounds)}",
    ]


def say_share(share: float | None) -> str:
    """A part of a whole, in percent; nothing if it is not known.

    >>> say_share(0.123), say_share(0.004), say_share(None)
    ('12 %', '0.4 %', '')
    """
    if share is None:
        return ""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else f"{share * 100:.1f} %"


def _sending(size: Size) -> str:
    sending, bare = size.share("sending"), size.share("bare")
    alone = f" ({say_share(bare)} alone)" if bare is not None else ""
    return f"{say_share(sending)}{alone}"


def _memory(size: Size) -> str:
    here, gpu = size.share("memory") or 0, size.share("gpu_memory") or 0
    parts = [format_bytes(here) if here else "", f"GPU {format_bytes(gpu)}" if gpu else ""]
    return ", ".join(filter(None, parts))


def notes(scaling: Scaling) -> list[str]:
    """What has to be said of the numbers: how far they can be trusted goes first."""
    return [
        *_crowded(scaling),
        *_noise(scaling),
        *_kinds(scaling),
        *_threads(scaling),
        *_legend(scaling),
    ]


def _crowded(scaling: Scaling) -> list[str]:
    return [
        f"{ranks} ranks on {plural(there, what)}: not a scaling of your model"
        for ranks, there, what in scaling.crowded
    ]


def _noise(scaling: Scaling) -> list[str]:
    apart = [f"{say_share(size.spread)} at {_ranks(size.ranks)}" for size in scaling.noisy]
    if apart:
        return [
            f"noisy: the rounds lie {', '.join(apart)} apart, more than {say_share(NOISY)}; what "
            "differs by less than that is no difference. Something else may run on this machine, "
            "or the cell has too few steps"
        ]
    few = [size for size in scaling.sizes if len(size.rounds) < scaling.rounds]
    return [
        f"{_ranks(size.ranks)}: {len(size.rounds)} of {scaling.rounds} rounds came to their end"
        for size in few
    ]


def _ranks(count: int) -> str:
    return plural(count, "rank")


def _kinds(scaling: Scaling) -> list[str]:
    said = [WEAK if scaling.is_weak else STRONG]
    if scaling.is_other_kind:
        batches = ", ".join(map(str, scaling.batches))
        how = "stays the same" if scaling.is_weak else "grows with them"
        other = "strong scaling: leave --weak out" if scaling.is_weak else "weak scaling: --weak"
        said.append(f"but the batch of all ranks together {how} ({batches}): that is {other}")
    elif not scaling.has_samples and scaling.counts_steps:
        said.append(
            "how many samples a step has is not known (it is that of the one loader trained on): "
            "speed-up is of steps"
        )
    elif not scaling.counts_steps:
        said.append("the cell reports no steps (`nbddp.log`): speed-up is of its whole time")
    return said


def _threads(scaling: Scaling) -> list[str]:
    known = [(size.ranks, scaling.threads.get(size.ranks, 0)) for size in scaling.sizes]
    is_cpu = not any(each != "cpu" for each in scaling.devices)
    if not is_cpu or len({threads for _, threads in known}) < 2:
        return []
    said = ", ".join(f"{_ranks(ranks)} {threads}" for ranks, threads in known)
    return [f"ranks share out the cores (threads of each: {said}); --threads 1 gives all the same"]


def _legend(scaling: Scaling) -> list[str]:
    said = ["medians of the rounds, each on fresh ranks, the first fifth of the steps left out"]
    if any(size.share("waiting") is not None for size in scaling.sizes):
        said.append(
            "waiting: the ranks' time until the last one came to a collective; for data: until a "
            "DataLoader gave a batch"
        )
    elif any(size.share("loading") is not None for size in scaling.sizes):
        said.append(
            "waiting is not known: of NCCL's collectives the time line has the times of enqueueing"
        )
    if any(size.share("sending") is not None for size in scaling.sizes):
        said.append(
            "sending: a step's communication as DDP measures it, waiting included; alone: nothing "
            "was computed beside it"
        )
    return said
