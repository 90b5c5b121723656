"""A recorder of reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sinks import Recorder, recording


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as recorder:
        yield recorder
