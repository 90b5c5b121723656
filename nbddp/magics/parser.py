"""The commands of ``%ddp``, the options of ``%%ddp``, and their parser."""

from __future__ import annotations

import io
import re
import shlex
from argparse import REMAINDER, SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import product

from IPython.core.error import UsageError

from nbddp.archive.comparison import XAxis
from nbddp.archive.scaling import MIN_ROUNDS
from nbddp.charts.axes import AxisScale
from nbddp.magics.magic_parser import MagicParser
from nbddp.magics.presenter import SHOWN_STEPS, ViewChoice
from nbddp.magics.publishing import METAVAR, installed_target
from nbddp.publish.tracker import TRACKER_CLASSES
from nbddp.train.faults.kinds import MEANINGS as FAULTS
from nbddp.ui.report.run_list import SHOWN_RUNS
from nbddp.wire.group_spec import BACKENDS
from nbddp.wire.options.option_values import (
    count,
    gpus,
    name,
    names,
    node_range,
    numbers,
    numbers_or_all,
    picture_file,
    port_number,
    positive_int,
    seconds,
    step_range,
    swept,
    variable,
    whole_number,
    without_quotes,
    world_sizes,
)

_TRACKER = f"{', '.join(TRACKER_CLASSES)}; with a project or folder: wandb:digits"
MIN_SIMILARITY = 0.7  # of a misspelled word to the suggested one

_START = MagicParser()
add = _START.add
add("--nproc --nproc-per-node N", "ranks on this machine (default: as before, or 2)", positive_int)
add("--backend", "collectives: auto is nccl if every rank has a GPU, else gloo", choices=BACKENDS)
add("--gpus 0,1", "GPUs that the ranks may use: numbers, UUIDs or MIG devices", gpus)
add("--name NAME", "part of the name of the run's folder")
add("--timeout SECONDS", "a collective fails after this time (default: 1800)", seconds)
add("--env K=V", "environment variable for the ranks; may be repeated", variable, action="append")
add("--grace SECONDS", "after it, an ignored interrupt or stop is a kill (default: 5)", seconds)
add("--threads N", "threads per rank for torch's operators (default: cores / ranks)", positive_int)

_RUN = MagicParser()
add = _RUN.add
add("--ranks 0,2", "run it on these ranks only", numbers)
add("--fresh", "restart the ranks first, with empty namespaces")
add(
    "--max-restarts N",
    "after a failure, up to N times: restart the ranks and run it again; before a cell, replay "
    "the successful cells (default: 0)",
    count,
    default=0,
)
add(
    "--heal N",
    "after the death of a rank, up to N times and before any restart: replace the rank and run it "
    "again; in cells, the new rank gets the variables of a living one (default: 0)",
    count,
    default=0,
)
add(
    "--elastic",
    "when a node joins, restart with its ranks, replay the successful cells, and run "
    "this one again (see `%%ddp nodes`)",
)
add(
    "--break-ranks 0,2",
    "ranks that breakpoint() stops, or all (default: the first to reach one)",
    numbers_or_all,
)
add("--trace A:B", "trace these steps with torch's profiler (see `%%ddp trace`)", step_range)
add(
    "--publish TRACKER",
    f"send the run while it runs to {_TRACKER}; may be repeated",
    installed_target,
    action="append",
)
add("--no-trainer-metrics", "do not record what other people's trainers report")
add("--no-wait", "return at once; `%%ddp wait` waits")
add("--quiet", "show only the values of the last line")

CELL = MagicParser(
    prog="%%ddp",
    parents=[_START, _RUN],
    description="""Run the cell on every rank of the worker group.

The first such cell starts the ranks: processes that stay, each with its own IPython. Later
cells run on the same ranks and find the same variables. A cell can use `rank`, `local_rank`,
`world_size`, `device`, `torch`, `dist` (torch.distributed) and `nbddp`; the process group is
ready. `%ddp help` lists the commands that control the group.

Examples:

    %%ddp --nproc 4
    x = torch.ones(1, device=device) * rank
    dist.all_reduce(x)
    x

    %%ddp --ranks 0 --push config --out report

    %%ddp --sweep lr=0.1,0.01 --sweep batch=16,64

    %%ddp --scale 1,2,4""",
)
add = CELL.add
add("--push a,b", "first copy these variables from the notebook to the ranks", names)
add("--out NAME", "store the value of the last line of every rank as a list", name)
add("--no-init", "no process group: the cell calls init_process_group() itself")
add("--once", "leave this cell out of any replay")
add(
    "--shard-copies N",
    "every N steps, copy each rank's shards to the memory of the next rank; a heal goes back to "
    "the last copy if no other rank has the shards of the dead one (default: 0, no copies)",
    count,
    default=0,
)
add("--timeline", "then show which rank waited for which")
add(
    "--sweep lr=0.1,0.01",
    "run the cell once for each of these values of a name, on fresh ranks, each as a run "
    "of its own; if repeated, once for each combination; quote values that contain spaces",
    swept,
    action="append",
)
add("--repeat N", "run each with the seeds 0 to N-1, which are `seed` in the cell", positive_int)
add(
    "--scale 1,2,4",
    "run the cell on each of these numbers of ranks and compare the speed",
    world_sizes,
)
add("--weak", "with --scale: every rank has the same work")
add(
    "--rounds N",
    f"with --scale: runs for each number of ranks, at least {MIN_ROUNDS} (default: {MIN_ROUNDS})",
    whole_number(MIN_ROUNDS),
)
add("--start-over", "repeat runs that an earlier sweep has finished")
add("--auto", SUPPRESS)  # `%ddp auto on` writes it

