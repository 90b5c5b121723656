"""A heal replaces a dead rank; the other ranks keep their processes and names."""

import os
import re
import signal
import time
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest
from conditions import when
from drivers.ranks import Capture, MakeRanks, Ranks
from limits import set_limits
from processes import wait_until
from trained import STATE, TRAINED, kill

from nbddp import RequestError
from nbddp.wire.request_messages import JoinGroup


@pytest.fixture
def group(make_group: MakeRanks) -> Ranks:
    group = make_group(3)
    group.run(TRAINED, quiet=True)
    return group


@pytest.mark.parametrize("dead", [(1,), (0, 2)], ids=str)
def test_heal_keeps_ranks_and_copies_state_to_new_ones(group: Ranks, dead: tuple[int, ...]) -> None:
    before = group.pids
    kill(group, *dead)
    healed = group.heal()
    donor = min({0, 1, 2} - {*dead})
    assert (healed.ranks, healed.donor) == (dead, donor)
    assert healed.left == {"gate": "cannot pickle '_thread.lock' object"}
    after = group.pids
    assert {rank for rank in range(3) if before[rank] != after[rank]} == {*dead}
    states = group.evaluate(STATE)
    assert [each.pop("rank") for each in states] == [0, 1, 2]
    assert [each.pop("at") for each in states] == [rank not in dead for rank in range(3)]
    assert states[0] == states[1] == states[2]
    assert states[0]["owned"]
    assert states[0]["sees"]
    assert states[0]["position"] == (0, 5)  # in the same epoch
    error = group.failure_of(f"if rank == {dead[0]}: scaled(None)")
    assert "return x * scale" in error.report  # it has the sources of cells


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [16, 64])
def test_heal_replaces_one_of_many_ranks(make_group: MakeRanks, nproc: int) -> None:
    group = make_group(nproc)
    group.run(TRAINED, quiet=True)
    for victim in (3, 0, nproc - 1):
        group.kill(victim)
        assert group.heal().ranks == (victim,)
        first, *others = [each["weights"] for each in group.evaluate(STATE)]
        assert others == [first] * (nproc - 1)


def test_heal_replaces_a_rank_whose_process_is_still_exiting(make_group: MakeRanks) -> None:
    group = make_group(3)
    for dead in [(1,), (0, 2)]:
        pids = group.pids
        for rank in dead:
            os.kill(pids[rank], signal.SIGKILL)
            assert wait_until(partial(_is_killed, pids[rank]))
        assert group.heal().ranks == dead


def _is_killed(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_heal_replaces_all_dead_ranks_or_none(make_group: MakeRanks) -> None:
    group = make_group(3)
    kill(group, 1, 2)
    with pytest.raises(RequestError, match=r"rank 2 .*`group.heal\(\)`"):
        group.heal((1,))
    assert group.alive == [0]
    assert group.heal((1, 2, 1), donor=0).ranks == (1, 2)
    group.assert_works()


def test_a_fault_finds_the_prepared_model_of_a_healed_rank(make_group: MakeRanks) -> None:
    group = make_group(2)
    group.run("model = nbddp.prepare(torch.nn.Linear(8, 2))", quiet=True)
    kill(group, 1)
    group.heal()
    group.run(
        "nbddp.faults.at(step=1, rank=1, kind='nan')\nnbddp.log(step=1)\n"
        "model(torch.ones(1, 8)).sum().backward()",
        quiet=True,
    )
    assert group.evaluate("any(bool(each.grad.isnan().any()) for each in model.parameters())") == [
        True,
        True,
    ]
    # a fault that waits for a collective does not reach the next cell
    group.run("nbddp.faults.at(step=1, rank=1, kind='skip')\nnbddp.log(step=1)", quiet=True)
    assert group.evaluate("nbddp.all_gather(1)") == [[1, 1]] * 2


LOOP = """
import pathlib, time
done = globals().get("done", 0)
for step in range(done, 12):
    optimizer.zero_grad()
    model(big[: 4 * 8].float().reshape(4, 8) / 100).square().mean().backward()
    optimizer.step()
    while rank == 1 and step == 7 and len([*pathlib.Path().glob("past*")]) < 2: time.sleep(0.01)
    nbddp.log(step=step, loss=step)
    done = step + 1
    if step == 7: pathlib.Path(f"past{rank}").touch()  # all of this step is done when rank 1 dies
"""


def test_cell_with_heal_resumes_from_the_model_after_a_death(group: Ranks, capsys: Capture) -> None:
    before = group.pids
    group.run("nbddp.faults.at(step=7, rank=1, kind='kill')\n" + LOOP, heal=2)
    output = capsys.readouterr().out
    for words in (
        r"rank 1 .*SIGKILL after the fault kill@rank=1,step=7; heal 1 of 2",
        r"noticed after \d+\.\d\d s, healed in \d+\.\d\d s",
        r"gate \(.*'_thread.lock'.*\).* cell \[1\] .*--ranks 1",
        r"1 heal, \d+\.\d s lost",
    ):
        assert re.search(f"^nbddp: .*{words}$", output, re.MULTILINE), words
    assert group.attempt == 1
    after = group.pids
    assert [rank for rank in range(3) if before[rank] != after[rank]] == [1]
    curve = group.metrics(most=1).curves["loss"][0]
    assert len(curve.resume_points) == 1  # one curve, with a mark
    assert curve.steps == tuple(map(float, range(12)))
    states = group.evaluate("[each.tolist() for each in model.parameters()], done")
    assert states[0] == states[1] == states[2]
    assert states[0][1] == 12
    events = {each["kind"]: each for each in group.read_lines("events.jsonl")}
    assert {*events["recovery"]} >= {"detected", "healed"}
    assert {*events["healed"]} >= {"fork", "carry", "meet", "bytes", "left", "names", "donor"}


SHARDED = {
    "FSDP": "from torch.distributed.fsdp import fully_shard\n"
    "cut = torch.nn.Linear(8, 8)\nfully_shard(cut)",
    "ZeroRedundancyOptimizer": "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    "cut = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)",
}
DTENSOR = (
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.tensor import Shard, distribute_tensor\n"
    "mesh = init_device_mesh('cpu', (3,))\n"
    "cut = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])"
)


