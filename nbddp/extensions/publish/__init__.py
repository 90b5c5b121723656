"""Publish a run's metrics and events to trackio, W&B, TensorBoard or MLflow.

A separate process reads the files in the run's folder and publishes them. So neither the ranks nor
the notebook import a tracker, wait for it, or fail with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbddp.extension.manifest import Command, Extension
from nbddp.extensions.runs import RUN_NAME, run_names
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import argument, flag, option

if TYPE_CHECKING:
    from nbddp.extensions.publish.tracker import Target

# maps a tracker's package (also the name of an extra) to its class in to_KIND.py
TRACKER_CLASSES = {
    "trackio": "ToTrackio",
    "wandb": "ToWandb",
    "tensorboard": "ToTensorBoard",
    "mlflow": "ToMlflow",
}
_TARGET = f"{', '.join(TRACKER_CLASSES)}; with a project or folder: wandb:digits"


def _read_target(text: str) -> Target:
    from nbddp.extensions.publish.notebook import installed_target

    return installed_target(text)


class PublishOptions(Frozen):
    """The options of a cell or script whose run is published."""

    publish: Sequence[Target] = option(
        "--publish TRACKER",
        f"send the run while it runs to {_TARGET}; may be repeated",
        (),
        _read_target,
        repeat=list,
        complete=TRACKER_CLASSES.keys,
        before="no_trainer_metrics no_wait",
    )


class PublishArguments(Command, example="publish wandb:digits", before="push"):
    """Send a run to a tracker: one run there for all ranks."""

    tracker: Target = argument(
        "tracker", _TARGET, _read_target, metavar="TRACKER", complete=TRACKER_CLASSES.keys
    )
    run: str | None = option("run", RUN_NAME, None, nargs="?", metavar="RUN", complete=run_names)
    again: bool = flag("--again", "even if it is there already: as another run")


EXTENSION = Extension(
    name="publish",
    needs=("runs",),
    commands=(PublishArguments,),
    options=PublishOptions,
    notebook="nbddp.extensions.publish.notebook:Publishing",
)
