"""Work that takes a rank a known time, as source text for the ranks."""

from __future__ import annotations

CALIBRATE = """
import time
work = torch.randn(256, 256)

def calibrate(rate):
    '''Return how many products take nine tenths of a step at `rate` steps per second.'''
    began = time.perf_counter()
    for _ in range(200):
        work[:64] @ work
    counts = torch.tensor([0.9 / rate / ((time.perf_counter() - began) / 200)])
    dist.all_reduce(counts)
    return max(1, round(counts.item() / world_size))
"""
