"""What a heal and an interrupt transfer of models and loaders."""

from typing import Any

import torch
from torch import nn

import nbddp
from nbddp.reporting.training_objects import prepared_models
from nbddp.worker.heal.namespace_transfer import load_namespace, pickle_namespace
from nbddp.worker.process_group.object_state import (
    describe_state,
    load_state,
    state_from_description,
)


def test_a_copy_of_a_prepared_model_is_prepared() -> None:
    models = [nbddp.prepare(nn.Linear(1, 1)), nn.Linear(1, 1)]
    carried = pickle_namespace({"models": models})
    copies: dict[str, Any] = {}
    load_namespace(carried.data, copies, carried.storages)
    assert [each in prepared_models for each in copies["models"]] == [True, False]


def test_nbddp_loaders_and_precision_objects_are_transferred() -> None:
    loader = nbddp.loader(range(100), 4, seed=3)
    batches = iter(loader)
    next(batches), next(batches)
    names = {"loader": loader, "precision": nbddp.precision("fp32"), "net": nn.Linear(1, 1)}
    carried = pickle_namespace(names)
    assert carried.not_carried == {}
    there: dict[str, Any] = {}
    load_namespace(carried.data, there, carried.storages)
    assert there["loader"].state_dict() == loader.state_dict()


def bring(source: nbddp.Loader, other: nbddp.Loader) -> None:
    load_state(other, state_from_description(other, describe_state(source), torch.device("cpu")))


def test_a_loader_with_transferred_state_continues_like_the_source() -> None:
    loaders = [nbddp.loader(range(40), 4) for _ in range(2)]
    for _ in zip(range(3), loaders[0], strict=False):
        pass
    bring(*loaders)
    assert [*loaders[0]] != [*loaders[1]]  # a loop that was left goes on, if its state is loaded
    bring(loaders[1], loaders[0])
    assert loaders[0].state_dict() == loaders[1].state_dict()
