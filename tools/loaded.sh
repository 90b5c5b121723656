#!/bin/bash
# The gate's tests with ranks, kernels and pages, beside two processes that keep both cores busy.
# It adds a row to docs/development/loaded.md: bash tools/loaded.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
busy=()
trap 'kill "${busy[@]}"; rm "$log"' EXIT
for _ in 1 2; do
    python -c 'while True: pass' &
    busy+=($!)
done

failed=0
pytest -v -n 3 --dist loadfile --no-loadscope-reorder \
    -m "(multiproc or notebook or browser) and not (full or soak or ecosystem)" 2>&1 |
    tee "$log" || failed=$?
counts=$(grep -oE '[0-9].* (passed|failed).* in [0-9.]+s' "$log" | tail -1)
failures=$(sed -nE 's/^(FAILED|ERROR) ([^ ]+).*/`\2`/p' "$log" | paste -sd ' ')
printf '| %s | %s | %s | %s |\n' "$(date +%F)" "$(git rev-parse --short HEAD)" "${counts:-ended early}" \
    "$failures" >>docs/development/loaded.md
exit "$failed"
