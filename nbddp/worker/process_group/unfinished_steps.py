"""Bring sharded and pipeline models from an unfinished step back to the state between two steps.

An interrupt or an error may end a forward or a backward pass at any line. FSDP2 and pipeline stages
then keep results of that pass, and the next step would hang or add its gradients. After the reset
the next steps are bit for bit those of a run without the unfinished step. No rank communicates.

Gradients are dropped only if a rank has begun a backward pass in the cell. So an interrupted
evaluation keeps what an earlier cell has accumulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer, optimizer

from nbddp import accelerator
from nbddp.formatting import format_ranks, plural
from nbddp.sharding import has_dtensors, parameters_of
from nbddp.worker.process_group.bound_objects import (
    BoundObjects,
    accumulations,
    instances,
    is_sharded,
    sharded_modules,
)
from nbddp.worker.wrapping import wrap

# Private names of FSDP2 that the reset needs, in torch 2.9 to 2.15. Without one of them nothing is
# reset: a model that is half reset would train with wrong gradients.
_OF_STATE = attrgetter(
    "_is_root", "_modules", "_training_state", "_state_ctx.iter_forward_root", "_comm_ctx"
)
_OF_GROUP = attrgetter("_training_state", "_sharded_state", "fsdp_params", "_post_forward_indices")
_OF_PARAMETER = attrgetter("_module_info", "sharded_param", "sharded_state", "to_sharded")
# Results of the unfinished step, where torch has them, of FSDP2 and of pipeline stages
_RESULTS = {
    *("all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "post_forward_order"),
    *("_last_post_reduce_events", "_modules_to_run_forward", "iter_forward_root"),
    *("_all_gather_result", "_post_reduce_event", "_all_reduce_state"),
    *("_reshard_after_forward_event", "_post_forward_indices"),
    *("fwd_cache", "bwd_cache", "backward_state", "dw_runner", "_forward_chunk_states"),
}
# What a schedule has exchanged with the other ranks; they repeat it together. Since torch 2.13.
_EXCHANGED = {
    *("_stage_forward_initialized", "_stage_backward_initialized", "_p2p_initialized"),
    *("_stages_forward_initialized", "_stages_backward_initialized"),
}
_GRADIENTS = {"unsharded_accumulated_grad", "grad_offload_event", "_partial_reduce_output"}
StepReport = dict[str, list[Any]]  # by optimizer; see describe_uneven()
_STAGE = "stage"  # the kind of the optimizer of a pipeline stage
_LOAD = "load a checkpoint"
_FSDP1 = "FSDP 1 cannot leave an unfinished step"


class StepCounts:
    """Counts the steps of each optimizer, begun and finished, since the last :meth:`clear`.

    Attributes:
        made: steps that all optimizers together have finished in the running cell.
        has_begun_backward: whether the running cell, or an earlier one that has failed, has begun a
            backward pass.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        self._earlier: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._has_failed = self.has_begun_backward = False
        self._iterations = Iterations()
        self.made = 0
        wrap(torch.autograd, "_make_grads", self._begin_backward)
        optimizer.register_optimizer_step_pre_hook(self._begin)
        optimizer.register_optimizer_step_post_hook(self._end)

    def _begin(self, obj: Optimizer, *_: Any) -> None:
        self._counts.setdefault(obj, [0, 0])[0] += 1

    def _end(self, obj: Optimizer, *_: Any) -> None:
        counts = self._counts.setdefault(obj, [1, 0])
        counts[1] = counts[0]  # also after an earlier step that has failed
        self.made += 1
        if self._iterations.is_over:
            self._iterations = Iterations()
        self._iterations.add(obj)

    @property
    def is_inside_step(self) -> bool:
        """Whether an optimizer has begun a step and not finished it."""
        return any(begun > finished for begun, finished in self._counts.values())

    def _begin_backward(
        self, make_gradients: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        self.has_begun_backward = True
        return make_gradients(*args, **options)

    def begin_cell(self) -> None:
        """Forget a backward pass of an earlier cell, unless a cell has failed since then."""
        self.has_begun_backward = self.has_begun_backward and self._has_failed
        self.made = 0

    def end_cell(self, error: BaseException | None) -> None:
        """Note whether a cell has failed."""
        self._has_failed = self._has_failed or error is not None
        if error is None:
            self._iterations = Iterations()
        self._iterations.is_over = True  # a later cell begins other iterations

    def clear(self) -> None:
        """Start at zero again, but keep the totals."""
        self._earlier.update({obj: self.total(obj) for obj in self._counts})
        self._counts.clear()
        self._has_failed = self.has_begun_backward = False
        self._iterations = Iterations()

    def unfinished_iteration(self) -> tuple[list[Optimizer], list[Optimizer]]:
        """Return the optimizers that have stepped in an unfinished iteration, and the others."""
        # an optimizer may step another one in its own step
        return ([], []) if self.is_inside_step else self._iterations.unfinished()

    def total(self, obj: Optimizer) -> int:
        """Return how many steps an optimizer has finished since it was made."""
        return self._earlier.get(obj, 0) + self.of(obj)[1]

    def set_total(self, obj: Optimizer, total: int) -> None:
        """Count from another number, as the other ranks do."""
        self._earlier[obj] = total - self.of(obj)[1]

    def of(self, obj: Optimizer) -> list[int]:
        """Return how many steps an optimizer has begun, and how many of them it has finished."""
        return self._counts.get(obj, [0, 0])


class Iterations:
    """Recognizes a loop in which several optimizers make one step each, always in one order.

    Where a loop steps one optimizer more often than another, nothing is known of its iterations.

    Attributes:
        is_over: whether the cell has ended.

    >>> first, second = (torch.optim.SGD([torch.ones(1)]) for _ in range(2))
    >>> iterations = Iterations()
    >>> for each in (first, second, first, second, first):
    ...     iterations.add(each)
    >>> iterations.unfinished() == ([first], [second])
    True
    """

    def __init__(self) -> None:
        self._order: list[ref[Optimizer]] = []
        self._count = 0
        self._is_regular = True
        self.is_over = False

    def add(self, obj: Optimizer) -> None:
        """Note a step."""
        made, reference = self._count, ref(obj)
        self._count += 1
        if made == len(self._order) and reference not in self._order:  # the first iteration
            self._order.append(reference)
        elif self._order[made % len(self._order)] != reference:
            self._is_regular = False

    def unfinished(self) -> tuple[list[Optimizer], list[Optimizer]]:
        """Return the optimizers that have made their step of an iteration, and those that have not.

        Both are empty after a whole iteration, and before two equal ones.
        """
        living = [obj for each in self._order if (obj := each()) is not None]
        size, count = len(self._order), self._count
        if not self._is_regular or len(living) < size or count <= 2 * size or not count % size:
            return [], []
        return living[: count % size], living[count % size :]


def describe_uneven(all_ranks: Sequence[StepReport]) -> list[str]:
    """Return a line for each optimizer that has not made the same whole steps on its ranks.

    Optimizers of plain models may belong to a training on each rank alone. They have made the same
    steps but the last one if they train together. Those of pipeline stages may have other names on
    each rank.

    Args:
        all_ranks: for each rank, the steps that each optimizer has begun and finished, and its kind
            of :func:`spread_optimizers`, or "".

    >>> describe_uneven([{"optimizer": [4, 4, "shards"]}, {"optimizer": [3, 3, "shards"]}, {}])
    ['optimizer: rank 1 is 1 step behind; load a checkpoint']
    >>> describe_uneven([{"first": [4, 4, "stage"]}, {"last": [3, 3, "stage"]}])
    ['last: rank 1 is 1 step behind; load a checkpoint']
    """
    lines = []
    for counts in _matched(all_ranks):
        numbers = [begun for _, begun, *_ in counts.values()]
        begun = max(numbers)
        is_spread = any(kind for *_, kind in counts.values())
        if not is_spread and (len(counts) < len(all_ranks) or min(numbers) < max(1, begun - 1)):
            continue
        inside = [rank for rank, (_, started, ended, _) in counts.items() if started > ended]
        behind = [rank for rank, (_, started, *_) in counts.items() if started < begun]
        if inside:
            name, reason = counts[inside[0]][0], "stopped inside a step, and may have updated only"
            lines.append(f"{name}: {format_ranks(inside)} {reason} some parameters; {_LOAD}")
        if behind:
            name, steps = counts[behind[0]][0], begun - min(counts[rank][1] for rank in behind)
            verb = "is" if len(behind) == 1 else "are"
            lines.append(
                f"{name}: {format_ranks(behind)} {verb} {plural(steps, 'step')} behind; {_LOAD}"
            )
    return lines


def _matched(all_ranks: Sequence[StepReport]) -> Iterable[dict[int, list[Any]]]:
    """Return for each optimizer its name and its report, by rank."""
    matched: dict[str | int, dict[int, list[Any]]] = {}
    for rank, report in enumerate(all_ranks):
        stages = count()
        for name, (*steps, kind) in report.items():
            is_stage = kind == _STAGE and any(name not in each for each in all_ranks)
            matched.setdefault(next(stages) if is_stage else name, {})[rank] = [name, *steps, kind]
    return matched.values()


def spread_optimizers(bound_objects: BoundObjects) -> dict[Optimizer, str]:
    """Return the optimizers of pipeline stages and of sharded models, and sharded optimizers.

    Each of their parameters, or its shard, or its state, is on one rank only. With each optimizer
    comes its kind: "stage" or "shards".
    """
    of_stages = {id(each) for stage in _stages() for each in stage.submod.parameters()}
    kinds = {}
    for opt in bound_objects.optimizers:
        if any(id(each) in of_stages for each in parameters_of(opt)):
            kinds[opt] = _STAGE
        elif is_sharded(opt) or has_dtensors(opt):
            kinds[opt] = "shards"
    return kinds


def is_unfinished() -> bool:
    """Return whether an FSDP2 model is in the middle of a forward or backward pass."""
    return any(
        getattr(getattr(state, "_training_state", None), "name", "IDLE") != "IDLE"
        or getattr(getattr(state, "_state_ctx", None), "iter_forward_root", None) is not None
        for state in _fsdp_states()
    )


def reset(bound_objects: BoundObjects, *, drops_gradients: bool = True) -> list[tuple[Any, str]]:
    """Reset all models of this rank, and drop the gradients of the unfinished step, if any.

    Return the FSDP models that cannot be reset, and why.
    """
    missing = _reset_fsdp(drops_gradients=drops_gradients)
    for stage in _stages():
        _reset_stage(stage)
    for schedule in _pipeline_objects("schedules", "_PipelineSchedule"):
        schedule._internal_losses.clear()
        vars(schedule).update(dict.fromkeys(vars(schedule).keys() & _EXCHANGED, False))
    if drops_gradients:
        for stage in _stages():
            stage.submod.zero_grad(set_to_none=True)
        drop_gradients(bound_objects, spread_optimizers(bound_objects))
    reasons = [
        (module, missing if hasattr(module, "set_requires_gradient_sync") else _FSDP1)
        for module in sharded_modules()
    ]
    return [(module, reason) for module, reason in reasons if reason]


def drop_gradients(bound_objects: BoundObjects, optimizers: Collection[Optimizer]) -> None:
    """Drop the gradients of these optimizers, and what belongs to them."""
    for opt in optimizers:
        opt.zero_grad(set_to_none=True)
    for accumulation in accumulations(optimizers):
        accumulation._drop_accumulation()
    for scaler in bound_objects.scalers if optimizers else ():
        # it may have stopped between unscale_() and update(); a disabled one has no states
        getattr(scaler, "_per_optimizer_states", {}).clear()


# ---- FSDP2


def _fsdp_states() -> list[Any]:
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return [] if module is None else instances([module.FSDPState])


def fsdp_groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    if hasattr(state, "_fsdp_param_groups"):  # not in torch 2.9
        return list(state._fsdp_param_groups)
    return [each for each in [state._fsdp_param_group] if each is not None]


def _reset_fsdp(*, drops_gradients: bool) -> str:
    """Reset all models. Return why none was reset; "" if they were."""
    # a model that has run no forward pass has nothing to reset, and lacks some names
    states = [each for each in _fsdp_states() if getattr(each, "_is_root", True) is not None]
    try:
        for state in states:
            _OF_STATE(state)
            for parameter in [
                part for group in fsdp_groups_of(state) for part in _OF_GROUP(group)[2]
            ]:
                _OF_PARAMETER(parameter)
    except AttributeError as error:
        return f"torch {torch.__version__} has other names: {error}"
    if states:
        accelerator.synchronize()  # other streams may still use the tensors that are dropped
    for state in states:
        _reset_state(state, drops_gradients=drops_gradients)
    for state in states if drops_gradients else ():
        root = state._modules[0]
        if state._is_root and hasattr(root, "reset_iter_state"):  # since torch 2.13
            root.reset_iter_state()
    return ""


def _reset_state(state: Any, *, drops_gradients: bool) -> None:
    results = _RESULTS | _GRADIENTS if drops_gradients else _RESULTS
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._state_ctx.post_backward_final_callback_queued = False
    for holder in (state, state._state_ctx, state._comm_ctx):
        _forget(holder, results)
    for group in fsdp_groups_of(state):
        _forget(group, results)
        group._training_state = idle
        for parameter in group.fsdp_params:
            _forget(parameter, results)
            for tensor in (parameter.sharded_param, getattr(parameter, "_unsharded_param", None)):
                if tensor is not None and drops_gradients:
                    tensor.grad = None
            # each on its own: an interrupt may have come while the group was unsharded
            if _is_unsharded(parameter):
                parameter.to_sharded()
        group._sharded_state = type(group._sharded_state).SHARDED


def _is_unsharded(parameter: Any) -> bool:
    module, name = parameter._module_info.module, parameter._module_info.param_name
    is_replaced = module._parameters.get(name) is not parameter.sharded_param
    return is_replaced or parameter.sharded_state is not type(parameter.sharded_state).SHARDED


def _forget(obj: Any, results: Set[str]) -> None:
    for name in vars(obj).keys() & results:  # some are properties in some versions
        if hasattr(vars(obj)[name], "clear"):
            vars(obj)[name].clear()
        else:
            setattr(obj, name, None)


# ---- pipeline stages


def _stages() -> list[Any]:
    return _pipeline_objects("stage", "_PipelineStageBase")


def _pipeline_objects(module: str, kind: str) -> list[Any]:
    imported = sys.modules.get(f"torch.distributed.pipelining.{module}")
    return [] if imported is None else instances([getattr(imported, kind)])


def _reset_stage(stage: Any) -> None:
    if getattr(stage, "_gradient_reduction_handle", None) is not None:  # since torch 2.15
        stage._gradient_reduction_handle = None
        stage.submod.set_manual_backward_finalization(False)
    _forget(stage, _RESULTS)
    for infos in [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]:
        for info in infos:
            if hasattr(info, "take_buffer"):
                # torch 2.15 refuses a buffer that a receive may fill; the connection is closed
                info.buffer = None
    stage.clear_runtime_states()
