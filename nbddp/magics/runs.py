"""``%ddp runs``: list runs, remove some, and note something of one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbddp.archive.find import apart, find_run
from nbddp.archive.run_list import list_runs, remove, write_note
from nbddp.archive.summary import read_note
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.magics.desk import Desk
from nbddp.ui.report.run_list import run_list_report


def steer_runs(desk: Desk, args: Namespace) -> None:
    """List the runs, or remove or note what the first word says.

    Raises:
        RequestError: there is no such run, or it cannot be removed or noted.
    """
    word, *rest = args.run or [""]
    current, base = desk.current_run, Path.cwd()
    if word == "rm":
        paths = apart(_named("rm", rest, current))
        for path in paths:
            remove(path, current=current)
        names = ", ".join(path.name for path in paths)
        desk.views.say(f"nbddp: deleted {plural(len(paths), 'run')}: {names}")
    elif word == "note":
        [path] = _named("note", rest[:1], current)
        desk.views.say(f"nbddp: {path.name}: {_note(path, rest[1:], args) or 'no note'}")
    else:
        listing = list_runs(base, args.run, sort=args.sort, is_down=args.down, current=current)
        desk.views.show(run_list_report(listing, most=args.number))


def _note(path: Path, words: list[str], args: Namespace) -> str:
    """Write a note if one was given; return the note of the run."""
    note = " ".join(words).strip()
    if words and bool(note) == args.off:
        raise RequestError("note needs a text, or --off alone, which takes the note away")
    if note or args.off:
        write_note(path, note)
    return read_note(path)


def _named(act: str, names: list[str], current: Path | None) -> list[Path]:
    if not names:
        raise RequestError(f"which run? `%ddp runs {act} NAME`; `%ddp runs` lists them")
    base = Path.cwd()
    return [
        _damaged(name, base) or find_run(name, base, current=current, is_unique=True)
        for name in names
    ]


def _damaged(name: str, base: Path) -> Path | None:
    """Return the folder of exactly this name, even if no run can be read in it."""
    path = base / ".nbddp" / "runs" / name
    try:
        is_one = name == path.name and not name.startswith(".") and path.is_dir()
    except OSError:  # no folder can have such a name
        return None
    return path if is_one else None
