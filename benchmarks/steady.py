"""Work that takes a rank a known time, as text that ranks run."""

from __future__ import annotations

CALIBRATE = """
import time
work = torch.randn(256, 256)

def calibrate(rate):
    '''How many products make nine tenths of a step when there are `rate` of them a second.'''
    began = time.perf_counter()
    for _ in range(200):
        work[:64] @ work
    counts = torch.tensor([0.9 / rate / ((time.perf_counter() - began) / 200)])
    dist.all_reduce(counts)
    return max(1, round(counts.item() / world_size))
"""
