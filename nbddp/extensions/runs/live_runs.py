"""A list of this user's live runs on this machine, in all folders."""

from __future__ import annotations

from typing import Any

from nbddp.extensions.runs import SCHEMA
from nbddp.extensions.runs.kept_ranks import kept_facts, kept_ranks
from nbddp.extensions.runs.open_run import live_runs, read_state

_SHOWN = ("run", "folder", "kernel", "age", "note", "state", "cell")


def live() -> dict[str, Any]:
    """Return the live runs, as JSON values."""
    kept = kept_ranks()
    runs = []
    for path in live_runs():
        state = read_state(path)
        facts = {name: state[name] for name in _SHOWN}
        runs.append({**facts, "kept": kept_facts(kept.get(path))})
    return {"schema": SCHEMA, "runs": runs}


def live_text(answer: dict[str, Any]) -> str:
    """Return two lines for each live run."""
    lines = []
    for run in answer["runs"]:
        kernel, kept = run["kernel"], run["kept"]
        is_dead = kernel["is_alive"] is False
        state = "its kernel is dead" if is_dead else f"{run['state']} · process {kernel['pid']}"
        words = [run["run"], state, *([kept["text"]] if kept else [])]
        lines.append(f"{' · '.join(words)}\n  {run['folder']}")
    return "\n".join(lines) or "none of your runs is live on this machine"
