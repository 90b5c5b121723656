"""The layer of experts of notebook 4.4: right ones pass, each mistake has a hint."""

import pytest
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

ANSWERS = "from torch.nn.functional import one_hot\n"
ANSWERS += definitions("4.4", "exchange", "Exchange", "MyExperts")
OTHERS = """
from nbddp.extensions.course import time_limit

time_limit.SECONDS = 5.0  # one answer below waits as long

class Everywhere(MyExperts):
    # sends all tokens to all ranks
    def forward(self, tokens, choices, weights):
        chosen = one_hot(choices.flatten(), self.total)
        weights = weights * ((chosen.cumsum(0) * chosen).sum(1) <= self.capacity).view_as(choices)
        receives, sends = [None] * world_size, [len(tokens)] * world_size
        dist.all_gather_object(receives, len(tokens))
        given = (each.repeat(world_size, 1) for each in (tokens, choices, weights))
        tokens, choices, weights = (Exchange.apply(each, sends, receives) for each in given)
        results = 0
        for number, expert in enumerate(self.experts, len(self.experts) * rank):
            results += ((choices == number) * weights).sum(1, keepdim=True) * expert(tokens)
        return Exchange.apply(results, receives, sends).view(world_size, sends[0], 24).sum(0)

class First(MyExperts):
    def forward(self, tokens, choices, weights):
        return super().forward(tokens, choices[:, :1], weights[:, :1])

def before(experts, total):
    # how many choices of its expert other ranks have before each one
    counts = [torch.zeros(total, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(counts, experts.bincount(minlength=total))
    return sum(counts[:rank], 0 * counts[0])[experts]

def hooked(hook):
    class Hooked(MyExperts):
        def __init__(self, experts, capacity):
            super().__init__(experts, capacity)
            for each in self.parameters():
                each.register_hook(hook)
    return Hooked

def added_up(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total
"""
MINE = '"4.4a", but("MyExperts"'
SHARE = '"experts[rank * count : (rank + 1) * count]"'
DISPATCH, COMBINE = '"Exchange.apply(tokens', '"Exchange.apply(results'
LOOP = "torch.cat([expert(part) for expert, part in pairs])"
RIGHT = ['"4.4a", MyExperts']
WRONG = [
    '"4.4a", MyExperts(nn.ModuleList(), 1)',
    '"4.4a", type("Other", (), {})',
    f'{MINE}, {SHARE}, "experts")',
    f'{MINE}, {SHARE}, "experts[rank::world_size]")',
    f'{MINE}, "None] * back)", "None] * back).flip(0)")',
    f'{MINE}, "weights.flatten()[kept, None] * back", "back")',
    '"4.4a", First',
    f'{MINE}, "results[order.argsort()]", "results")',
    f'{MINE}, "arrived[order].split(arriving.sum(0).tolist())", "arrived[order].tensor_split(3)")',
    f'{MINE}, "<= self.capacity", "<= 1000")',
    f'{MINE}, "<= self.capacity", "<= self.capacity + 1")',
    f'{MINE}, "chosen.cumsum(0)", "chosen.flip(0).cumsum(0).flip(0)")',
    f'{MINE}, "<= self.capacity", "+ before(experts, self.total) <= self.capacity")',
    f'{MINE}, "weights.flatten()", "(weights / weights.sum(1, keepdim=True)).flatten()")',
    f'{MINE}, "None] * back)", "None] * back).detach()")',
    f'{MINE}, {DISPATCH}", "exchange(tokens")',
    f'{MINE}, {COMBINE}", "exchange(results")',
    f'{MINE}, "weights.flatten()", "weights.detach().flatten()")',
    '"4.4a", hooked(lambda gradient: gradient / world_size)',
    '"4.4a", hooked(added_up)',
    '"4.4a", Everywhere',
    f'{MINE}, "{LOOP}", "{LOOP} if len(arrived) else arrived.detach()")',
    f'{MINE}, "None] * back)", "None] * back.float())")',
    '"4.4a", hooked(lambda gradient: gradient.float().double())',
]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_of_experts_gets_a_verdict(
    make_group: MakeRanks, snapshot: SnapshotAssertion, ranks: int
) -> None:
    assert_verdicts(make_group(ranks), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
