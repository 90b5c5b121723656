"""Handwritten digits of 28x28 pixels for the notebooks: MNIST, or the digits in scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from nbddp.private_files import open_new_file

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"  # the mirror that torchvision uses
FILES = {  # the MD5 of each file, as in torchvision
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits; see :func:`digits`.

    Attributes:
        train: training images (float32, [N, 1, 28, 28], from 0 for white to 1) with their labels
            (int64, [N], 0 to 9), on the CPU.
        test: test images with their labels, in the same format.
        source: the name of the dataset and the numbers of images, as text.
    """

    train: TensorDataset
    test: TensorDataset
    source: str


def digits(folder: str | Path = "data", *, download: bool = False) -> Digits:
    """Load digits to train on: MNIST from its IDX files, else the 1,797 digits in scikit-learn.

    Args:
        folder: the folder with the four ``.gz`` files of MNIST, or the folder for the download.
        download: whether to download missing files; download on one rank first
            (:func:`nbddp.main_rank_first`).

    Returns:
        Two datasets, which are the same in every process.

    Raises:
        ConnectionError: the download failed; no partial file is left.
        ModuleNotFoundError: there are no MNIST files, and scikit-learn is not installed.
        ValueError: the checksum of a file is wrong.

    >>> images, labels = digits().train.tensors
    >>> images.dtype, tuple(images.shape[1:]), labels.dtype
    (torch.float32, (1, 28, 28), torch.int64)
    """
    folder = Path(folder)
    if download:
        for name in FILES:
            _fetch(name, folder)
    if all((folder / name).exists() for name in FILES):
        return _mnist(folder)
    return _scikit_learn_digits()


def _fetch(name: str, folder: Path) -> None:
    """Download one file and check it; keep no partial or wrong file."""
    if (folder / name).exists():
        return
    try:
        with urllib.request.urlopen(f"{MIRROR}/{name}", timeout=TIMEOUT) as answer:
            content = answer.read()
    except OSError as error:
        raise ConnectionError(
            f"MNIST cannot be downloaded ({error}); put its four .gz files into {folder}, or leave "
            "download=True out and train on the digits inside scikit-learn"
        ) from None
    _check(name, content)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{name}.tmp"
    with os.fdopen(open_new_file(draft), "wb") as file:
        file.write(content)
    draft.replace(folder / name)


def _check(name: str, content: bytes) -> None:
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != FILES[name]:
        raise ValueError(f"{name} has the wrong checksum for MNIST; delete it and try again")


def _mnist(folder: Path) -> Digits:
    parts = []
    for name in FILES:
        content = (folder / name).read_bytes()
        _check(name, content)
        parts.append(_read_idx(gzip.decompress(content)))
    train_images, train_labels, test_images, test_labels = parts
    return Digits(
        train=TensorDataset(_scaled(train_images), train_labels.long()),
        test=TensorDataset(_scaled(test_images), test_labels.long()),
        source="MNIST: 60,000 digits to train on, 10,000 to test",
    )


def _read_idx(content: bytes) -> torch.Tensor:
    """Read a tensor of bytes in the IDX format: two zeros, type, number of dimensions, sizes, data.

    >>> _read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    tensor([7, 8, 9], dtype=torch.uint8)
    """
    data_start = 4 + 4 * content[3]
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, data_start, 4)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=data_start).reshape(sizes)


def _scaled(images: torch.Tensor) -> torch.Tensor:
    return images.unsqueeze(1).float() / 255


def _scikit_learn_digits() -> Digits:
    """Load the digits of scikit-learn; every fifth digit of the file is a test digit."""
    # the import would take 80 MB and a second in each rank
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            "nbddp.digits() takes its digits from scikit-learn, which is not installed: "
            "pip install scikit-learn, or put MNIST's four .gz files into the folder"
        )
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    small = table[:, :-1].reshape(-1, 1, 8, 8) / 16
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear")
    labels = table[:, -1].long()
    is_test = torch.arange(len(table)) % 5 == 0
    return Digits(
        train=TensorDataset(images[~is_test], labels[~is_test]),
        test=TensorDataset(images[is_test], labels[is_test]),
        source="scikit-learn: 1,437 digits to train on, 360 to test, 8x8 pixels scaled to 28x28",
    )
