"""Ranks that exchange small messages return when their connections are aborted."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nbddp.worker.process_group.connections import Connections
from nbddp.worker.process_group.gloo import watch_new_groups
from nbddp.worker.process_group.process_group import set_timeout

pytestmark = pytest.mark.multiproc

RANKS = 3
ROUNDS = 30  # with both directions shut down, one round in ten had a rank that waited on
TIMEOUT = timedelta(seconds=5)


def _talk() -> None:
    mine = torch.zeros(512, dtype=torch.uint8)
    while True:
        parts = [torch.empty_like(mine) for _ in range(RANKS)] if dist.get_rank() == 0 else None
        dist.gather(mine, parts, dst=0)
        dist.broadcast(mine, src=0)


def _be_interrupted(rank: int, port: int) -> None:
    connections = Connections()
    watch_new_groups(lambda _ranks: connections.recording_group(), lambda _group: None)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def all_reach(place: str) -> None:
        store.add(place, 1)
        while store.add(place, 0) < RANKS:
            time.sleep(0.002)

    for turn in range(ROUNDS):
        again = dist.PrefixStore(f"{turn}", store.clone())
        dist.init_process_group("gloo", store=again, rank=rank, world_size=RANKS)
        set_timeout(TIMEOUT)
        all_reach(f"begun {turn}")
        ends_in = random.Random(turn).uniform(0.02, 0.05) + random.random() / 1000
        strike = threading.Timer(ends_in, connections.shut_down)
        strike.start()
        try:
            _talk()
        except RuntimeError as error:
            if "Timed out" in str(error):
                sys.stdout.write(f"rank {rank}, round {turn}: {error}\n")
        strike.join()
        all_reach(f"ended {turn}")
        dist.destroy_process_group()
        connections.close_groups()
        all_reach(f"closed {turn}")


@pytest.mark.full
def test_aborting_connections_frees_ranks_that_are_sending() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(server.port)], stdout=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]
    assert [rank.communicate()[0] for rank in ranks] == [b""] * RANKS
    assert [rank.returncode for rank in ranks] == [0] * RANKS


if __name__ == "__main__":
    _be_interrupted(int(sys.argv[1]), int(sys.argv[2]))
