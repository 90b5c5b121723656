"""``%ddp export``: the cells as a script for torchrun."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.export.script import ExportedScript, write_script
from nbddp.extensions.export.slurm import script_job
from nbddp.magics.command_arguments import ExportArguments
from nbddp.magics.notebook_state import NotebookState

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def export(notebook: NotebookState, args: ExportArguments) -> str:
    """Write the script and the files that it needs.

    Returns:
        What was written, how to run it, and what was left out.

    Raises:
        RequestError: there is nothing to write, or a file cannot be written.
    """
    path = Path(args.file).expanduser()
    if path.suffix != ".py":
        raise RequestError(f"expected the name of a Python file like train.py, got {args.file!r}")
    _check_name(path)
    group, log = notebook.group, notebook.export_log
    script = write_script(log.items(), path, group.spec, log.store_ports)
    files = {path: script.text.encode()}
    if script.pickled:
        files[path.with_suffix(".pushed.pkl")] = script.pickled
    if args.slurm:
        job = path.with_suffix(".sbatch")
        command = shlex.quote(str(path))
        has_gpus = any(each.device not in ("", "cpu") for each in group.session.snapshot().ranks)
        nprocs = [each.nproc for each in group.nodes.launcher.assignments] if group.nodes else []
        nnodes, nproc = (len(nprocs), max(nprocs)) if nprocs else (2, group.spec.nproc)
        text = script_job(path.stem, command, nnodes=nnodes, nproc=nproc, has_gpus=has_gpus)
        files[job] = text.encode()
    _write_files(files, replaces=args.force)
    return _describe_export(script, list(files))


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
