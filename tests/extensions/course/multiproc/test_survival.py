"""The project of notebook 2.6: scripts that run under torchrun and lose ranks."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lessons import written_file
from syrupy.assertion import SnapshotAssertion

import nbddp
from nbddp.extensions.course.survival import project

pytestmark = pytest.mark.timeout(500)

STARTER = written_file("2.6", "train.py")
SOLUTION = written_file("2.6", "solution.py")
SAVE = SOLUTION[SOLUTION.index("            if step % SAVE_EVERY") :].partition("\n\n")[0] + "\n"
LOAD = "    if CHECKPOINT.exists():\n        saved = torch.load(CHECKPOINT, weights_only=True)\n"
OWN_GENERATOR = "sampler=sampler, generator=torch.Generator()"


def but(*changes: tuple[str, str], of: str = SOLUTION) -> str:
    for old, new in changes:
        assert of.count(old) == 1, old
        of = of.replace(old, new)
    return of


WRONG = {
    "no checkpoint": STARTER,
    "a larger net": but(
        ("nn.Linear(20, 64)", "nn.Linear(20, 32)"), ("nn.Linear(64, 5)", "nn.Linear(32, 5)")
    ),
    "more dropout": but(("Dropout(0.2)", "Dropout(0.3)")),
    "another optimizer": but(("optim.AdamW", "optim.Adam")),
    "a constant rate": but(("            scheduler.step()\n", "")),
    "all ranks write one file": but((SAVE, SAVE.replace("if rank == 0", "if rank >= 0"))),
    "never calls set_epoch": but(("sampler.set_epoch(epoch)", "pass")),
    "written in place": but(("save_whole(state |", "torch.save(state |")),
    "written in place, errors of loading ignored": but(
        ("save_whole(state |", "torch.save(state |"),
        (
            LOAD,
            "    saved = None\n    try:\n        saved = torch.load(CHECKPOINT)\n"
            "    except Exception:\n        pass\n    if saved is not None:\n",
        ),
    ),
    "forgets the optimizer": but(('"optimizer": optimizer, ', "")),
    "forgets the random state": but(('        torch.set_rng_state(saved["random"][rank])\n', "")),
    "a number is drawn after the random state is restored": but((OWN_GENERATOR, "sampler=sampler")),
    "restores on rank 0 only": but(
        ("if CHECKPOINT.exists()", "if rank == 0 and CHECKPOINT.exists()")
    ),
    "counts a batch twice": but(('"done": step}', '"done": step - 1}')),
    "catches the failure and exits with 0": but(
        (
            "    main()\n",
            "    try:\n        main()\n    except RuntimeError as error:\n        print(error)\n",
        )
    ),
}

NUMBERED = but(  # another right way: a file for each checkpoint, and the newest that can be loaded
    (", CHECKPOINT)", ', Path(f"step-{step:02}.pt"))'),
    ("save_whole(state |", "torch.save(state |"),
    (
        LOAD,
        "    saved = None\n"
        "    for path in sorted(Path().glob('step-*.pt')):\n"
        "        try:\n"
        "            saved = torch.load(path, weights_only=True)\n"
        "        except (RuntimeError, EOFError, OSError):\n"
        "            break\n"
        "    if saved is not None:\n",
    ),
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, in which the judge leaves nothing."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.glob("nbddp-*")) == []  # torch creates a cache beside them


@pytest.mark.full
@pytest.mark.parametrize("script", [SOLUTION, NUMBERED], ids=["one file", "numbered files"])
def test_a_right_script_survives(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nbddp.check_answer("2.6a", script).text == "Right."
    told = capsys.readouterr().out
    assert "continues with step 31" in told
    assert "continues with step 41" in told


@pytest.mark.full
@pytest.mark.parametrize("mistake", WRONG)
def test_a_script_with_a_mistake_gets_its_hint(mistake: str, snapshot: SnapshotAssertion) -> None:
    assert nbddp.check_answer("2.6a", WRONG[mistake]).text == snapshot


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "STANDSTILL", 40.0)
    waits = SAVE + "                    dist.barrier()\n"
    judgement = nbddp.check_answer("2.6a", but((SAVE, waits)))
    assert "stands still after 10 steps" in judgement.text


def test_an_interrupt_ends_the_job_and_leaves_no_file(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = project._Job.look

    def interrupted(job: project._Job) -> None:
        look(job)
        assert len([*temporary.glob("nbddp-*")]) == 1
        if job.attempts:  # its workers run
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(project._Job, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nbddp.check_answer("2.6a", STARTER)
