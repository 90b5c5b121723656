"""Check answers to the exercises of the course."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="course",
    needs=("checks", "memory", "train"),
    public={
        "Digits": "nbddp.extensions.course.digits:Digits",
        "Judgement": "nbddp.extensions.course.exercises:Judgement",
        "check_answer": "nbddp.extensions.course.exercises:check_answer",
        "digits": "nbddp.extensions.course.digits:digits",
        "sonnets": "nbddp.extensions.course.sonnets:sonnets",
    },
)
