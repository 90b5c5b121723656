"""``%ddp``: steer the worker group."""

from __future__ import annotations

import ast
import re
from argparse import REMAINDER, ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from nbddp.errors import RequestError
from nbddp.export import PulledValue
from nbddp.group.scripts import find_script
from nbddp.magics.check import check
from nbddp.magics.compare import compare_options, compare_runs
from nbddp.magics.desk import Desk
from nbddp.magics.export import export
from nbddp.magics.heal import heal
from nbddp.magics.nodes import node_range, steer_nodes
from nbddp.magics.options import (
    count,
    numbers,
    parse,
    positive_int,
    rank_number,
    run_options,
    seconds,
    start_options,
)
from nbddp.magics.overview import overview, parser_of
from nbddp.magics.publish import publish_options, publish_run
from nbddp.magics.runs import runs_options, steer_runs
from nbddp.magics.show import show_run
from nbddp.magics.stopped import interrupted
from nbddp.magics.suggest import usage
from nbddp.magics.syntax import unquoted
from nbddp.magics.trace import steer_trace, trace_options
from nbddp.magics.views import SHOWN_STEPS, ViewChoice
from nbddp.record.cell import CellRequest
from nbddp.record.log_reader import log_name, tail
from nbddp.train.kinds import KINDS

HELP = ("--help", "-h")  # as the first word: a script has options of its own
KEPT = (
    "nbddp: these are the ranks of the last script; `%ddp debug` looks into them until the next "
    "cell or script"
)


