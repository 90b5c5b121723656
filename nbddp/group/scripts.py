"""Which script is meant, and whether it can be run at all: before anything is started for it."""

from __future__ import annotations

import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.wire.script import Script

INSTEAD = {
    ".ipynb": "open it, and run its cells with %%ddp",
    ".sh": "run it with !bash",
}


def find_script(
    name: str, arguments: Sequence[str], *, is_module: bool = False, keeps: bool = False
) -> Script:
    """A script as ``torchrun`` would find it from the working folder.

    Args:
        name: a file, or with ``is_module`` what ``python -m`` takes.
        arguments: the script's own.
        is_module: the ranks look for the module, each for itself.
        keeps: whether its names stay in the namespace of the cells.

    Raises:
        RequestError: in one line, why it cannot be run.
    """
    cwd = Path.cwd()
    path, folder = "", cwd
    if not is_module:
        file = cwd / Path(name).expanduser()
        _check(file, name)
        path, folder = str(file), file.resolve().parent
    return Script(
        name=name,
        path=path,
        arguments=list(arguments),
        folder=str(folder),
        keeps=keeps,
    )


def _check(file: Path, name: str) -> None:
    if file.is_dir():
        raise RequestError(f"{name} is a folder: `%ddp run -m PACKAGE` runs a package")
    if file.suffix in INSTEAD:
        raise RequestError(f"{name} is no Python script: {INSTEAD[file.suffix]}")
    refuse_devices(file, name)
    with saying_why_not(name):
        try:
            with tokenize.open(file) as opened:
                compile(opened.read(), str(file), "exec", dont_inherit=True)
        except FileNotFoundError:
            raise RequestError(f"there is no {name} in {Path.cwd()}") from None


def refuse_devices(file: Path, name: str) -> None:
    """What is no file may have no end, and nothing to read.

    Raises:
        RequestError: it is a device, a pipe or a socket.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        raise RequestError(f"{name} is no Python script: it is no file")


@contextmanager
def saying_why_not(name: str) -> Iterator[None]:
    """What is done with a script's code in here may fail, and then it is said in one line.

    Raises:
        RequestError: it cannot be read, or is no Python.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from None
    except SyntaxError as error:  # a wrong encoding is one, too
        raise RequestError(f"{name}: {explain(error)}") from None
    except ValueError as error:
        raise RequestError(f"{name} is no Python script: {error}") from None
    except (RecursionError, MemoryError):
        raise RequestError(f"{name} is nested too deeply for Python, or too large") from None


def explain(error: SyntaxError) -> str:
    """The line, and what is wrong in it."""
    if error.lineno is None:  # of the whole file, such as its encoding
        return str(error.msg)
    text = (error.text or "").rstrip("\n")
    pointer = " " * max(0, (error.offset or 1) - 1) + "^"
    return f"syntax error in line {error.lineno}: {error.msg}\n    {text}\n    {pointer}"
