"""``%ddp autoreload``: before a cell, let all ranks reload the modules that were edited."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from nbddp.controller.rank_requests import ask_all, ask_each
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.autoreload import AutoreloadArguments
from nbddp.formatting import format_ranks
from nbddp.group.notebook_half import Notebook, NotebookHalf, UnstartedCell
from nbddp.lifecycle.group_state import GroupState
from nbddp.wire.messages import JsonDict
from nbddp.wire.request_messages import Answer, ExtensionMessage

ALL: JsonDict = {"undo": False, "only": [], "skip": []}


class Autoreload(NotebookHalf):
    """Reloads edited modules on the ranks before each cell, if that is on."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self._is_on: bool | None = None  # None: as in the notebook

    def autoreload(self, args: AutoreloadArguments) -> None:
        """Switch it on or off."""
        self._is_on = args.switch == "on"
        when = "before each cell" if self._is_on else "only when ranks restart"
        self.notebook.print_line(f"nbddp: ranks reload edited modules {when}")

    def run_cell(self, cell: UnstartedCell) -> bool:
        """Reload modules before the cell runs as usual.

        Raises:
            RequestError: a module cannot be reloaded; the cell does not run.
        """
        del cell
        session, rules = self.notebook.group.session, self._rules()
        is_ready = session.life.state is GroupState.IDLE and session.life.alive
        if is_ready and rules is not None and (text := reload_modules(session, rules)):
            self.notebook.print_line(f"nbddp: {text}")
        return False

    def _rules(self) -> JsonDict | None:
        """Return the modules to reload, as IPython's ``%autoreload`` and ``%aimport`` set them."""
        if self._is_on is not None:
            return ALL if self._is_on else None
        shell: Any = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
        magics = shell.magics_manager.registry.get("AutoreloadMagics") if shell else None
        if magics is None or not magics._reloader.enabled:
            return None
        reloader = magics._reloader
        if reloader.check_all:
            return {**ALL, "skip": sorted(reloader.skip_modules)}
        return {**ALL, "only": sorted(reloader.modules)} if reloader.modules else None


def reload_modules(session: Session, rules: JsonDict) -> str:
    """Reload edited modules on all ranks, and return a sentence if there were some.

    Raises:
        RequestError: a rank failed; all ranks keep the old versions.
    """
    outcomes = ask_each(session, dict.fromkeys(session.life.alive, _message(rules)))
    answers = {
        rank: outcome.content["autoreload"]
        for rank, outcome in outcomes.items()
        if isinstance(outcome, Answer)
    }
    failed = {rank: each["error"] for rank, each in answers.items() if each["error"]}
    lost = [each for each in outcomes.values() if isinstance(each, RequestError)]
    if failed or lost:
        done = [rank for rank in answers if rank not in failed]
        ask_all(session, done, _message({**ALL, "undo": True}))
        if lost:
            raise lost[0]
        raise RequestError(
            f"{format_ranks([*failed])} cannot reload {next(iter(failed.values()))}. All ranks "
            "keep the old version. Correct the file, or run `%ddp autoreload off`"
        )
    names = list(dict.fromkeys(name for each in answers.values() for name in each["names"]))
    kept = list(dict.fromkeys(text for each in answers.values() for text in each["kept"]))
    rest = f"; these keep the old code: {', '.join(kept)}" if kept else ""
    return f"reloaded {', '.join(names)}{rest}" if names else ""


def _message(content: JsonDict) -> ExtensionMessage:
    return ExtensionMessage(extension="autoreload", content=content)
