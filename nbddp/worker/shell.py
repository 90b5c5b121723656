"""A rank's IPython shell: runs a cell and tells what came of it."""

from __future__ import annotations

import builtins
from base64 import b64encode
from collections.abc import Callable
from typing import Any, NoReturn

import IPython
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type
from traitlets.config import Config

from nbddp.wire.messages import Display, JsonDict, RunCell
from nbddp.worker.streams import flush_python_streams


class NotebookLines(CachingCompiler):
    """Compiles a cell so that its line numbers are those of the notebook's editor.

    A ``%%ddp`` cell's first line stays in the kernel, so what a rank compiles begins on line 2.
    """

    first_line = 1

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        """Parse as if the lines that stayed behind were there."""
        return super().ast_parse(self._pad(source), filename, symbol)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Keep the source for tracebacks under the same line numbers."""
        return super().cache(self._pad(transformed_code), number, raw_code)

    def _pad(self, source: str) -> str:
        return "\n" * (self.first_line - 1) + source


class ResultHook(DisplayHook):
    """Keeps the last expression's MIME bundle instead of printing it."""

    bundle: JsonDict = {}  # noqa: RUF012 - replaced, never changed

    def __call__(self, result: Any = None) -> None:
        """Keep the value; behind a closing semicolon too, where it is not shown."""
        super().__call__(result)
        if result is not None and self.quiet():
            self.fill_exec_result(result)

    def write_output_prompt(self) -> None:
        """Print no ``Out[1]:``; the controller shows the value once for ranks that agree."""

    def write_format_data(self, format_dict: JsonDict, md_dict: JsonDict | None = None) -> None:
        """Keep what would have been printed."""
        self.bundle = {"data": json_ready(format_dict), "metadata": json_ready(md_dict or {})}

    def finish_displayhook(self) -> None:
        """Print no closing line break."""


class MailingPublisher(DisplayPublisher):
    """Mails what ``display()`` and figures produce."""

    mail: Callable[[Display], None] | None = None
    cell = 0

    def publish(  # type: ignore[override]
        self,
        data: JsonDict,
        metadata: JsonDict | None = None,
        *,
        transient: JsonDict | None = None,
        update: bool = False,
        **_ignored: Any,
    ) -> None:
        """Mail one bundle, after all output that precedes it."""
        flush_python_streams()
        message = Display(
            cell=self.cell,
            data=json_ready(data),
            metadata=json_ready(metadata or {}),
            display_id=str((transient or {}).get("display_id", "")),
            is_update=update,
        )
        if self.mail is not None:
            self.mail(message)

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002
        """Clear nothing: the cell's output is shared by all ranks."""


class RankShell(InteractiveShell):
    """The shell that cells run in; one per rank, kept from cell to cell."""

    compiler_class = NotebookLines
    displayhook_class = Type(ResultHook)
    display_pub_class = Type(MailingPublisher)
    compile: NotebookLines
    displayhook: ResultHook
    display_pub: MailingPublisher
    shown_traceback: str = ""
    is_interrupted: Callable[[], bool] = staticmethod(lambda: False)

    def showtraceback(self, *args: Any, **options: Any) -> None:
        """Format a traceback, unless nobody will read it: torch's sources take a second."""
        if not self.is_interrupted():
            super().showtraceback(*args, **options)

    def _showtraceback(self, _etype: Any, _evalue: Any, stb: list[str]) -> None:
        self.shown_traceback = "\n".join(stb)

    def show_usage_error(self, exc: BaseException) -> None:
        """Keep a magic's one-line complaint instead of printing it."""
        self.shown_traceback = f"UsageError: {exc}"

    def wear(self, theme: str) -> None:
        """Format tracebacks in one of IPython's colour themes."""
        self.colors = theme
        if IPython.version_info[0] < 9:  # there the trait alone does not reach them
            self.InteractiveTB.set_colors(theme)

    def run(self, command: RunCell) -> ExecutionResult:
        """Run a cell; raises nothing that the cell raised."""
        # `%reset -f` takes it away, and multiprocessing cannot do without
        self.user_module.__dict__.setdefault("__spec__", None)
        self.execution_count = command.execution_count
        self.compile.first_line = command.first_line + _leading_blank_lines(command.source)
        self.display_pub.cell = command.cell
        self.displayhook.bundle = {}
        self.shown_traceback = ""
        result: ExecutionResult = self.run_cell(command.source, store_history=True)
        return result

    def is_cell_file(self, filename: str) -> bool:
        """Whether a code object's file is one of the cells run here."""
        return self.compile.format_code_name(filename) is not None


def _leading_blank_lines(source: str) -> int:
    """IPython strips these before it compiles."""
    lines = source.splitlines()
    return next((count for count, line in enumerate(lines) if line.strip()), 0)


def make_shell() -> RankShell:
    """Create the process's shell; done in the forkserver, so that ranks are born with one."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.banner1 = ""
    config.Completer.use_jedi = False  # evaluates nothing, but takes a second to load
    shell: RankShell = RankShell.instance(config=config)
    InteractiveShell._instance = shell  # type: ignore[assignment]  # get_ipython() of code that asks for the base class
    return shell


def warm_shell(shell: RankShell) -> None:
    """Pay now for what the first cell, value, traceback and Tab would import."""
    for source in ("None", "0", "1/0"):
        shell.run(RunCell(cell=0, source=source))
    shell.complete(None, "pri", 3)
    shell.reset(new_session=True)


def json_ready(value: Any) -> Any:
    """Make a MIME bundle fit for JSON: bytes become base64, as in Jupyter's own messages."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def refuse_input() -> None:
    """Make ``input()`` say why it cannot work, instead of failing on a closed stdin."""

    def refuse(_prompt: object = "") -> NoReturn:
        __tracebackhide__ = True
        raise RuntimeError(
            "input() is not supported: a rank has no keyboard; ask in a cell of the notebook's "
            "own and send the answer with `%ddp push NAME`"
        )

    builtins.input = refuse
