"""``%ddp memory`` and ``%ddp free``: ask all ranks, and show who holds their memory."""

from __future__ import annotations

from nbddp.controller.rank_requests import ask_each, resolve_ranks
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.memory import FreeArguments, MemoryArguments
from nbddp.extensions.memory.messages import MemoryAnswer
from nbddp.extensions.memory.view import freed_report, memory_report, sampled_report
from nbddp.group.notebook_half import NotebookHalf
from nbddp.wire.request_messages import Answer, ExtensionMessage


class Memory(NotebookHalf):
    """Shows the memory of the ranks, and has them give some back."""

    def memory(self, _args: MemoryArguments) -> None:
        """Show who holds the memory; while a cell runs, the last samples."""
        session = self.notebook.group.session
        if session.life.state.is_busy:
            self.notebook.show(sampled_report(session.snapshot().ranks))
        else:
            self.notebook.show(memory_report(*ask(session, frees=False)))

    def free(self, _args: FreeArguments) -> None:
        """Have the ranks give memory back, and show how much, and who holds the rest."""
        self.notebook.show(freed_report(*ask(self.notebook.group.session, frees=True)))


def ask(session: Session, *, frees: bool) -> tuple[dict[int, MemoryAnswer], list[str]]:
    """Return the answer of each rank, and the problems of those without one.

    Raises:
        RequestError: no rank can answer.
    """
    request = ExtensionMessage(extension="memory", content={"free": frees})
    outcomes = ask_each(session, dict.fromkeys(resolve_ranks(session, None), request))
    answers = {
        rank: MemoryAnswer(**outcome.content["memory"])
        for rank, outcome in sorted(outcomes.items())
        if isinstance(outcome, Answer)
    }
    problems = [each for each in outcomes.values() if isinstance(each, RequestError)]
    if not answers:
        raise problems[0]
    return answers, [*dict.fromkeys(map(str, problems))]
