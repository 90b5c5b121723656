"""``%ddp trace``: which steps of the next cell are traced, and that none are after all."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from nbddp.magics.desk import Desk
from nbddp.wire.trace_messages import Steps

NOTHING = "no trace is requested: `%ddp trace --steps 10:15` traces these steps of the next cell"


def steer_trace(desk: Desk, args: Namespace) -> str:
    """Set or cancel which steps are traced; return a sentence about it."""
    if args.off:
        before, desk.next_trace = desk.next_trace, None
        return NOTHING if before is None else "the next cell is not traced"
    if args.steps is not None:
        desk.next_trace = replace(args.steps, with_memory=args.memory)
        return _say(desk.next_trace)
    if desk.next_trace is None:
        return NOTHING
    return f"{_say(desk.next_trace)}; `%ddp trace --off` takes that back"


def _say(steps: Steps) -> str:
    memory = ", with memory" if steps.with_memory else ""
    return f"the next cell is traced: {steps}{memory}"
