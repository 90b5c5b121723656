"""Traces of the profiler: begin them, collect them and merge them into one file."""

from __future__ import annotations

from typing import Any

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import MAX_STEP, option_type, pair


class TraceSteps(Frozen):
    """The steps of a cell to trace: from ``first`` to ``last``, both included.

    >>> str(TraceSteps(first=10, last=15)), str(TraceSteps(first=3, last=3))
    ('steps 10 to 15', 'step 3')
    """

    first: int
    last: int
    with_memory: bool = False

    def __str__(self) -> str:
        return format_steps(self.first, self.last)


def format_steps(first: int, last: int) -> str:
    """Format a range of steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _steps(text: str) -> TraceSteps:
    first, last = pair(text, ":")
    return TraceSteps(first=first, last=last)


step_range = option_type(
    "a step like 10, or steps from the first to the last like 10:15",
    _steps,
    lambda steps: steps.first <= steps.last < MAX_STEP,
)


class TraceOptions(Frozen):
    """The option of a cell or script whose steps are traced."""

    trace: TraceSteps | None = option(
        "--trace A:B",
        "trace these steps with torch's profiler (see `%%ddp trace`)",
        None,
        step_range,
        before="publish no_trainer_metrics no_wait",
    )

    def __post_init__(self) -> None:
        steps: Any = self.trace
        if isinstance(steps, dict):  # from JSON
            object.__setattr__(self, "trace", TraceSteps(**steps))


class TraceArguments(Command, example="trace", before="logs"):
    """Trace steps of the next cell or script with torch's profiler."""

    steps: TraceSteps | None = option(
        "--steps A:B", "first and last step, or a single step", None, step_range
    )
    memory: bool = flag("--memory", "with torch's memory events", needs=("steps",))
    off: bool = flag(
        "--off",
        "cancel the trace",
        excludes=dict.fromkeys(("steps", "memory"), "--off cancels the trace"),
    )


EXTENSION = Extension(
    name="trace",
    commands=(TraceArguments,),
    options=TraceOptions,
    notebook="nbddp.extensions.trace.notebook:Tracing",
    rank="nbddp.extensions.trace.rank:TraceOnRank",
    group_methods={
        "trace": "nbddp.extensions.trace.group_methods:trace",
    },
    public={
        "Trace": "nbddp.extensions.trace.merge:Trace",
    },
)
