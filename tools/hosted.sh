#!/bin/bash
# Test nbddp's wheel in an environment like Colab's or Kaggle's: bash tools/hosted.sh [colab|kaggle]
# With "install FOLDER" or "test FOLDER" added, it does the first or second half and keeps the files there.
#
# Installing the wheel must replace no package: that breaks the page of a running kernel. Then a selection
# of the tests runs with the wheel, not with the clone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
list=tests/platforms/${1:-colab}.txt

scratch=${3:-$(mktemp -d)}
[ $# -ge 3 ] || trap 'rm -rf "$scratch"' EXIT
here="$scratch/venv/bin"

install_all() {
    python3 -m venv "$scratch/venv"
    there=(cloudpickle ipykernel ipython ipywidgets jupyter_client matplotlib nbclient nbconvert
        nbformat notebook numpy psutil scikit-learn tqdm)
    "$here/pip" install -qq --disable-pip-version-check -c "$list" "${there[@]}"
    "$here/python" -c 'import sys; sys.path.insert(0, "binder")
import install
sys.exit(install.install_torch(install.TESTED_TORCH))'
    "$here/pip" install -qq --disable-pip-version-check -c "$list" "torch==$("$here/python" -c \
        'from importlib.metadata import version; print(version("torch"))')"

    "$here/pip" wheel -qq --disable-pip-version-check --no-deps -w "$scratch" .
    "$here/pip" freeze >"$scratch/before"
    "$here/pip" install -qq --disable-pip-version-check "$scratch"/nbddp-*.whl
    "$here/pip" freeze >"$scratch/after"
    # setproctitle is in neither list: it is added, and replaces nothing
    changed=$(diff "$scratch/before" "$scratch/after" | grep '^[<>]' | grep -v '^> \(nbddp @\|setproctitle==\)' || true)
    [ -z "$changed" ] || { printf 'installing nbddp has changed:\n%s\n' "$changed"; exit 1; }
    echo "nbddp replaced no package of $list"

    "$here/pip" install -qq --disable-pip-version-check -c "$list" hypothesis playwright pytest \
        pytest-timeout pytest-xdist syrupy
}

run_tests() {
    mkdir "$scratch/clone" # without the package, so that the wheel is tested
    cp -r binder notebooks pyproject.toml README.md tests "$scratch/clone"
    cd "$scratch/clone"
    # -W default: packages of that age warn about newer ones
    "$here/pytest" -q -W default -p no:cacheprovider \
        tests/unit/ui/test_frontend.py tests/multiproc/test_cells.py tests/multiproc/test_deaths.py \
        tests/multiproc/test_interrupts.py tests/multiproc/test_steering.py \
        tests/notebooks/test_panel.py tests/platforms/classic_notebook.py \
        "tests/notebooks/test_notebooks.py::test_a_notebook_runs_from_start_to_end[1.1_quickstart]"
}

case ${2:-both} in
install) install_all ;;
test) run_tests ;;
both)
    install_all
    run_tests
    ;;
*)
    echo "expected install or test, got '$2'"
    exit 2
    ;;
esac
