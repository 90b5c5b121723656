"""``%ddp trace``: trace the next cell."""

from __future__ import annotations

from dataclasses import replace

from nbddp.extensions.trace.messages import TraceSteps
from nbddp.magics.command_arguments import TraceArguments
from nbddp.magics.notebook_state import NotebookState

NO_TRACE = "no trace is requested: `%ddp trace --steps 10:15` traces these steps of the next cell"


def set_trace_steps(notebook: NotebookState, args: TraceArguments) -> str:
    """Set or cancel the steps to trace; return a sentence about it."""
    if args.off:
        before, notebook.next_trace = notebook.next_trace, None
        return NO_TRACE if before is None else "the next cell is not traced"
    if args.steps is not None:
        notebook.next_trace = replace(args.steps, with_memory=args.memory)
        return _describe_steps(notebook.next_trace)
    if notebook.next_trace is None:
        return NO_TRACE
    return f"{_describe_steps(notebook.next_trace)}; `%ddp trace --off` cancels it"


def _describe_steps(steps: TraceSteps) -> str:
    memory = ", with memory" if steps.with_memory else ""
    return f"the next cell is traced: {steps}{memory}"
