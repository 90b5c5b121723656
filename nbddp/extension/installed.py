"""The installed extensions: the folders in ``nbddp/extensions/``, and those of other packages."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from nbddp.extension.manifest import API, Command, Extension

PACKAGE = "nbddp.extensions"  # also the group of entry points
logger = logging.getLogger(__name__)


def folders() -> list[str]:
    """Return the names of the folders."""
    modules = pkgutil.iter_modules(import_module(PACKAGE).__path__)
    return [module.name for module in modules if module.ispkg]


@cache
def installed() -> dict[str, Extension]:
    """Return the extensions by name, each after those that it needs."""
    return without_conflicts(_manifests())


def _manifests() -> list[Extension]:
    from importlib.metadata import entry_points  # 40 ms, unless torch or IPython is loaded

    found = [_read(folder, f"{PACKAGE}.{folder}:EXTENSION") for folder in folders()]
    for entry in entry_points(group=PACKAGE):
        other = _read(entry.name, entry.value)
        if other is not None and other.api != API:
            logger.warning(
                "the extension %s is not loaded: it is for API %s, and this nbddp has API %s",
                *(other.name, other.api, API),
            )
        else:
            found.append(other)
    return [each for each in found if each is not None]


def _read(name: str, target: str) -> Extension | None:
    try:
        extension = load(target)
        if not isinstance(extension, Extension):
            raise TypeError(f"{target} is no Extension")
    except Exception:
        logger.exception("nbddp works without the extension %s, which cannot be read", name)
        return None
    return extension


def without_conflicts(manifests: Iterable[Extension]) -> dict[str, Extension]:
    """Return the extensions that can be used; refuse the others, and log the reason."""
    found: dict[str, Extension] = {}
    owners: dict[str, str] = {}  # of a command, an option or a public name
    waiting = sorted(manifests, key=lambda each: (each.api, each.name))  # own ones first
    while ready := [each for each in waiting if found.keys() >= {*each.needs}]:
        extension = ready[0]
        waiting.remove(extension)
        if taken := sorted(owners.keys() & (claims := _claims(extension))):
            logger.warning(
                "the extension %s is not loaded: %s already has %s",
                *(extension.name, owners[taken[0]], taken[0]),
            )
            continue
        found[extension.name] = extension
        owners |= dict.fromkeys(claims, extension.name)
    for extension in waiting:
        missing = ", ".join(sorted({*extension.needs} - found.keys()))
        logger.warning("the extension %s is not loaded: it needs %s", extension.name, missing)
    return found


def _claims(extension: Extension) -> set[str]:
    """Return what no other extension may have."""
    kinds = (extension.options, extension.cell_options, extension.start_options)
    options = [option for kind in kinds if kind is not None for option in fields(kind)]
    flags = {word for option in options for word in option.metadata.get("names", "").split()}
    return {
        f"the name {extension.name}",
        *(f"the command {command_name(kind)}" for kind in extension.commands),
        *(f"the command nbddp {command_name(kind)}" for kind in extension.terminal_commands),
        *(f"the option {flag}" for flag in flags if flag.startswith("-")),
        *(f"an option with the field {option.name}" for option in options),
        *(f"the backend {name}" for name in extension.backends),
        *(f"the name nbddp.{name}" for name in extension.public),
        *(f"the method WorkerGroup.{name}" for name in extension.group_methods),
    }


def command_name(kind: type[Command]) -> str:
    """Return the name of a command."""
    return kind.example.partition(" ")[0]


def owner_of_command(name: str, *, is_of_terminal: bool = False) -> str:
    """Return the extension that has a command, installed or not; "" if none has it."""
    extensions = import_module(PACKAGE)
    owners = extensions.TERMINAL_COMMANDS if is_of_terminal else extensions.COMMANDS
    return str(owners.get(name, ""))


def public_targets() -> dict[str, str]:
    """Return the public names of all extensions, each with its target."""
    targets: dict[str, str] = {}
    for extension in installed().values():
        targets |= extension.public
    return targets


def own_backends() -> dict[str, str]:
    """Return the backends of all extensions, each with its target."""
    targets: dict[str, str] = {}
    for extension in installed().values():
        targets |= extension.backends
    return targets


def offered(name: str) -> list[Any]:
    """Return what extensions offer under a name."""
    targets = [extension.offers.get(name) for extension in installed().values()]
    return [load(target) for target in targets if target is not None]


def load(target: str) -> Any:
    """Return what a target names."""
    module, _, name = target.partition(":")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded
