"""``%%ddp --sweep``, ``--repeat`` and ``--scale``: run a cell several times, each on new ranks."""

from __future__ import annotations

from nbddp.errors import RequestError
from nbddp.extensions.sweeps import SweepOptions
from nbddp.extensions.sweeps.grid import sweep_points
from nbddp.extensions.sweeps.scaling import ScalingStudy
from nbddp.extensions.sweeps.sweep import Sweep
from nbddp.extensions.sweeps.trials import TrialRunner
from nbddp.group.notebook_events import CellRanOnOtherRanks
from nbddp.group.notebook_half import NotebookHalf, UnstartedCell


class Sweeps(NotebookHalf):
    """Runs cells several times."""

    def run_cell(self, cell: UnstartedCell) -> bool:
        """Run a cell several times if its line says so."""
        options, group = cell.options(SweepOptions), self.notebook.group
        if not (options.sweep or options.repeat or options.scale):
            return False
        if options.scale and group.nodes is not None:
            raise RequestError(
                "--scale runs on this machine only: release the nodes with `%ddp stop`"
            )
        runner = TrialRunner(
            group=group,
            display=cell.display,
            run_cell=cell.run,
            request=cell.request,
            spec=cell.spec,
            values=cell.values,
            fresh=cell.fresh,
        )
        study: Sweep | ScalingStudy
        if options.scale:
            rounds, is_weak = options.rounds, options.weak
            study = ScalingStudy(runner, options.scale, rounds=rounds, is_weak=is_weak)
        else:
            trials = sweep_points(options.sweep, options.repeat)
            study = Sweep(runner, trials, start_over=options.start_over)
        group.session.prepare(cell.spec)
        self.notebook.tell(CellRanOnOtherRanks(number=cell.request.execution_count))
        study.run()
        return True
