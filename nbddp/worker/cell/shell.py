"""The IPython shell of a rank. It runs cells and scripts, and returns their results."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import mmap
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from IPython.core import interactiveshell
from IPython.core.autocall import ExitAutocall
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type, default
from traitlets.config import Config

from nbddp.import_hooks import change_when_imported
from nbddp.wire.messages import Display, RunCell
from nbddp.wire.rank_start import Script
from nbddp.worker.cell import run_script
from nbddp.worker.cell.compiler import CellCompiler
from nbddp.worker.cell.debugger import RankPdb, post_mortem
from nbddp.worker.cell.display import RankDisplayHook, RankDisplayPublisher
from nbddp.worker.cell.signal_handlers import CellSignalHandlers
from nbddp.worker.cell.warning_lines import name_users_lines, remove_filters_of_tools
from nbddp.worker.tracebacks import error_text, format_traceback

# matplotlib's backends without windows
_IMAGE_BACKENDS = ("inline", "agg", "svg", "pdf", "ps", "cairo")


class CellExit(ExitAutocall):
    """``exit`` and ``quit``: end the cell, as ``sys.exit()`` does, but not the rank."""

    __call__ = staticmethod(sys.exit)  # keeps nbddp out of the traceback


# Small objects that fill RLIMIT_AS leave nothing to report the cell's MemoryError. The memory is
# reserved, but never touched, so it costs none.
RESERVE_BYTES = 32 << 20


class RankShell(InteractiveShell):
    """The shell that runs the cells of a rank, one for all cells."""

    compiler_class = CellCompiler
    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)
    compile: CellCompiler
    displayhook: RankDisplayHook
    display_pub: RankDisplayPublisher
    debugger_cls = RankPdb  # for ``%debug STATEMENT`` and ipdb
    _is_script = False  # whether it runs, or ran last, a script
    is_rank = True  # `%load_ext nbddp` refuses to load in a rank
    signal_handlers_active: Callable[[], AbstractContextManager[None]] = nullcontext
    _loop: asyncio.AbstractEventLoop | None = None  # one for all cells: their tasks continue
    _task: asyncio.Task[Any] | None = None
    _reserve: mmap.mmap | None = None  # address space for the end of a cell without memory

    def __init__(self, **options: Any) -> None:
        self._nested_errors: list[BaseException] = []
        self._script_files = run_script.UserFiles()
        super().__init__(**options)
        self.loop_runner = self._run_coroutine

    def init_magics(self) -> None:
        """Register IPython's magics. Register errors in place of nbddp's magics."""
        super().init_magics()
        for kind, name in itertools.product(("line", "cell"), ("ddp", "local", "%ddp", "%local")):
            self.magics_manager.register_function(_refuse_nbddp_magic, kind, name)
        self.magics_manager.register_function(_refuse_pdb, "line", "pdb")

    # ---- cells

    def run(
        self, command: RunCell, prepare: Callable[[RunCell], object] = lambda _: None
    ) -> ExecutionResult:
        """Run a cell, and return its result. The result holds errors of the cell.

        ``prepare`` is called before. An interrupt of it is one of the cell.
        """
        # multiprocessing needs __spec__, which `%reset -f` removes
        self.user_module.__dict__.setdefault("__spec__", None)
        self.execution_count = command.execution_count
        self.compile.begin_cell(command.source, command.first_line, command.execution_count)
        self.display_pub.begin_cell(command.cell)
        self.displayhook.bundle = {}
        self._is_script = bool(command.script)
        self._nested_errors.clear()
        with suppress(OSError):  # no memory
            self._reserve = self._reserve or mmap.mmap(-1, RESERVE_BYTES)
        try:
            prepare(command)
        except KeyboardInterrupt as error:
            result = ExecutionResult(None)
            result.error_before_exec = error
            return result
        if command.script:
            result = self._run_script(command.script)
        else:
            result = super().run_cell(command.source, store_history=True)
        if result.success and self._nested_errors:
            result.error_in_exec = self._nested_errors[0]
        self._print_nested_errors(result)
        self._nested_errors.clear()  # their frames hold the cell's memory
        return result

    def _print_nested_errors(self, result: ExecutionResult) -> None:
        error = result.error_before_exec or result.error_in_exec
        for nested in self._nested_errors:
            if nested is not error:
                print(self.format_error(nested))  # noqa: T201 - as IPython does

    def run_cell(self, raw_cell: str, *args: Any, **options: Any) -> ExecutionResult:
        """Run a cell within the cell, as ``%%capture`` does. If it fails, so does the outer cell.

        IPython would show the error and continue, which is easy to miss among several ranks.
        """
        outer = self.displayhook.exec_result
        result: ExecutionResult = super().run_cell(raw_cell, *args, **options)
        self.displayhook.exec_result = outer
        error = result.error_before_exec or result.error_in_exec
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt or an exit ends the outer cell
        if error is not None and sys._getframe(1).f_code.co_name != "safe_execfile_ipy":
            self._nested_errors.append(error)  # %run of a notebook raises its error instead
        return result

    def attach_to_rank(self, send: Callable[[Display], None]) -> None:
        """Make this the shell of a rank; ``send`` sends rich output to the controller."""
        self.display_pub.send = send
        self.signal_handlers_active = CellSignalHandlers().active
        name_users_lines(self.is_cell_file)
        remove_filters_of_tools()

    async def run_code(self, code_obj: Any, *more: Any, **options: Any) -> bool:
        """Run a part of a cell. An error raised by its signal handlers ends only the cell."""
        with self.signal_handlers_active():
            return bool(await super().run_code(code_obj, *more, **options))

    def is_cell_file(self, filename: str) -> bool:
        """Return whether a file name belongs to a cell, or to a user's file of a script."""
        return filename in self.compile.sources or bool(self._script_files.name(filename))

    def name_of_file(self, filename: str) -> str:
        """Return the name of a script's file, or ``cell [3]`` for an earlier cell; else ""."""
        return self._script_files.name(filename) or self.compile.name_of_cell(filename)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell with top-level ``await`` as a task that :meth:`cancel_task` can cancel."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None

    def cancel_task(self) -> bool:
        """Cancel the task of the cell, in a signal handler. Return False if there is none."""
        if self._task is None:
            return False
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        return True

    # ---- scripts

    def _run_script(self, script: Script) -> ExecutionResult:
        """Run the script of ``%ddp run``."""
        result = ExecutionResult(None)
        self.events.trigger("pre_execute")
        try:
            with self.signal_handlers_active():
                if script.keeps_names:
                    run_script.run_in_namespace(self.user_ns, script, self._script_files)
                else:
                    run_script.run(script, self._script_files)
        except BaseException as error:  # noqa: BLE001 - it ends the script, not the rank
            result.error_in_exec = error
        self.events.trigger("post_execute")  # shows figures
        return result

    # ---- tracebacks

    def format_error(self, error: BaseException, *, is_whole: bool = False) -> str:
        """Format the traceback of an error, in full for the log.

        As in Python, the exit of a script has none: argparse or sys.exit() has printed why.
        """
        if self._is_script and isinstance(error, SystemExit) and not is_whole:
            return ""
        has_colors = not is_whole and self.colors.lower() != "nocolor"
        return format_traceback(error, is_whole=is_whole, has_colors=has_colors)

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """Print a requested traceback. The report of a failed cell has its own.

        Raises:
            BaseException: the error, where IPython would show it and continue, as in %run.
        """
        # first, because the cell has filled all other memory
        if self._reserve and isinstance(sys.exc_info()[1], MemoryError):
            self._reserve.close()
            self._reserve = None
        caller, error = sys._getframe(1), sys.exc_info()[1]
        caller_module, function = caller.f_globals.get("__name__", ""), caller.f_code.co_name
        if caller_module == interactiveshell.__name__:
            is_exit = isinstance(error, SystemExit) and function == "run_code"
            if error is not None and (is_exit or function.startswith("safe_")):  # in %run
                raise error
            return
        is_magic = caller_module.startswith("IPython.core.magics") and function != "tb"
        if error is not None and is_magic:
            raise error
        try:
            error = self._get_exc_info(exc_tuple)[1]
        except ValueError:
            print("No traceback available to show.", file=sys.stderr)  # noqa: T201 - as IPython
            return
        print(self.format_error(error))  # noqa: T201 - as IPython does

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        """Print nothing: the failure of the cell shows the error."""

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        """Return an error without its traceback for IPython's history: do not format it twice."""
        return {"ename": type(exception).__name__, "evalue": error_text(exception), "traceback": []}

    # ---- features that a rank lacks: a terminal and windows

    @default("exiter")
    def _exiter_default(self) -> CellExit:
        return CellExit(self)

    def init_prompts(self) -> None:
        """Set no ``sys.ps1``: by it, code such as Lightning detects an interactive session."""

    def debugger(self, force: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        """Debug the last error, for ``%debug``."""
        post_mortem()

    def enable_gui(self, gui: str | None = None) -> None:
        """Start no event loop: a rank has no windows."""

    def enable_matplotlib(self, gui: str | None = None) -> Any:
        """Show figures as images, even if the user asks for a window."""
        if gui not in (None, "auto", *_IMAGE_BACKENDS):
            print(  # noqa: T201 - for the user
                f"nbddp: %matplotlib {gui}: a rank has no windows; figures are shown as images, as "
                "with %matplotlib inline"
            )
        chosen = super().enable_matplotlib(gui if gui in _IMAGE_BACKENDS else "inline")
        # its runner is for windows, and leaves figures turned off when a script fails
        self.magics_manager.registry["ExecutionMagics"].default_runner = None
        return chosen


def _refuse_nbddp_magic(*_: str) -> NoReturn:
    raise UsageError(
        "`%ddp`, `%%ddp` and `%%local` work only in the notebook, and this code runs on a rank. "
        "Move the command to a separate cell"
    )


def _refuse_pdb(_line: str) -> NoReturn:
    raise UsageError("%pdb does not work on a rank. After a failure, `%ddp debug` opens a debugger")


def make_shell() -> RankShell:
    """Create the shell of this process. The forkserver does so, and ranks inherit it."""
    config = Config()
    config.HistoryManager.enabled = False
    config.Completer.use_jedi = False  # takes a second to load
    shell: RankShell = RankShell.instance(config=config)
    # in a spawned rank it would delete all names before the rank has flushed their files
    atexit.unregister(shell.atexit_operations)
    change_when_imported("tqdm.notebook", _use_text_bars)
    return shell


def _use_text_bars(module: Any) -> None:
    """Replace the bars of ``tqdm.notebook`` by text: widgets of a rank cannot be shown."""
    from tqdm.std import tqdm

    class TextBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        """tqdm's text bar, with the options of the notebook bar."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:  # noqa: ARG002
            super().__init__(*args, **options)

    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = lambda *args, **options: TextBar(range(*args), **options)


def preload_shell(shell: RankShell) -> None:
    """Import the modules that the first cell, value and completion need."""
    for source in ("None", "0"):
        shell.run(RunCell(cell=0, source=source))
    with warnings.catch_warnings(action="ignore"):  # IPython 9's complete() is deprecated
        shell.complete(None, "pri", 3)
    shell.reset(new_session=True)
