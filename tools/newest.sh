#!/bin/bash
# Run a command with the newest torch and the newest of all other packages: bash tools/newest.sh pytest -m unit
#
# The environment is kept in ~/.cache/nbddp/newest (NEWEST names another folder), because a CUDA build of torch has
# several GB. Each run updates its packages. If a pip configuration limits the versions, put PIP_CONFIG_FILE=/dev/null
# in front.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${NEWEST:-$HOME/.cache/nbddp/newest}
[ -x "$folder/bin/python" ] || python3 -m venv "$folder"
# shellcheck source=/dev/null
. "$folder/bin/activate"
pip install -qq --disable-pip-version-check --upgrade --upgrade-strategy eager torch -e ".[test]"
versions=$(python -c 'from importlib.metadata import version as v; print(", ".join(
    f"{p} {v(p)}" for p in ("torch", "ipykernel", "ipython", "jupyterlab", "matplotlib", "numpy", "cloudpickle")))')
printf '\n== Newest packages: %s\n' "$versions" # tools/tested.py takes it as a title
# ranks then show warnings about nbddp's own calls, such as of a deprecated function, and tests fail on them
PYTHONWARNINGS=default::FutureWarning "$@"
