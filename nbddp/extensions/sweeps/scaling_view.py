"""`%%ddp --scale`: the results of a cell on several world sizes."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.extensions.sweeps.scaling_results import MAX_SPREAD, Scaling, WorldSizeResult
from nbddp.formatting import format_bytes, format_seconds, plural
from nbddp.ui.report.blocks import Picture, Report, Table, note
from nbddp.ui.wording import align_columns, format_rate

BAR = 24  # characters that stand for an efficiency of 100 %


def scaling_report(scaling: Scaling) -> Report:
    """Report the speed-up, and how the ranks spent their time."""
    if not scaling.sizes:
        return Report("no world size finished: there is nothing to compare")
    speed_ups = [
        f"{scaling.speed_up(size):.2f} on {plural(size.ranks, 'rank')}" for size in scaling.sizes
    ]
    kind = "weak" if scaling.is_weak else "strong"
    title = f"{kind} scaling: speed-up {', '.join(speed_ups)}"
    head = ["ranks", "steps/s" if scaling.counts_steps else "time", "samples/s", "speed-up"]
    head += ["efficiency", "waiting", "for data", "communication", "memory", "rounds apart"]
    rows = [_row(scaling, size) for size in scaling.sizes]
    bars = [[str(size.ranks), _bar(scaling.efficiency(size))] for size in scaling.sizes]
    text = "\n".join(["efficiency:", *align_columns(bars)])
    return Report(
        title,
        [
            Picture(lambda: _draw(scaling), f"{title}; the table has the numbers", text),
            Table(head, rows, "world sizes").without_empty_columns(),
            *map(note, _notes(scaling)),
        ],
    )


def _draw(scaling: Scaling) -> tuple[bytes, int]:
    from nbddp.charts.figure import png_of  # loads matplotlib
    from nbddp.extensions.sweeps.scaling_figure import draw_scaling

    return png_of(draw_scaling(scaling))


def _bar(efficiency: float) -> str:
    """Return a bar that is full at 100 %.

    >>> _bar(0.5)
    '████████████············'
    """
    filled = round(min(1.0, efficiency) * BAR)
    return "█" * filled + "·" * (BAR - filled)


def _row(scaling: Scaling, size: WorldSizeResult) -> list[str]:
    pace = format_rate(size.rate) if scaling.counts_steps else format_seconds(1 / size.rate)
    samples = size.samples_per_second if scaling.has_samples else None
    exposed = size.share("exposed")
    alone = "" if exposed is None else f" ({format_share(exposed)} exposed)"
    return [
        str(size.ranks),
        pace,
        f"{samples:,.0f}" if samples else "",
        f"{scaling.speed_up(size):.2f}",
        format_share(scaling.efficiency(size)),
        format_share(size.share("waiting")),
        format_share(size.share("loading")),
        format_share(size.share("communication")) + alone,
        _memory(size),
        f"{format_share(size.spread)} of {len(size.rounds)}",
    ]


def format_share(share: float | None) -> str:
    """Return a fraction in percent; an empty text if it is unknown.

    >>> format_share(0.123), format_share(0.004), format_share(None)
    ('12 %', '0.4 %', '')
    """
    if share is None:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def _memory(size: WorldSizeResult) -> str:
    here, gpu = size.share("memory"), size.share("gpu_memory")
    parts = [format_bytes(here) if here else "", f"GPU {format_bytes(gpu)}" if gpu else ""]
    return ", ".join(filter(None, parts))


def _notes(scaling: Scaling) -> Iterator[str]:
    if scaling.oversubscribed:
        yield f"{scaling.oversubscribed}: not a scaling of your model"
    noisy = [
        f"{format_share(size.spread)} on {plural(size.ranks, 'rank')}" for size in scaling.noisy
    ]
    if noisy:
        yield (
            f"noisy: the rounds differ by {', '.join(noisy)}, more than {format_share(MAX_SPREAD)}"
            "; smaller differences mean nothing"
        )
    yield (
        "medians of the rounds, without the first fifth of the steps; waiting: for the last rank "
        "of a collective; for data: for a DataLoader; communication is exposed while nothing is "
        "computed"
    )
