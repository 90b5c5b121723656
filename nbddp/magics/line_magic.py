"""``%ddp``: the handler of every command."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from nbddp.errors import RequestError
from nbddp.export.script import PulledValue
from nbddp.group.run_script import find_script
from nbddp.magics.after_failure import interrupted
from nbddp.magics.commands.diagnose import check, steer_trace
from nbddp.magics.commands.export import export
from nbddp.magics.commands.nodes import steer_nodes
from nbddp.magics.commands.publish import publish_run
from nbddp.magics.commands.runs import compare_runs, show_run, steer_runs
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.parser import command, help_text, parse
from nbddp.magics.presenter import ViewChoice
from nbddp.record.cell import CellRequest
from nbddp.record.log_reader import log_name, tail
from nbddp.ui.report.timeline import timeline_report

HELP = ("--help", "-h")  # only as the first word: the arguments of a script may have it too
KEPT = (
    "nbddp: these are the ranks of the last script; `%ddp debug` looks into them until the next "
    "cell or script"
)
SCRIPT_RANKS_DIED = (
    "no rank of the cells is gone: the dead ranks ran a script, which gets new ones each time"
)

Handler = Callable[[NotebookState, Namespace], Any]


@magics_class
class LineMagics(Magics):
    """The line magic."""

    def __init__(self, desk: NotebookState) -> None:
        super().__init__(desk.shell)
        self._desk = desk

    @line_magic
    def ddp(self, line: str) -> Any:
        """Control the worker group: `%ddp COMMAND`; `%ddp help` lists the commands."""
        desk = self._desk
        before = desk.group.life
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        try:
            if name in HELP or rest.partition(" ")[0] in HELP:
                name, rest = "help", "" if name in HELP else name
            name = name or "status"
            args = parse(command(name), rest)
            args.line = rest
            return HANDLERS[name](desk, args)
        except RequestError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            raise interrupted(f"%ddp {name}", before, desk.group.life) from None


def _status(desk: NotebookState, _args: Namespace) -> None:
    scripts = desk.group.scripts
    desk.views.show_status(scripts.active)
    if scripts.are_kept:
        desk.views.say(KEPT)


def _start(desk: NotebookState, args: Namespace) -> None:
    desk.make_ready(replace(desk.asked_spec(args), joins_group=True), fresh=False)
    desk.views.show_status(desk.group.session)


def _restart(desk: NotebookState, args: Namespace) -> None:
    spec, begins_run = desk.asked_spec(args), args.name is not None
    if args.replay:
        desk.restart_and_replay(spec, begins_run=begins_run)
    else:
        desk.make_ready(spec, fresh=True, begins_run=begins_run)
    desk.views.show_status(desk.group.session)


def _run(desk: NotebookState, args: Namespace) -> None:
    desk.check_ranks(args)
    script = find_script(args.script, args.script_args, is_module=args.module, keeps=args.keep)
    request = CellRequest(
        source=f"%ddp run {args.line}",
        ranks=args.ranks,
        execution_count=desk.prompt_number,
        needs_group=False,
        once=not args.keep,
        script=script,
    )
    if not args.keep:
        desk.run_script(request, args)
        return
    with desk.ready_for_cell(replace(desk.asked_spec(args), joins_group=False), args):
        desk.run(request, args)


def _interrupt(desk: NotebookState, _args: Namespace) -> None:
    if not desk.group.scripts.active.life.state.is_at_work:
        raise RequestError("no cell is running")
    desk.group.interrupt()


def _heal(desk: NotebookState, args: Namespace) -> None:
    if desk.group.scripts.lost and not desk.group.life.gone:
        desk.views.say(f"nbddp: {SCRIPT_RANKS_DIED}")
        return
    desk.views.say(f"nbddp: {desk.heal(args.rank or (), donor=args.donor)}")


def _logs(desk: NotebookState, args: Namespace) -> None:
    folder, name = desk.last_run, log_name(args.rank)
    if folder is None or (folder.exists() and not (folder / name).exists()):
        raise RequestError(f"there is no log of rank {args.rank}")
    path = folder / name
    try:
        said = tail(path, args.lines)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    desk.views.say(said)


def _push(desk: NotebookState, args: Namespace) -> None:
    names = [name for word in args.names for name in word.split(",") if name]
    desk.group.push(desk.values(names or args.names), ranks=args.ranks)


def _pull(desk: NotebookState, args: Namespace) -> Any:
    expression = args.expression
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise RequestError(
            f"`{expression}` is not a single expression ({error.msg}); pull takes one "
            "expression, for example `%ddp pull losses` or `%ddp pull losses, rank`"
        ) from error
    value = desk.group.pull(expression, rank=args.rank)
    desk.diary.note(PulledValue(expression, args.rank))
    if expression.isidentifier():
        desk.shell.user_ns[expression] = value
    return None if args.line.endswith(";") else value  # as IPython does for a statement


def _auto(desk: NotebookState, args: Namespace) -> None:
    desk.auto.is_on = args.switch == "on"


def _view(desk: NotebookState, args: Namespace) -> None:
    desk.views.choice = ViewChoice(args.choice)


HANDLERS: dict[str, Handler] = {
    "status": _status,
    "start": _start,
    "restart": _restart,
    "run": _run,
    "export": lambda desk, args: desk.views.say(export(desk, args)),
    "stop": lambda desk, _args: desk.group.stop(),
    "interrupt": _interrupt,
    "kill": lambda desk, args: desk.group.kill(args.rank),
    "heal": _heal,
    "nodes": lambda desk, args: desk.views.say(f"nbddp: {steer_nodes(desk, args)}"),
    "fault": lambda desk, args: desk.arm(
        args.kind, rank=args.rank, step=args.step, factor=args.factor
    ),
    "debug": lambda desk, args: desk.debug(args.rank, args.command),
    "check": check,
    "timeline": lambda desk, args: desk.views.show(timeline_report(desk.group.timeline(args.last))),
    "trace": lambda desk, args: desk.views.say(f"nbddp: {steer_trace(desk, args)}"),
    "logs": _logs,
    "show": show_run,
    "runs": steer_runs,
    "compare": compare_runs,
    "publish": publish_run,
    "push": _push,
    "pull": _pull,
    "wait": lambda desk, _args: desk.wait(),
    "auto": _auto,
    "view": _view,
    "help": lambda desk, args: desk.views.say(help_text(args.command)),
}
