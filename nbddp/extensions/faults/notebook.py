"""``%ddp fault``: arm a fault, or disarm all."""

from __future__ import annotations

from nbddp.errors import RequestError
from nbddp.extensions.faults import FaultArguments
from nbddp.extensions.faults.kinds import Fault
from nbddp.group.notebook_half import NotebookHalf
from nbddp.magics.parser import command_parser
from nbddp.ui.wording import describe_armed


class Faults(NotebookHalf):
    """Arms faults by code that it runs on the ranks, so that a replay arms them again."""

    def fault(self, args: FaultArguments) -> None:
        """Arm a fault, or disarm all.

        Raises:
            RequestError: a rank or a step is named for ``off``.
            ArgumentError: the options do not describe a fault.
        """
        session, call = self.notebook.group.session, "clear()"
        ranks = tuple(session.life.alive) or None
        if args.kind == "off":
            if args.rank is not None or args.step is not None:
                raise RequestError("`%ddp fault off` disarms the faults of all ranks and steps")
        elif args.rank is None or args.step is None:
            given = {"--rank": args.rank, "--step": args.step}
            missing = ", ".join(name for name, value in given.items() if value is None)
            command_parser("fault").error(f"the following arguments are required: {missing}")
        else:
            fault = Fault(kind=args.kind, rank=args.rank, step=args.step, factor=args.factor)
            at = f"step={fault.step}, rank={fault.rank}, kind={fault.kind!r}, factor={fault.factor}"
            ranks, call = (fault.rank,), f"at({at}, again=True)"
        command = f"fault {args.line}"
        self.notebook.run_on_ranks(f"nbddp.faults.{call}  # %ddp {command}", ranks, command)
        self.notebook.print_line(f"nbddp: {describe_armed(session.armed_now)}")
