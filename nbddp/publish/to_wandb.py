"""W&B: a run of its own, online or, by ``WANDB_MODE=offline``, in the folder ``wandb``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from nbddp.publish.step_aggregator import AggregatedStep
from nbddp.publish.tracker import DEFAULT_PROJECT, RunIdentity, RunOutcome

STEP = "step"


class ToWandb:
    """W&B's own steps only count up, whatever falls back; charts are drawn over ``step``."""

    def start(self, run: RunIdentity) -> str:
        """A run with the name of the folder as its id: nowhere can it be there twice."""
        project = run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
        self._run = wandb.init(
            project=project,
            id=run.name,
            name=run.name,
            config=dict(run.settings),
            resume="never",
            save_code=False,
            settings=wandb.Settings(
                console="off",  # what this process writes is not the run's
                disable_git=True,  # nor is the commit of its folder at this moment
                silent=True,
                x_disable_stats=True,  # nor the load of its machine
            ),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.url:
            return str(self._run.url)
        return f"project {project}, run {run.name}, in {self._run.settings.sync_dir}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """More of the run's config, or other values."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Each step as a row of the history, with the time when it was reported."""
        for step in steps:
            self._run.log({**step.values, STEP: step.step, "_timestamp": step.time})

    def log_event(self, at: float, text: str) -> None:
        """Told in a table at the end: W&B has no place for lines that come one by one."""

    def finish(self, outcome: RunOutcome) -> None:
        """The outcome and the sums in the summary, the record as a table."""
        summary: dict[str, Any] = {f"nbddp/{name}": value for name, value in outcome.totals.items()}
        self._run.summary.update({**summary, "nbddp/outcome": outcome.text})
        rows = [[at, text] for at, text in outcome.events]
        self._run.log({"nbddp/record": wandb.Table(columns=["time", "what"], data=rows)})
        # a run that goes on has not failed
        self._run.finish(exit_code=0 if outcome.outcome in ("ok", "running", "empty") else 1)
