"""What ``%ddp help`` shows: the commands, each with what it does."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

_MORE = "`%ddp help COMMAND` shows its options, `%%ddp?` those of a cell."


def parser_of(function: Any) -> ArgumentParser:
    """Of a magic, as IPython keeps it."""
    parser: ArgumentParser = function.parser
    return parser


def overview(commands: dict[str, Callable[[str], Any]]) -> str:
    """A line for each command."""
    lines = ["%ddp steers the worker group that %%ddp cells run on:", ""]
    for name, act in commands.items():
        summary = (parser_of(act).description or "").strip().partition("\n")[0]
        lines.append(f"  {name:<10} {summary}")
    return "\n".join([*lines, "", _MORE])
