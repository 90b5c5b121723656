"""Rules about trainers of other libraries, and the GPUs and precisions that they use."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from nbddp.extensions.checks.facts import GroupFacts, TrainerFacts
from nbddp.extensions.checks.rank_fact_rules import describe_by_value
from nbddp.extensions.checks.registry import Hit, rule
from nbddp.extensions.checks.source import CellSource
from nbddp.formatting import format_bytes, format_ranks

_SPLIT = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
_TRAINING_CALLS = ("train", "fit", "prepare", "setup", "backward")
USED = 64 << 20  # bytes on a GPU that a training uses


@rule("ND128")
def _splits_model_in_rank(source: CellSource) -> Iterator[Hit]:
    for call in source.calls:
        given = {each.arg: each.value for each in call.keywords}.get("device_map")
        if not (isinstance(given, ast.Constant) and given.value in _SPLIT):
            continue
        if source.is_cell or source.is_distributed:
            split = f'device_map="{given.value}" makes each rank split the model over all GPUs'
            yield call, f"{split}, so that the ranks get into each other's way."


def _trainers(facts: GroupFacts) -> Iterator[tuple[int, str, dict[int, TrainerFacts]]]:
    """Yield the trainers of all ranks: the line, the name, and the facts by rank."""
    line = _training_line(facts)
    for name, by_rank in facts.all_have(TrainerFacts):
        yield line, name, by_rank


def _training_line(facts: GroupFacts) -> int:
    """Return the line of the call that trains, or the first line if another cell has it."""
    lines = (facts.source.line_of(each) for each in _TRAINING_CALLS)
    return next((each for each in lines if each), 1)


@rule("ND218")
def _trains_alone(facts: GroupFacts) -> Iterator[Hit]:
    for line, name, by_rank in _trainers(facts):
        sizes = {each.world_size for each in by_rank.values()}
        if sizes != {facts.world_size}:
            size = min(sizes)
            sizes_text = f"world size {size} in a group of {facts.world_size} ranks"
            effect = "alone, on all the data" if size == 1 else "with some of them"
            yield line, f"{name} has {sizes_text}: each rank trains {effect}."
            return  # one such finding is enough for a cell


@rule("ND219")
def _uses_data_parallel(facts: GroupFacts) -> Iterator[Hit]:
    for line, name, by_rank in _trainers(facts):
        gpus = max(each.gpus for each in by_rank.values())
        if gpus > 1:
            yield line, f"{name} drives {gpus} GPUs with the threads of DataParallel."


@rule("ND220")
def _idle_gpu(facts: GroupFacts) -> Iterator[Hit]:
    trains = facts.has_ddp or any(True for _ in _trainers(facts))
    used = {rank: each.gpu_bytes for rank, each in facts.ranks.items()}
    idle = [rank for rank, size in used.items() if size == 0]
    if trains and idle and max(used.values()) > USED:
        busiest = max(used, key=lambda rank: used[rank])
        other = f"that of rank {busiest} has held {format_bytes(used[busiest])}"
        line = _training_line(facts)
        yield line, f"the GPU of {format_ranks(idle)} holds nothing, and {other}."


@rule("ND221")
def _bf16_without_support(facts: GroupFacts) -> Iterator[Hit]:
    lacking = [rank for rank, each in facts.ranks.items() if not each.has_bf16]
    for line, name, by_rank in _trainers(facts):
        if lacking and any(by_rank[rank].is_bf16 for rank in lacking if rank in by_rank):
            yield line, f"{name} trains in bf16, which the GPU of {format_ranks(lacking)} lacks."
            return


@rule("ND222")
def _does_not_shard(facts: GroupFacts) -> Iterator[Hit]:
    for line, name, by_rank in _trainers(facts):
        if unused := by_rank[min(by_rank)].unused:
            yield line, f"{name} was asked for {unused}, and trains with DDP: there is no GPU."


@rule("ND223")
def _different_train_sets(facts: GroupFacts) -> Iterator[Hit]:
    for line, name, by_rank in _trainers(facts):
        samples = {rank: each.samples for rank, each in by_rank.items()}
        if -1 in samples.values():
            continue
        if len(set(samples.values())) > 1:
            problem = f"differs between ranks: {describe_by_value(samples)} samples"
        elif _have_other_rows([each.columns for each in by_rank.values()]):
            example = "for example because of a split or shuffle without a seed"
            problem = f"has other rows, or another order, on each rank, {example}"
        else:
            continue
        yield line, f"the train set of {name} {problem}."


def _have_other_rows(by_rank: list[Mapping[str, int]]) -> bool:
    """Return whether no column is equal on all ranks.

    If a column is equal, the rows are the same ones. Only values in them differ, such as those of
    a random augmentation.
    """
    common = set(by_rank[0]).intersection(*by_rank[1:])
    return bool(common) and all(len({each[name] for each in by_rank}) > 1 for name in common)