@pytest.mark.gate_runs("FSDP")
@pytest.mark.parametrize("kind", SHARDED)
def test_heal_refuses_sharded_objects_and_changes_nothing(group: Ranks, kind: str) -> None:
    group.run(SHARDED[kind], quiet=True)
    group.failure_of("import os\nif rank == 1: os.abort()")
    with pytest.raises(RequestError, match=rf"rank 0: .*{kind}.*`group.restart\(\)`"):
        group.heal()
    # not of its replacement, and the heal is not proposed again
    with pytest.raises(RequestError, match=r"rank 1 .*SIGABRT; `group.restart\(\)` restarts all"):
        group.pull("rank", rank=1)
    assert group.alive == [0, 2]
    assert group.evaluate("big.sum().item()", ranks=[0, 2]) == [499999500000] * 2
    group.run("del cut", ranks=[0, 2], quiet=True)
    if kind == "ZeroRedundancyOptimizer":
        assert group.heal().ranks == (1,)


@pytest.mark.full
def test_heal_does_not_carry_a_tensor_whose_shard_died(group: Ranks) -> None:
    group.run(DTENSOR, quiet=True)
    group.failure_of("import os\nif rank == 1: os.abort()")
    lost = "not carried: cut (a part of it died with its rank)"
    [line] = [line for line in group.heal().lines() if line.startswith(lost)]
    assert line.endswith("run that line again on all ranks")
    group.run(DTENSOR.splitlines()[-1], quiet=True)
    assert group.evaluate("cut.full_tensor().sum().item()") == [12.0] * 3


@pytest.mark.gate_runs("0, 2")
@pytest.mark.parametrize(("ranks", "part"), [("[0, 2]", "0,2"), ("[1, 2]", "1-2")])
def test_heal_asks_for_a_donor_if_subgroups_differ(group: Ranks, ranks: str, part: str) -> None:
    group.run(f"part = dist.new_group({ranks})\nalone = dist.new_group([rank])\nshare = 'mine'")
    kill(group, 1)
    refusal = rf"rank 0: ranks {part} .*rank 1 .*`group.heal\(donor=R\)`"
    with pytest.raises(RequestError, match=refusal):
        group.heal()
    assert group.alive == [0, 2]
    assert group.heal(donor=2).ranks == (1,)
    assert group.pull("share") == ["mine"] * 3
    kill(group, 1)  # the group is still there
    with pytest.raises(RequestError, match=refusal):
        group.heal()


def test_failed_heal_falls_back_to_a_restart(group: Ranks, capsys: Capture) -> None:
    group.run(SHARDED["FSDP"], quiet=True)
    group.run(
        "import os, signal\nif rank == 1 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) == 0:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        heal=1,
        max_restarts=1,
    )
    output = capsys.readouterr().out
    for words in ("not healed: rank 0: .*FSDP", "rank 1 .*SIGKILL; restart 1 of 1", "1 restart, "):
        assert re.search(f"^nbddp: .*{words}", output, re.MULTILINE), words
    assert output.count("not healed") == 1  # the reason does not repeat it


def kill_1_in_the_rendezvous(
    group: Ranks, monkeypatch: pytest.MonkeyPatch, *, stopped: int | None = None
) -> None:
    """Kill rank 1 when all ranks have got the message; one may be stopped before it gets it."""

    def before(rank: int) -> None:
        if rank == stopped:
            os.kill(group.pids[rank], signal.SIGSTOP)

    def after(rank: int) -> None:
        if rank == 2:  # the last one that is told
            os.kill(group.pids[1], signal.SIGKILL)

    group.around_joins(monkeypatch, before=before, after=after)


