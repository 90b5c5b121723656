"""An interrupt ends the cell and keeps every name, wherever the ranks are."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from notebook import Notebook, Reply

from nbddp import CellFailedError, CellInterruptedError, WorkerGroup

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

AFTER = "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, x.item())"


def interrupted(notebook: Notebook, body: str, *, nproc: int = 3) -> Reply:
    """Run a body that never ends, press the stop button when every rank is about to enter it."""
    notebook.run(f"%%ddp --nproc {nproc}\nkept = rank\nimport time")
    request = notebook.begin(f"%%ddp\nif rank == 0:\n    print('begun')\n{body}")
    notebook.finish(request, until="begun")
    time.sleep(0.3)  # for the ranks to get from the print into the wait
    notebook.interrupt()
    began = time.monotonic()
    reply = notebook.finish(request)
    reply.seconds = time.monotonic() - began
    return reply


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("time.sleep(60)", "ranks 0-2 interrupted, line 4"),
        ("while True: pass", "ranks 0-2 interrupted, line 4"),
        (
            "x = torch.ones(1)\nif rank == 1: time.sleep(60)\ndist.all_reduce(x)",
            r"ranks 0,2:? interrupted in all_reduce #\d+, line 6",
        ),
        (
            "x = torch.ones(1)\nif rank == 0: dist.recv(x, src=1)\nelse: dist.all_reduce(x)",
            r"rank 0:? interrupted in recv, line 5",
        ),
        (
            "pair = dist.new_group([0, 1])\nx = torch.ones(1)\n"
            "if rank == 0: dist.recv(x, src=1, group=pair)\nelse: dist.barrier()",
            r"interrupted in barrier #\d+, line 7",
        ),
        (
            "class Slow:\n    def __del__(self): time.sleep(60)\nSlow()\ntime.sleep(60)",
            "ranks 0-2 interrupted, line 7",
        ),
        (
            "w = dist.all_reduce(torch.ones(3), async_op=True) if rank else None\n"
            "w.wait() if w else time.sleep(60)",
            r"ranks 1-2:? interrupted in all_reduce #\d+, line 5",
        ),
    ],
    ids=["sleep", "python", "waiting", "deadlock", "subgroup", "swallowed", "async"],
)
def test_the_stop_button_ends_the_cell_and_keeps_the_names(
    notebook: Notebook, body: str, place: str
) -> None:
    reply = interrupted(notebook, body)
    assert reply.error.startswith("CellInterruptedError: ")
    assert re.search(place, reply.traceback)
    assert "Every rank keeps its names; the next cell works." in reply.traceback
    assert reply.seconds < 4  # the promise is 1 s; a busy machine gets more
    after = notebook.run(AFTER)
    assert [after.lines(rank)[-1:] for rank in range(3)] == [["0 3.0"], ["1 3.0"], ["2 3.0"]]
    assert ("pair: a group ends with the default one; make it again" in after.text) == (
        "pair" in body
    )


def test_what_a_rank_imports_when_it_is_interrupted_can_be_imported_afterwards(
    notebook: Notebook,
) -> None:
    notebook.run("%%ddp --nproc 2\nimport sys, threading, time")
    request = notebook.begin(
        "%%ddp\ndef watch():\n    while 'sympy.polys' not in sys.modules: time.sleep(0.01)\n"
        "    print('half way')\nthreading.Thread(target=watch).start()\n"
        "import torch._dynamo\ntime.sleep(60)"
    )
    notebook.finish(request, until="half way")
    notebook.interrupt()
    assert "interrupted, line " in notebook.finish(request).traceback
    # the first step of an optimizer imports it; half imported, it failed in every later cell
    step = "torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).step()\nprint('stepped')"
    assert notebook.run(f"%%ddp\n{step}").text.count("stepped") == 2


def test_a_ddp_backward_that_waits_for_a_peer_is_freed(notebook: Notebook) -> None:
    notebook.run(
        "%%ddp --nproc 2\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
    )
    reply = interrupted(
        notebook,
        "if rank == 0: time.sleep(60)\nmodel(torch.ones(2, 4)).sum().backward()",
        nproc=2,
    )
    assert re.search(r"rank 1:? interrupted in all_reduce #\d+, line 5", reply.traceback)
    assert notebook.run(AFTER).lines(1) == ["1 2.0"]


def test_a_cell_that_catches_the_interrupt_may_clean_up(group: WorkerGroup) -> None:
    source = (
        "import time\ntry:\n    print('begun')\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('cleaned')\n    raise"
    )
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source)
    group.run("done = 1")


def test_c_code_that_never_returns_is_killed_after_the_grace_and_said_so(
    make_group: Callable[..., WorkerGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2, grace=2.0)
    group.run("kept = rank")
    with pytest.raises(CellFailedError) as failure:
        run_and_interrupt(
            group,
            "import ctypes\nprint('begun')\n"
            "if rank == 1: ctypes.PyDLL(None).sleep(60)\ndist.barrier()",
        )
    text = capsys.readouterr().out
    assert "rank 1 did not answer the interrupt yet (in C code that does not return?)" in text
    assert "rank 1 did not answer the interrupt in 2 s: killed" in text
    assert str(failure.value) == "rank 1 was killed by SIGKILL"
    assert group.run("kept", ranks=[0]).results[0]["data"]["text/plain"] == "0"


def test_a_rank_that_takes_long_to_say_how_it_ended_is_not_killed(
    make_group: Callable[..., WorkerGroup],
) -> None:
    group = make_group(2, grace=1.0)
    group.run(
        "import time\nkept = rank\nclass Slow(Exception):\n    asked = 0\n"
        "    def __str__(self):\n        self.asked += 1  # first while the cell still runs\n"
        "        time.sleep(2 if self.asked == 2 else 0)\n        return 'slow'"
    )
    source = "try:\n    print('begun')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, f"{source}    raise Slow from None")
    assert group.pull("kept") == [0, 1]


def test_a_notebook_that_stood_still_takes_nobody_for_deaf(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2 --grace 2\nimport time\nkept = rank")
    request = notebook.begin(
        "%%ddp\nif rank == 0: print('begun')\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(6)\n    raise"
    )
    notebook.finish(request, until="begun")
    time.sleep(0.3)
    notebook.interrupt()
    time.sleep(0.03)  # the ranks are told, and cannot be heard
    os.kill(notebook.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(notebook.pid, signal.SIGCONT)
    reply = notebook.finish(request)
    assert re.search(r"interrupted, line \d", reply.error)
    assert "killed" not in reply.text
    assert "kept 1" in notebook.run("%%ddp --ranks 1\nprint('kept', kept)").text


def test_a_second_interrupt_kills_at_once(make_group: Callable[..., WorkerGroup]) -> None:
    group = make_group(2, grace=40.0)
    source = (
        "import ctypes\nprint('begun')\nif rank == 1: ctypes.PyDLL(None).sleep(60)\ndist.barrier()"
    )

    def rank_0_is_done() -> bool:
        return group.life.cell is not None and group.life.cell.waiting == {1}

    began = time.monotonic()
    with pytest.raises(CellFailedError, match=r"^rank 1 was killed by SIGKILL"):
        run_and_interrupt(group, source, again_when=rank_0_is_done)
    assert time.monotonic() - began < 30  # without the second it takes the grace


def run_and_interrupt(
    group: WorkerGroup, source: str, *, again_when: Callable[[], bool] | None = None
) -> None:
    """Run source, interrupt when a rank has said that it begun, raise what came of it."""
    from nbddp.record.cell import CellRequest
    from nbddp.record.notices import Wrote
    from nbddp.ui.screen import StreamScreen
    from nbddp.ui.text.view import TextView

    class Interrupting(TextView):
        def _show_notice(self, notice: object) -> None:
            super()._show_notice(notice)
            if isinstance(notice, Wrote) and "begun" in notice.text and not pressed:
                pressed.append(notice)
                time.sleep(0.3)  # for the ranks to get from the print into the wait
                group.interrupt()
                if again_when is not None:
                    while not again_when():
                        time.sleep(0.02)
                    group.interrupt()

    pressed: list[object] = []
    handle = group.submit(CellRequest(source=source))
    group.show(handle, Interrupting(StreamScreen())).raise_for_failure()


TRAINING = (
    "for _ in range({steps}):\n    optimizer.zero_grad()\n"
    "    model(torch.randn(8, 4)).square().sum().backward()\n    optimizer.step()\n"
)


@pytest.mark.parametrize("delay", [0.31, 0.37, 0.43])
def test_an_interrupted_training_goes_on_with_the_same_model(
    notebook: Notebook, delay: float
) -> None:
    notebook.run(
        "%%ddp --nproc 2\nimport time\ntorch.manual_seed(rank)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)\n"
        "alias = model\nkept = rank"
    )
    request = notebook.begin(f"%%ddp\nprint('begun')\n{TRAINING.format(steps=10**9)}")
    notebook.finish(request, until="begun")
    time.sleep(delay)  # to strike at different places of a step
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run(
        f"%%ddp --out sums\n{TRAINING.format(steps=20)}"
        "sum(p.double().sum().item() for p in model.parameters())"
    )
    assert reply.status == "ok", reply.traceback
    assert "alias, optimizer: on the new process group, as rank 0 has them" in reply.text
    assert notebook.run("sums[0] == sums[1]").result == "True"


def test_after_a_failure_on_one_rank_models_and_optimizers_agree_again(
    group: WorkerGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "if rank == 0:\n    model.module(torch.ones(1, 2)).sum().backward()\n    optimizer.step()"
    )
    with pytest.raises(CellFailedError):
        group.run("if rank == 1: raise ValueError('before its first step')\ndist.barrier()")
    group.run("pass")
    text = capsys.readouterr().out
    assert "nbddp: model, optimizer: on the new process group, as rank 0 has them" in text
    one, other = group.pull(
        "[p.tolist() for p in model.parameters()], "
        "{k: float(v['step']) for k, v in optimizer.state_dict()['state'].items()}"
    )
    assert one == other
    assert one[1] == {0: 1.0, 1: 1.0}
