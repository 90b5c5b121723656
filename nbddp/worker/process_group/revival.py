"""Give the process groups of a rank new connections after an interrupt, and keep their objects.

A C++ ``ProcessGroup`` looks up the backend of a device for each call. So a new ``ProcessGroupGloo``
is registered in it, and all objects that refer to the group can use it again: subgroups, meshes,
DTensors, sharded models, compiled functions (tried with torch 2.9, 2.13 and 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from nbddp.extension.backend import lasting
from nbddp.worker.process_group.connections import listening
from nbddp.worker.process_group.gloo import GlooUnblocker
from nbddp.worker.process_group.object_collectives import gather_objects
from nbddp.worker.process_group.unfinished_steps import StepReport

# A group keeps the first backend of each type, so each revival needs a type of its own. A type is
# a number below 256, and torch uses those below 10.
FIRST_TYPE = 50
MAX_DEAD_BACKENDS = 200  # each keeps two threads until its group is destroyed
# torch 2.14 made it public, and warns when the private function is called
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def set_timeout(timeout: timedelta, group: Any = None) -> None:
    """Set the timeout of a group, unless the checks of TORCH_DISTRIBUTED_DEBUG wrap it."""
    if (lasting_group := lasting(group or dist.group.WORLD)) is not None:
        lasting_group.set_timeout(timeout)
    elif dist.get_debug_level() != dist.DebugLevel.DETAIL:
        _set_timeout(timeout, group)


@dataclass(frozen=True, slots=True)
class Subgroups:
    """What has become of this rank's groups, except the default group.

    Attributes:
        with_objects: revived groups of this rank in which models or optimizers communicate.
        has_objects_anywhere: whether any rank has such a group.
        dropped: groups that were destroyed, because not all of their ranks had them.
        reports: for each rank of the default group, its report.
        ranks: by name, the ranks and the description of each group of any rank.
    """

    has_objects_anywhere: bool
    ranks: dict[str, tuple[list[int], str]]
    with_objects: list[Any] = field(default_factory=list)
    dropped: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Connected:
    """Connected groups, and what a migration must know of the ranks.

    Attributes:
        subgroups: the subgroups if all groups live on; None if there are new groups.
        new_ranks: in a heal, the ranks with a new process.
        steps: for each rank, the steps of its optimizers; empty if there are new groups.
        steps_of: returns how many steps an optimizer of this rank has begun and finished.
        uneven: lines about optimizers that have not made the same steps.
        is_inside_step: whether this rank has stopped inside a step, or between the steps of several
            optimizers in one iteration.
        drops_gradients: whether the gradients of this rank are those of an unfinished step.
        not_reset: models that are in the middle of a step, and why.
    """

    subgroups: Subgroups | None
    new_ranks: Sequence[int]
    steps: list[StepReport]
    steps_of: Callable[[Optimizer], list[int]]
    uneven: Sequence[str]
    is_inside_step: bool
    drops_gradients: bool
    not_reset: Sequence[tuple[Any, str]]


class GroupReviver:
    """Replaces the Gloo backends of this rank's groups.

    Args:
        unblocker: ends the waits of a backend that forms.
        recording: context in which connections of groups are opened.
        has_objects: returns whether models or optimizers of this rank communicate in a group.
    """

    def __init__(
        self,
        unblocker: GlooUnblocker,
        recording: Callable[[], AbstractContextManager[None]],
        has_objects: Callable[[Any], bool],
    ) -> None:
        self._has_objects = has_objects
        self._unblocker = unblocker
        self._recording = recording
        # All new backends share one device, which has four descriptors and a thread.
        self._devices: list[Any] = []
        self._addresses: list[Any] = []
        self.forget()

    def forget(self) -> None:
        """Start again, after all groups were destroyed."""
        self._revivals = self._dead_backends = 0
        self.forget_devices()

    def forget_devices(self) -> None:
        """Use a new device from now on; some pairs of this one have got connections that ended."""
        self._devices, self._addresses, self._pairs = [], [], 0

    def can_revive(self) -> bool:
        """Return whether all groups use Gloo for all devices, or an extension's backend."""
        return all(lasting(each) or _gloo_backend(each) for each in _world().pg_names)

    def is_exhausted(self) -> bool:
        """Return whether one more revival would keep too many threads of dead backends."""
        return self._dead_backends + len(_world().pg_names) > MAX_DEAD_BACKENDS

    def revive_default(self, store: dist.Store, timeout: timedelta) -> None:
        """Give the default group a new backend. All ranks have arrived, and none uses a group."""
        self._revivals += 1
        _world().pg_coalesce_state.clear()
        with self._forming(dist.get_world_size()):
            self._revive(dist.group.WORLD, store, timeout)

    def revive_others(
        self,
        store: dist.Store,
        timeout: timedelta,
        report: Any,
        new_ranks: Sequence[int],
        lost: Mapping[str, tuple[list[int], str]],
    ) -> Subgroups:
        """Give a new backend to each group that all its ranks have, and destroy the others.

        A rank with a new process adopts its groups from the other ranks. All ranks call this, and
        follow one order of names, so that no two wait for each other.

        Args:
            store: a store for this revival.
            timeout: the least time for the ranks of a group to connect.
            report: a JSON value for the other ranks.
            new_ranks: ranks with a new process.
            lost: groups in which all ranks have a new process, with their ranks and description.
        """
        world = _world()
        groups = {name: pg for pg, name in list(world.pg_names.items()) if pg != world.default_pg}
        backend = _backend_of(world.default_pg)
        seconds = timeout.total_seconds()
        facts = {name: (*each, seconds, backend, False) for name, each in lost.items()}
        facts |= {name: self._facts(group) for name, group in groups.items()}
        gathered = gather_objects([facts, report])
        merged = {name: fact for facts, _ in reversed(gathered) for name, fact in facts.items()}
        subgroups = Subgroups(
            has_objects_anywhere=any(has for *_, has in merged.values()),
            reports=[report for _, report in gathered],
            ranks={name: (ranks, text) for name, (ranks, text, *_) in merged.items()},
        )
        own_rank = dist.get_rank()
        names = sorted(name for name in merged if name in groups or own_rank in merged[name][0])
        with self._forming(sum(len(merged[name][0]) for name in names)):
            for name in names:
                ranks, text, seconds, backend, _ = facts.get(name) or merged[name]
                members = [gathered[rank][0].get(name) for rank in ranks if rank not in new_ranks]
                is_whole = bool(ranks) and all(each and each[0] == ranks for each in members)
                group = groups.get(name)
                if not is_whole and group is not None:
                    world.pg_group_ranks.setdefault(group, {})
                    dist.destroy_process_group(group)
                    subgroups.dropped.append(group)
                if not is_whole or (group is None and own_rank not in new_ranks):
                    continue
                group_timeout = max(timeout, timedelta(seconds=seconds))
                if group is None:
                    group = _adopt(name, ranks, text, backend, store, group_timeout)
                else:
                    self._revive(group, store, group_timeout)
                set_timeout(timedelta(seconds=seconds), group)
                subgroups.with_objects.extend([group] if any(has for *_, has in members) else [])
        return subgroups

    def _facts(self, group: Any) -> tuple[list[int], str, float, str, bool]:
        """Return what other ranks must know of a group."""
        # a group has no ranks yet if an interrupt has ended its creation
        ranks = _world().pg_group_ranks.get(group, {})
        lives_on = lasting(group)
        timeout = lives_on.timeout if lives_on else _gloo_backend(group).options._timeout
        return (
            sorted(ranks, key=ranks.get),
            group.group_desc,
            timeout.total_seconds(),
            _backend_of(group),
            self._has_objects(group),
        )

    @contextmanager
    def _forming(self, pairs: int) -> Iterator[None]:
        """Form groups with so many pairs of ranks: to look at all sockets takes 2 ms each time."""
        numbers = range(self._pairs, self._pairs + pairs)
        with self._unblocker.forming(self._addresses, numbers), self._recording():
            yield

    def _revive(self, group: Any, store: dist.Store, timeout: timedelta) -> None:
        world = _world()
        name, description = world.pg_names[group], group.group_desc
        group_store = dist.PrefixStore(f"{name}/", store)
        store = dist.PrefixStore("cpu/", group_store)
        world.pg_map[group] = (world.pg_map[group][0], group_store)
        if (lasting_group := lasting(group)) is not None:
            lasting_group.connect(store, timeout)
            return
        old = _gloo_backend(group)
        rank, size = group.rank(), group.size()
        new = self._make_backend(store, rank, size, timeout)
        for attribute in ("global_ranks_in_group", "group_name"):  # for the flight recorder
            setattr(new.options, attribute, getattr(old.options, attribute))
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            with_checks: Any = dist.distributed_c10d._create_process_group_wrapper
            new = with_checks(new, name, store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType(FIRST_TYPE + self._revivals)
        for device in group._device_types:
            group._register_backend(device, kind, new)
        self._dead_backends += 1
        group._set_group_name(name)  # both also set the names of the new backend
        group._set_group_desc(description)

    def _make_backend(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        self._pairs += size
        if not self._devices:
            before = listening()
            new = gloo(store, rank, size, timeout=timeout)  # torch chooses the network interface
            self._devices = new.options._devices
            self._addresses = [each for each in listening() if each not in before]
            return new
        options = gloo._Options()
        options._devices, options._timeout = self._devices, timeout
        options._threads = 2 * len(self._devices)  # as torch does
        return gloo(store, rank, size, options)


def _adopt(
    name: str,
    ranks: list[int],
    description: str,
    backend: str,
    store: dist.Store,
    timeout: timedelta,
) -> Any:
    """Create a group of a rank that has a new process, while its other ranks revive it."""
    create: Any = dist.distributed_c10d._new_process_group_helper  # recorded, as in new_group()
    rank = ranks.index(dist.get_rank())
    options = {"timeout": timeout, "group_desc": description}
    group, _ = create(len(ranks), rank, ranks, backend, store, name, **options)
    _world().pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    return group


def _world() -> Any:
    return dist.distributed_c10d._world


def _backend_of(group: Any) -> str:
    """Return the name of the backend with which another rank adopts the group."""
    return "gloo" if lasting(group) is None else str(dist.get_backend(group))


def _gloo_backend(group: Any) -> Any:
    """Return the Gloo backend of a group for all of its devices; None if it has another one."""
    backends = {group._get_backend(device) for device in group._device_types}
    [backend, *others] = [getattr(each, "wrapped_pg", each) for each in backends] or [None]
    return backend if not others and isinstance(backend, dist.ProcessGroupGloo) else None
