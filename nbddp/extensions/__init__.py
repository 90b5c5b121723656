"""Features outside of the core, each in a folder of its own that can be deleted.

This is the only file that names what is in the folders. Lines of a deleted folder may stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the types of their public names; a manifest says how to load a name
    from nbddp.extensions.course.digits import Digits as Digits
    from nbddp.extensions.course.digits import digits as digits
    from nbddp.extensions.course.exercises import Judgement as Judgement
    from nbddp.extensions.course.exercises import check_answer as check_answer
    from nbddp.extensions.course.sonnets import sonnets as sonnets
    from nbddp.extensions.faults import arming
    from nbddp.extensions.memory.step_memory import StepMemory as StepMemory
    from nbddp.extensions.memory.step_memory import memory_of_step as memory_of_step
    from nbddp.extensions.runs.api import Run as Run
    from nbddp.extensions.runs.api import compare as compare
    from nbddp.extensions.runs.api import runs as runs
    from nbddp.extensions.sweeps import group_methods
    from nbddp.extensions.timeline import group_methods as timeline_methods
    from nbddp.extensions.timeline.collective_timeline import Timeline as Timeline
    from nbddp.extensions.timeline.of_notebook import timeline as timeline
    from nbddp.extensions.trace import group_methods as trace_methods
    from nbddp.extensions.trace.merge import Trace as Trace
    from nbddp.extensions.train.checkpoint.checkpoint import Checkpoint as Checkpoint
    from nbddp.extensions.train.checkpoint.checkpoint import Resumed as Resumed
    from nbddp.extensions.train.collectives import all_gather as all_gather
    from nbddp.extensions.train.collectives import all_reduce as all_reduce
    from nbddp.extensions.train.collectives import main_rank_first as main_rank_first
    from nbddp.extensions.train.collectives import on_main as on_main
    from nbddp.extensions.train.config import config as config
    from nbddp.extensions.train.loader import Loader as Loader
    from nbddp.extensions.train.loader import loader as loader
    from nbddp.extensions.train.precision import Precision as Precision
    from nbddp.extensions.train.precision import precision as precision
    from nbddp.extensions.train.prepare import prepare as prepare
    from nbddp.extensions.trainers.attach import report_trainers as report_trainers

    faults = arming

    class GroupMethods:
        """The methods of ``WorkerGroup`` that are in the folders."""

        scale = group_methods.scale
        sweep = group_methods.sweep
        timeline = timeline_methods.timeline
        trace = trace_methods.trace


# each command of the folders, so that the core can name the folder that a command needs
COMMANDS = {
    "autoreload": "autoreload",
    "bench": "bench",
    "check": "checks",
    "compare": "runs",
    "export": "export",
    "fault": "faults",
    "free": "memory",
    "keep-alive": "keep_alive",
    "memory": "memory",
    "nodes": "nodes",
    "publish": "publish",
    "rejoin": "keep_alive",
    "runs": "runs",
    "show": "runs",
    "timeline": "timeline",
    "trace": "trace",
}
# the same of `nbddp` in a terminal
TERMINAL_COMMANDS = {
    **dict.fromkeys(
        ("status", "why", "logs", "metrics", "watch", "runs", "show", "interrupt", "stop", "kill"),
        "terminal",
    ),
    "mcp": "agents",
}
