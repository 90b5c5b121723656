"""What tells whether tensors of several ranks are equal, without sending them."""

import torch

from nbddp.worker.process_group.object_collectives import _fingerprint


def test_a_fingerprint_changes_with_the_values_of_a_tensor_and_their_order() -> None:
    values = torch.randn(10_007)
    same = values.clone()
    assert _fingerprint(values) == _fingerprint(same)
    for change in (0, 5_000, 10_006):
        other = values.clone()
        other[change] += 1e-3
        assert _fingerprint(other) != _fingerprint(values)
    assert _fingerprint(values.flip(0)) != _fingerprint(values)


def test_a_fingerprint_depends_only_on_the_values_of_a_tensor() -> None:
    whole = torch.randn(101, 103)
    part = whole[1:, 1:]
    assert _fingerprint(part) == _fingerprint(part.clone())
    halves = torch.arange(999, dtype=torch.bfloat16)
    assert _fingerprint(halves[1:]) == _fingerprint(halves[1:].clone())
    assert _fingerprint(torch.tensor(1.0)) != _fingerprint(torch.tensor(2.0))
