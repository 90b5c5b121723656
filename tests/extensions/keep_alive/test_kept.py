"""Which kept ranks a name means."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from refusals import refusal

from nbddp.errors import RequestError
from nbddp.extensions.keep_alive import kept
from nbddp.extensions.runs.kept_ranks import KeptRanks

ONE, TWO = "20260102-030405", "20260102-030405-2"  # started in the same second


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks_of(run: str, *, has_notebook: bool = False) -> KeptRanks:
        facts = {"agent": Mock(), "join_file": Path(), "seconds": 60.0, "remaining": 9.0}
        return KeptRanks(run=Path(run), has_notebook=has_notebook, count=2, memory=1, **facts)

    found = [
        *(ranks_of(f"/a/{name}") for name in (ONE, TWO)),
        *(ranks_of(f"/{folder}/20260102-030406-lr-0.1") for folder in "ab"),
        ranks_of("/a/20260102-030407-deep"),
        ranks_of("/a/20260102-030408-deep", has_notebook=True),
    ]
    monkeypatch.setattr(kept, "kept_ranks", lambda: {each.run: each for each in found})


@pytest.mark.parametrize(
    ("name", "run"),
    [
        (ONE, f"/a/{ONE}"),
        (TWO, f"/a/{TWO}"),
        ("/b/20260102-030406-lr-0.1", "/b/20260102-030406-lr-0.1"),
        ("deep", "/a/20260102-030407-deep"),  # the other one has a notebook
        ("030408", "/a/20260102-030408-deep"),
    ],
)
def test_a_name_or_path_means_one_run(name: str, run: str) -> None:
    assert kept.find_kept(name).run == Path(run)


def test_runs_of_the_same_name_are_listed_by_their_paths() -> None:
    reason = refusal(RequestError, kept.find_kept, "lr 0.1")
    assert "/a/20260102-030406-lr-0.1, /b/20260102-030406-lr-0.1" in reason
    assert f"name one: {ONE}, {TWO}" in refusal(RequestError, kept.find_kept, "030405")
