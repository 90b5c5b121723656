"""``%ddp runs``: which runs there are, which of them stay, and what the user says of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.magic_arguments import argument

from nbddp.archive.keeping import (
    bytes_of,
    limit_of,
    make_room,
    mark,
    remove,
    say_gone,
    set_limit,
)
from nbddp.archive.listing import list_runs
from nbddp.archive.summary import read_marks, summarize
from nbddp.errors import RequestError
from nbddp.magics.arguments import with_arguments
from nbddp.magics.desk import Desk
from nbddp.magics.options import positive_int
from nbddp.record import log_reader
from nbddp.record.runs import apart, find_run, named
from nbddp.ui.text.runs import SHOWN


def runs_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What may be written behind ``%ddp runs``."""
    return with_arguments(function, _ARGUMENTS)


_ARGUMENTS = (
    argument(
        "run",
        nargs="*",
        metavar="WORD",
        help="lr=0.1, loss<0.5, or a part of a name; or rm, keep, note or limit, and to what",
    ),
    argument("--sort", default="", metavar="NAME", help="by a setting, a metric or a column"),
    argument("--down", action="store_true", help="from the highest to the lowest"),
    argument("-n", "--number", type=positive_int, default=SHOWN, help="how many (default: 50)"),
    argument("--force", action="store_true", help="rm: those that are to be kept, too"),
    argument("--off", action="store_true", help="keep, note, limit: no longer"),
)


def steer_runs(desk: Desk, args: Namespace) -> None:
    """List the runs, or do to some of them what the first word says.

    Raises:
        RequestError: what is asked for is not there, or cannot be done.
    """
    word, *rest = args.run or [""]
    act = _ACTS.get(word)
    if act is not None:
        desk.views.say(f"nbddp: {act(desk.current_run, rest, args)}")
        return
    base = Path.cwd()
    listing = list_runs(base, args.run, sort=args.sort, is_down=args.down, current=desk.current_run)
    desk.views.show_runs(listing, most=args.number, limit=limit_of(base))


Act = Callable[[Path | None, list[str], Namespace], str]


def _remove(current: Path | None, names: list[str], args: Namespace) -> str:
    paths = _named("rm", names, current)
    for path in paths:
        try:
            is_running = summarize(path, current=current).is_running
        except RequestError:  # a damaged one goes like any other
            is_running = False
        remove(path, current=current, is_running=is_running, is_forced=args.force)
    return say_gone([path.name for path in paths])


def _keep(current: Path | None, names: list[str], args: Namespace) -> str:
    paths = _named("keep", names, current)
    for path in paths:
        mark(path, is_kept=not args.off)
    what = "may go again" if args.off else "kept"
    return f"{', '.join(path.name for path in paths)}: {what}"


def _note(current: Path | None, words: list[str], args: Namespace) -> str:
    [path] = _named("note", words[:1], current)
    note = " ".join(words[1:]).strip()
    if words[1:] and bool(note) == args.off:
        raise RequestError("note needs a text, or --off alone, which takes the note away")
    if note or args.off:
        mark(path, note=note)
    else:
        said = read_marks(path).get("note")
        note = said if isinstance(said, str) else ""
    return f"{path.name}: {note or 'no note'}"


def _limit(current: Path | None, words: list[str], args: Namespace) -> str:
    base = Path.cwd()
    if not words and not args.off:
        limit = limit_of(base)
        return "runs may take what they like" if limit is None else _say_limit(limit)
    set_limit(base, None if args.off else bytes_of(" ".join(words)))
    gone = make_room(base, current=current)
    limit = limit_of(base)
    said = "runs may take what they like" if limit is None else _say_limit(limit)
    return f"{said}; {say_gone(gone)}" if gone else said


def _say_limit(limit: int) -> str:
    return (
        f"beyond {log_reader.say_bytes(limit)} the oldest runs go when another starts, "
        "but for those that are kept"
    )


def _named(act: str, names: list[str], current: Path | None) -> list[Path]:
    if not names:
        raise RequestError(f"which run? `%ddp runs {act} NAME`; `%ddp runs` lists them")
    base = Path.cwd()
    asked = [named(name) for name in names]
    return apart(
        _damaged(name, base) or find_run(name, base, current=current, takes_newest=False)
        for name in asked
    )


def _damaged(name: str, base: Path) -> Path | None:
    """A folder of this very name, be it a run or not: it can be taken away."""
    path = base / ".nbddp" / "runs" / name
    try:
        is_one = name == path.name and not name.startswith(".") and path.is_dir()
    except OSError:  # no folder can have such a name
        return None
    return path if is_one else None


_ACTS: dict[str, Act] = {"rm": _remove, "keep": _keep, "note": _note, "limit": _limit}
