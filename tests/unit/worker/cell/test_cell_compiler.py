"""A cell has one name and the editor's line numbers, however its code is compiled."""

import ast
import linecache
import traceback
from typing import Any

import pytest

from nbddp.worker.cell.compiler import CellCompiler


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CellCompiler:
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    return CellCompiler()


def compiled(compiler: CellCompiler, source: str) -> tuple[str, int]:
    """Compile as IPython's ``run_cell`` does; return the file name and the first line."""
    name = compiler.cache(source.lstrip("\n"), 99, source)
    tree = compiler.ast_parse(source.lstrip("\n"), name)
    return name, compiler(tree, name, "exec").co_firstlineno and tree.body[0].lineno


def test_code_of_a_cell_magic_is_compiled_with_the_cells_name_and_line_numbers(
    compiler: CellCompiler,
) -> None:
    compiler.begin_cell("%%capture\n\nx = 1\ny = 2", 2, 3)
    assert compiled(compiler, "get_ipython().run_cell_magic()") == ("<ipython-input-3 (2)>", 1)
    assert compiled(compiler, "\nx = 1\ny = 2\n") == ("<ipython-input-3>", 4)
    assert linecache.getline("<ipython-input-3>", 5) == "y = 2"
    of_string = ("<ipython-input-3 (3)>", 1)  # which the cell runs
    assert compiled(compiler, "z = 3") == of_string


def test_leading_blank_lines_count_for_line_numbers(compiler: CellCompiler) -> None:
    compiler.begin_cell("\n\n1", 2, 3)
    assert compiled(compiler, "\n\n1") == ("<ipython-input-3>", 4)


def test_code_compiled_by_the_time_magic_belongs_to_the_cell(compiler: CellCompiler) -> None:
    compiler.begin_cell("%%time\n1 / 0", 2, 3)
    code: Any = compiler(compiler.ast_parse("1 / 0"), "<timed eval>", "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code)
    [*_, frame] = traceback.extract_tb(caught.value.__traceback__)
    assert (frame.filename, frame.lineno, frame.line) == ("<ipython-input-3>", 3, "1 / 0")


def test_different_cells_with_the_same_prompt_number_get_different_names(
    compiler: CellCompiler,
) -> None:
    first, second = "<ipython-input-1>", "<ipython-input-1 (2)>"
    for source, name in (("a", first), ("b", second), ("a", first)):
        compiler.begin_cell(source, 2, 1)
        assert compiled(compiler, source)[0] == name


def test_a_cell_is_named_only_if_it_is_not_the_current_cell(compiler: CellCompiler) -> None:
    for number, source in ((0, "seed"), (1, "a"), (1, "b"), (2, "c")):
        compiler.begin_cell(source, 2, number)
    names = {each: compiler.name_of_cell(each) for each in [*compiler.sources, "<string>"]}
    assert names == {
        "<ipython-input-0>": "",
        "<ipython-input-1>": "cell [1]",
        "<ipython-input-1 (2)>": "cell [1]",
        "<ipython-input-2>": "",
        "<string>": "",
    }


def test_added_sources_do_not_replace_the_source_of_a_known_cell(compiler: CellCompiler) -> None:
    compiler.begin_cell("a", 1, 1)
    compiled(compiler, "a")
    compiler.add_sources({"<ipython-input-1>": "other", "<ipython-input-2>": "b\n"})
    assert compiler.sources == {"<ipython-input-1>": "a", "<ipython-input-2>": "b\n"}
    assert linecache.getline("<ipython-input-2>", 1) == "b\n"
    assert isinstance(compiler.ast_parse("x", "<ipython-input-2>"), ast.Module)
