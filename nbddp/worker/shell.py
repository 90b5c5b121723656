"""A rank's IPython shell: runs a cell and tells what came of it."""

from __future__ import annotations

import asyncio
import itertools
import runpy
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import IPython
from IPython.core import interactiveshell
from IPython.core.autocall import ExitAutocall
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type, default
from traitlets.config import Config

from nbddp.wire.messages import Display, RunCell
from nbddp.wire.script import Script
from nbddp.worker import commands, scripts
from nbddp.worker.backend_errors import is_backends
from nbddp.worker.cell.compiler import CellCompiler
from nbddp.worker.debugger import RankPdb, forget, post_mortem, rank_pdb, steps
from nbddp.worker.displays import MailingPublisher, ResultHook
from nbddp.worker.failure import hide_end, needs_pythons_format, pythons_format
from nbddp.worker.folding import folded
from nbddp.worker.handlers import CellHandlers
from nbddp.worker.headline import text_of
from nbddp.worker.plain_values import PlainValues
from nbddp.worker.textbars import make_bars_text
from nbddp.worker.tracebacks import make_quick
from nbddp.worker.warning_places import name_users_lines
from nbddp.worker.watch.profiler import CellProfiler, profiled

_MAGICS = "IPython.core.magics"
_PICTURES = ("inline", "agg", "svg", "pdf", "ps", "cairo")  # matplotlib's backends without windows


class CellExit(ExitAutocall):
    """``exit`` and ``quit``: they end the cell as ``sys.exit()`` does, and the rank lives on."""

    __call__ = staticmethod(sys.exit)  # no line of ours in a traceback


