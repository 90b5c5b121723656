"""torchmetrics in a cell: a metric is computed over what all ranks have seen."""

from __future__ import annotations

import pytest

from nbddp import WorkerGroup

pytest.importorskip("torchmetrics")


def test_torchmetrics_accuracy_covers_all_ranks(group: WorkerGroup) -> None:
    group.run(
        "from torchmetrics.classification import MulticlassAccuracy\n"
        "metric = MulticlassAccuracy(num_classes=3, average='micro')\n"
        "metric.update(torch.tensor([rank, 1, 2]), torch.tensor([0, 1, 2]))\n"
        "found = metric.compute().item()"
    )
    assert group.pull("found") == [pytest.approx(5 / 6)] * 2


def test_list_metric_accepts_different_lengths_per_rank(
    group: WorkerGroup,
) -> None:
    group.run(
        "from torchmetrics.regression import SpearmanCorrCoef\n"
        "values = torch.arange(10.0)[: 6] if rank == 0 else torch.arange(10.0)[6:]\n"
        "metric = SpearmanCorrCoef()\nmetric.update(values, -values)\n"
        "found = metric.compute().item()"
    )
    assert group.pull("found") == [pytest.approx(-1.0)] * 2