@magics_class
class LineMagics(Magics):
    """The line magic, a method for each of its commands."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk.shell)
        self._desk = desk

    @line_magic
    def ddp(self, line: str) -> Any:
        """Steer the worker group: `%ddp COMMAND`; `%ddp help` lists the commands."""
        before, command = self._desk.group.life, ""
        try:
            command, _, rest = line.strip().partition(" ")
            if command in HELP or rest.strip().partition(" ")[0] in HELP:
                return self.help("" if command in HELP else command)
            return self._act(command)(rest)
        except RequestError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            magic = f"%ddp {command}".rstrip()
            raise interrupted(magic, before, self._desk.group.life) from None

    def _act(self, command: str) -> Callable[[str], Any]:
        act = self.commands().get(command or "status")
        if act is None:
            allowed = ", ".join(self.commands())
            raise UsageError(f"there is no `%ddp {command}`; the commands are: {allowed}")
        return act

    def commands(self) -> dict[str, Callable[[str], Any]]:
        """The commands, in the order that help shows them."""
        return {
            "status": self.status,
            "start": self.start,
            "restart": self.restart,
            "run": self.run,
            "export": self.export,
            "stop": self.stop,
            "interrupt": self.interrupt,
            "kill": self.kill,
            "heal": self.heal,
            "nodes": self.nodes,
            "fault": self.fault,
            "debug": self.debug,
            "check": self.check,
            "timeline": self.timeline,
            "trace": self.trace,
            "logs": self.logs,
            "show": self.show,
            "runs": self.runs,
            "compare": self.compare,
            "publish": self.publish,
            "push": self.push,
            "pull": self.pull,
            "wait": self.wait,
            "auto": self.auto,
            "view": self.view,
            "help": self.help,
        }

    def parsers(self) -> dict[str, ArgumentParser]:
        """The parser of every command, for Tab."""
        return {name: parser_of(act) for name, act in self.commands().items()}

    @magic_arguments("ddp status")
    def status(self, line: str) -> None:
        """Show what the group and every rank are doing."""
        parse(self.status, line)
        scripts = self._desk.group.scripts
        self._desk.views.show_status(scripts.active)
        if scripts.are_kept:
            self._desk.views.say(KEPT)

    @magic_arguments("ddp start")
    @start_options
    def start(self, line: str) -> None:
        """Start the ranks, so that the next cell need not."""
        args = parse(self.start, line)
        desk = self._desk
        spec = replace(desk.asked_spec(args), joins_group=True)
        desk.make_ready(spec, fresh=False)
        desk.views.show_status(desk.group.session)

    @magic_arguments("ddp restart")
    @start_options
    @argument("--replay", action="store_true", help="then run the cells again that had gone well")
    def restart(self, line: str) -> None:
        """Stop all ranks, even in a running cell, and start new ones; their names are lost."""
        args = parse(self.restart, line)
        desk = self._desk
        spec, begins_run = desk.asked_spec(args), args.name is not None
        if args.replay:
            desk.restart_and_replay(spec, begins_run=begins_run)
        else:
            desk.make_ready(spec, fresh=True, begins_run=begins_run)
        desk.views.show_status(desk.group.session)

    @magic_arguments("ddp run")
    @start_options
    @run_options
    @argument("-m", "--module", action="store_true", help="the script is a module's name")
    @argument(
        "--keep", action="store_true", help="run it in the ranks of the cells, which find its names"
    )
    @argument("script", help="a Python file, as for torchrun")
    @argument("script_args", nargs=REMAINDER, help="all that follows is the script's")
    def run(self, line: str) -> None:
        """Run a script as torchrun would: panel, interrupt, and who failed where."""
        args, desk = parse(self.run, line), self._desk
        desk.check_ranks(args)
        script = find_script(args.script, args.script_args, is_module=args.module, keeps=args.keep)
        request = CellRequest(
            source=f"%ddp run {line.strip()}",
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

    @magic_arguments("ddp export")
    @argument("file", help="the script's name, such as train.py")
    @argument("--slurm", action="store_true", help="write an sbatch file beside it")
    @argument("--force", action="store_true", help="replace files that are there")
    def export(self, line: str) -> None:
        """Write the cells that went well since the ranks started as a script for torchrun."""
        self._desk.views.say(export(self._desk, parse(self.export, line)))

    @magic_arguments("ddp stop")
    def stop(self, line: str) -> None:
        """End all ranks."""
        parse(self.stop, line)
        self._desk.group.stop()

    @magic_arguments("ddp interrupt")
    def interrupt(self, line: str) -> None:
        """End the cell that runs (started with --no-wait); every name is kept."""
        parse(self.interrupt, line)
        if not self._desk.group.scripts.active.life.state.is_at_work:
            raise RequestError("no cell is running")
        self._desk.group.interrupt()

    @magic_arguments("ddp kill")
    @argument("rank", type=rank_number, help="the rank to kill, with SIGKILL")
    def kill(self, line: str) -> None:
        """Kill one rank, to see what happens."""
        self._desk.group.kill(parse(self.kill, line).rank)

    @magic_arguments("ddp heal")
    @argument(
        "--rank", type=numbers, metavar="R", help="whom to replace (default: all that are gone)"
    )
    @argument(
        "--from", dest="donor", type=rank_number, metavar="R", help="whose names the new one gets"
    )
    def heal(self, line: str) -> None:
        """Put new ranks in the places of those that died; the others keep all they have."""
        args = parse(self.heal, line)
        heal(self._desk, args)

    @magic_arguments("ddp nodes")
    @argument("--nnodes", type=node_range, metavar="N", help="how many, or MIN:MAX (default: 1)")
    @argument("--nproc-per-node", type=positive_int, metavar="N", help="ranks on each (default: 1)")
    @argument(
        "--host",
        metavar="ADDRESS",
        help="the address of this machine at which they come in (default: 127.0.0.1)",
    )
    @argument("--port", type=positive_int, metavar="N", help="the port there (default: any)")
    @argument(
        "--local", type=positive_int, metavar="N", help="start N agents here, to learn and to test"
    )
    @argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="wait for the nodes that a cell needs, and for those of --local; fail after that long",
    )
    @argument("--slurm", action="store_true", help="write an sbatch file that starts them")
    @argument("--leave", metavar="NODE", help="send this one home")
    @argument(
        "--orphan-timeout",
        type=seconds,
        metavar="SECONDS",
        help="how long nodes and ranks wait for a notebook that is gone (default: 60)",
    )
    @argument(
        "--rejoin",
        nargs="?",
        const="",
        metavar="JOIN",
        help="take back the ranks of a notebook that is gone: the last one, or this join file's",
    )
    def nodes(self, line: str) -> None:
        """Have ranks on other machines: open a door for them, and see who has come in."""
        if said := steer_nodes(self._desk, parse(self.nodes, line)):
            self._desk.views.say(f"nbddp: {said}")

    @magic_arguments("ddp fault")
    @argument("kind", help=", ".join(KINDS))
    @argument("--rank", type=rank_number, required=True, metavar="R", help="whom it shall strike")
    @argument("--step", type=count, required=True, metavar="N", help="at which step, once")
    @argument("--factor", type=float, default=2.0, help="how much slower (kind slow; default: 2)")
    def fault(self, line: str) -> None:
        """Let something go wrong on purpose, at a step that nbddp.log or the loader reports."""
        args = parse(self.fault, line)
        self._desk.arm(args.kind, rank=args.rank, step=args.step, factor=args.factor)

    @magic_arguments("ddp debug")
    @argument("--rank", type=rank_number, metavar="R", help="where (default: the first cause)")
    @argument(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="COMMAND",
        help="what to type first, as of python -m pdb; may be given again",
    )
    def debug(self, line: str) -> None:
        """Look into the last failure: its frames and their names are still there."""
        args = parse(self.debug, line)
        self._desk.debug(args.rank, args.command)

    @magic_arguments("ddp check")
    @argument("script", nargs="?", metavar="FILE", help="a script (default: the last cell)")
    @argument("--strict", action="store_true", help="what is found is an error")
    @argument("--explain", nargs="?", const="", metavar="ND101", help="a rule, or the checklist")
    def check(self, line: str) -> None:
        """Look for mistakes in the last cell, or in a script: before they hang, or go unnoticed."""
        check(self._desk, parse(self.check, line))

    @magic_arguments("ddp timeline")
    @argument(
        "--last",
        type=positive_int,
        default=SHOWN_STEPS,
        metavar="N",
        help=f"the last N steps, or collectives (default: {SHOWN_STEPS})",
    )
    def timeline(self, line: str) -> None:
        """Show who waited for whom in the last cell: ranks as rows, time across."""
        args = parse(self.timeline, line)
        self._desk.views.show_timeline(self._desk.group.timeline(last=args.last))

    @magic_arguments("ddp trace")
    @trace_options
    def trace(self, line: str) -> None:
        """Have torch's profiler trace these steps of the next cell, or script, on all ranks."""
        self._desk.views.say(f"nbddp: {steer_trace(self._desk, parse(self.trace, line))}")

    @magic_arguments("ddp logs")
    @argument("rank", type=rank_number, help="whose log")
    @argument("-n", "--lines", type=positive_int, default=50, help="how many lines (default: 50)")
    def logs(self, line: str) -> None:
        """Show the end of what a rank wrote, C code and child processes included."""
        args = parse(self.logs, line)
        folder, name = self._desk.last_run, log_name(args.rank)
        if folder is None or (folder.exists() and not (folder / name).exists()):
            raise RequestError(f"there is no log of rank {args.rank}")
        path = folder / name
        try:
            said = tail(path, args.lines)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None
        self._desk.views.say(said)

    @magic_arguments("ddp show")
    @argument("run", nargs="?", help="a name, a part of one, or a path (default: last)")
    @argument("--cell", type=positive_int, metavar="N", help="one of its cells")
    @argument("--metrics", metavar="NAME,...", help="the charts of these: names, or val/* and such")
    def show(self, line: str) -> None:
        """Draw a run again from its folder: cells, charts, failures, the last lines of ranks."""
        show_run(self._desk, parse(self.show, line))

    @magic_arguments("ddp runs")
    @runs_options
    def runs(self, line: str) -> None:
        """List the runs of this folder, the newest first; take some away, or note one."""
        steer_runs(self._desk, parse(self.runs, line))

    @magic_arguments("ddp compare")
    @compare_options
    def compare(self, line: str) -> None:
        """Put runs beside each other: in what they differ, their curves, what they came to."""
        compare_runs(self._desk, parse(self.compare, line))

    @magic_arguments("ddp publish")
    @publish_options
    def publish(self, line: str) -> None:
        """Send a run to trackio, W&B, TensorBoard or MLflow: one run there for all ranks."""
        publish_run(self._desk, parse(self.publish, line))

    @magic_arguments("ddp push")
    @argument("names", nargs="+", help="names of the notebook")
    @argument("--ranks", type=numbers, metavar="0,2", help="to these ranks only")
    def push(self, line: str) -> None:
        """Send values of the notebook to the ranks."""
        args = parse(self.push, line)
        names = [name for word in args.names for name in word.split(",") if name]
        self._desk.group.push(self._desk.values(names or args.names), ranks=args.ranks)

    @magic_arguments("ddp pull")
    @argument("expression", help="a name, or any expression")
    @argument("--rank", type=rank_number, metavar="R", help="of one rank (default: a list)")
    def pull(self, line: str) -> Any:
        """Fetch a value from the ranks: returned, and kept under the same name here."""
        option = re.search(r"(?:^|\s)--rank[\s=]+(\S+)", line)
        expression = unquoted(line.replace(option.group(), " ", 1) if option else line)
        args = parse(self.pull, f"x{option.group() if option else ''}")
        if not expression:
            raise RequestError("pull needs a name: `%ddp pull losses --rank 0`")
        try:
            ast.parse(expression, mode="eval")
        except SyntaxError as error:
            raise RequestError(
                f"`{expression}` is not a single expression ({error.msg}); pull takes one "
                "expression, for example `%ddp pull losses` or `%ddp pull losses, rank`"
            ) from error
        value = self._desk.group.pull(expression, rank=args.rank)
        self._desk.note(PulledValue(expression, args.rank))
        if expression.isidentifier():
            self._desk.shell.user_ns[expression] = value
        return None if line.rstrip().endswith(";") else value  # as IPython does for a statement

    @magic_arguments("ddp wait")
    def wait(self, line: str) -> None:
        """Wait for the cell that was started with --no-wait; fails if it failed."""
        parse(self.wait, line)
        self._desk.wait()

    @magic_arguments("ddp auto")
    @argument("switch", choices=("on", "off"), help="on: other cells go to the ranks too")
    def auto(self, line: str) -> None:
        """Send every later cell to the ranks; %%local keeps one in the kernel."""
        self._desk.auto.is_on = parse(self.auto, line).switch == "on"

    @magic_arguments("ddp view")
    @argument(
        "choice",
        choices=[each.value for each in ViewChoice],
        help="auto: a panel on a page that draws widgets, else text",
    )
    def view(self, line: str) -> None:
        """Choose how later cells are shown: as a live panel, or as plain text."""
        self._desk.views.choice = ViewChoice(parse(self.view, line).choice)

    @magic_arguments("ddp help")
    @argument("command", nargs="?", help="more about this command")
    def help(self, line: str) -> None:
        """Show the commands, or more about one."""
        command = parse(self.help, line).command
        if command is None:
            self._desk.views.say(overview(self.commands()))
        elif command in self.commands():
            self._desk.views.say(usage(parser_of(self.commands()[command])))
        else:
            raise RequestError(f"there is no `%ddp {command}`; `%ddp help` lists the commands")
