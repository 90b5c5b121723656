#!/bin/bash
# Run a part of the tests with each installed Python and the newest packages: bash tools/matrix.sh
#
# Run it before a release. For each of python3.11 to python3.15 (PYTHONS names others, separated by spaces) it makes
# environments with the newest packages: one for each of four versions of torch, from the oldest supported one to the
# newest (TORCHS names others). A version without a wheel for a Python is no failure. At the end it prints a table in
# Markdown. uv installs the packages, because pip takes a quarter of an hour for each CUDA build.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# ranks then show warnings about nbddp's own calls, such as of a deprecated function, and tests fail on them
export PYTHONWARNINGS=default::FutureWarning

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/uv" && "$scratch/uv/bin/pip" install -qq --disable-pip-version-check uv || exit
uv=$scratch/uv/bin/uv here=$scratch/venv/bin
rows=()

install() { # install PYTHON TORCH: torch without CUDA, if there is no GPU and PyTorch's own index can be reached
    local packages=("torch${2:+==$2}" -e ".[test]")
    "$uv" venv -q --clear --seed --python "$1" "$scratch/venv" &&
        { "$uv" pip install -q --python "$here/python" --torch-backend=auto "${packages[@]}" ||
            "$uv" pip install -q --python "$here/python" "${packages[@]}"; }
}

try() { # try PYTHON TORCH: add a row to the table
    local title found said
    title=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
        { rows+=("| ${1##*python} | | not here |"); return; }
    printf '\n== Python %s, torch %s\n' "$title" "$2"
    if ! install "$1" "${2#newest}" >"$scratch/log" 2>&1; then
        if grep -q 'torch.* has no wheels with a matching Python' "$scratch/log"; then
            rows+=("| $title | torch $2 | no wheel |")
        else
            tail -n 5 "$scratch/log"
            rows+=("| $title | torch $2 | cannot be installed |")
        fi
        return
    fi
    found=$("$here/python" -c 'from importlib.metadata import version as v; print(", ".join(
        f"{p} {v(p)}" for p in ("torch", "ipykernel", "ipython", "jupyterlab", "matplotlib", "numpy")))')
    said=$("$here/python" -m pytest -q -W default -p no:cacheprovider "${part[@]}" 2>&1 |
        tee >(cat >&2) | grep -E ' (passed|failed|error).* in ' | tail -n 1)
    rows+=("| $title | $found | ${said:-it did not end} |")
}

part=(
    tests/golden tests/multiproc/test_interrupts.py tests/multiproc/test_groups_live_on.py tests/test_architecture.py
    tests/unit/worker/process_group/test_shared_gpus.py tests/unit/wire/test_function_sources.py
)
for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14 python3.15}; do
    for torch in ${TORCHS:-newest 2.14.1 2.13.0 2.9.1}; do
        try "$python" "$torch"
    done
done

printf '\n| Python | with | the tests said |\n|---|---|---|\n'
printf '%s\n' "${rows[@]}"
! printf '%s\n' "${rows[@]}" | grep -q 'failed\|error\|cannot\|did not end'
