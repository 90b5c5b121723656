"""The kinds of faults, in words; nothing here loads torch, so that a notebook can list them."""

from __future__ import annotations

MEANINGS = {
    "raise": "a FaultError",
    "kill": "SIGKILL",
    "segfault": "a segmentation fault",
    "exit": "its process exits, code 3",
    "hang": "it sleeps",
    "stop": "SIGSTOP",
    "slow": "later steps take longer, see --factor",
    "nan": "a gradient becomes NaN",
    "skip": "it leaves out a collective",
    "oom": "it runs out of memory",
    "corrupt": "the newest checkpoint is damaged",
}

KINDS = tuple(MEANINGS)
HANDED_OVER = "NBDDP_FAULTS"  # the variable by which the ranks of a script get armed faults
