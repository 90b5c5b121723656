"""The timeline of collectives: when each rank arrived, and which rank was late."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="timeline",
    public={
        "Timeline": "nbddp.extensions.timeline.collective_timeline:Timeline",
    },
)
