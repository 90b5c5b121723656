"""``%ddp``: run a command by its handler."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbddp.errors import RequestError, as_request_error
from nbddp.group.find_script import find_script
from nbddp.group.notebook_events import ValuePulled
from nbddp.lifecycle.refusals import way_out
from nbddp.magics.command_arguments import (
    AutoArguments,
    HealArguments,
    InterruptArguments,
    KillArguments,
    LogsArguments,
    PullArguments,
    PushArguments,
    RestartArguments,
    ScriptArguments,
    StartArguments,
    StatusArguments,
    StopArguments,
    ViewArguments,
)
from nbddp.magics.magic_errors import reporting_errors
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.parser import command_parser, help_text, parse_line
from nbddp.magics.presenter import ViewChoice
from nbddp.record.cell import CellRequest
from nbddp.record.heal.heal_report import describe_disarmed
from nbddp.record.heal.rerun import cells_to_rerun
from nbddp.record.log_reader import log_name, tail
from nbddp.ui.wording import describe_armed, relative_path

HELP = ("--help", "-h")  # only as the first word: a script may have such an argument too
SCRIPT_RANKS_KEPT = (
    "nbddp: these are the ranks of the last script. Until the next cell or script, `%ddp debug` "
    "opens a debugger on them"
)
SCRIPT_RANKS_DIED = (
    "all ranks of the cells are alive: the dead ranks ran a script, and a script always gets "
    "new ranks"
)
STOPPED = "all ranks are stopped and their variables are lost; the next cell starts new ranks"
NOTHING_TO_STOP = "there were no ranks to stop"
NO_LOG_YET = (
    "no ranks have run in this kernel; `%ddp show NAME` shows an earlier run with its logs, which "
    "are in `.nbddp/runs/NAME`, and `%ddp runs` lists the names"
)
AUTO_ON = (
    "later cells run on the ranks; `%%local` runs a cell in the kernel, `%ddp auto off` ends this"
)
AUTO_OFF = "later cells run in the kernel; `%%ddp` runs a cell on the ranks"
VIEWS = {
    ViewChoice.AUTO: "later cells are shown as a panel if the page draws widgets, else as text",
    ViewChoice.PANEL: "later cells are shown as a panel",
    ViewChoice.TEXT: "later cells are shown as text",
}

Handler = Callable[[NotebookState, Any], Any]  # with the dataclass of the command


def run_command(notebook: NotebookState, line: str) -> Any:
    """Run a command; return the value that the notebook shows."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name in HELP or rest.partition(" ")[0] in HELP:
        name, rest = "help", "" if name in HELP else name
    if name == "help":
        rest = rest.lstrip("-")  # `%ddp help --sweep` has no option: it asks about one
    name = name or "status"
    with reporting_errors(f"%ddp {name}", notebook.group):
        args = parse_line(command_parser(name), rest)
        try:
            if name in HANDLERS:
                return HANDLERS[name](notebook, args)
            return notebook.extensions.command(name)(args)
        finally:
            notebook.show_messages()


def _status(notebook: NotebookState, _args: StatusArguments) -> None:
    scripts = notebook.group.scripts
    notebook.presenter.show_status(scripts.active_session)
    if armed := notebook.group.session.armed_now:
        notebook.presenter.print_line(f"nbddp: {describe_armed(armed)}")
    if scripts.are_kept:
        notebook.presenter.print_line(SCRIPT_RANKS_KEPT)


def _start(notebook: NotebookState, args: StartArguments) -> None:
    spec = replace(notebook.ranks.requested_spec(args), joins_group=True)
    notebook.extensions.before_start(spec, args.extensions)
    notebook.ranks.ensure_started(spec, fresh=False)
    notebook.presenter.show_status(notebook.group.session)


def _restart(notebook: NotebookState, args: RestartArguments) -> None:
    spec, new_run = notebook.ranks.requested_spec(args), "name" in args.start
    if args.replay:
        notebook.ranks.restart_and_replay(spec, new_run=new_run)
    else:
        notebook.ranks.ensure_started(spec, fresh=True, new_run=new_run)
    notebook.presenter.show_status(notebook.group.session)


def _run(notebook: NotebookState, args: ScriptArguments) -> None:
    notebook.ranks.check_ranks(args)
    script = find_script(args.script, args.script_args, is_module=args.module, keeps=args.keep)
    request = CellRequest(
        source=f"%ddp run {args.line}",
        ranks=args.ranks,
        execution_count=notebook.prompt_number,
        needs_group=False,
        once=not args.keep,
        script=script,
    )
    if not args.keep:
        notebook.run_script(request, args)
        return
    with notebook.ranks.started_for_cell(
        replace(notebook.ranks.requested_spec(args), joins_group=False), args
    ):
        notebook.run(request, args)


