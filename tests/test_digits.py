"""The digits that the notebooks train on: MNIST's files, read and checked, or scikit-learn's."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbddp.train import digits as room
from nbddp.train.digits import FILES, digits, read_idx


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
    monkeypatch.setattr(room, "FILES", sums)
    return tmp_path


def test_files_that_are_there_are_read(mnist: Path) -> None:
    found = digits(mnist)
    images, labels = found.train.tensors
    assert (images.shape, images.dtype) == ((6, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == ([0, 1, 2, 3, 4, 5], torch.int64)
    assert images.max() == 1.0
    assert len(found.test) == 2
    assert found.source.startswith("MNIST")


def test_a_file_that_is_another_is_refused(mnist: Path) -> None:
    name = list(FILES)[1]
    (mnist / name).write_bytes(gzip.compress(idx(7)))
    with pytest.raises(ValueError, match=f"{name} is not MNIST's: its checksum is another"):
        digits(mnist)


def test_without_files_scikit_learns_are_brought_to_28_pixels_and_it_is_said(
    tmp_path: Path,
) -> None:
    found = digits(tmp_path)
    assert found.train.tensors[0].shape == (1437, 1, 28, 28)
    assert len(found.test) == 360
    assert found.train.tensors[0].max() <= 1
    assert found.source == (
        "scikit-learn: 1,437 digits to train on, 360 to test, 8x8 pixels brought to 28x28"
    )
    again = digits(tmp_path)
    assert torch.equal(found.test.tensors[1], again.test.tensors[1])  # the same on every rank


def test_scikit_learns_digits_are_all_there_and_each_once(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    whole = load_digits()
    small = torch.tensor(whole.images, dtype=torch.float32)[:, None] / 16
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear")
    is_test = torch.arange(1797) % 5 == 0
    found = digits(tmp_path)
    for part, chosen in ((found.test, is_test), (found.train, ~is_test)):
        assert torch.equal(part.tensors[0], images[chosen])
        assert torch.equal(part.tensors[1], torch.tensor(whole.target)[chosen])


@pytest.mark.process
def test_scikit_learn_itself_is_not_loaded(tmp_path: Path) -> None:
    code = "import sys, nbddp; nbddp.digits(); print('sklearn' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "False\n"


def test_without_scikit_learn_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError, match="not installed: pip install scikit-learn, or"):
        digits(tmp_path)


def test_offline_it_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MIRROR", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ConnectionError, match=r"MNIST cannot be downloaded .*; put its four \.gz"):
        digits(tmp_path / "data", download=True)
    assert not (tmp_path / "data").exists()


def test_what_is_downloaded_is_checked_before_it_is_kept(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MIRROR", mnist.as_uri())
    target = tmp_path / "target"
    assert digits(target, download=True).source.startswith("MNIST")
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    (mnist / next(iter(FILES))).write_bytes(b"half")
    with pytest.raises(ValueError, match="its checksum is another"):
        digits(tmp_path / "other", download=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an IDX file of bytes"),
        (b"\0\0\x0d\1", "not an IDX file of bytes"),
        (idx(3)[:-1], r"an IDX file of \[3\] is not 10 bytes long"),
    ],
)
def test_what_is_no_idx_file_is_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_idx(content)
