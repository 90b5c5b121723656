"""``%ddp bench``: measure the collectives of the ranks, and show their speed."""

from __future__ import annotations

from nbddp.errors import RequestError
from nbddp.extensions.bench import BenchArguments
from nbddp.extensions.bench.view import speed_report
from nbddp.group.notebook_half import NotebookHalf


class Bench(NotebookHalf):
    """Measures collectives by code that it runs on the ranks."""

    def bench(self, args: BenchArguments) -> None:
        """Measure, and show a table and a chart.

        Raises:
            RequestError: there is only one rank.
        """
        if len(self.notebook.group.life.ranks) == 1:
            raise RequestError("a single rank sends nothing: `%ddp restart --nproc 2` starts two")
        module = "nbddp.extensions.bench.measure"
        source = f"__import__({module!r}, fromlist=['measure']).measure({args.sizes});"
        self.notebook.show(speed_report(self.notebook.evaluate_on_ranks(source)[0]))
