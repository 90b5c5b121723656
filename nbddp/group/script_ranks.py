"""The ranks of a script, or of one trial, which run next to the ranks of the cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extension.guard import Guard, Hooks
from nbddp.lifecycle.refusals import BUSY
from nbddp.record.cell import CellResult, is_interrupted
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import Script


class ScriptHooks:
    """What an extension does for scripts; it overrides the hooks that it needs."""

    def environment(self, cells: Session) -> Mapping[str, str]:
        """Return environment variables for the ranks of a script.

        Args:
            cells: the session of the cells.
        """
        del cells
        return {}

    def after_script(self, script: Session, cells: Session) -> None:
        """Called when a script has ended, before its ranks end.

        Args:
            script: the session of the script.
            cells: the session of the cells.
        """


class ScriptRanks:
    """The session of the last script or trial. It shares the launcher of the cells' session.

    The ranks of a script that succeeded end with it. After a failure they stay for a debugger until
    the next cell or script starts. A trial closes its session when it ends.

    Args:
        cells: the session of the cells.
    """

    def __init__(self, cells: Session) -> None:
        self._cell_session = cells
        guard = Guard(cells.router.notify, lambda: cells.life.attempt)
        self._hooks: Hooks[ScriptHooks] = Hooks("scripts", guard)
        self._script_session: Session | None = None

    @property
    def last_session(self) -> Session:
        """The session that ran last: the script's until a cell runs, else the cells'."""
        return self._script_session or self._cell_session

    @property
    def active_session(self) -> Session:
        """The last session, or the cells' session if the ranks of the script have ended."""
        return self.last_session if self.last_session.life.state.is_live else self._cell_session

    @property
    def are_kept(self) -> bool:
        """Whether ranks of a failed script still run."""
        return self._script_session is not None and self._script_session.life.state.is_ready

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks that died in the last script."""
        return () if self._script_session is None else self._script_session.life.gone

    def open(self) -> Session:
        """Return a new session for the ranks of a script.

        Raises:
            RequestError: a cell or another script is running.
        """
        self.end_previous()
        if self._cell_session.life.state.is_busy:
            raise RequestError(BUSY)
        self._script_session = self._cell_session.create_sibling()
        return self._script_session

    def start(self, spec: GroupSpec, script: Script | None = None) -> None:
        """Start the ranks.

        Raises:
            RequestError: the ranks cannot be started now.
            StartError: a rank failed to start.
        """
        env = {**spec.env}
        for added in self._hooks.call("environment", self._environment).values():
            env |= added
        started_by = {"started_by": Path(script.name).name} if script else {}
        try:
            self.last_session.start(replace(spec, env=env, joins_group=False, more=started_by))
        except BaseException:
            self.close()
            raise

    def end(self, session: Session, result: CellResult) -> None:
        """End the ranks of a script that has ended, unless a debugger may inspect them."""
        if session is not self._script_session:
            return  # the user has ended the script
        self._hooks.call(
            "after_script",
            lambda _, hooks: hooks.after_script(session, self._cell_session),
            is_urgent=is_interrupted(result),
        )
        can_debug = result.verdict is not None and not result.verdict.ended_by
        if not (can_debug and session.life.alive):
            session.close()

    def end_previous(self, *, by_force: bool = False) -> None:
        """End the remaining ranks of the last script, before a cell or another script starts.

        Raises:
            RequestError: the script is still running and ``by_force`` is False.
        """
        runs = self.active_session is self._script_session and not self.are_kept
        if runs and not by_force:
            raise RequestError(BUSY)
        self.close()

    def close(self) -> None:
        """End all ranks of the script and drop its session."""
        if self._script_session is not None:
            self._script_session.close()
        self._script_session = None  # last, so that the next cell can close it after an interrupt

    def _environment(self, _: str, hooks: ScriptHooks) -> dict[str, str]:
        variables = hooks.environment(self._cell_session)
        return {str(name): str(text) for name, text in variables.items()}
