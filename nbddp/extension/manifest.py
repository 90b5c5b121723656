"""What an extension declares: ``EXTENSION`` in the ``__init__`` of its folder.

The core reads the manifests of all extensions, so a manifest loads nothing else of its extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from nbddp.wire.frozen import Frozen

API = 1  # the version of this interface; it may change with each version of nbddp


class Command(Frozen):
    """A command of ``%ddp``, or of ``nbddp`` in a terminal.

    Its docstring is the help, its fields are the options and arguments.

    Attributes:
        example: the command with its required arguments.
        before: commands, separated by blanks: the help lists it in front of the first that exists.
    """

    example: ClassVar[str]
    before: ClassVar[str]

    def __init_subclass__(cls, example: str, before: str = "") -> None:
        super().__init_subclass__()
        cls.example, cls.before = example, before


class Extension(Frozen):
    """What an extension adds to the core.

    A target is ``module:name``, or a module alone. It is imported at its first use.

    Attributes:
        name: the name of its folder, or of its entry point.
        api: the API that it was written for; an extension in another package must name it.
        needs: the extensions that it imports. Without them it is not loaded.
        public: its names in ``nbddp``, each with its target.
        commands: its commands; a method of the same name in its notebook's half carries it out.
        options: its options of ``%%ddp`` and ``%ddp run``; each has a default.
        cell_options: its options of ``%%ddp`` alone.
        start_options: its options of ``%%ddp`` and ``%ddp start``.
        events: the events of the notebook (``group/notebook_events.py``) that it hears of.
        notebook: the target of its :class:`~nbddp.group.notebook_half.NotebookHalf`.
        rank: the target of its :class:`~nbddp.extension.rank_half.RankHalf`.
        cells: the target of its :class:`~nbddp.controller.cell_hooks.CellHooks`.
        scripts: the target of its :class:`~nbddp.group.script_ranks.ScriptHooks`.
        sessions: the target of its :class:`~nbddp.controller.cell_hooks.SessionHooks`.
        terminal_commands: its commands of ``nbddp`` in a terminal.
        terminal: the target of a class without arguments; a method of the name of each of these
            commands carries it out.
        backends: its backends for ``--backend``, each with the target of its
            :class:`~nbddp.extension.backend.Backend`.
        offers: what it offers to other extensions, by name, each with its target. The extension
            that asks for a name defines the type.
        group_methods: its methods of :class:`~nbddp.WorkerGroup`, each with its target: a function
            whose first argument is the group.
    """

    name: str
    api: int = 0
    needs: tuple[str, ...] = ()
    public: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[type[Command], ...] = ()
    options: type[Frozen] | None = None
    cell_options: type[Frozen] | None = None
    start_options: type[Frozen] | None = None
    events: tuple[type[Frozen], ...] = ()
    notebook: str = ""
    rank: str = ""
    cells: str = ""
    scripts: str = ""
    sessions: str = ""
    terminal_commands: tuple[type[Command], ...] = ()
    terminal: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    offers: Mapping[str, str] = field(default_factory=dict)
    group_methods: Mapping[str, str] = field(default_factory=dict)
