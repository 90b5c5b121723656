"""Auto mode sends cells without a magic of their own to the ranks, and only those."""

import pytest

from nbddp.magics.auto_mode import AutoMode


def transform(cell: str, *, is_on: bool = True) -> str:
    auto = AutoMode()
    auto.is_on = is_on
    return "".join(auto(cell.splitlines(keepends=True)))


FOR_RANKS = (
    *("x = 1\n", "x = 1", "\n\nx = 1\n", "# a comment\nx = 1\n", "%time x = 1\n", "!ls\n"),
    *("text = '%%time'\n", "await thing()\n", "%ddpx\n", "%unload_ext autoreload\n"),
)
FOR_THE_KERNEL = (
    *("%%ddp --nproc 2\nx = 1\n", "%%time\nx = 1\n", "\n%%bash\nls\n", "%ddp status\n"),
    *("x = 1\n  %ddp stop\n", "%ddp\n", "get_ipython().run_line_magic('env', 'A')\n"),
    *("%unload_ext nbddp\n", "x = 1\n%reload_ext  nbddp\n"),
    *("", "\n", "   \n\n"),
)


@pytest.mark.parametrize("cell", FOR_RANKS)
def test_auto_mode_sends_a_plain_cell_to_the_ranks(cell: str) -> None:
    assert transform(cell) == f"%%ddp --auto\n{cell}"


@pytest.mark.parametrize("cell", FOR_THE_KERNEL)
def test_auto_mode_leaves_empty_cells_and_other_magics_unchanged(cell: str) -> None:
    assert transform(cell) == cell


def test_every_cell_is_unchanged_when_auto_mode_is_off() -> None:
    for cell in (*FOR_RANKS, *FOR_THE_KERNEL):
        assert transform(cell, is_on=False) == cell


@pytest.mark.parametrize("is_on", [True, False])
def test_a_local_cell_stays_in_the_kernel_with_its_line_numbers(is_on: bool) -> None:
    assert transform("\n%%local  \nx = 1\n", is_on=is_on) == "\n\nx = 1\n"
    text = "t = '''\n%%local\n'''\n"
    assert transform(f"%%local\n{text}", is_on=is_on) == f"\n{text}"
