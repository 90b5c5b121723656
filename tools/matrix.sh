#!/bin/bash
# Run the golden walks with each installed Python and the newest packages: bash tools/matrix.sh
#
# Run it before a release. For each of python3.11 to python3.15 (PYTHONS names others, separated by spaces) it
# makes environments with the newest packages: one for each of four versions of torch, from the oldest supported one
# to the newest (TORCHS names others; "" is the tested one). A version without a wheel for a Python is no failure. At the end it prints a table in Markdown. For the tested torch alone:
#     TORCHS='""' bash tools/matrix.sh
# If a pip configuration limits the versions: PIP_CONFIG_FILE=/dev/null bash tools/matrix.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# ranks then show warnings about nbddp's own calls, such as of a deprecated function, and tests fail on them
export PYTHONWARNINGS=default::FutureWarning

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rows=()

install_with() { # install_with TORCH: that version, or "newest" (without CUDA if there is no GPU); newest other packages
    "$here/python" - "$1" <<'PYTHON' && "$here/pip" install -qq -e ".[test]" \
        "torch==$("$here/python" -c 'from importlib.metadata import version; print(version("torch"))')"
import sys
sys.path.insert(0, "binder")
import install
if sys.argv[1] == "newest":
    wanted = "torch"
    failed = install.has_nvidia_gpu() or install.pip("--no-deps", "--index-url", install.CPU_INDEX, wanted)
else:
    version = sys.argv[1] or install.TESTED_TORCH
    wanted = f"torch=={version}"
    failed = install.install_torch(version)
if failed:
    sys.exit(install.pip("--no-deps", wanted))  # this build has CUDA, and is on every index
PYTHON
}

try() { # try PYTHON TORCH: add a row to the table; an empty TORCH is the version in binder/install.py
    local title here="$scratch/venv/bin" found said
    title=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
        { rows+=("| ${1##*python} | | not here |"); return; }
    printf '\n== Python %s, torch %s\n' "$title" "${2:-as tested}"
    rm -rf "$scratch/venv"
    if ! { "$1" -m venv "$scratch/venv" && install_with "$2"; } >"$scratch/log" 2>&1; then
        if grep -q 'No matching distribution found for torch' "$scratch/log"; then
            rows+=("| $title | torch ${2:-as tested} | no wheel |")
        else
            tail -n 5 "$scratch/log"
            rows+=("| $title | torch ${2:-as tested} | cannot be installed |")
        fi
        return
    fi
    found=$("$here/python" -c 'from importlib.metadata import version as v; print(", ".join(
        f"{p} {v(p)}" for p in ("torch", "ipykernel", "ipython", "jupyterlab", "matplotlib", "numpy")))')
    said=$("$here/python" -m pytest -q -W default -p no:cacheprovider "${part[@]}" 2>&1 |
        tee /dev/stderr | grep -E ' (passed|failed|error).* in ' | tail -n 1)
    rows+=("| $title | $found | ${said:-it did not end} |")
}

part=(tests/golden tests/multiproc/test_interrupts.py tests/test_architecture.py tests/unit/worker/process_group/test_shared_gpus.py tests/unit/wire/test_function_sources.py)
for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14 python3.15}; do
    for torch in ${TORCHS-newest 2.14.1 2.13.0 2.9.1}; do
        try "$python" "${torch//\"/}"
    done
done

printf '\n| Python | with | the tests said |\n|---|---|---|\n'
printf '%s\n' "${rows[@]}"
! printf '%s\n' "${rows[@]}" | grep -q 'failed\|error\|cannot\|did not end'
