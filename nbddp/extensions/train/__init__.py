"""The training kit: it needs no notebook and no store of nbddp, and runs under torchrun too."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="train",
    public={
        "Checkpoint": "nbddp.extensions.train.checkpoint.checkpoint:Checkpoint",
        "Loader": "nbddp.extensions.train.loader:Loader",
        "Precision": "nbddp.extensions.train.precision:Precision",
        "Resumed": "nbddp.extensions.train.checkpoint.checkpoint:Resumed",
        "all_gather": "nbddp.extensions.train.collectives:all_gather",
        "all_reduce": "nbddp.extensions.train.collectives:all_reduce",
        "config": "nbddp.extensions.train.config:config",
        "loader": "nbddp.extensions.train.loader:loader",
        "main_rank_first": "nbddp.extensions.train.collectives:main_rank_first",
        "on_main": "nbddp.extensions.train.collectives:on_main",
        "precision": "nbddp.extensions.train.precision:precision",
        "prepare": "nbddp.extensions.train.prepare:prepare",
    },
)
