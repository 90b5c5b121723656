"""Settings and the record as a tracker shows text: Markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST_NAME = 250
_ODD = re.compile(r"[^\w\-. :/]")


def settings_text(settings: Mapping[str, Any]) -> str:
    """A table.

    >>> print(settings_text({"lr": 0.1}))
    | setting | value |
    |---|---|
    | lr | 0.1 |
    """
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def record_text(record: Iterable[tuple[float, str]]) -> str:
    """What happened, line by line, with the time of this machine.

    >>> record_text([]), record_text([(0.0, "stopped")])[:4]
    ('', '- 19')
    """
    return "\n".join(f"- {_clock(at)} {' '.join(text.split())}" for at, text in record)


def plain_name(name: str) -> str:
    """A name in letters that MLflow takes, and no longer than it takes them; it could be a path.

    >>> plain_name("val/acc@5 (%)"), plain_name("/train//loss"), plain_name("../loss")
    ('val/acc_5 ___', 'train/loss', 'loss')
    """
    parts = [part for part in _ODD.sub("_", name).split("/") if part.strip(".")]
    plain = "/".join(parts).lstrip(".") or "_"
    if len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[: LONGEST_NAME // 2]}_{plain[-(LONGEST_NAME // 2 - 1) :]}"  # /min is at the end


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
