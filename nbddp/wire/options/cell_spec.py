"""A cell as its ranks run it: its code, and the options that they obey."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import option
from nbddp.wire.options.option_values import count, numbers_or_all
from nbddp.wire.rank_start import Script


class RunOptions(Frozen):
    """The options of a cell or script that its ranks obey."""

    break_ranks: tuple[int, ...] = option(
        "--break-ranks 0,2",
        "ranks that breakpoint() stops, or all (default: the first to reach one)",
        (),
        numbers_or_all,
        before="no_wait",
    )

    def for_ranks(self) -> dict[str, Any]:
        """Return the options that ranks obey, by name."""
        names = {item.name for item in fields(CellOptions)}
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in names}


class CellOptions(RunOptions):
    """The options that only cells have, and that their ranks obey."""

    shard_copies: int = option(
        "--shard-copies N",
        "every N steps, copy each rank's shards to the memory of the next rank; a heal goes back "
        "to the last copy if no other rank has the shards of the dead one (default: {default}, "
        "no copies)",
        0,
        count,
        before="auto",
    )


class CellSpec(CellOptions):
    """What ranks run: code, or a script.

    Attributes:
        source: Python code, with IPython syntax if you like.
        first_line: the line in the notebook cell at which ``source`` starts, for tracebacks.
        execution_count: the number in the prompt of the notebook cell.
        wants_value: whether the ranks send back the pickled value of the last expression.
        needs_group: true creates the default process group if there is none, false destroys it,
            None changes nothing.
        script: a script to run instead of the source.
        answers: replies to input requests; the user is asked when none is left.
        options: the options of extensions that have a half on ranks, by extension and name.
    """

    source: str
    first_line: int = 1
    execution_count: int = 1
    wants_value: bool = False
    needs_group: bool | None = True
    script: Script | None = None
    answers: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)
