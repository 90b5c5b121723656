# What .ci/run and .ci/full share; sourced by them in the repository's root.
# shellcheck shell=bash

scratch=$(mktemp -d)
beside= # the process group of what runs beside the tests
trap '[ -z "$beside" ] || kill -- "-$beside" 2>/dev/null || true; rm -rf "$scratch"' EXIT
unset PYTHONDONTWRITEBYTECODE # without bytecode every kernel and every helper compiles all of nbddp

step() { # step TITLE COMMAND...: run it under a heading and tell how long it took
    printf '\n== %s\n' "$1"
    local began=$SECONDS failed=0
    "${@:2}" || failed=$? # bash ignores "set -e" in a function of an "||" list, so return it
    printf -- '-- %s: %d s\n' "$1" $((SECONDS - began))
    return "$failed"
}

install_debian_packages() { # only what is missing, and only where we may
    local missing=()
    [ -x /usr/bin/chromium ] || missing+=(chromium fonts-dejavu-core)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "not installed, for want of root and apt-get: ${missing[*]}"
        return 0
    fi
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"
}

readme_test_command() { # the fenced block after the marker in README.md
    awk '/<!-- test-command -->/ { marked = 1; next }
         marked && /^```/        { if (inside) exit; inside = 1; next }
         inside' README.md
}

make_environment() { # by the README's own command, without the tests
    python3 -m venv "$scratch/venv"
    # shellcheck source=/dev/null
    . "$scratch/venv/bin/activate"
    test_command=$(readme_test_command)
    [[ $test_command == *" && pytest" ]] || { echo "README.md has no test command that ends in pytest"; exit 1; }
    step "README's test command, its first half" bash -euo pipefail -c "${test_command% && pytest}"
}

run_tests() {
    pytest "$@" 2>&1 | tee -a "$scratch/tests.log"
}

check_the_rest() { # nothing in it waits for a page or for a rank: it gets what the tests leave
    step "ruff check" ruff check
    step "ruff format" ruff format --check
    step "mypy" mypy
    step "lint-imports" lint-imports
    step "Wheel and sdist" bash tools/package.sh
    step "Site" build_site
}

build_site() {
    NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict --site-dir "$scratch/site" &&
        python tools/dead_links.py "$scratch/site"
}

begin_beside() { # begin_beside LOG COMMAND...: at low priority, so that it gets what others leave
    set -m # a process group of its own, so that it can be ended with all that it started
    (renice -n 5 "$BASHPID" >/dev/null; "${@:2}") >"$1" 2>&1 </dev/null &
    beside=$!
    set +m
}

end_beside() { # end_beside LOG: wait for it, and tell what it said
    local failed=0
    wait "$beside" || failed=$?
    beside=
    cat "$1"
    return "$failed"
}

report() {
    printf '\nAll checks passed in %d s; the tests said:\n' "$SECONDS"
    grep -E '^=+ .*(passed|failed).* =+$' "$scratch/tests.log"
}
