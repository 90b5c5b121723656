"""The digits that the notebooks train on: MNIST's files, read and checked, or scikit-learn's."""

import gzip
import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.course import digits as digits_module
from nbddp.extensions.course.digits import FILES, digits


def idx(*sizes: int) -> bytes:
    head = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    return head + bytes(value % 256 for value in range(torch.Size(sizes).numel()))


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small files in MNIST's format, under their own checksums."""
    shapes = [(6, 28, 28), (6,), (2, 28, 28), (2,)]
    sums = {}
    for name, shape in zip(FILES, shapes, strict=True):
        content = gzip.compress(idx(*shape), mtime=0)
        (tmp_path / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(digits_module, "FILES", sums)
    return tmp_path


def test_existing_mnist_files_are_read_if_their_checksums_are_right(mnist: Path) -> None:
    found = digits(mnist)
    images, labels = found.train.tensors
    assert (images.shape, images.dtype) == ((6, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == ([0, 1, 2, 3, 4, 5], torch.int64)
    assert images.max() == 1.0
    assert len(found.test) == 2
    assert found.source.startswith("MNIST")
    name = list(FILES)[1]
    (mnist / name).write_bytes(gzip.compress(idx(7)))
    with pytest.raises(ValueError, match=f"{name} .*checksum"):
        digits(mnist)


def test_without_mnist_files_the_scikit_learn_digits_are_scaled_to_28_pixels(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found, again = digits(tmp_path), digits(tmp_path)
    (images, labels), (test_images, test_labels) = found.train.tensors, found.test.tensors
    assert (images.shape, test_images.shape) == ((1437, 1, 28, 28), (360, 1, 28, 28))
    assert images.max() == 1
    assert torch.cat([images, test_images]).mean().item() == pytest.approx(0.3053, abs=1e-3)
    assert found.source == snapshot
    assert torch.equal(test_labels, again.test.tensors[1])  # the same on every rank
    counts = torch.cat([labels, test_labels]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.full  # to load scikit-learn takes seconds
def test_train_and_test_sets_together_have_each_scikit_learn_digit_once(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    whole = load_digits()
    small = torch.tensor(whole.images, dtype=torch.float32)[:, None] / 16
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear")
    is_test = torch.arange(1797) % 5 == 0
    found = digits(tmp_path)
    for part, chosen in ((found.test, is_test), (found.train, ~is_test)):
        assert torch.equal(part.tensors[0], images[chosen])
        assert torch.equal(part.tensors[1], torch.tensor(whole.target)[chosen])


def test_digits_that_cannot_be_loaded_raise_an_error_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(digits_module, "MIRROR", "http://127.0.0.1:9")  # no server listens there
    assert ".gz" in refusal(ConnectionError, digits, tmp_path / "data", download=True)
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert refusal(ModuleNotFoundError, digits, tmp_path) == snapshot


def test_downloads_are_verified_before_they_are_stored(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_module, "MIRROR", mnist.as_uri())
    target = tmp_path / "target"
    assert digits(target, download=True).source.startswith("MNIST")
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    (mnist / next(iter(FILES))).write_bytes(b"half")
    with pytest.raises(ValueError, match="checksum"):
        digits(tmp_path / "other", download=True)
    assert not (tmp_path / "other").exists()
