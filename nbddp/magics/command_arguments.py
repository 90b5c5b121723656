"""The commands of ``%ddp``, with their options and arguments."""

from __future__ import annotations

from argparse import REMAINDER
from collections.abc import Sequence

from nbddp.extension.manifest import Command
from nbddp.magics.presenter import ViewChoice
from nbddp.magics.run_arguments import GroupArguments, RunArguments
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import argument, flag, option
from nbddp.wire.options.option_values import (
    count,
    numbers,
    positive_int,
)


class LineArguments(Frozen):
    """Control the ranks that run the %%ddp cells."""


class StatusArguments(Command, example="status"):
    """Show what the group and every rank are doing."""


class StartArguments(GroupArguments, Command, example="start"):
    """Start the ranks before the first cell does."""


class RestartArguments(GroupArguments, Command, example="restart"):
    """Replace all ranks, even in a running cell, by new ones without variables."""

    replay: bool = flag("--replay", "then run the successful cells again")


class ScriptArguments(RunArguments, Command, example="run train.py --lr 0.1"):
    """Run a script as torchrun does, with a panel and interrupts."""

    module: bool = flag("-m --module", "the script is the name of a module")
    keep: bool = flag(
        "--keep", "run the script on the ranks of the cells; its variables stay there"
    )
    script: str = argument("script", "a Python file, as for torchrun")
    script_args: list[str] = argument("script_args", "arguments of the script", nargs=REMAINDER)
    line: str = ""  # as the user wrote it


# ---- the group


class StopArguments(Command, example="stop"):
    """End all ranks."""


class InterruptArguments(Command, example="interrupt"):
    """Interrupt the cell that runs (started with --no-wait); variables are kept."""


class KillArguments(Command, example="kill 1"):
    """Kill one rank and lose its variables; %ddp heal or %ddp restart --replay makes them again."""

    rank: int = argument("rank", "the rank to kill, with SIGKILL", count, complete="rank")


class HealArguments(Command, example="heal"):
    """Replace the ranks that died; the other ranks keep all their variables."""

    rank: tuple[int, ...] = option(
        "--rank R", "ranks to replace (default: all that died)", (), numbers, complete="rank"
    )
    donor: int | None = option(
        "--from R", "copy the variables of this rank", None, count, complete="rank"
    )
    rerun: bool = flag("--rerun", "then run the cells again, on all ranks, that make trainers")


# ---- failures and slow cells


class DebugArguments(Command, example="debug"):
    """Open a debugger in the frames of the last failure."""

    rank: int | None = option(
        "--rank R", "on this rank (default: the first cause)", None, count, complete="rank"
    )
    command: Sequence[str] = option(
        "-c --command COMMAND", "debugger command to run first; may be repeated", (), repeat=list
    )


class LogsArguments(Command, example="logs 1"):
    """Show the last lines of a rank, also those of C code and child processes."""

    rank: int = argument("rank", "the rank whose log is shown", count, complete="rank")
    lines: int = option("-n --lines LINES", "how many lines (default: {default})", 50, positive_int)


# ---- the notebook


class PushArguments(Command, example="push model config"):
    """Copy variables of the notebook to the ranks."""

    names: list[str] = argument("names", "variables of the notebook", nargs="+")
    ranks: tuple[int, ...] | None = option(
        "--ranks 0,2", "to these ranks only", None, numbers, complete="ranks"
    )


class PullArguments(Command, example="pull losses --rank 0"):
    """Fetch a value from the ranks; a name is also set in the notebook."""

    expression: str = argument("expression", "a name, or any expression", complete="expression")
    rank: int | None = option(
        "--rank R", "of one rank (default: a list of all ranks)", None, count, complete="rank"
    )
    line: str = ""  # as the user wrote it


class WaitArguments(Command, example="wait"):
    """Wait for the running cell, also one with --no-wait; raise its failure."""


class AutoArguments(Command, example="auto on"):
    """Send every later cell to the ranks; %%local keeps one in the kernel."""

    switch: str = argument(
        "switch", "on: cells without %%ddp run on the ranks, too", choices=("on", "off")
    )


class ViewArguments(Command, example="view text"):
    """Show later cells as a live panel or as plain text."""

    choice: str = argument(
        "choice",
        "auto: a panel on a page that draws widgets, else text",
        choices=[each.value for each in ViewChoice],
    )


class HelpArguments(Command, example="help"):
    """Show the commands, or more about one."""

    command: str | None = option(
        "command", "show the options of this command", None, nargs="?", complete="command"
    )
