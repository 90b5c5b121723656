"""Packages of somebody else, installed in a folder of a test."""

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, name: str, target: str, files: Mapping[str, str]) -> None:
    """Install a package with these files; ``target`` is the manifest of its extension."""
    info = f"nbddp_{name}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: nbddp-{name}\nVersion: 1.0\n",
        f"{info}/entry_points.txt": f"[nbddp.extensions]\n{name} = {target}\n",
    }
    for path, text in {**files, **metadata}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
