"""W&B: a new run, online or, with ``WANDB_MODE=offline``, in the folder ``wandb``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from nbddp.extensions.publish.step_aggregator import AggregatedStep
from nbddp.extensions.publish.tracker import RunIdentity, RunOutcome

STEP = "step"


class ToWandb:
    """Publishes to W&B; charts use ``step`` as x axis, because W&B's own step only increases."""

    def start(self, run: RunIdentity) -> str:
        """Create a run with the folder's name as its id, so that it cannot exist twice."""
        self._run = wandb.init(
            project=run.project,
            id=run.name,
            name=run.name,
            config=dict(run.settings),
            resume="never",
            save_code=False,
            settings=wandb.Settings(
                console="off",  # the output of this process does not belong to the run
                disable_git=True,  # nor does the current commit of the folder
                silent=True,
                x_disable_stats=True,  # nor does the load of this machine
            ),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.url:
            return str(self._run.url)
        return f"project {run.project}, run {run.name}, in {self._run.settings.sync_dir}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Send each step as a row of the history, with the time of its report."""
        for step in steps:
            self._run.log({**step.values, STEP: step.step, "_timestamp": step.time})

    def log_event(self, at: float, text: str) -> None:
        """Do nothing: W&B has no live event log; ``finish`` sends a table."""

    def finish(self, outcome: RunOutcome) -> None:
        """Send the outcome and the totals as summary, and the events as a table."""
        summary: dict[str, Any] = {f"nbddp/{name}": value for name, value in outcome.totals.items()}
        self._run.summary.update({**summary, "nbddp/outcome": outcome.text})
        rows = [[at, text] for at, text in outcome.events]
        self._run.log({"nbddp/record": wandb.Table(columns=["time", "what"], data=rows)})
        # a run that still goes on has not failed
        self._run.finish(exit_code=0 if outcome.outcome in ("ok", "running", "empty") else 1)
