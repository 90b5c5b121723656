"""Check what ``check_answer`` says to right and to wrong answers."""

from collections.abc import Sequence

from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

# in a rank: `but(name, old, new)` is an answer of the notebook in which one text is another
BUT = '''
def but(name, *texts):
    """Return a function or class of the notebook's answers with other texts."""
    source = SOURCE
    for old, new in zip(texts[::2], texts[1::2]):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(globals())
    exec(source, names)
    return names[name]
'''


def assert_verdicts(
    group: Ranks,
    code: str,
    right: Sequence[str],
    wrong: Sequence[str],
    snapshot: SnapshotAssertion,
    *,
    answers: str = "",
) -> None:
    """Check that all ranks accept the right answers, and give the hints of the snapshot.

    ``answers`` are definitions of a notebook, which ``but`` changes. ``code`` defines further names
    in ``right`` and ``wrong``, which are arguments of ``check_answer``, as code.
    """
    calls = ", ".join(f"repr(nbddp.check_answer({call}))" for call in (*right, *wrong))
    given = f"from torch import nn\nSOURCE = {answers!r}\nexec(SOURCE)\n{BUT}\n{code}"
    group.run(f"{given}\nshown = [{calls}]", quiet=True).raise_for_failure()
    first, *others = group.pull("shown")
    assert others == [first] * (group.world_size - 1)
    assert first[: len(right)] == ["Right."] * len(right)
    hints = dict(zip(wrong, first[len(right) :], strict=True))
    assert [each for each, hint in hints.items() if not hint.startswith("Not yet. ")] == []
    assert hints == snapshot