LINE = MagicParser(
    prog="%ddp",
    description="Control the ranks that run the %%ddp cells.",
    epilog="`%ddp help COMMAND` shows its options, `%%ddp?` those of a cell.",
)
_COMMANDS = LINE.add_subparsers(title="commands", metavar="COMMAND ARGUMENTS")


def _command(example: str, what: str, *parents: MagicParser) -> Callable[..., None]:
    """Add a command; return a function that adds an option to it.

    Args:
        example: the command with its required arguments.
        what: a sentence that says what the command does.
        parents: parsers whose options the command has too.
    """
    name, _, arguments = example.partition(" ")
    parser: MagicParser = _COMMANDS.add_parser(
        name,
        help=what.replace("%", "%%"),
        description=what,
        parents=[*parents],
        allow_abbrev=name != "run",  # else `run s.py --n 4` is ambiguous before Python 3.12
        epilog=f"for example `%ddp {example}`" if arguments else None,
    )
    return parser.add


# ---- the group

_command("status", "Show what the group and every rank are doing.")
_command("start", "Start the ranks before the first cell does.", _START)

add = _command(
    "restart", "Replace all ranks, even in a running cell, by new ones without variables.", _START
)
add("--replay", "then run the successful cells again")

add = _command(
    "run train.py --lr 0.1",
    "Run a script as torchrun does, with a panel and interrupts.",
    _START,
    _RUN,
)
add("-m --module", "the script is the name of a module")
add("--keep", "run the script on the ranks of the cells; its variables stay there")
add("script", "a Python file, as for torchrun")
add("script_args", "arguments of the script", nargs=REMAINDER)

add = _command(
    "export train.py", "Write the successful cells since the start of the ranks as a script."
)
add("file", "name of the script, such as train.py")
add("--slurm", "also write an sbatch file")
add("--force", "replace existing files")
_command("stop", "End all ranks.")
_command("interrupt", "Interrupt the cell that runs (started with --no-wait); variables are kept.")

add = _command("kill 1", "Kill one rank, to see what happens.")
add("rank", "the rank to kill, with SIGKILL", count)

add = _command("heal", "Replace the ranks that died; the other ranks keep all their variables.")
add("--rank R", "ranks to replace (default: all that died)", numbers)
add("--from R", "copy the variables of this rank", count, dest="donor")
add("--rerun", "then run the cells again, on all ranks, that make trainers")

add = _command("nodes", "Run ranks on other machines: listen for nodes, and list them.")
add("--nnodes N", "how many, or MIN:MAX (default: 1)", node_range)
add("--nproc-per-node N", "ranks on each (default: 1)", positive_int)
add("--host ADDRESS", "address of this machine at which nodes join (default: 127.0.0.1)")
add("--port N", "the port there (default: any)", port_number)
add("--local N", "start N nodes on this machine, as a test", positive_int)
add("--wait SECONDS", "wait for the nodes that a cell or --local needs, or fail", seconds)
add("--slurm", "write an sbatch file that starts the nodes")
add("--leave NODE", "remove this node")
add("--orphan-timeout SECONDS", "how long nodes wait for a lost notebook (default: 60)", seconds)
add(
    "--rejoin JOIN",
    "take back the ranks of the last lost notebook, or of this join file",
    nargs="?",
    const="",
)


# ---- faults, failures and slow cells

add = _command(
    "fault kill --rank 1 --step 30",
    "Cause a failure at a step that nbddp.log or the loader reports.",
)
meanings = ", ".join(f"{kind} ({meaning})" for kind, meaning in FAULTS.items())
add("kind", f"{meanings}; off (disarms all faults)", choices=(*FAULTS, "off"), metavar="KIND")
add("--rank R", "the rank on which it happens", count)
add("--step N", "the step at which it happens, once", count)
add("--factor FACTOR", "how much slower (kind slow; default: 2)", float, default=2.0)

