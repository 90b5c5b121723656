"""Answers as one line of JSON, or in words."""

from __future__ import annotations

import json
from typing import Any

from nbddp.extensions.terminal.safe_json import safe

Json = dict[str, Any]


def to_line(answer: Json) -> str:
    """Return an answer as one line of JSON."""
    return json.dumps(safe(answer), default=str)


def status_text(state: Json) -> str:
    """Return the status in the words of ``%ddp status``."""
    folder = f"all files of the run are in {state['folder']}"
    return "\n".join(filter(None, [state["note"], state["text"], folder]))


def why_text(answer: Json) -> str:
    """Return the reason, with the run that it is about."""
    title = f"{answer['state']} · {answer['run']}"
    note = answer["note"] if answer["kind"] != "dead kernel" else ""
    return "\n".join(filter(None, [title, note, answer["text"], answer["way_out"]]))


def logs_text(answer: Json) -> str:
    """Return the lines; those of several ranks with the rank in front."""
    if len(answer["logs"]) == 1:
        return "\n".join(answer["logs"][0]["lines"])
    return "\n".join(
        f"[rank {log['rank']}] {line}" for log in answer["logs"] for line in log["lines"]
    )


def metrics_text(answer: Json) -> str:
    """Return a line for each metric."""
    from nbddp.ui.wording import format_last

    lines = [f"{each['name']}: {format_last(each['last'])}" for each in answer["metrics"]]
    return "\n".join(lines) or f"run {answer['run']} has no metrics"
