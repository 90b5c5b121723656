"""Check what ``check_answer`` says to right and to wrong answers."""

from __future__ import annotations

from collections.abc import Sequence

from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion


def assert_verdicts(
    group: Ranks,
    code: str,
    right: Sequence[str],
    wrong: Sequence[str],
    snapshot: SnapshotAssertion,
) -> None:
    """Check that all ranks accept the right answers, and give the hints of the snapshot.

    ``code`` defines the names in the answers, which are arguments of ``check_answer``, as code.
    """
    calls = ", ".join(f"repr(nbddp.check_answer({call}))" for call in (*right, *wrong))
    group.run(f"{code}\nshown = [{calls}]", quiet=True).raise_for_failure()
    first, *others = group.pull("shown")
    assert others == [first] * (group.world_size - 1)
    assert first[: len(right)] == ["Right."] * len(right)
    hints = dict(zip(wrong, first[len(right) :], strict=True))
    assert [each for each, hint in hints.items() if not hint.startswith("Not yet. ")] == []
    assert hints == snapshot
