"""The timeline of collectives: which rank waited for which, and what DDP measured."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import positive_int

SHOWN_STEPS = 20  # unless the user names others


class TimelineOptions(Frozen):
    """The option of a cell below which the timeline is shown."""

    timeline: bool = flag(
        "--timeline",
        "then show which rank waited for which",
        excludes={"no_wait": "use `%ddp timeline` later"},
    )


class TimelineArguments(Command, example="timeline", before="trace logs"):
    """Show which rank waited for which in the last cell, along the time."""

    last: int = option(
        "--last N",
        "the last N steps, or collectives (default: {default})",
        SHOWN_STEPS,
        positive_int,
    )


EXTENSION = Extension(
    name="timeline",
    commands=(TimelineArguments,),
    cell_options=TimelineOptions,
    notebook="nbddp.extensions.timeline.notebook:Timelines",
    group_methods={
        "timeline": "nbddp.extensions.timeline.group_methods:timeline",
    },
    public={
        "Timeline": "nbddp.extensions.timeline.collective_timeline:Timeline",
        "timeline": "nbddp.extensions.timeline.of_notebook:timeline",
    },
)
