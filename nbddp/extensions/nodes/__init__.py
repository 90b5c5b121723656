"""Ranks on other machines: a listener in the notebook, an agent on each node, the protocol."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(name="nodes")
