"""The replica of notebook 2.7: right ones pass, each mistake has a hint."""

import pytest
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

ANSWERS = """
import io
import json
import time
from datetime import timedelta
from nbddp.extensions.course import time_limit

time_limit.SECONDS = 4.0  # for the answers that hang
"""
ANSWERS += definitions("2.7", "share", "Replica").replace("seconds=10", "seconds=4")
OTHERS = """
class Late(Replica):  # works in the step after that in which it returns, as torchft's replicas
    def step(self, alive, loss_of):
        number, members, done = self.agree(alive)
        if members != self.members:
            self.members, self.group = members, self.connect(number, members)
        is_new = self.done < max(done)
        ready = [each for each, steps in zip(members, done) if steps == max(done)]
        self.optimizer.zero_grad()
        if not is_new:
            loss_of(self.done).backward()
        for parameter in self.model.parameters():
            gradient = torch.zeros_like(parameter) if is_new else parameter.grad
            self.group.allreduce(gradient).wait()
            parameter.grad = gradient / len(ready)
        if not is_new:
            self.optimizer.step()
            self.done += 1
        if len(ready) < len(members):
            self.copy(done.index(max(done)), max(done) + 1)
        self.store.set("quorums", str(number + 1))

class Waiting(Replica):
    def step(self, alive, loss_of):
        number, members, _ = self.agree(alive)
        if len(members) == world_size:
            return super().step(alive, loss_of)
        self.store.set("quorums", str(number + 1))

class Pausing(Replica):
    def step(self, alive, loss_of):
        number, members, done = self.agree(alive)
        if members == self.members or number == 0:
            return super().step(alive, loss_of)
        self.members, self.group = members, self.connect(number, members)
        self.copy(done.index(max(done)), max(done))
        self.store.set("quorums", str(number + 1))

class Averaging(Replica):  # of the parameters, each with a momentum of its own
    def step(self, alive, loss_of):
        number, members, done = self.agree(alive)
        self.group = self.connect(number, members)
        self.copy(done.index(max(done)), max(done))
        self.optimizer.zero_grad()
        loss_of(self.done).backward()
        self.optimizer.step()
        for parameter in self.model.parameters():
            self.group.allreduce(parameter.data).wait()
            parameter.data /= len(members)
        self.done += 1
        self.store.set("quorums", str(number + 1))

class Twice(Replica):
    def step(self, alive, loss_of):
        super().step(alive, loss_of)
        loss_of(self.done)
"""
REPLICA = '"2.7a", but("Replica"'
MEAN = "parameter.grad /= len(members)"
ALL_REDUCE = "self.group.allreduce(parameter.grad).wait()"
RIGHT = ['"2.7a", Replica', '"2.7a", Late']
WRONG = [
    '"2.7a", Replica(None, 0, None, None)',
    '"2.7a", type("Other", (), {})',
    f'{REPLICA}, "{MEAN}", "pass")',
    f'{REPLICA}, "{MEAN}", "parameter.grad /= world_size")',
    f'{REPLICA}, "{ALL_REDUCE}", "pass", "{MEAN}", "pass")',
    f'{REPLICA}, "self.optimizer.zero_grad()", "pass")',
    '"2.7a", Averaging',
    f'{REPLICA}, "parts = [self.model, self.optimizer]", "parts = [self.model]")',
    f'{REPLICA}, "part.load_state_dict(state)", "pass")',
    f'{REPLICA}, "self.done = steps", "pass")',
    f'{REPLICA}, "self.copy(done.index(max(done)), max(done))", "self.copy(0, done[0])")',
    f'{REPLICA}, "self.done += 1", "self.done += len(members)")',
    f'{REPLICA}, "self.optimizer.step()", "self.rank and self.optimizer.step()")',
    '"2.7a", Waiting',
    '"2.7a", Pausing',
    '"2.7a", Twice',
    f'{REPLICA}, ">= alive()", ">= {{*range(world_size)}}")',
    f'{REPLICA}, "self.agree(alive)", "self.agree(lambda: {{*range(world_size)}})")',
    f'{REPLICA}, "self.connect(number, members)", "self.connect(number, sorted(alive()))")',
]


@pytest.mark.full
def test_a_replica_gets_a_verdict(make_group: MakeRanks, snapshot: SnapshotAssertion) -> None:
    assert_verdicts(make_group(3), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