def _interrupt(notebook: NotebookState, _args: InterruptArguments) -> None:
    if not notebook.group.scripts.active_session.life.state.is_interruptible:
        raise RequestError("no cell is running")
    notebook.group.interrupt()


def _heal(notebook: NotebookState, args: HealArguments) -> None:
    if notebook.group.scripts.dead_ranks and not notebook.group.life.gone:
        notebook.presenter.print_line(f"nbddp: {SCRIPT_RANKS_DIED}")
        return
    before = notebook.group.session.last_healed
    healed = notebook.ranks.heal(args.rank, donor=args.donor, rerun=args.rerun)
    if healed is not before:
        log = notebook.group.session.replay_log
        reruns = cells_to_rerun(log) if args.rerun else ()
        notebook.presenter.print_line("nbddp: " + "\n".join(healed.lines(reruns)))
    if args.rerun:
        notebook.ranks.rerun_after_heal()


def _logs(notebook: NotebookState, args: LogsArguments) -> None:
    folder = notebook.last_run or notebook.group.scripts.last_session.event_log.path
    name = log_name(args.rank)
    if folder is None:
        raise RequestError(NO_LOG_YET)
    if folder.exists() and not (folder / name).exists():
        raise RequestError(f"there is no log of rank {args.rank} in {relative_path(str(folder))}")
    with as_request_error(f"{folder / name} cannot be read"):
        text = tail(folder / name, args.lines)
    notebook.presenter.print_line(text)


def _push(notebook: NotebookState, args: PushArguments) -> None:
    names = [name for word in args.names for name in word.split(",") if name]
    notebook.group.push(notebook.notebook_values(names or args.names), ranks=args.ranks)


def _pull(notebook: NotebookState, args: PullArguments) -> Any:
    expression = args.expression
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise RequestError(
            f"`{expression}` is not a single expression ({error.msg}); pull takes one "
            "expression, for example `%ddp pull losses` or `%ddp pull losses, rank`"
        ) from error
    value = notebook.group.pull(expression, rank=args.rank)
    notebook.extensions.tell(ValuePulled(expression=expression, rank=args.rank))
    if expression.isidentifier():
        notebook.shell.user_ns[expression] = value
    return None if args.line.endswith(";") else value  # as IPython does for a statement


def _stop(notebook: NotebookState, _args: StopArguments) -> None:
    sessions = notebook.group.session, notebook.group.scripts.active_session
    is_live = any(session.life.state.is_live for session in sessions)
    disarmed = notebook.group.session.armed_now
    notebook.group.stop()
    notebook.presenter.print_line(f"nbddp: {STOPPED if is_live else NOTHING_TO_STOP}")
    if disarmed:
        notebook.presenter.print_line(f"nbddp: {describe_disarmed(disarmed)}")


def _kill(notebook: NotebookState, args: KillArguments) -> None:
    notebook.group.kill(args.rank)
    session = notebook.group.scripts.active_session
    advice = f"; {way_out(session.life)}" if session is notebook.group.session else ""
    notebook.presenter.print_line(f"nbddp: rank {args.rank} was killed{advice}")


def _auto(notebook: NotebookState, args: AutoArguments) -> None:
    notebook.auto.is_on = args.switch == "on"
    notebook.presenter.print_line(f"nbddp: {AUTO_ON if notebook.auto.is_on else AUTO_OFF}")


def _view(notebook: NotebookState, args: ViewArguments) -> None:
    notebook.presenter.choice = choice = ViewChoice(args.choice)
    notebook.presenter.print_line(f"nbddp: {VIEWS[choice]}")


HANDLERS: dict[str, Handler] = {
    "status": _status,
    "start": _start,
    "restart": _restart,
    "run": _run,
    "stop": _stop,
    "interrupt": _interrupt,
    "kill": _kill,
    "heal": _heal,
    "debug": lambda notebook, args: notebook.debug(args.rank, args.command),
    "logs": _logs,
    "push": _push,
    "pull": _pull,
    "wait": lambda notebook, _args: notebook.wait(),
    "auto": _auto,
    "view": _view,
    "help": lambda notebook, args: notebook.presenter.print_line(help_text(args.command)),
}
