"""What ``%ddp memory`` and ``%ddp free`` show."""

from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.memory.messages import GPU, PROCESS, MemoryAnswer, Used
from nbddp.extensions.memory.view import freed_report, memory_report, sampled_report
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.report.render import render_text

MIB = 1 << 20
HOLDERS = [
    (PROCESS, "optimizer", "optimizer state", 80 * MIB),
    (PROCESS, "model", "parameters", 40 * MIB),
    (PROCESS, "model", "gradients", 41 * MIB),
    (PROCESS, "x", "tensors", 40),
    (PROCESS, "", "tensors without a name", 5 * MIB),
    (GPU, "x", "tensors", 7 * MIB),
]
WHOLE = MemoryAnswer(
    used={
        PROCESS: Used(total=400 * MIB, shared=150 * MIB, share=300 * MIB),
        GPU: Used(total=20 * MIB, tensors=8 * MIB),
    },
    before={PROCESS: Used(total=600 * MIB), GPU: Used(total=30 * MIB)},
    holders=HOLDERS,
)
UNTOUCHED = MemoryAnswer(
    used={PROCESS: Used(total=190 * MIB, shared=150 * MIB, share=MIB)},
    before={PROCESS: Used(total=190 * MIB)},
    holders=[(PROCESS, "empty", "tensors", 60 * MIB)],
)


def test_rows_explain_the_total_of_each_rank(snapshot: SnapshotAssertion) -> None:
    answers = {0: WHOLE, 2: UNTOUCHED}
    assert render_text(memory_report(answers, ["rank 1 is dead"])) == snapshot
    assert render_text(freed_report(answers)) == snapshot


def test_of_many_ranks_and_holders_the_largest_are_shown() -> None:
    holders = [(PROCESS, f"x{number}", "tensors", number * MIB) for number in range(1, 31)]
    answers = {
        rank: MemoryAnswer(used={PROCESS: Used(total=(1000 + rank) * MIB)}, holders=holders)
        for rank in range(12)
    }
    head, *rows = render_text(memory_report(answers)).splitlines()[1:]
    assert [*map(int, head.split("rank")[1:])] == [*range(4, 12)]
    named = [row.split()[0] for row in rows if row.startswith("x")]
    assert named == [f"x{number}" for number in range(30, 15, -1)]
    assert f"smallerholders{sum(range(16))}MiB" in "".join("".join(rows).split())
    assert rows[-1] == "and 4 more ranks, with less"


def test_while_a_cell_runs_the_last_samples_are_shown(snapshot: SnapshotAssertion) -> None:
    ranks = [
        RankSnapshot(rank=0, state="", memory=MIB, gpu="H", gpu_memory=MIB, gpu_reserved=2 * MIB),
        RankSnapshot(rank=1, state=""),
        RankSnapshot(rank=2, state="", is_alive=False),
    ]
    assert render_text(sampled_report(ranks)) == snapshot
