"""What torch keeps of a destroyed group is forgotten, or it is said that it cannot be."""

import pytest
import torch
import torch.distributed.tensor  # as in a cell that uses it

from nbddp.worker.process_group import kept_references


def test_a_cache_that_torch_has_renamed_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept_references._warn_of_missing_cache.cache_clear()
    kept_references._clear_mesh_caches()
    assert caplog.messages == []
    monkeypatch.delattr(torch._C, "_clear_DTensor_sharding_propagator_cache")
    for _ in range(2):
        kept_references._clear_mesh_caches()
    (message,) = caplog.messages
    assert "_clear_DTensor_sharding_propagator_cache" in message
    assert "run %ddp restart" in message
