"""The speed of collectives: their latency and bus bandwidth, beside that of a copy in memory."""

from __future__ import annotations

import re

from nbddp.extension.manifest import Command, Extension
from nbddp.formatting import format_bytes
from nbddp.wire.options.option import option
from nbddp.wire.options.option_values import option_type

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)  # bytes
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _sizes(text: str) -> tuple[int, ...]:
    found = [re.fullmatch(r"(\d{1,9})([KMG]?)", part) for part in text.split(",")]
    if not all(found):
        raise ValueError
    return tuple(int(each[1]) * _UNITS[each[2]] for each in found if each)


sizes = option_type("bytes like 1K,64M", _sizes, all)


class BenchArguments(Command, example="bench --sizes 1K,64M", before="trace logs"):
    """Measure the speed of the collectives of all ranks."""

    sizes: tuple[int, ...] = option(
        "--sizes SIZES",
        f"sizes of the tensors (default: {', '.join(map(format_bytes, SIZES))})",
        SIZES,
        sizes,
    )


EXTENSION = Extension(
    name="bench",
    commands=(BenchArguments,),
    notebook="nbddp.extensions.bench.notebook:Bench",
)
