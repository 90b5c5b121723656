"""``%ddp export``: the cells as a script for torchrun."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.export import ExportArguments
from nbddp.extensions.export.items import ExportLog, omitted_cell
from nbddp.extensions.export.script import ExportedScript, Omitted, PulledValue, write_script
from nbddp.extensions.export.slurm import script_job
from nbddp.group.notebook_events import (
    CellLeftOut,
    CellRanOnOtherRanks,
    NotebookEvent,
    PushAsked,
    ValuePulled,
)
from nbddp.group.notebook_half import Notebook, NotebookHalf

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


class Exporting(NotebookHalf):
    """Collects what the replay log lacks, and writes scripts."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self._log = ExportLog(notebook.group.session)

    def on_event(self, event: NotebookEvent) -> None:
        """Remember an item of an export that is not in the replay log."""
        match event:
            case PushAsked(names=names):
                self._log.record_store_ports(names)
            case ValuePulled(expression=expression, rank=rank):
                self._log.add(PulledValue(expression, rank))
            case CellLeftOut(request=request, reason=reason):
                self._log.add(omitted_cell(request, reason))
            case CellRanOnOtherRanks(number=number):
                self._log.add(Omitted(f"cell [{number}]", "it ran several times, on its own ranks"))

    def export(self, args: ExportArguments) -> None:
        """Write the script and the files that it needs; print what was left out.

        Raises:
            RequestError: there is nothing to write, or a file cannot be written.
        """
        path = Path(args.file).expanduser()
        if path.suffix != ".py":
            raise RequestError(
                f"expected the name of a Python file like train.py, got {args.file!r}"
            )
        _check_name(path)
        group, log = self.notebook.group, self._log
        script = write_script(log.items(), path, group.spec, log.store_ports)
        files = {path: script.text.encode()}
        if script.pickled:
            files[path.with_suffix(".pushed.pkl")] = script.pickled
        if args.slurm:
            job = path.with_suffix(".sbatch")
            command = shlex.quote(str(path))
            ranks = group.session.snapshot().ranks
            has_gpus = any(rank.device not in ("", "cpu") for rank in ranks)
            nprocs = [*Counter(group.session.launcher.nodes().values()).values()]
            nnodes, nproc = (len(nprocs), max(nprocs)) if nprocs else (2, group.spec.nproc)
            text = script_job(path.stem, command, nnodes=nnodes, nproc=nproc, has_gpus=has_gpus)
            files[job] = text.encode()
        _write_files(files, replaces=args.force)
        self.notebook.print_line(_describe_export(script, list(files)))


def _check_name(path: Path) -> None:
    """Refuse a script that would hide a module: imports search the folder of the script first."""
    file = getattr(sys.modules.get(path.stem), "__file__", None) or ""
    is_installed = bool(_PACKAGE_FOLDERS & set(Path(file).parts)) or path.stem == "nbddp"
    if path.stem in sys.stdlib_module_names or is_installed:
        raise RequestError(f"{path.name} would hide the module {path.stem}: choose another name")


def _write_files(files: dict[Path, bytes], *, replaces: bool) -> None:
    existing = [str(path) for path in files if path.exists()]
    if existing and not replaces:
        raise RequestError(
            f"already there: {', '.join(existing)}; `--force` replaces existing files"
        )
    for path, data in files.items():
        with as_request_error(f"{path} cannot be written"):
            path.write_bytes(data)


def _describe_export(script: ExportedScript, files: list[Path]) -> str:
    lines = [f"wrote {', '.join(map(str, files))}; run it with", f"    {script.command}"]
    lines += [f"    sbatch {each}" for each in files if each.suffix == ".sbatch"]
    if script.remarks:
        lines += ["what it needs or leaves out:", *(f"  {each}" for each in script.remarks)]
    return "\n".join(lines)