add = _command("debug", "Open a debugger in the frames of the last failure.")
add("--rank R", "on this rank (default: the first cause)", count)
add(
    "-c --command COMMAND",
    "debugger command to run first; may be repeated",
    action="append",
    default=[],
)

add = _command("check", "Look for mistakes in the last cell, or in a script.")
add("script", "a script (default: the last cell)", nargs="?", metavar="FILE")
add("--strict", "raise an error if there are findings")
add("--explain ND101", "show a rule, or the checklist", nargs="?", const="")

add = _command("timeline", "Show which rank waited for which in the last cell, along the time.")
add(
    "--last N",
    f"the last N steps, or collectives (default: {SHOWN_STEPS})",
    positive_int,
    default=SHOWN_STEPS,
)

add = _command("trace", "Trace steps of the next cell or script with torch's profiler.")
add("--steps A:B", "first and last step, or a single step", step_range)
add("--memory", "with torch's memory events")
add("--off", "cancel the trace")

add = _command("logs 1", "Show the last lines of a rank, also those of C code and child processes.")
add("rank", "the rank whose log is shown", count)
add("-n --lines LINES", "how many lines (default: 50)", positive_int, default=50)


# ---- runs on disk

_RUN_NAME = "a name, a part of one, or a path (default: the run of this notebook, else the newest)"

_SCALE = "y axis (default: auto, log for values of many magnitudes)"
_SCALES = [each.value for each in AxisScale]

add = _command("show", "Show a run from its folder: cells, charts, failures, last lines.")
add("run", _RUN_NAME, nargs="?")
add("--cell N", "one of its cells", positive_int)
add("--metrics NAME,...", "the charts of these: names, or patterns like val/*")
add("--scale", _SCALE, choices=_SCALES, default="auto")

add = _command("runs", "List the runs of this folder, newest first; remove some, or write a note.")
add("run", "lr=0.1, loss<0.5, a part of a name; rm NAME; note NAME", nargs="*", metavar="WORD")
add("--sort NAME", "by a setting, a metric or a column", default="")
add("--down", "from the highest to the lowest")
add("-n --number NUMBER", f"how many (default: {SHOWN_RUNS})", positive_int, default=SHOWN_RUNS)
add("--off", "with note: remove it")

add = _command("compare first second", "Compare runs: their settings, curves and last values.")
add("run", "names, parts of names, or paths; 2 to 8", nargs="+", metavar="RUN")
add("--metrics NAME,...", "only these, or patterns like val/*", default="")
add(
    "--over",
    "x axis of the curves (default: step)",
    choices=[each.value for each in XAxis],
    default="step",
)
add("--smooth", "smooth lines in front of the faint raw ones")
add("--scale", _SCALE, choices=_SCALES, default="auto")
add("--save FILE", "save the charts as .pdf, .png or .svg", picture_file)

add = _command("publish wandb:digits", "Send a run to a tracker: one run there for all ranks.")
add("tracker", _TRACKER, installed_target, metavar=METAVAR)
add("run", _RUN_NAME, nargs="?", metavar="RUN")
add("--again", "even if it is there already: as another run")


# ---- the notebook

add = _command("push model config", "Copy variables of the notebook to the ranks.")
add("names", "variables of the notebook", nargs="+")
add("--ranks 0,2", "to these ranks only", numbers)

add = _command(
    "pull losses --rank 0", "Fetch a value from the ranks; a name is also set in the notebook."
)
add("expression", "a name, or any expression")
add("--rank R", "of one rank (default: a list of all ranks)", count)
_command("wait", "Wait for the running cell, also one with --no-wait; raise its failure.")

add = _command("auto on", "Send every later cell to the ranks; %%local keeps one in the kernel.")
add("switch", "on: cells without %%ddp run on the ranks, too", choices=("on", "off"))

add = _command("view text", "Show later cells as a live panel or as plain text.")
add(
    "choice",
    "auto: a panel on a page that draws widgets, else text",
    choices=[each.value for each in ViewChoice],
)

add = _command("help", "Show the commands, or more about one.")
add("command", "show the options of this command", nargs="?")


COMMANDS: dict[str, MagicParser] = _COMMANDS.choices

# an option needs one of these; below, options that cannot be combined
_REQUIRED = {
    "start_over": ("sweep", "repeat"),
    "weak": ("scale",),
    "rounds": ("scale",),
    "memory": ("steps",),
}
_TRIALS = ("sweep", "repeat", "scale")
_CONFLICTS = (
    (("out",), ("no_wait",), "fetch the value with `%ddp pull` later"),
    (("timeline",), ("no_wait",), "use `%ddp timeline` later"),
    (_TRIALS, ("no_wait",), "it returns when all runs are done; the stop button ends them"),
    (_TRIALS, ("out",), "`nbddp.log` records numbers of each run, `nbddp.runs()` returns them"),
    (_TRIALS, ("timeline", "trace"), "run the cell once for that"),
    (("scale",), ("sweep", "repeat"), "run one after the other"),
    (("scale",), ("nproc", "ranks", "elastic"), "--scale sets the numbers of ranks"),
    (("off",), ("steps", "memory"), "--off cancels the trace"),
)


