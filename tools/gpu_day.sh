#!/bin/bash
# Run all checks that need GPUs, in 10 minutes at most: bash tools/gpu_day.sh >report.md
#
# Needs an environment made by `python binder/install.py --test`, with a torch that supports the GPU.
# A part for which this machine lacks the GPUs is reported as not run, which is no failure.
cd "$(dirname "${BASH_SOURCE[0]}")/.." && exec "${PYTHON:-python}" tools/gpu_day.py "$@"