def test_a_heal_in_which_a_rank_dies_is_tried_again(
    group: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    victims = [1]

    def after(rank: int) -> None:
        if rank == 2 and victims:  # the last one that is told
            os.kill(group.pids[victims.pop()], signal.SIGKILL)

    group.around_joins(monkeypatch, before=lambda _: None, after=after)
    group.run(
        "import os, pathlib\nif rank == 1 and not pathlib.Path('died').exists():\n"
        "    pathlib.Path('died').touch()\n    os.kill(os.getpid(), 9)\ndist.barrier()",
        heal=2,
    )
    output = capsys.readouterr().out
    for words in ("heal 1 of 2", "not healed: rank 1 was killed", "heal 2 of 2", "healed in"):
        assert words in output


@pytest.mark.parametrize("late", ["the new rank", "another"])
def test_death_of_the_new_rank_during_rendezvous_fails_the_heal_at_once(
    group: Ranks, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    kill(group, 1)
    if late == "another":  # it hears of the failure before it can begin
        group.begin_pull(2, "__import__('time').sleep(2)")
    kill_1_in_the_rendezvous(group, monkeypatch, stopped=1 if late == "the new rank" else None)
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"rank 1 .*SIGKILL"):
        group.heal()
    assert time.monotonic() - began < 30  # not the minute that ranks wait for each other
    monkeypatch.undo()
    group.run("kept = rank", ranks=[0, 2], quiet=True)  # it has nothing to do with that
    assert group.heal().ranks == (1,)
    assert group.evaluate("dist.barrier()\nbig.sum().item()") == [499999500000] * 3


def test_hang_in_the_rendezvous_is_named(group: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(group, 1)
    set_limits(monkeypatch, cancel_timeout=5.0)  # rank 0 may be slow
    kill_1_in_the_rendezvous(group, monkeypatch, stopped=2)
    with pytest.raises(RequestError, match=r"rank 2 .* 5 s.*`group.kill\(2\)`"):
        group.heal()
    monkeypatch.undo()
    group.kill(2)
    assert group.heal().ranks == (1, 2)
    group.assert_works()


def test_a_stop_during_a_heal_deletes_the_pickled_variables(
    group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(group, 1)
    link, store, keys = group.session.require_link(), group.store, []
    send = link.send

    def send_no_join(rank: int, command: Any) -> None:
        if isinstance(command, JoinGroup):
            keys.append(f"{command.payload['key']}/0")
        else:
            send(rank, command)

    monkeypatch.setattr(link, "send", send_no_join)
    stopping = when(lambda: bool(keys), lambda: group.stop())
    with pytest.raises(RequestError, match="the group was stopped"):
        group.heal()
    stopping.join()
    assert not store.check(keys[:1])


EXACT = """
import time
from pathlib import Path
torch.manual_seed(0)
model = nbddp.prepare(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
loader = nbddp.loader(data, 4, seed=2)
place = loader.state_dict()
"""
EPOCHS = """
loader.load_state_dict(place)
while loader.epoch < 2:
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        place = loader.state_dict()
        past = Path(f"past{loader.step}")
        while (rank, loader.step) == dies and not past.exists(): time.sleep(0.01)
        nbddp.log(step=loader.step, loss=0)
        if loader.step == dies[1]: past.touch()  # the step is whole here when the other rank dies
[each.tolist() for each in model.parameters()], loader.step
"""


def test_healed_training_ends_with_identical_bits(make_group: MakeRanks) -> None:
    """The cell records its position after each optimizer step, and resumes from there.

    With more than two ranks the first step can round differently: DDP's buckets are new.
    """
    group = make_group(2)
    group.run(EXACT, quiet=True)
    calm = group.evaluate(f"dies = 0, 0\n{EPOCHS}")
    assert calm[0] == calm[1]
    for rank, step in ((1, 7), (0, 23), (1, 41)):
        group.run(f"nbddp.faults.clear()\n{EXACT}", quiet=True)
        fault = f"nbddp.faults.at(step={step}, rank={rank}, kind='kill')\ndies = {rank}, {step}"
        again = group.evaluate(f"{fault}\n{EPOCHS}", heal=1)
        assert again == calm, f"rank {rank} died after step {step}"


LARGE = """
model = nbddp.prepare(torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model(torch.ones(1, 600)).sum().backward()
optimizer.step()
[first, *_, last] = model.parameters()
if rank == 2:
    with torch.no_grad():
        first += 1
    optimizer.state[first]["exp_avg"] += 1
    last.data[3] = 7
"""
SUMS = """
moments = [each["exp_avg"] for each in optimizer.state.values()]
[each.double().sum().item() for each in (*model.parameters(), *moments)]
"""


def test_large_tensors_are_equal_on_all_ranks_after_a_heal(make_group: MakeRanks) -> None:
    """Tensors that are equal on all ranks are not sent; others are copied from the donor."""
    group = make_group(3)
    group.run(LARGE, quiet=True)
    [donors, same, other] = group.evaluate(SUMS)
    assert donors == same != other
    kill(group, 1)
    group.heal()
    assert group.evaluate(SUMS) == [donors] * 3
