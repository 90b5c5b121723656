"""Write the page on the last full tier: tools/tested.py LOG >docs/development/tested.md."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "ipykernel", "ipython", "ipywidgets", "jupyterlab", "matplotlib")
STEP = re.compile(r"^== (?P<title>.+)$")
SUMMARY = re.compile(r"^(?:=+ )?(?P<counts>(?:\d+ \w+,? ?)+) in (?P<seconds>[\d.]+)s")
LISTED = re.compile(r"^(?P<outcome>SKIPPED|XFAIL|FAILED|ERROR)\S*(?: \[\d+\])? (?P<what>.+)$")


def read(log: str) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return (step, counts, minutes) of each run of pytest, and (outcome, test) of what failed."""
    title, runs, listed = "", [], []
    for line in log.splitlines():
        if step := STEP.match(line):
            title = step["title"]
        elif summary := SUMMARY.match(line):
            minutes = f"{float(summary['seconds']) / 60:.0f}"
            runs.append((title, summary["counts"].strip(), minutes))
        elif one := LISTED.match(line):
            listed.append((one["outcome"], one["what"]))
    return runs, sorted(set(listed))


def page(log: str) -> str:
    """Return the page in Markdown."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    runs, listed = read(log)
    rows = [f"| {title} | {counts} | {minutes} |" for title, counts, minutes in runs]
    kinds = {"FAILED": "Failed", "ERROR": "Failed", "SKIPPED": "Skipped", "XFAIL": "Skipped"}
    parts = [
        "# The last run of the full tier",
        f"Commit {commit}, {date.today():%Y-%m-%d}, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}.",
        "\n".join(["| step | tests | minutes |", "|---|---|---|", *rows]),
    ]
    for kind in ("Failed", "Skipped"):
        tests = [f"* {what}" for outcome, what in listed if kinds[outcome] == kind]
        if tests:
            parts += [f"## {kind}", "\n".join(tests)]
    parts.append("`bash .ci/full` wrote this page.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1]).read_text()))
