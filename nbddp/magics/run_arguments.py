"""The options of everything that starts ranks or runs code: of ``%%ddp`` and ``%ddp run``."""

from __future__ import annotations

import shlex
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any

from nbddp.errors import RequestError
from nbddp.formatting import format_ranks
from nbddp.lifecycle.retries import Retries
from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import GroupSpec, StartOptions
from nbddp.wire.options import option_values as values
from nbddp.wire.options.cell_spec import CellOptions, RunOptions
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import (
    count,
    numbers,
)


class GroupArguments(Frozen):
    """The options with which ranks start.

    Attributes:
        start: the options of :class:`~nbddp.wire.group_spec.StartOptions` that the line has.
        extensions: the options of extensions that the line has, by their class.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    extensions: Mapping[type[Frozen], Any] = field(default_factory=dict)

    def spec(self, base: GroupSpec) -> GroupSpec:
        """Return ``base`` with the options of the line."""
        return replace(base, **{**self.start, "env": {**base.env, **self.start.get("env", {})}})


class RunArguments(GroupArguments, RunOptions):
    """The options of a cell or script that only the notebook obeys."""

    ranks: tuple[int, ...] | None = option(
        "--ranks 0,2", "run it on these ranks only", None, numbers, complete="ranks"
    )
    fresh: bool = flag("--fresh", "restart the ranks first, with empty namespaces")
    max_restarts: int = option(
        "--max-restarts N",
        "after a failure, up to N times: restart the ranks and run it again; before a cell, replay "
        "the successful cells (default: {default})",
        0,
        count,
    )
    heal: int = option(
        "--heal N",
        "after the death of a rank, up to N times and before any restart: replace the rank and run "
        "it again; in cells, the new rank gets the variables of a living one (default: {default})",
        0,
        count,
    )
    elastic: bool = flag(
        "--elastic",
        "when a node joins, restart with its ranks, replay the successful cells, and run "
        "this one again (see `%%ddp nodes`)",
    )
    no_wait: bool = flag("--no-wait", "return at once; `%%ddp wait` waits")
    quiet: bool = flag("--quiet", "show only the values of the last line")

    @property
    def retries(self) -> Retries:
        """How often the cell runs again after a failure."""
        return Retries(heals=self.heal, restarts=self.max_restarts, is_elastic=self.elastic)


class CellArguments(RunArguments, CellOptions):
    """Run the cell on every rank of the worker group.

    The first such cell starts the ranks: processes that stay, each with its own IPython. Later
    cells run on the same ranks and find the same variables. A cell can use `rank`, `local_rank`,
    `world_size`, `device`, `torch`, `dist` (torch.distributed) and `nbddp`; the process group is
    ready. `%ddp help` lists the commands that control the group.

    Examples:

        %%ddp --nproc 4
        x = torch.ones(1, device=device) * rank
        dist.all_reduce(x)
        x

        %%ddp --ranks 0 --push config --out report

        %%ddp --sweep lr=0.1,0.01 --sweep batch=16,64

        %%ddp --scale 1,2,4
    """  # noqa: D412 - this is the help

    push: tuple[str, ...] = option(
        "--push a,b", "first copy these variables from the notebook to the ranks", (), values.names
    )
    out: str = option(
        "--out NAME",
        "store the value of the last line of every rank as a list",
        "",
        values.name,
        excludes={"no_wait": "fetch the value with `%ddp pull` later"},
    )
    no_init: bool = flag(
        "--no-init", "no process group: the cell calls init_process_group() itself"
    )
    once: bool = flag("--once", "leave this cell out of any replay")
    auto: bool = flag("--auto", SUPPRESS)  # `%ddp auto on` writes it


def check_unchanged(asked: GroupSpec, current: GroupSpec, *, gone: Sequence[int] = ()) -> None:
    """Refuse options that take effect only when ranks start, and name ranks that have died.

    Raises:
        RequestError: an option differs; the message says which, and how to restart.
    """
    names = [item.name for item in fields(StartOptions) if item.name != "name"]
    changed = [name for name in names if getattr(asked, name) != getattr(current, name)]
    if changed:
        values = {name: getattr(current, name) for name in changed}
        options = ", ".join(
            f"with {name} {_format_value(value)}" if value else f"without --{name}"
            for name, value in values.items()
        )
        flags = " ".join(f"--{name} {_format_value(getattr(asked, name))}" for name in changed)
        first = f"{format_ranks(gone)} of the group died; " if gone else ""
        raise RequestError(
            f"{first}the ranks run {options}; `%ddp restart {flags}` restarts them with "
            "the new options (their variables are lost), and so does --fresh in the cell"
        )


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return " --env ".join(shlex.quote(f"{key}={text}") for key, text in value.items())
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return shlex.quote(str(value))
