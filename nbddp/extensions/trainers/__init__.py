"""Report the metrics of other people's trainers, without a line of the user's code.

Transformers (and TRL), Lightning, Accelerate and TensorBoard are changed after their import, where
they have a place for it. Their metrics, steps and progress then go where those of
:func:`nbddp.log` and :func:`nbddp.track` go.
"""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="trainers",
    public={
        "report_trainers": "nbddp.extensions.trainers.attach:report_trainers",
    },
)
