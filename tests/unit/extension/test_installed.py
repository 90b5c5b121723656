"""Which extensions are installed, and what each adds."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from packages_on_disk import install
from refusals import refusal

from nbddp import extensions
from nbddp.extension import installed as installing
from nbddp.extension.installed import installed, without_conflicts
from nbddp.extension.manifest import Command, Extension
from nbddp.magics import parser
from nbddp.magics.parser import COMMANDS, command_parser
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag


class FirstArguments(Command, example="same 1"):
    """Do it in one way."""


class SecondArguments(Command, example="same"):
    """Do it in another way."""


class FirstOptions(Frozen):
    one: bool = flag("-s --same", "in one way")


class SecondOptions(Frozen):
    other: bool = flag("--same", "in another way")


class ThirdOptions(Frozen):
    other: bool = flag("--third", "in a third way")


def same(name: str, number: int) -> dict[str, Extension]:
    """Return two extensions that declare the same."""
    pairs: dict[str, list[dict[str, Any]]] = {
        "the command same": [{"commands": (kind,)} for kind in (FirstArguments, SecondArguments)],
        "the option --same": [{"options": kind} for kind in (FirstOptions, SecondOptions)],
        "the option --same 2": [{"options": FirstOptions}, {"cell_options": SecondOptions}],
        "an option with the field other": [{"options": SecondOptions}, {"options": ThirdOptions}],
        "the name nbddp.same": [{"public": {"same": "json:loads"}}] * 2,
        "the method WorkerGroup.same": [{"group_methods": {"same": "json:loads"}}] * 2,
    }
    return {what: Extension(name=name, **pair[number]) for what, pair in pairs.items()}


def test_the_second_owner_of_a_command_an_option_or_a_name_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = same("apple", 0), same("pear", 1)
    for what in first:
        caplog.clear()
        assert [*without_conflicts([second[what], first[what]])] == ["apple"]
        assert caplog.messages == [
            f"the extension pear is not loaded: apple already has {what.removesuffix(' 2')}",
        ]


def test_an_extension_of_another_package_with_a_command_of_the_core_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class StopArguments(Command, example="stop"):
        """Stop something else."""

    for other in ({"commands": (StopArguments,)}, {"options": SecondOptions}):
        fig = Extension(name="fig", api=1, **other)
        refused = "commands" in other
        assert [*without_conflicts([fig, parser.CORE])] == ["nbddp", "fig"][: 2 - refused]
    assert caplog.messages == [
        "the extension fig is not loaded: nbddp already has the command stop"
    ]


def test_an_extension_comes_after_those_that_it_needs_or_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, c = Extension(name="a", needs=("b",)), Extension(name="c", needs=("a", "x"))
    assert [*without_conflicts([c, a, Extension(name="b")])] == ["b", "a"]
    assert caplog.messages == ["the extension c is not loaded: it needs x"]


def test_an_extension_of_another_package_is_refused_if_it_has_another_api_or_a_taken_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "from nbddp.extension.manifest import Extension\nEXTENSION = Extension(name={!r}, {})"
    packages = folder / "packages"
    (packages / "apple").mkdir(parents=True)
    (packages / "apple" / "__init__.py").write_text(text.format("apple", ""))
    monkeypatch.setattr(extensions, "__path__", [*extensions.__path__, str(packages)])
    for name, api in (("fig", "api=1"), ("kiwi", "api=2"), ("plum", ""), ("apple", "api=1")):
        install(
            folder, name, f"{name}_fruit:EXTENSION", {f"{name}_fruit.py": text.format(name, api)}
        )
    monkeypatch.syspath_prepend(str(folder))
    found = without_conflicts(installing._manifests())
    assert {*found} - {*installing.folders()} == {"fig"}
    assert found["apple"].api == 0
    assert [message.partition(",")[0] for message in sorted(caplog.messages)] == [
        "the extension apple is not loaded: apple already has the name apple",
        "the extension kiwi is not loaded: it is for API 2",
        "the extension plum is not loaded: it is for API 0",
    ]


@pytest.fixture
def without_publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folders = [name for name in installing.folders() if name != "publish"]
    monkeypatch.setattr(installing, "folders", lambda: folders)
    commands = {name: each for name, each in COMMANDS.items() if name != "publish"}
    monkeypatch.setattr(parser, "COMMANDS", commands)  # a deleted item would come back as the last
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.mark.usefixtures("without_publish")
def test_the_command_of_a_deleted_extension_names_the_extension() -> None:
    assert "publish" not in installed()
    assert refusal(UsageError, command_parser, "publish") == (
        "there is no `%ddp publish`; the extension publish is not installed"
    )


BROKEN = """
import sys
from types import ModuleType
from nbddp.extension import installed
sys.modules["nbddp.extensions.course"] = ModuleType("broken")
installed.folders = lambda: ["course", "runs", "publish"]
import nbddp
from nbddp.magics.parser import COMMANDS, CELL
print("publish" in COMMANDS, "--publish" in CELL.options(), "debug" in COMMANDS)
print(*(name for name in ("runs", "check_answer", "log") if name in nbddp.__all__))
"""


@pytest.mark.process
def test_the_magics_work_without_extensions_that_are_missing_or_broken() -> None:
    command = [sys.executable, "-c", BROKEN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\nruns log\n"
    assert "nbddp works without the extension course, which cannot be read" in done.stderr
