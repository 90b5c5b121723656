"""``nbddp COMMAND``: a run seen from a terminal, while its kernel is busy, or after its end."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.extension.manifest import Command, Extension
from nbddp.extensions.runs import LIVE, SHOWN_RUNS
from nbddp.wire.options.option import argument, flag, option
from nbddp.wire.options.option_values import count, positive_int

RUN = "a name, a part of one, or a path (default: the live run of this folder, or your only one)"
YES = "do not ask for confirmation"
JSON = "as JSON; docs/terminal.md lists the fields"


class StatusCommand(Command, example="status"):
    """Show what the group and every rank are doing."""

    run: str | None = option("run", RUN, None, nargs="?")
    json: bool = flag("--json", JSON)


class WhyCommand(Command, example="why"):
    """Say why a run has failed, hangs or is slow, and what to do."""

    run: str | None = option("run", RUN, None, nargs="?")
    json: bool = flag("--json", JSON)


class LogsCommand(Command, example="logs"):
    """Show the last lines of a rank, or of all ranks."""

    rank: int | None = option("rank", "the rank (default: all)", None, count, nargs="?")
    run: str | None = option("--run NAME", RUN, None)
    lines: int | None = option(
        "-n --lines LINES", "how many of each rank (default: 50, or 10)", None, positive_int
    )
    json: bool = flag("--json", JSON)


class MetricsCommand(Command, example="metrics"):
    """Show the newest values of the metrics."""

    run: str | None = option("run", RUN, None, nargs="?")
    metrics: str = option("--metrics NAME,...", "only these, or patterns like val/*", "")
    json: bool = flag("--json", f"{JSON}, with their curves")


class WatchCommand(Command, example="watch"):
    """Show the status, the metrics and the last lines again every second, until the run ends."""

    run: str | None = option("run", RUN, None, nargs="?")
    json: bool = flag("--json", "the status as JSON, a line for each change")


class RunsCommand(Command, example="runs"):
    """List the runs of this folder, newest first."""

    words: Sequence[str] = option(
        "words", "lr=0.1, loss<0.5, a part of a name", (), nargs="*", metavar="WORD"
    )
    live: bool = flag("--live", LIVE)
    number: int = option(
        "-n --number NUMBER", "how many (default: {default})", SHOWN_RUNS, positive_int
    )
    json: bool = flag("--json", JSON)


class ShowCommand(Command, example="show"):
    """Show a run from its folder: cells, failures, last values, last lines."""

    run: str | None = option("run", RUN, None, nargs="?")
    json: bool = flag("--json", JSON)


class InterruptCommand(Command, example="interrupt"):
    """Interrupt the cell that runs; variables are kept."""

    run: str | None = option("run", RUN, None, nargs="?")
    yes: bool = flag("--yes", YES)
    json: bool = flag("--json", JSON)


class StopCommand(Command, example="stop"):
    """End all ranks, also those that are kept alive; their variables are lost."""

    run: str | None = option("run", RUN, None, nargs="?")
    yes: bool = flag("--yes", YES)
    json: bool = flag("--json", JSON)


class KillCommand(Command, example="kill 1"):
    """Kill one rank; it loses its variables."""

    rank: int = argument("rank", "the rank to kill, with SIGKILL", count)
    run: str | None = option("--run NAME", RUN, None)
    yes: bool = flag("--yes", YES)
    json: bool = flag("--json", JSON)


EXTENSION = Extension(
    name="terminal",
    needs=("runs",),
    sessions="nbddp.extensions.terminal.state_publisher:StatePublisher",
    terminal_commands=(
        StatusCommand,
        WhyCommand,
        LogsCommand,
        MetricsCommand,
        WatchCommand,
        RunsCommand,
        ShowCommand,
        InterruptCommand,
        StopCommand,
        KillCommand,
    ),
    terminal="nbddp.extensions.terminal.terminal_commands:Terminal",
)