def command_parser(name: str) -> MagicParser:
    """Return the parser of a command.

    Raises:
        UsageError: the command does not exist; the message suggests one.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    if flag := _cell_option(name):
        meant = f"`{flag}` is an option of a cell: `%%ddp {flag}`; `%ddp help {name}` explains it"
    elif close := get_close_matches(name, COMMANDS, n=1, cutoff=MIN_SIMILARITY):
        meant = f"did you mean `%ddp {close[0]}`?"
    else:
        meant = f"the commands are: {', '.join(COMMANDS)}"
    raise UsageError(f"there is no `%ddp {name}`; {meant}")


def help_text(name: str | None) -> str:
    """Return the help of a command or of a cell option. Without a name, list all commands.

    Raises:
        UsageError: the command does not exist.
    """
    flag = _cell_option(name or "")
    if name is None or name in COMMANDS or not flag:
        return (LINE if name is None else command_parser(name)).format_help()
    formatter = CELL._get_formatter()
    formatter.start_section("an option of %%ddp")
    formatter.add_arguments([each for each in CELL._actions if flag in each.option_strings])
    formatter.end_section()
    return formatter.format_help()


def _cell_option(name: str) -> str:
    flag = f"--{name.lstrip('-')}"
    return flag if flag in CELL.options() else ""


def parse_line(parser: MagicParser, line: str) -> Namespace:
    """Parse the line of a command, or of ``%%ddp``.

    Raises:
        UsageError: the line is wrong; the message says in one line what to write instead.
    """
    if parser is COMMANDS["pull"]:
        return _parse_pull(parser, _without_comment(line, escaped_quotes="'\""))
    try:
        words = shlex.split(_without_comment(line, escaped_quotes='"'))
    except ValueError as error:
        raise UsageError(
            f"{error} in {line!r}; put text that contains a quotation mark into quotation marks of "
            'the other kind: "it\'s the best"'
        ) from None
    args = _parse_words(parser, words)
    _check_combinations(args)
    return args


def _without_comment(line: str, *, escaped_quotes: str) -> str:
    """Cut the line at the first unquoted word ``#``; ``a#1`` and ``#1`` are no comments.

    Args:
        line: the line of a command.
        escaped_quotes: inside these quotation marks a backslash escapes: ``"`` in a shell, both in
            Python.
    """
    text = io.StringIO(line)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escapedquotes = True, "", escaped_quotes
    start = 0
    with suppress(ValueError):  # an open quotation mark: shlex.split reports it
        while lexer.get_token() is not None:
            end = text.tell()
            if line[start:end].strip() == "#":
                return line[:start]
            start = end
    return line


def _check_combinations(args: Namespace) -> None:
    given = {name for name, value in vars(args).items() if value}
    for option, needed in _REQUIRED.items():
        if option in given and not given & {*needed}:
            raise UsageError(f"{_flag(option)} needs {' or '.join(map(_flag, needed))}")
    for some, others, instead in _CONFLICTS:
        for one, other in product(some, others):
            if {one, other} <= given:
                raise UsageError(f"{_flag(one)} and {_flag(other)} cannot be combined: {instead}")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _parse_pull(parser: MagicParser, line: str) -> Namespace:
    """Parse the line of ``%ddp pull``, and leave quotes and spaces of the expression to Python."""
    option = re.search(r"(?:^|\s)--rank[\s=]+(\S+)", line)
    expression = without_quotes(line.replace(option.group(), " ", 1) if option else line)
    placeholder = ["x"] if expression else []
    args = _parse_words(parser, [*placeholder, *(("--rank", option[1]) if option else ())])
    args.expression = expression
    return args


def _parse_words(parser: MagicParser, words: Sequence[str]) -> Namespace:
    if any(each.nargs == REMAINDER for each in parser._actions):
        args, unknown = parser.parse_known_args(words)
    else:  # also accepts an optional argument after an option
        args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        options = parser.options()
        close = get_close_matches(unknown[0].partition("=")[0], options, n=1, cutoff=MIN_SIMILARITY)
        known = f"did you mean {close[0]}?" if close else f"the options are: {', '.join(options)}"
        quote = "" if unknown[0].startswith("-") else "put a value with spaces into quotes; "
        hint = f"{quote}{known}" if options else "the command has no options"
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return args
