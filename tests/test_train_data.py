"""Each rank's own part of the data: whole, reshuffled, and the same again after a stop."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from nbddp.train import place, report
from nbddp.train.data import Loader, loader

# a rank of a worker group, and pytest, have threads; workers that only load do not mind
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Augmented(Dataset[Any]):
    """Samples that draw from all three generators; it notes what was loaded here."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


@pytest.fixture
def be_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Be some rank of several, as far as the loader can tell."""

    def be(rank: int, world_size: int) -> None:
        monkeypatch.setattr(place, "rank", lambda: rank)
        monkeypatch.setattr(place, "world_size", lambda: world_size)

    return be


@pytest.fixture
def steps() -> Iterator[list[tuple[int, str]]]:
    """What is reported while a test runs."""
    seen: list[tuple[int, str]] = []
    end = report.on_step(lambda step, source: seen.append((step, source)))
    yield seen
    end()


def samples_of(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in torch.as_tensor(batch).reshape(-1)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# ---- parts


@given(
    samples=st.integers(1, 40),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_training_rank_gets_what_distributed_sampler_gives_it_in_batches(
    samples: int, world_size: int, batch_size: int, shuffle: bool, drop_last: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "world_size", lambda: world_size)
        for rank in range(world_size):
            patch.setattr(place, "rank", lambda rank=rank: rank)
            ours = loader(range(samples), batch_size, shuffle=shuffle, drop_last=drop_last, seed=3)
            theirs = DistributedSampler(
                range(samples), world_size, rank, shuffle=shuffle, seed=3, drop_last=drop_last
            )
            for epoch in range(2):
                theirs.set_epoch(epoch)
                order = list(theirs)
                batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
                if drop_last:
                    batches = [batch for batch in batches if len(batch) == batch_size]
                assert len(ours) == len(batches)
                assert [batch.tolist() for batch in ours] == batches


@given(samples=st.integers(1, 40), world_size=st.integers(1, 5), batch_size=st.integers(1, 7))
def test_evaluation_gives_every_sample_to_one_rank_and_sizes_differ_by_one(
    samples: int, world_size: int, batch_size: int
) -> None:
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "world_size", lambda: world_size)
        for rank in range(world_size):
            patch.setattr(place, "rank", lambda rank=rank: rank)
            ours = loader(range(samples), batch_size, evaluation=True)
            batches = list(ours)
            assert len(batches) == len(ours)
            parts.append(samples_of(batches))
    assert sorted(itertools.chain(*parts)) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_have_different_orders_and_seeds_too() -> None:
    ours = loader(range(50), 10)
    first, second = samples_of(ours), samples_of(ours)
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(samples_of(loader(range(50), 5, seed=10)))}) == 3


def test_samples_that_can_be_had_together_are_asked_for_together() -> None:
    asked = []

    class Fast(Augmented):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return indices

    assert samples_of(loader(Fast(5), 2, shuffle=False)) == [0, 1, 2, 3, 4]
    assert asked == [[0, 1], [2, 3], [4]]


def test_collate_and_other_options_reach_the_dataloader() -> None:
    ours = loader(range(4), 2, shuffle=False, collate_fn=tuple)
    assert list(ours) == [(0, 1), (2, 3)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        loader(range(4), 2, batchsize=3)
    pairs = TensorDataset(torch.arange(4), torch.arange(4) * 2)
    assert [[part.tolist() for part in batch] for batch in loader(pairs, 4, shuffle=False)] == [
        [[0, 1, 2, 3], [0, 2, 4, 6]]
    ]


# ---- random numbers


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1}])
def test_augmentations_do_not_depend_on_workers_nor_on_the_training(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(1)
    expected = list(loader(Augmented(), 4, seed=5))
    torch.manual_seed(2)
    assert equal(list(loader(Augmented(), 4, seed=5, **options)), expected)


def test_augmentations_differ_between_ranks_batches_epochs_and_seeds(
    be_rank: Callable[[int, int], None],
) -> None:
    drawn = []
    for rank in (0, 1):
        be_rank(rank, 2)
        for seed in (0, 1):
            ours = loader(Augmented(), 4, shuffle=False, seed=seed)
            for _ in range(2):
                drawn += [batch[:, 1:] for batch in ours]
    numbers = torch.cat(drawn).flatten()
    assert len(numbers.unique()) == len(numbers)


def test_evaluation_draws_the_same_each_time() -> None:
    ours = loader(Augmented(), 4, evaluation=True)
    assert equal(list(ours), list(ours))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_does_not_disturb_the_trainings_random_numbers(workers: int) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [draw() for _ in range(6)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert [draw() for _ in loader(Augmented(), 4, num_workers=workers)] == expected


class OfWorker(Augmented):
    """What a worker had drawn when it began."""

    def __getitem__(self, _index: int) -> float:
        return self.drawn


def draw_in_worker(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.dataset.drawn = torch.rand((), dtype=torch.float64).item()


@pytest.mark.process
def test_workers_begin_with_seeds_of_their_rank_and_epoch(
    be_rank: Callable[[int, int], None],
) -> None:
    def begin(epoch: int) -> list[float]:
        ours = loader(OfWorker(8), 2, num_workers=2, worker_init_fn=draw_in_worker)
        ours.load_state_dict({**ours.state_dict(), "epoch": epoch})
        return torch.cat(list(ours)[:2]).unique().tolist()

    found = []
    for rank in (0, 1):
        be_rank(rank, 2)
        found += [begin(0), begin(1)]
        assert begin(1) == found[-1]
    assert len({number for each in found for number in each}) == 8


def test_a_dataset_that_fails_leaves_the_random_numbers_alone() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) / (1 // 0)

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError):
        list(loader(Failing(), 1))
    assert torch.equal(torch.rand(3), expected)


# ---- resuming


@settings(max_examples=25)
@given(stop=st.integers(1, 15), shuffle=st.booleans(), drop_last=st.booleans())
def test_a_resumed_loader_gives_bit_for_bit_what_was_left(
    stop: int, shuffle: bool, drop_last: bool
) -> None:
    def make() -> Loader:
        return loader(Augmented(), 4, shuffle=shuffle, drop_last=drop_last, seed=7)

    unbroken, state = play(make(), epochs=3, stop=stop)
    resumed = make()
    resumed.load_state_dict(state)
    rest, _ = play(resumed, epochs=3)
    assert equal(rest, unbroken[stop:])
    assert (resumed.epoch, resumed.step) == (3, len(unbroken))


def play(
    ours: Loader, *, epochs: int, stop: int = 0
) -> tuple[list[torch.Tensor], dict[str, Any] | None]:
    """Train to the end; all batches, and the state at the stop-th."""
    batches, state = [], None
    while ours.epoch < epochs:
        for batch in ours:
            batches.append(batch)
            if len(batches) == stop:
                state = pickle.loads(pickle.dumps(ours.state_dict()))
    return batches, state


@pytest.mark.process
@pytest.mark.gate_runs("2-", "6-")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stop", [2, 6, 8])
def test_with_workers_that_prefetch_too(stop: int, persistent: bool) -> None:
    def make() -> Loader:
        return loader(Augmented(), 4, num_workers=2, persistent_workers=persistent, seed=7)

    unbroken, state = play(make(), epochs=2, stop=stop)
    resumed = make()
    resumed.load_state_dict(state)
    rest, _ = play(resumed, epochs=2)
    assert equal(rest, unbroken[stop:])
    gc.collect()  # persistent workers end with their loader


def test_resuming_loads_nothing_that_was_loaded_before() -> None:
    dataset = Augmented(20)
    ours = loader(dataset, 4, shuffle=False)
    ours.load_state_dict({**ours.state_dict(), "batches": 3, "step": 3})
    assert [int(batch[0, 0]) for batch in ours] == [12, 16]
    assert dataset.loaded == list(range(12, 20))


def test_a_state_of_the_last_batch_ends_that_epoch_without_a_batch() -> None:
    ours = loader(range(8), 4)
    states = [ours.state_dict() for _ in ours]
    ours.load_state_dict(states[-1])
    assert (ours.epoch, ours.step, list(ours)) == (0, 2, [])
    assert (ours.epoch, ours.step, len(list(ours))) == (1, 2, 2)


def test_a_state_between_epochs_begins_the_next() -> None:
    ours, theirs = loader(range(8), 4), loader(range(8), 4)
    list(ours)
    theirs.load_state_dict(ours.state_dict())
    assert (theirs.epoch, theirs.step) == (1, 2)
    assert samples_of(theirs) == samples_of(ours)


def test_after_a_break_the_next_iteration_is_the_next_epoch_but_a_state_goes_on_in_the_middle() -> (
    None
):
    ours, theirs, whole = (loader(range(12), 4) for _ in range(3))
    assert len(list(itertools.islice(ours, 1))) == 1
    theirs.load_state_dict(ours.state_dict())
    first, second = samples_of(whole), samples_of(whole)
    assert samples_of(theirs) == first[4:]
    assert ours.epoch == 0
    assert samples_of(ours) == second


def test_an_iteration_that_is_still_open_does_not_move_a_loader_that_began_anew() -> None:
    ours = loader(range(12), 4)
    old = iter(ours)
    next(old)
    new = iter(ours)
    next(new)
    assert len(list(old)) == 2
    assert (ours.epoch, ours.state_dict()["batches"], ours.step) == (1, 1, 2)


def test_the_seed_of_the_state_wins() -> None:
    ours, theirs = loader(range(30), 5, seed=4), loader(range(30), 5, seed=9)
    theirs.load_state_dict(ours.state_dict())
    assert samples_of(theirs) == samples_of(ours)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("evaluation", [False, True])
def test_on_another_number_of_ranks_the_rest_of_the_epoch_is_divided_anew_and_it_says_so(
    be_rank: Callable[[int, int], None], world_size: int, evaluation: bool
) -> None:
    be_rank(0, 2)
    whole = loader(range(48), 4, evaluation=evaluation)
    states = [whole.state_dict() for _ in whole]
    be_rank(0, 1)
    order = samples_of(loader(range(48), 48, evaluation=evaluation))
    found = []
    for rank in range(world_size):
        be_rank(rank, world_size)
        resumed = loader(range(48), 4, evaluation=evaluation)
        if rank == 0:
            words = (
                "the loader goes on at sample 24 of epoch 0, saved on world size 2 with batches of "
                f"4, resumed on world size {world_size} with batches of 4: what is left of the "
                "epoch is seen once, but augmentations, and batches of another total size, are not "
                "those of a run that was never stopped"
            )
            with pytest.warns(UserWarning, match=f"^{words}$"):
                resumed.load_state_dict(states[2])
        else:
            resumed.load_state_dict(states[2])
        found += samples_of(resumed)
        assert resumed.epoch == 1
    assert sorted(found) == sorted(order[24:])


def test_ranks_and_batch_size_may_change_again_in_the_same_epoch(
    be_rank: Callable[[int, int], None],
) -> None:
    ours = loader(range(20), 2, shuffle=False)
    next(iter(ours))
    theirs = loader(range(20), 3, shuffle=False)
    with pytest.warns(UserWarning, match="sample 2 of epoch 0, .* batches of 2, .* batches of 3"):
        theirs.load_state_dict(ours.state_dict())
    assert next(iter(theirs)).tolist() == [2, 3, 4]
    state = theirs.state_dict()
    be_rank(0, 2)
    last = loader(range(20), 3, shuffle=False)
    with pytest.warns(UserWarning, match="sample 5 of epoch 0"):
        last.load_state_dict(state)
    again = loader(range(20), 3, shuffle=False)
    again.load_state_dict(last.state_dict())  # the same ranks: nothing to say
    assert next(iter(again)).tolist() == [5, 7, 9]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 9}, "samples=9, this loader has samples=8"),
        ({"shuffle": False}, "shuffle=False, this loader has shuffle=True"),
        ({"drop_last": True}, "drop_last=True, this loader has drop_last=False"),
    ],
)
def test_a_state_of_another_kind_of_loader_is_refused(change: dict[str, Any], words: str) -> None:
    ours = loader(range(8), 4)
    words = f"the loader's state was saved with {words}: make it as it was"
    with pytest.raises(ValueError, match=f"^{words}$"):
        ours.load_state_dict({**ours.state_dict(), **change})


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a loader's state: it has no epoch, start, batches"):
        loader(range(8), 4).load_state_dict({"step": 3})


# ---- steps and wrong use


def test_training_reports_each_step_before_it_gives_the_batch(
    steps: list[tuple[int, str]],
) -> None:
    ours = loader(range(8), 4)
    for _ in range(2):
        for _ in ours:
            assert steps[-1] == (ours.step - 1, "loader")
    assert steps == [(step, "loader") for step in range(4)]
    assert len(list(loader(range(8), 4, evaluation=True))) == 2
    assert len(steps) == 4


def test_the_loader_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"^batch_size must be a whole number above 0, got 0$"):
        loader(range(3), 0)
    words = r"^an evaluation loader leaves nothing out: drop_last must be False$"
    with pytest.raises(ValueError, match=words):
        loader(range(3), 2, evaluation=True, drop_last=True)
