"""Find the script to run, and refuse one that cannot run before anything is started for it."""

from __future__ import annotations

import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.wire.rank_start import Script

NOT_SCRIPTS = {
    ".ipynb": "open it and run its cells with %%ddp",
    ".sh": "run it with !bash",
}


def find_script(
    name: str, arguments: Sequence[str], *, is_module: bool = False, keeps: bool = False
) -> Script:
    """Find a script as ``torchrun`` would, from the working folder.

    Args:
        name: a file, or with ``is_module`` the argument of ``python -m``.
        arguments: the arguments of the script.
        is_module: whether ``name`` is a module; each rank looks for it itself.
        keeps: whether the variables of the script stay in the namespace of the cells.

    Raises:
        RequestError: the script cannot run; the message gives the reason in one line.
    """
    cwd = Path.cwd()
    path, folder = "", cwd
    if not is_module:
        file = cwd / Path(name).expanduser()
        if file.is_dir():
            raise RequestError(f"{name} is a folder: `%ddp run -m PACKAGE` runs a package")
        if file.suffix in NOT_SCRIPTS:
            raise RequestError(f"{name} is not a Python script: {NOT_SCRIPTS[file.suffix]}")
        if not file.exists():
            raise RequestError(f"there is no {name} in {cwd}")
        with script_text(file, name) as text:
            compile(text, str(file), "exec", dont_inherit=True)
        path, folder = str(file), file.resolve().parent
    words = list(arguments)
    return Script(name=name, path=path, arguments=words, folder=str(folder), keeps_names=keeps)


@contextmanager
def script_text(file: Path, name: str) -> Iterator[str]:
    """Yield the text of a script.

    Raises:
        RequestError: the file cannot be read or is not Python; the message gives the reason in one
            line.
    """
    if file.exists() and not file.is_file() and not file.is_dir():  # a pipe may never end
        raise RequestError(f"{name} is not a Python script: it is not a regular file")
    try:
        with tokenize.open(file) as opened:
            yield opened.read()
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from None
    except SyntaxError as error:  # also raised for a wrong encoding
        raise RequestError(f"{name}: {describe_syntax_error(error)}") from None
    except ValueError as error:
        raise RequestError(f"{name} is not a Python script: {error}") from None
    except (RecursionError, MemoryError):
        raise RequestError(f"{name} is nested too deeply for Python, or too large") from None


def describe_syntax_error(error: SyntaxError) -> str:
    """Return the message of a syntax error, with its line and a pointer to the column."""
    if error.lineno is None:  # about the whole file, such as its encoding
        return str(error.msg)
    text = (error.text or "").rstrip("\n")
    pointer = " " * max(0, (error.offset or 1) - 1) + "^"
    return f"syntax error in line {error.lineno}: {error.msg}\n    {text}\n    {pointer}"
