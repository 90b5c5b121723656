"""Rules about data: who gets which samples, and in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbddp.checks.conditions import depends_on_rank
from nbddp.checks.rule import Found, Rule
from nbddp.checks.source import Source
from nbddp.checks.syntax import argument, is_false, is_true, names_in, passes_on_more

NOTEBOOK = "02_from_one_process_to_ddp.ipynb"
_EVALUATES = re.compile(
    r"(?i)(?:^|_)(?:val|valid\w*|test\w*|eval\w*|dev|query|gallery)(?:_|$|set|load|data)"
)


def loaders(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Every DataLoader that is made, and what it is called."""
    for call in source.calls:
        if source.kind_of_call(call) == "loader" and not passes_on_more(call):
            yield call, assigned_to(source, call)


def assigned_to(source: Source, call: ast.Call) -> str:
    """The name, or attribute, that is made of it."""
    outer = source.parents.get(call)
    if isinstance(outer, ast.Assign) and len(outer.targets) == 1:
        return ast.unparse(outer.targets[0])
    return ""


def _shuffles_alone(source: Source) -> Iterator[Found]:
    if not source.is_distributed or _has_other_sharding(source):
        return
    for call, name in loaders(source):
        has_sampler = argument(call, "sampler", 3) or argument(call, "batch_sampler", 4)
        if has_sampler is not None or not is_true(argument(call, "shuffle", 2)):
            continue
        if _is_for_one(source, call, name) or not call.args + call.keywords:
            continue
        said = f"{name} has" if name else "a DataLoader with"
        yield Found(
            source.line(call),
            f"{said} shuffle=True and no sampler: every rank draws from all of the data.",
        )


def _has_other_sharding(source: Source) -> bool:
    """Whether the code deals the data out in a way of its own, or has a framework do it."""
    if not source.is_cell and "DistributedSampler" in source.text:
        return True  # it is known here: the other loader may be another way to run the script
    return bool(source.attributes & {"prepare", "shard", "split_dataset_by_node", "split_by_node"})


def _is_for_one(source: Source, call: ast.Call, name: str) -> bool:
    """Whether its data is a rank's own, or it is not for training."""
    data = argument(call, "dataset", 0)
    words = names_in(data) if data is not None else set()
    if _EVALUATES.search(name) or any(map(_EVALUATES.search, words)):
        return True
    made = [source.maker(each) for each in words]
    texts = [ast.unparse(each) for each in made if each is not None]
    if any(re.search(r"\brank\b|world_size|Iterable", each) for each in texts):
        return True
    if any(re.search(r"rank|world_size", each) for each in words):
        return True
    return _is_in_one_branch(source, call)


def _is_in_one_branch(source: Source, call: ast.Call) -> bool:
    """Whether it stands under a condition that may ask if there are several ranks at all."""
    for outer in source.above(call):
        if isinstance(outer, ast.If | ast.IfExp):
            text = ast.unparse(outer.test)
            if re.search(r"(?i)dist|ddp|rank|world|gpu|parallel|sampler|multi", text):
                return True
    return False


SHUFFLES_ALONE = Rule(
    id="ND111",
    title="a loader that shuffles without a sampler",
    why="Each rank then goes through all of the data by itself: an epoch is N times as long, and "
    "what the ranks have at one time may be the same samples, or not, as their seeds will.",
    fix="Give it a DistributedSampler (and leave `shuffle=True` out), or use `nbddp.loader`.",
    notebook=NOTEBOOK,
    find=_shuffles_alone,
    bad=Source(
        "from torch.utils.data import DataLoader\n"
        "train = DataLoader(data, batch_size=32, shuffle=True)\n"
        "for x, y in train:\n    model(x)\n",
        {"model": "ddp"},
    ),
    good=Source(
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "train = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))\n"
        "for x, y in train:\n    model(x)\n",
        {"model": "ddp"},
    ),
)


def _same_order(source: Source) -> Iterator[Found]:
    if "set_epoch" in source.text or _has_framework(source):
        return
    for loop, name in _epoch_loops(source):
        yield Found(
            source.line(loop),
            f"every epoch goes through {name} in the same order: nobody calls set_epoch().",
        )
        return


def _has_framework(source: Source) -> bool:
    """Whether something else may tell the sampler."""
    return any(
        name in " ".join(source.aliases.values())
        for name in (
            "accelerate",
            "lightning",
            "ignite",
            "fastai",
            "catalyst",
            "transformers",
            "mmcv",
        )
    )


def _epoch_loops(source: Source) -> Iterator[tuple[ast.For, str]]:
    """Loops over epochs with one over a loader inside that has a DistributedSampler."""
    for node in source.every(ast.For):
        if _times(node) == 1 or _hands_on(source, node):
            continue
        for inner in ast.walk(node):
            if inner is node or not isinstance(inner, ast.For):
                continue
            for name in sorted(
                each.id for each in ast.walk(inner.iter) if isinstance(each, ast.Name)
            ):
                if is_dealt_out(source, name, shuffled=True):
                    yield node, name
                    return


_SAYING = frozenset({"print", "log", "add_scalar", "format", "append", "info", "str", "int"})


def _hands_on(source: Source, loop: ast.For) -> bool:
    """Whether the epoch goes to something from elsewhere, which may tell the sampler."""
    epochs = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for call in source.within(loop):
        given = {each.id for each in call.args if isinstance(each, ast.Name)}
        given |= {each.value.id for each in call.keywords if isinstance(each.value, ast.Name)}
        if given & epochs and source.method(call) not in _SAYING:
            return True
    return False


