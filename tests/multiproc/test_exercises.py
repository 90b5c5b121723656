"""Answers that are functions, tried out on four ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drivers.ranks import Ranks

pytestmark = pytest.mark.multiproc
RANKS = 4
FIRST_PARTS = """
left, right = (rank - 1) % world_size, (rank + 1) % world_size

def turn(x, to=right, of=left):
    arriving = torch.empty_like(x)
    there, here = dist.isend(x, to), dist.irecv(arriving, of)
    there.wait(), here.wait()
    return arriving

def ring(tensor, first=1, steps=world_size - 1):
    chunks = tensor.tensor_split(world_size)
    for step in range(steps):
        mine = (rank - step - 1 - first) % world_size
        chunks[mine].add_(turn(chunks[(rank - step - first) % world_size]))
    return chunks[(rank + 1 - first) % world_size]

def name_of(store, download):
    if store.add("turn", 1) == 1:
        store.set("name", download())
    return store.get("name").decode()

def each_for_itself(store, download):
    return download()

def in_bytes(store, download):
    if store.add("turn", 1) == 1:
        store.set("name", download())
    return store.get("name")

def another_name(store, download):
    if store.add("turn", 1) == 1:
        download()
    return "digits"

def own_name(store, download):
    if store.add("turn", 1) == 1:
        download()
    return f"digits-{rank}"

def checksum(model):
    return sum(each.double().sum().item() for each in model.parameters())

def spread(model):
    mine = checksum(model)
    return nbddp.all_reduce(mine, "max") - nbddp.all_reduce(mine, "min")

def seen_by_the_last(model):
    return spread(model) and rank == world_size - 1
"""
FIRST = [
    ('"01.1", turn', "Right."),
    ('"01.1", lambda x: x', "what this rank has sent"),
    ('"01.1", lambda x: turn(x, left, right)', "the right neighbour"),
    ('"01.1", lambda x: turn(x) * 0', "the left one"),
    ('"01.1", lambda x: None', "has to return the tensor"),
    ('"01.1", lambda x: turn(x)[:0]', "has to return the tensor"),
    ('"01.1", turn if rank else 3', "On rank 0: Give the function itself"),
    ('"01.1", lambda x: turn(x) * (rank != 2)', "On rank 2: "),
    ('"01.2", ring', "Right."),
    ('"01.2", lambda x: ring(x, first=0)', "Begin the ring one chunk before"),
    ('"01.2", lambda x: ring(x, steps=1)', "not the sum over all ranks"),
    ('"01.2", lambda x: None', "has to return this rank's chunk"),
    ('"01.4", name_of', "Right."),
    ('"01.4", each_for_itself', "downloaded 4 times"),
    ('"01.4", lambda store, download: "digits"', "downloaded 0 times"),
    ('"01.4", in_bytes', "decode them"),
    ('"01.4", another_name', "what `download` returns"),
    ('"01.4", own_name', "different names"),
    ('"01.4", lambda store, download: len(name_of(store, download))', "what `download` returns"),
    ('"02.2", spread', "Right."),
    ('"02.2", lambda model: True', "which are equal"),
    ('"02.2", lambda model: False', "it was not noticed"),
    ('"02.2", seen_by_the_last', "On rank 0: A weight was another on rank 3"),
    ('"02.3", 12, 8, 3, 11', "Right."),
]
FAILURES_PARTS = """
import math

def begin(loader, state):
    batches = iter(loader)
    torch.set_rng_state(state)
    return batches

def is_left_out(loss):
    return math.isnan(nbddp.all_reduce(loss.item(), "mean"))

def shared(batches):
    return batches[: nbddp.all_reduce(len(batches), "min")]
"""
FAILURES = [
    ('"04.1", begin', "Right."),
    ('"05.3", is_left_out', "Right."),
    ('"05.3", lambda loss: loss.isnan()', "When only rank 3's loss was NaN, rank 0 goes on"),
    ('"05.3", lambda loss: is_left_out(loss) and rank == 2', "only rank 3's loss was NaN, rank 0"),
    ('"05.3", lambda loss: True', "When no loss was NaN, it leaves the step out"),
    ('"05.3", lambda loss: False', "goes on into `backward()`"),
    ('"06.1", shared', "Right."),
    ('"06.1", lambda batches: iter(shared(batches))', "Right."),
    ('"06.1", lambda batches: batches', "On rank 0: This rank would go on alone"),
    ('"06.1", lambda batches: shared(batches)[::-1]', "from the first on"),
    ('"06.1", lambda batches: batches[:2]', "as many as each rank has"),
    ('"06.1", lambda batches: None', "It has to give this rank's batches"),
]
FURTHER = [
    ('"10.2", lambda loss: nbddp.all_reduce(loss, "mean") < 0.1', "Right."),
    ('"10.2", lambda loss: nbddp.all_reduce(loss, "min") < 0.1', "Right."),
    ('"10.2", lambda loss: torch.tensor(nbddp.all_reduce(loss)) < 0.4', "Right."),
    ('"10.2", lambda loss: loss < 0.1', "some stop, some go on"),
    ('"10.2", lambda loss: True', "was 1.0 on all ranks, and it stopped"),
    ('"10.2", lambda loss: rank == 3', "was 1.0 on all ranks, and it stopped"),
    ('"10.2", lambda loss: False', "was 0.01 on all ranks, and it went on"),
    ('"10.2", lambda loss: rank < 2 and loss < 0.1', "was 0.01 on all ranks, and it went on"),
]


@pytest.mark.parametrize(
    ("parts", "judged"),
    [(FIRST_PARTS, FIRST), (FAILURES_PARTS, FAILURES), ("", FURTHER)],
    ids=["00 to 03", "04 to 07", "an early stop has to be one of all ranks"],
)
def test_each_answer_is_tried_out_and_all_ranks_hear_the_same(
    make_group: Callable[..., Ranks], parts: str, judged: list[tuple[str, str]]
) -> None:
    group = make_group(RANKS)
    calls = ", ".join(f"repr(nbddp.check_answer({call}))" for call, _ in judged)
    group.run(f"{parts}\nshown = [{calls}]", quiet=True).raise_for_failure()
    first, *others = group.pull("shown")
    assert others == [first] * (RANKS - 1)
    for (call, hint), text in zip(judged, first, strict=True):
        assert hint in text, call
        assert text.startswith("Not yet. ") or text == hint == "Right.", call
