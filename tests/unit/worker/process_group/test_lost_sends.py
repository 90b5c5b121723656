"""When a rank searches its memory for sends that Gloo has lost."""

import pytest
import torch

from nbddp.worker.process_group import lost_sends


@pytest.mark.parametrize(
    ("version", "switch", "found"),
    [
        ("2.13.0+cpu", None, 7),
        ("2.15.1", "1", 7),
        ("2.13.0", "0", 0),
        ("2.14.0", None, 0),
        ("2.130.0", None, 0),
        ("3.0", None, 0),
    ],
)
def test_the_search_runs_with_measured_versions_unless_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, version: str, switch: str | None, found: int
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(lost_sends, "_abort_waits", lambda _library: 7)
    if switch is not None:
        monkeypatch.setenv(lost_sends.SWITCH, switch)
    assert lost_sends.abort_stuck_sends() == found
