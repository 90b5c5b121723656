"""``nbddp kept``: list ranks that are kept alive, or end some."""

from __future__ import annotations

import sys

from nbddp.errors import RequestError
from nbddp.extensions.keep_alive import KeptCommand
from nbddp.extensions.keep_alive.kept import describe_kept, end_kept, find_kept


class Terminal:
    """The command, by the name of its method."""

    def kept(self, args: KeptCommand) -> None:
        """List the kept ranks, or end those of a run.

        Raises:
            RequestError: there are no such ranks, or the user did not agree.
        """
        if args.stop is None:
            sys.stdout.write(describe_kept() + "\n")
            return
        kept = find_kept(args.stop)
        if not args.yes:
            if not sys.stdin.isatty():
                raise RequestError("nothing was done: this command asks before it acts; add --yes")
            sys.stderr.write(f"end all ranks of run {kept.run.name}? [y/N] ")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                raise RequestError("nothing was done")
        sys.stdout.write(end_kept(kept) + "\n")
