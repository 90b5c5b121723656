"""Check answers to the exercises of the course."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="course",
    needs=("checks", "train"),
    public={
        "Digits": "nbddp.extensions.course.digits:Digits",
        "StepMemory": "nbddp.extensions.course.plan_project:StepMemory",
        "Judgement": "nbddp.extensions.course.exercises:Judgement",
        "check_answer": "nbddp.extensions.course.exercises:check_answer",
        "digits": "nbddp.extensions.course.digits:digits",
        "memory_of_step": "nbddp.extensions.course.plan_project:memory_of_step",
        "sonnets": "nbddp.extensions.course.sonnets:sonnets",
    },
)