class RankShell(InteractiveShell):
    """The shell that cells run in; one per rank, kept from cell to cell."""

    compiler_class = CellCompiler
    displayhook_class = Type(ResultHook)
    display_pub_class = Type(MailingPublisher)
    compile: CellCompiler
    displayhook: ResultHook
    display_pub: MailingPublisher
    shown_traceback: str = ""
    is_rank = True  # for `%load_ext nbddp`, which belongs into the notebook
    is_interrupted: Callable[[], bool] = staticmethod(lambda: False)
    keep: Callable[[str], None] = staticmethod(lambda _text: None)
    profiler: CellProfiler | None = None  # of the last cell, if some of its steps were to be traced
    handlers_acting: Callable[[], AbstractContextManager[None]] = nullcontext
    _loop: asyncio.AbstractEventLoop | None = None  # one for all cells: what they began goes on
    _awaited: asyncio.Task[Any] | None = None

    def __init__(self, **options: Any) -> None:
        self._kept: list[tuple[BaseException, str]] = []
        self._swallowed: list[BaseException] = []
        self._is_asked = False
        self._script_files = scripts.OwnFiles()
        self._debugger = rank_pdb(self.is_cell_file)
        super().__init__(**options)
        self.loop_runner = self._await
        self.plain_values = PlainValues(self.user_ns)

    def init_traceback_handlers(self, custom_exceptions: Any) -> None:
        """Make IPython's formatters, and have them spend little on long library files."""
        super().init_traceback_handlers(custom_exceptions)
        make_quick(self.InteractiveTB)

    def init_magics(self) -> None:
        """Register IPython's magics, and an explanation in place of nbddp's."""
        super().init_magics()
        for kind, name in itertools.product(("line", "cell"), ("ddp", "local", "%ddp", "%local")):
            self.magics_manager.register_function(_only_in_the_notebook, kind, name)

    # ---- cells

    def run(self, command: RunCell) -> ExecutionResult:
        """Run a cell; raises nothing that the cell raised."""
        # `%reset -f` takes it away, and multiprocessing cannot do without
        self.user_module.__dict__.setdefault("__spec__", None)
        self.execution_count = command.execution_count
        self.compile.begin_cell(command.source, command.first_line, command.execution_count)
        self.display_pub.cell = command.cell
        self.displayhook.bundle = {}
        self._kept.clear()
        self._swallowed.clear()
        with profiled(command) if command.trace else nullcontext() as self.profiler:
            result: ExecutionResult = (
                self._run_script(Script.read(command.script))
                if command.script
                else super().run_cell(command.source, store_history=True)
            )
            if result.success and self._swallowed:
                result.error_in_exec = self._swallowed[0]
        self._sort_tracebacks(result.error_before_exec or result.error_in_exec)
        return result

    def _sort_tracebacks(self, error: BaseException | None) -> None:
        """The traceback of what ended the cell belongs to its report, all others to its output."""
        self.shown_traceback = ""
        for each, text in self._kept:
            if each is error:
                self.shown_traceback = folded(text)
                if self.shown_traceback != text:
                    self.keep(text)
            else:
                print(text)  # noqa: T201 - as IPython does
        self._kept.clear()  # what it holds of the cell's frames
        self._swallowed.clear()

    def run_cell(self, raw_cell: str, *args: Any, **options: Any) -> ExecutionResult:
        """Run a cell within the cell, as ``%%capture`` does: if it fails, so does the cell.

        IPython shows the error and goes on, which nobody would notice in a group of ranks.
        """
        __tracebackhide__ = True
        outer = self.displayhook.exec_result
        result: ExecutionResult = super().run_cell(raw_cell, *args, **options)
        self.displayhook.exec_result = outer
        error = result.error_before_exec or result.error_in_exec
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt, or an exit: it ends all of the cell
        if error is not None:
            self._swallowed.append(error)
        return result

    def begin(self, mail: Callable[[Display], None], keep: Callable[[str], None]) -> None:
        """Be the shell of a rank, in its own process.

        Args:
            mail: is handed pictures.
            keep: is handed what the log has and nobody is shown: a traceback with all its frames.
        """
        self.display_pub.mail = mail
        self.keep = keep
        self.handlers_acting = CellHandlers().acting
        name_users_lines(self.is_cell_file)
        commands.take_over()

    async def run_code(self, code_obj: Any, *more: Any, **options: Any) -> bool:
        """Run a part of a cell; what a signal's handler raises ends it, and not the rank."""
        __tracebackhide__ = True
        with self.handlers_acting():
            return bool(await super().run_code(code_obj, *more, **options))

    def is_cell_file(self, filename: str) -> bool:
        """Whether a code object's file is one of the cells run here, or the user's in a script."""
        return filename in self.compile.files or filename in self._script_files

    def name_of_file(self, filename: str) -> str:
        """What a script's file is called, or another cell than the one that runs: ``cell [3]``."""
        return self._script_files.name(filename) or self.compile.name_of_cell(filename)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell with top-level ``await``, so that :meth:`cancel` ends it in good order."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        self._awaited = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(self._awaited)
        finally:
            self._awaited = None

    def cancel(self) -> bool:
        """Cancel what the cell awaits; false if it awaits nothing. For a signal's handler."""
        task = self._awaited
        if task is None:
            return False
        task.get_loop().call_soon_threadsafe(task.cancel)
        return True

    # ---- scripts

    def _run_script(self, script: Script) -> ExecutionResult:
        """Run what ``%ddp run`` names."""
        result = ExecutionResult(None)
        self.events.trigger("pre_execute")
        try:
            with self.handlers_acting():
                if script.keeps:
                    scripts.run_in(self.user_ns, script, self._script_files)
                else:
                    scripts.run(script, self._script_files)
        except BaseException as error:  # noqa: BLE001 - it ends the script, and not the rank
            result.error_in_exec = error
            self._show_end_of_script(error)
        self.events.trigger("post_execute")  # figures are shown
        return result

    def _show_end_of_script(self, error: BaseException) -> None:
        if not self._will_do_plain(error):
            self._show((type(error), error, self._from_cell(error)), tb_offset=0)

    def safe_execfile(
        self,
        fname: Any,
        *where: Any,
        exit_ignore: bool | None = None,
        raise_exceptions: bool = True,
        shell_futures: bool = False,
    ) -> None:
        """Run a script for ``%run``; what it raises ends the cell, where IPython only shows it.

        ``%run -p`` alone does not say ``exit_ignore``, and swallows an exit.
        """
        __tracebackhide__ = True
        del raise_exceptions
        Path(fname).expanduser().open("rb").close()  # where it cannot be read, IPython only warns
        try:
            super().safe_execfile(fname, *where, raise_exceptions=True, shell_futures=shell_futures)
        except SystemExit as error:
            if exit_ignore is None:
                self._swallowed.append(error)
            if not exit_ignore:
                raise

    def safe_execfile_ipy(
        self,
        fname: Any,
        shell_futures: bool = False,  # noqa: FBT001, FBT002
        raise_exceptions: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Run a notebook for ``%run``, which asks that errors be raised: then none is swallowed."""
        __tracebackhide__ = True
        before = len(self._swallowed)
        try:
            super().safe_execfile_ipy(fname, shell_futures, raise_exceptions)
        finally:
            if raise_exceptions:
                del self._swallowed[before:]

    def safe_run_module(self, mod_name: str, where: dict[str, Any]) -> None:
        """Run a module for ``%run -m``; what it raises ends the cell."""
        __tracebackhide__ = "__ipython_bottom__"  # IPython's word for: and all that is above
        try:
            where.update(runpy.run_module(str(mod_name), run_name="__main__", alter_sys=True))
        except SystemExit as error:
            if error.code:
                raise

    # ---- tracebacks

    def showtraceback(self, *args: Any, **options: Any) -> None:
        """Keep the traceback of what ends the cell; print one that somebody asked for."""
        __tracebackhide__ = True
        caller = sys._getframe(1)
        asker, error = caller.f_globals.get("__name__", ""), sys.exc_info()[1]
        if asker == interactiveshell.__name__:
            if isinstance(error, SystemExit):
                if caller.f_code.co_name == "run_code":
                    raise error  # else it goes on to warn that `exit` is the way to leave IPython
                self._show((type(error), error, self._from_cell(error)), tb_offset=0)
            elif not self._will_do_plain(error):
                self._show(*args, **options)
            return
        if error is not None and asker.startswith(_MAGICS) and caller.f_code.co_name != "tb":
            raise error  # a magic that would show it and go on, such as %time of older versions
        self._is_asked = True
        try:
            self._show(*args, **options)
        finally:
            self._is_asked = False

    def _will_do_plain(self, error: BaseException | None) -> bool:
        """Whether Python's own traceback is enough, and to format more would be for nobody.

        That is so for an interrupt, and for an error of the backend's own, which many ranks have at
        the same moment when one of them is gone.
        """
        return self.is_interrupted() or is_backends(error)

    def _show(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = self._get_exc_info(exc_tuple)[1] if _has_error(exc_tuple) else None
        if error is not None:
            hide_end(error)
        if error is not None and needs_pythons_format(error):
            text = pythons_format(error, is_cell_file=self.is_cell_file)
            self._showtraceback(type(error), error, [text])
        else:
            super().showtraceback(exc_tuple, *args, **options)

    def _from_cell(self, error: BaseException) -> TracebackType | None:
        for step in steps(error.__traceback__):
            if self.is_cell_file(step.tb_frame.f_code.co_filename):
                return step
        return error.__traceback__

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        if self._is_asked:
            super()._showtraceback(etype, evalue, stb)
        else:
            self._kept.append((evalue, self.InteractiveTB.stb2text(stb)))

    def show_usage_error(self, exc: BaseException) -> None:
        """Keep a magic's one-line complaint instead of printing it."""
        self._kept.append((exc, f"UsageError: {text_of(exc)}"))

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        """For IPython's history, which would format every traceback a second time."""
        return {"ename": type(exception).__name__, "evalue": text_of(exception), "traceback": []}

    def wear(self, theme: str) -> None:
        """Format tracebacks in one of IPython's colour themes."""
        self.colors = theme
        if IPython.version_info[0] < 9:  # there the trait alone does not reach them
            self.InteractiveTB.set_colors(theme)

    # ---- what a rank has not: somebody who types, and windows

    @default("exiter")
    def _exiter_default(self) -> CellExit:
        return CellExit(self)

    def ask_exit(self) -> NoReturn:
        """End the cell."""
        raise SystemExit

    def init_prompts(self) -> None:
        """Set no ``sys.ps1``, by which code such as Lightning's tells that somebody types here."""

    @property
    def call_pdb(self) -> bool:
        """Whether a debugger starts at every error: never, one failure has many ranks fail."""
        return False

    @call_pdb.setter
    def call_pdb(self, value: bool) -> None:
        if value:
            raise UsageError("%pdb stays off: after a failure, `%ddp debug` looks into it")

    @property
    def debugger_cls(self) -> type[RankPdb]:
        """What ``%debug STATEMENT`` and ipdb stop with."""
        return self._debugger

    def debugger(self, force: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        """Look into the last error, for ``%debug``."""
        __tracebackhide__ = True
        post_mortem(self.is_cell_file)

    def enable_gui(self, gui: str | None = None) -> None:
        """Start no event loop: there is no window that needs one."""

    def enable_matplotlib(self, gui: str | None = None) -> Any:
        """Have figures come as pictures, whatever kind of window was asked for."""
        if gui not in (None, "auto", *_PICTURES):
            print(  # noqa: T201 - for the user
                f"nbddp: %matplotlib {gui}: a rank has no window; figures come as pictures, as "
                "with %matplotlib inline"
            )
        chosen = super().enable_matplotlib(gui if gui in _PICTURES else "inline")
        # its own runner is for windows, and forgets to turn figures on again when a script fails
        self.magics_manager.registry["ExecutionMagics"].default_runner = None
        return chosen


def _only_in_the_notebook(*_: str) -> NoReturn:
    raise UsageError(
        "`%ddp`, `%%ddp` and `%%local` work only in the notebook, and this code runs on a rank. "
        "Move the command to a separate cell"
    )


def _has_error(exc_tuple: Any) -> bool:
    """Whether there is an exception that IPython could show."""
    return bool(exc_tuple) or sys.exc_info()[1] is not None or hasattr(sys, "last_value")


def make_shell() -> RankShell:
    """Create the process's shell; done in the forkserver, so that ranks are born with one."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.banner1 = ""
    config.Completer.use_jedi = False  # evaluates nothing, but takes a second to load
    shell: RankShell = RankShell.instance(config=config)
    InteractiveShell._instance = shell  # type: ignore[assignment]  # get_ipython() of code that asks for the base class
    make_bars_text()
    return shell


def warm_shell(shell: RankShell) -> None:
    """Pay now for what the first cell, value, traceback and Tab would import."""
    for source in ("None", "0", "1/0"):
        shell.run(RunCell(cell=0, source=source))
    forget()
    shell.complete(None, "pri", 3)
    shell.reset(new_session=True)