def _times(loop: ast.For) -> int | None:
    """How often it goes round, if that is written there; None for any number of times."""
    call = loop.iter
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return 1 if isinstance(call, ast.Name | ast.Attribute) else None
    if call.func.id not in ("range", "trange", "tqdm"):
        return 1
    if len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
        value = call.args[0].value
        return value if isinstance(value, int) else None
    return None


def is_dealt_out(source: Source, name: str, *, shuffled: bool) -> bool:
    """Whether this is a loader whose sampler deals the data out, in a new order if it is told."""
    known = source.kinds.get(name, "")
    if known.startswith("loader "):
        return known == "loader shuffled" or (known == "loader dealt" and not shuffled)
    made = source.maker(name)
    if made is None or source.kind_of_call(made) != "loader":
        return False
    given = argument(made, "sampler", 3)
    sampler = source.maker(given.id) if isinstance(given, ast.Name) else given
    if isinstance(given, ast.Name) and sampler is None:
        known = source.kinds.get(given.id, "")
        return known == "sampler shuffled" or (known.startswith("sampler") and not shuffled)
    if not isinstance(sampler, ast.Call) or source.kind_of_call(sampler) != "sampler":
        return False
    return not shuffled or not is_false(argument(sampler, "shuffle", 3))


SAME_ORDER = Rule(
    id="ND112",
    title="a sampler that is not told the epoch",
    why="DistributedSampler shuffles by seed + epoch: without set_epoch() every epoch has the "
    "batches of the first one.",
    fix="Call `sampler.set_epoch(epoch)` at the beginning of each epoch; `nbddp.loader` does so.",
    notebook=NOTEBOOK,
    find=_same_order,
    bad=Source(
        "for epoch in range(3):\n    for x, y in train:\n        step(x, y)\n",
        {"train": "loader shuffled"},
    ),
    good=Source(
        "for epoch in range(3):\n    sampler.set_epoch(epoch)\n"
        "    for x, y in train:\n        step(x, y)\n",
        {"train": "loader shuffled"},
    ),
)


def _seed_of_rank(source: Source) -> Iterator[Found]:
    for call in source.calls:
        seed = argument(call, "seed", 4)
        is_sampler = source.kind_of_call(call) in ("sampler", "nbddp loader")
        if is_sampler and seed is not None and depends_on_rank(seed):
            yield Found(
                source.line(call),
                f"seed={ast.unparse(seed)} gives each rank an order of its own: their shares "
                "overlap, and some samples are in none.",
            )


SEED_OF_RANK = Rule(
    id="ND113",
    title="a sampler whose seed depends on the rank",
    why="All ranks must shuffle in the same order, because each takes every N-th sample of it.",
    fix="Give all ranks the same seed; only augmentation may have one for each rank.",
    notebook=NOTEBOOK,
    find=_seed_of_rank,
    bad=Source(
        "from torch.utils.data import DistributedSampler\n"
        "sampler = DistributedSampler(data, seed=3407 + rank)\n"
    ),
    good=Source(
        "from torch.utils.data import DistributedSampler\n"
        "sampler = DistributedSampler(data, seed=3407)\n"
    ),
)


def _splits_at_random(source: Source) -> Iterator[Found]:
    is_known = re.search(r"(?i)seed", source.text) is not None
    if source.is_cell or is_known or not source.is_distributed:
        return
    for call in source.calls:
        name = source.called(call)
        if name == "torch.utils.data.random_split" and argument(call, "generator", 2) is None:
            yield Found(
                source.line(call),
                "random_split without a generator or a seed: every rank has another split.",
            )
        if name in ("random.shuffle", "numpy.random.shuffle") and _is_dealt_behind(source, call):
            yield Found(
                source.line(call),
                f"{ast.unparse(call)} without a seed: each rank has a different order, so the "
                "shares that the sampler gives to the ranks overlap.",
            )


def _is_dealt_behind(source: Source, call: ast.Call) -> bool:
    """Return whether a DistributedSampler below the call divides the list that it shuffles."""
    shuffled = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
    return any(
        source.kind_of_call(each) == "sampler"
        and each.lineno > call.lineno
        and bool(each.args)
        and shuffled in _names_behind(source, each.args[0])
        for each in source.calls
    )


def _names_behind(source: Source, node: ast.AST, depth: int = 3) -> set[str]:
    """Return the names in an expression, and in the values that are assigned to them."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    values = [value for name in found for value in source.values(name)] if depth else []
    return found.union(*(_names_behind(source, each, depth - 1) for each in values))


SPLITS_AT_RANDOM = Rule(
    id="ND114",
    title="a random split or order that differs between ranks",
    why="One rank trains on samples that another rank keeps for its test, so the score is too "
    "good. If the order differs, the sampler gives overlapping shares to the ranks.",
    fix="Pass `generator=torch.Generator().manual_seed(0)` to the split, or call "
    "`random.Random(0).shuffle(files)`, with the same seed on all ranks.",
    notebook=NOTEBOOK,
    find=_splits_at_random,
    bad=Source(
        "from torch.utils.data import random_split\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "train, test = random_split(data, [800, 200])\n"
        "model = DistributedDataParallel(net)\n",
        is_cell=False,
    ),
    good=Source(
        "import torch\nfrom torch.utils.data import random_split\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "same = torch.Generator().manual_seed(0)\n"
        "train, test = random_split(data, [800, 200], generator=same)\n"
        "model = DistributedDataParallel(net)\n",
        is_cell=False,
    ),
)

RULES: tuple[Rule[Source], ...] = (SHUFFLES_ALONE, SAME_ORDER, SEED_OF_RANK, SPLITS_AT_RANDOM)
