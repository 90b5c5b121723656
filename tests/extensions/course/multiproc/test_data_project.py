"""The stream of notebook 3.9: right ones pass, each mistake has a hint."""

from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

ANSWERS = "from torch.utils.data import DataLoader, IterableDataset, get_worker_info\n"
ANSWERS += definitions("3.9", "Order", "Stream")
OTHERS = """
class TwoNumbers(Stream):
    def state_dict(self):
        return dict(zip(("epoch", "place"), divmod(self.used, self.number)))

    def load_state_dict(self, state):
        self.used = state["epoch"] * self.number + state["place"]

class KeepsTheState(Stream):
    used = property(lambda self: self.state["used"], lambda self, n: self.state.update(used=n))

    def __init__(self, *given):
        self.state = {}
        super().__init__(*given)

    def load_state_dict(self, state):
        self.state = state

class WithoutWorkers(Stream):
    def __init__(self, number, seed, rank, world_size, workers):
        super().__init__(number, seed, rank, world_size, 0)

class OwnShare(Stream):
    def __iter__(self):
        mine = torch.arange(self.rank, self.number, self.world_size)
        while True:
            yield from mine[torch.randperm(len(mine), generator=torch.Generator())]
"""
STREAM = '"3.9a", but("Stream"'
STATE, LOAD = '{\\"used\\": self.used}', 'self.used = state[\\"used\\"]'
COUNT, FIRST = "self.used += self.world_size", "self.used + self.rank"
RIGHT = ['"3.9a", Stream', '"3.9a", TwoNumbers', '"3.9a", KeepsTheState']
WRONG = [
    '"3.9a", Stream(50, 7, 0, 4, 0)',
    '"3.9a", type("Other", (), {})',
    f'{STREAM}, "while True", "while at < self.number")',
    f'{STREAM}, "order[place]", "order[place] + 1")',
    f'{STREAM}, ", generator=generator", "")',
    f'{STREAM}, "{FIRST}, self.world_size", "0, 1")',
    f'{STREAM}, "torch.randperm(self.number, generator=generator)", "torch.arange(self.number)")',
    f'{STREAM}, "self.seed + epoch", "self.seed + epoch + self.first")',
    '"3.9a", OwnShare',
    f'{STREAM}, "self.seed + epoch", "self.seed")',
    f'{STREAM}, "self.seed + epoch", "epoch")',
    '"3.9a", WithoutWorkers',
    f'{STREAM}, "(info.id, info.num_workers) if info else (0, 1)", "0, 1")',
    f'{STREAM}, "workers * self.step\\n", "self.step\\n")',
    f'{STREAM}, "{STATE}", "{{\\"used\\": self.used, \\"all\\": [*range(self.used)]}}")',
    f'{STREAM}, "{STATE}", "{{\\"used\\": self.used + self.rank}}")',
    f'{STREAM}, "{LOAD}", "pass")',
    f'{STREAM}, "{STATE}", "{{\\"used\\": self.used - self.world_size}}")',
    f'{STREAM}, "{STATE}", "{{\\"used\\": self.used + 4 * self.world_size}}")',
    f'{STREAM}, "{STATE}", "{{\\"used\\": self.used % self.number}}")',
    f'{STREAM}, "{COUNT}", "self.used += 1", "{FIRST}", "self.used * self.world_size + self.rank")',
    f'{STREAM}, "{FIRST}", "self.used + dist.get_rank()")',
    f'{STREAM}, "{LOAD}", "self.begin = state[\\"used\\"]", "{FIRST}",'
    ' "getattr(self, \\"begin\\", 0) + self.rank")',
]


def test_a_stream_gets_a_verdict(make_group: MakeRanks, snapshot: SnapshotAssertion) -> None:
    assert_verdicts(make_group(2), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
