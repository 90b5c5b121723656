"""``%ddp trace``: which steps of the next cell are traced, and that none are after all."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from nbddp.errors import RequestError
from nbddp.magics.desk import Desk
from nbddp.wire.trace_messages import Steps

NOTHING = (
    "no trace is asked for: `%ddp trace --steps 10:15` has these steps of the next cell traced"
)


def steer_trace(desk: Desk, args: Namespace) -> str:
    """Note which steps are to be traced, or not any more; returns what is to be, in words.

    Raises:
        RequestError: the options do not go together.
    """
    if args.off and (args.steps is not None or args.memory):
        raise RequestError("--off takes back what was asked for: it goes with no other option")
    if args.memory and args.steps is None:
        raise RequestError("--memory goes with steps: `%ddp trace --steps 10:15 --memory`")
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
