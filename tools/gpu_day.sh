#!/bin/bash
# A day's work on a machine with a GPU or more, in 10 minutes at most: bash tools/gpu_day.sh >report.md
#
# In an environment made by `python binder/install.py --test`, with a torch that knows the GPU. Each
# part that this machine has nothing for says so in the report, and is no failure.
cd "$(dirname "${BASH_SOURCE[0]}")/.." && exec "${PYTHON:-python}" tools/gpu_day.py "$@"
