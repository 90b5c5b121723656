"""The speed of collectives as a table and a chart."""

from __future__ import annotations

from nbddp.extensions.bench.speeds import Speeds
from nbddp.formatting import format_bytes, plural
from nbddp.ui.report.blocks import Picture, Report, Table, note

NOTES = (
    "time of a call on the slowest rank · bus bandwidth in GB/s as in nccl-tests: what each rank "
    "must send in a second",
    "memcpy: each rank copies as many bytes, all ranks at the same time",
)


def speed_report(speeds: Speeds) -> Report:
    """Report how long each collective takes."""
    title = f"collectives over {speeds.backend} · {plural(speeds.world_size, 'rank')}"
    columns = [
        [
            f"{_duration(seconds)} · {bandwidth:.2f}"
            for seconds, bandwidth in zip(times, speeds.bandwidths(name), strict=True)
        ]
        for name, times in speeds.times.items()
    ]
    rows = [*zip(map(format_bytes, speeds.sizes), *columns, strict=True)]
    table = Table(["size", *speeds.times], rows, "time and bus bandwidth by size")
    picture = Picture(lambda: _draw(speeds), f"{title}; the table has the numbers")
    return Report(title, [picture, table, *map(note, NOTES)])


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def _draw(speeds: Speeds) -> tuple[bytes, int]:
    from nbddp.charts.figure import png_of  # loads matplotlib
    from nbddp.extensions.bench.figure import draw_speeds

    return png_of(draw_speeds(speeds))
