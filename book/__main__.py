"""Build the site: ``python -m book [FOLDER] [--executed COPIES]``."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from book.pages import lessons, write_site
from tools.dead_links import dead_links
from tools.execute_course import execute_all


def main(words: Sequence[str] | None = None) -> int:
    """Build the site and print dead links; return 1 if there are any."""
    parser = ArgumentParser(prog="python -m book", description="Build the course as a site.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/book"))
    parser.add_argument(
        "--executed",
        type=Path,
        metavar="COPIES",
        help="a folder with executed copies of all notebooks; without it they are executed now",
    )
    args = parser.parse_args(words)
    if args.executed:
        missing = [each.name for each in lessons() if not (args.executed / each.name).is_file()]
        if missing:
            parser.error(f"{args.executed} has no copy of {', '.join(missing)}")
    if why := _not_writable(args.folder):  # checked first, as the notebooks run for minutes
        parser.error(f"{args.folder} cannot be written: {why}")
    with tempfile.TemporaryDirectory() as scratch:
        executed = args.executed or Path(scratch)
        if args.executed is None:
            execute_all(lessons(), executed)
        write_site(args.folder, executed)
    dead = dead_links(args.folder)
    for each in dead:
        print(f"dead link: {each}", file=sys.stderr)
    print(f"{args.folder}/index.html: {len(list(args.folder.glob('*.html')))} pages")
    return 1 if dead else 0


def _not_writable(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "" if os.access(folder, os.W_OK) else os.strerror(errno.EACCES)


if __name__ == "__main__":
    raise SystemExit(main())
