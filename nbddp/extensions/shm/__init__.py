"""A backend for ranks on one Linux machine without GPUs: collectives over shared memory."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(name="shm", backends={"shm": "nbddp.extensions.shm.shm_backend:ShmBackend"})
