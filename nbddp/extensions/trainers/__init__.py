"""Report the metrics of other people's trainers, without a line of the user's code.

Transformers (and TRL), Lightning, Accelerate and TensorBoard are changed after their import, where
they have a place for it. Their metrics, steps and progress then go where those of
:func:`nbddp.log` and :func:`nbddp.track` go.
"""

from __future__ import annotations

from nbddp.extension.manifest import Extension
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag


class TrainerOptions(Frozen):
    """The options of a cell or script that trains."""

    no_trainer_metrics: bool = flag(
        "--no-trainer-metrics",
        "do not record the metrics that trainers of other libraries report",
        before="no_wait",
    )


EXTENSION = Extension(
    name="trainers",
    options=TrainerOptions,
    rank="nbddp.extensions.trainers.rank:Trainers",
    public={
        "report_trainers": "nbddp.extensions.trainers.attach:report_trainers",
    },
)
