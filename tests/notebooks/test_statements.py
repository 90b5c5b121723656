"""Statements of the notebooks that no cell can assert, or whose numbers are in the text."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lessons import NOTEBOOKS, definitions, sources_of


def prose_of(number: str) -> str:
    [path] = [path for path in NOTEBOOKS if path.name.startswith(f"{number}_")]
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def defined(number: str, *names: str, **variables: Any) -> dict[str, Any]:
    """Return these definitions of a notebook; `variables` are the variables that they use."""
    exec(definitions(number, *names), variables)
    return variables


def test_the_stages_of_zero_take_the_bytes_of_the_table() -> None:
    by_stage = defined("3.2", "by_stage")["by_stage"]
    rows = re.findall(
        r"^\| (?:DDP|stage \d) .*?\| ([\d.]+) \| ([\d.]+) \| `", prose_of("3.2"), re.M
    )
    ours, papers = zip(*(tuple(map(float, row)) for row in rows), strict=True)
    assert ours == by_stage(4, 4, 8, ranks=4)
    assert papers == by_stage(2, 2, 12, ranks=4)


def test_amdahls_law_has_the_numbers_of_the_text() -> None:
    names = defined("3.4", "amdahl", "counted")
    for ranks in (2, 4, 10, 100):
        assert names["amdahl"](ranks, 0.1) == pytest.approx(names["counted"](ranks))
    assert f"ten ranks are {names['counted'](10):.1f} times as fast" in prose_of("3.4")
    assert names["counted"](10_000) < 10


def test_the_tokens_for_each_link_are_those_of_the_text() -> None:
    names: dict[str, Any] = {}
    [source] = [each for each in sources_of("3.4") if "tokens = {}" in each]
    exec(source, names)
    nvlink, ethernet = (names["tokens"][each] for each in ("NVLink 4", "10 Gb Ethernet"))
    assert f"about {round(nvlink, -2):,.0f} tokens on each rank" in prose_of("3.4")
    assert f"it takes {round(ethernet, -3):,.0f}" in prose_of("3.4")


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (32.3, "too busy to tell"),  # less than the longest part
        (37.0, "the longest part is nearer"),
        (58.0, "the sum is nearer"),
        (70.0, "nothing is hidden"),
    ],
)
def test_the_verdict_about_a_predicted_step_follows_the_figures(
    measured: float, words: str
) -> None:
    assert words in defined("3.4", "verdict")["verdict"](measured, 35.4, 60.0)


def test_units_and_values_of_variables_are_written_out() -> None:
    assert [path.name for path in NOTEBOOKS if "teraflops a second" in path.read_text()] == []
    row = next(line for line in prose_of("2.4").splitlines() if "`NCCL_SOCKET_IFNAME=eth`" in line)
    values = re.findall(r"`([^`]+)`", row)
    assert len(values) == 3
    assert all(re.fullmatch(r"NCCL_SOCKET_IFNAME=[=^]?\w.*", value) for value in values)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("is_virtual", [False, True])
def test_torchrun_chooses_a_gpu_only_with_virtual_local_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_virtual: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = 'echo "$LOCAL_RANK ${CUDA_VISIBLE_DEVICES-none}" >$RANK'
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", *["--virtual-local-rank"][:is_virtual]]
    subprocess.run([*command, "--no-python", "sh", "-c", script], cwd=tmp_path, check=True)
    written = [(tmp_path / rank).read_text().strip() for rank in "01"]
    assert written == (["0 0", "0 1"] if is_virtual else ["0 none", "1 none"])
