"""The kernels of the golden walks; the rules of these tests are in ``walks.py``."""

from __future__ import annotations

from multiproc.conftest import fresh_notebook, kernel, lasting_kernel, notebook

__all__ = ["fresh_notebook", "kernel", "lasting_kernel", "notebook"]
