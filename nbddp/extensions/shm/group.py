"""A process group over shared memory: torch's collectives, of tensors on the CPU.

It is a Python ``ProcessGroup``. C++ code, such as functional collectives, also needs a C++ backend
in it, which has the name of the group. That is torch's fake one. It refuses all collectives (not in
torch 2.9), so no method that is missing here can do nothing without an error. From torch 2.15 on, a
subclass of ``Backend`` would do without it.
"""

# mypy: disable-error-code="override, assignment, call-arg, attr-defined"
# torch's types have other overloads in each version, and not all names

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._mode_utils import no_dispatch

from nbddp.extensions.shm.engine import Call, Channel, Record, Recorder
from nbddp.extensions.shm.point_to_point import Messages
from nbddp.extensions.shm.shared_memory import Memory
from nbddp.extensions.shm.slot_collectives import Collectives, Piece, Reducing

Tensors = Sequence[torch.Tensor]
MAX_SHOWN = 3  # tensors in the description of a call
_ABORTED = "nbddp has ended the waits of the group, after an interrupt or the death of a rank"


class ShmGroup(dist.ProcessGroup):
    """A group of ranks on this machine, after :meth:`connect`.

    Args:
        recorder: records all calls.

    Attributes:
        started: the number of calls that this rank has started.
    """

    def __init__(self, rank: int, size: int, recorder: Recorder) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        kind: Any = dist.ProcessGroup.BackendType.CUSTOM
        self._inner = _inner_backend(rank, size)
        self._register_backend(torch.device("cpu"), kind, self._inner)
        self._set_default_backend(kind)
        self._recorder, self._pid, self.started = recorder, os.getpid(), 0
        self._memory = Memory(rank, size, timedelta(0))
        self._channels: dict[str, Channel] = {}

    # Torch's methods of C++ look for a Python method first. If an interrupt arrives meanwhile, the
    # frame of the caller is never freed, nor its tensors and the memory of the group.
    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @cached_property
    def label(self) -> tuple[str, str]:
        """Name and description. Torch sets them after it has made the group."""
        return self.group_name, self.group_desc

    # ---- its life

    def connect(self, store: dist.Store, timeout: timedelta) -> None:
        """Get new memory, together with the other ranks; nothing remains of earlier calls."""
        self.close()
        self.started, self._channels = 0, {}
        memory = self._memory = Memory(self.rank(), self.size(), timeout)
        memory.connect(store)
        self._collectives, self._messages = Collectives(memory), Messages(memory)

    def close(self) -> None:
        """End all waits, and the threads."""
        self.abort()
        for channel in self._channels.values():
            channel.close()

    def abort(self) -> None:
        """End all waits, of all threads. The group needs new memory after that."""
        self._memory.leave(_ABORTED)

    shutdown = abort

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self.close()

    @property
    def has_failed(self) -> bool:
        """Whether a call did not end, so that the ranks may not be at the same call."""
        return bool(self._memory.reason)

    @property
    def timeout(self) -> timedelta:
        """The timeout of each wait."""
        return self._memory.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._memory.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it
        return "shm"

    name = _get_backend_name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        return self.started

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers of all ranks begin at zero."""

    # ---- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Call:
        return self._reduce_in_place("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Call:
        return self._reduce_in_place("all_reduce_coalesced", tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Call:
        return self._reduce_in_place("reduce", tensors, opts, root=self._member(opts.rootRank))

    def _reduce_in_place(self, name: str, tensors: Tensors, opts: Any, root: int = -1) -> Call:
        flat = _Flat(tensors)
        kinds = [_reducing(tensor.dtype, _kind(opts)) for tensor in tensors]

        def act(collectives: Collectives, call: str) -> None:
            for piece, kind in zip(flat.pieces, kinds, strict=True):
                collectives.all_reduce(call, piece, kind, root)
            if root in (-1, self.rank()):
                flat.copy_back()

        return self._collective(
            name, tensors, act, tensors, opts, _kind(opts).name.lower(), _root(root)
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> Call:
        flat, root = _Flat(tensors), self._member(opts.rootRank)

        def act(collectives: Collectives, call: str) -> None:
            nothing = Piece(0, 0)
            for piece in flat.pieces:
                is_root = self.rank() == root
                received = [] if is_root else [nothing] * root + [piece]
                sent = [piece] if is_root else []
                collectives.exchange(call, sent, received, largest=piece.size)
            if self.rank() != root:
                flat.copy_back()

        return self._collective("broadcast", tensors, act, tensors, opts, _root(root))

    def barrier(self, opts: Any = None) -> Call:
        def act(collectives: Collectives, call: str) -> None:
            collectives.exchange(call, [], [], largest=0)

        return self._collective("barrier", [], act, [], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Call:
        return self._gather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Call:
        of_inputs = [*zip(*outputs, strict=True)]  # torch has a list for each rank
        return self._gather("all_gather_coalesced", of_inputs, inputs, opts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Call:
        return self._gather("all_gather_into_tensor", [output], [given], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Call:
        return self._gather("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Call:
        return self._gather("gather", outputs, inputs, opts, root=self._member(opts.rootRank))

    def gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call:
        root = self._member(opts.rootRank)
        outputs = [output] if self.rank() == root else []
        return self._gather("gather_single", outputs, [given], opts, root=root)

    def _gather(
        self, name: str, outputs: Sequence[Any], inputs: Tensors, opts: Any, root: int = -1
    ) -> Call:
        """Gather each input: in one output for all ranks, or in an output for each of them."""
        flat = _Flat(inputs)
        pairs = zip(outputs, inputs, strict=False)  # not equally many if this is not the root
        gathered = [self._for_each_rank(output, tensor) for output, tensor in pairs]
        is_receiver = root in (-1, self.rank())
        if is_receiver and len(gathered) != len(inputs):
            raise ValueError(f"{name} needs an output for each of {len(inputs)} inputs")

        def act(collectives: Collectives, call: str) -> None:
            for index, piece in enumerate(flat.pieces):
                received = gathered[index].pieces if is_receiver else []
                collectives.exchange(call, [piece], received, largest=piece.size)
                if is_receiver:
                    gathered[index].copy_back()

        return self._collective(name, inputs, act, outputs, opts, _root(root))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Call:
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Call:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [given], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Call:
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: Sequence[Any], opts: Any
    ) -> Call:
        flat = _Flat(outputs)
        scattered = [
            self._for_each_rank(parts, output)
            for parts, output in zip(inputs, outputs, strict=True)
        ]
        kinds = [_reducing(tensor.dtype, _kind(opts)) for tensor in outputs]

        def act(collectives: Collectives, call: str) -> None:
            for piece, sent, kind in zip(flat.pieces, scattered, kinds, strict=True):
                size = piece.size
                collectives.exchange(
                    call, sent.pieces, [piece], largest=size, is_split=True, reducing=kind
                )
            flat.copy_back()

        return self._collective(name, outputs, act, outputs, opts, _kind(opts).name.lower())

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Call:
        [output], root = outputs, self._member(opts.rootRank)
        flat = _Flat([output])
        # the variable keeps the memory until the call has ended
        sent = self._for_each_rank(inputs[0], output) if self.rank() == root else _Flat([])

        def act(collectives: Collectives, call: str) -> None:
            received = [Piece(0, 0)] * root + flat.pieces
            size = flat.pieces[0].size
            collectives.exchange(call, sent.pieces, received, largest=size, is_split=True)
            flat.copy_back()

        return self._collective("scatter", outputs, act, outputs, opts, _root(root))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        return self._all_to_all("all_to_all", outputs, inputs, outputs, inputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Call:
        received, sent = self._split(output, output_sizes), self._split(given, input_sizes)
        return self._all_to_all("all_to_all_single", received, sent, [output], [given], opts)

    def _all_to_all(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        results: Tensors,
        given: Tensors,
        opts: Any,
    ) -> Call:
        received, sent = _Flat(outputs), _Flat(inputs)
        if not len(received.pieces) == len(sent.pieces) == self.size():
            raise ValueError(f"{name} needs an input and an output for each of {self.size()} ranks")

        def act(collectives: Collectives, call: str) -> None:
            pieces = sent.pieces, received.pieces
            collectives.exchange(call, *pieces, largest=None, is_split=True)
            received.copy_back()

        # the sizes may differ
        return self._collective(name, given, act, results, opts, has_same_sizes=False)

    # ---- messages

    def send(self, tensors: Tensors, target: int, tag: int) -> Call:
        def act(messages: Messages, flat: _Flat, call: str) -> None:
            messages.send(call, flat.pieces[0], target, tag)

        return self._message("send", tensors, act, self._member(target), tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Call:
        def act(messages: Messages, flat: _Flat, call: str) -> int:
            messages.receive(call, flat.pieces[0], source, tag)
            flat.copy_back()
            return source

        return self._message("recv", tensors, act, self._member(source), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Call:
        def act(messages: Messages, flat: _Flat, call: str) -> int:
            source = messages.receive_any(call, flat.pieces[0], tag)
            flat.copy_back()
            return source

        return self._message("recv", tensors, act, None, tag)

    # newer names of torch: 2.13 uses some of them, 2.15 others
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    gather_into_tensor = gather_single
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # ---- calls

    def _collective(
        self,
        name: str,
        tensors: Tensors,
        act: Callable[[Collectives, str], None],
        results: Sequence[Any],
        opts: Any,
        *details: str,
        has_same_sizes: bool = True,
    ) -> Call:
        """Make a collective, whose details must be the same on all ranks."""
        self._refuse_forks()
        self.started += 1
        shown = tensors[:MAX_SHOWN] if has_same_sizes else tensors[:1]
        sizes = [f"{each.numel()} " if has_same_sizes else "" for each in shown]
        texts = [*filter(None, details), *map(str.__add__, sizes, map(_dtype, shown))]
        if len(tensors) > MAX_SHOWN:
            texts.append(f"{len(tensors)} tensors")
        call = f"{name}({', '.join(texts)}) number {self.started}"
        record = self._recorder.add(self.started, name, self, tensors, is_message=False)
        return self._submit(
            "collectives",
            partial(act, self._collectives, call),
            results,
            record,
            is_async=opts is None or opts.asyncOp,
        )

    def _message(
        self,
        name: str,
        tensors: Tensors,
        act: Callable[[Messages, _Flat, str], int | None],
        peer: int | None,
        tag: int,
    ) -> Call:
        self._refuse_forks()
        call = f"{name} of {tensors[0].numel()} {_dtype(tensors[0])} with tag {tag}"
        record = self._recorder.add(self.started, name, self, tensors, is_message=True)
        flat = _Flat(tensors)
        # torch does not say whether it waits; a wait for the call is a wait for its thread
        return self._submit(
            f"{name} {peer}",
            partial(act, self._messages, flat, call),
            tensors,
            record,
            is_async=True,
        )

    def _submit(
        self,
        channel: str,
        act: Callable[[], int | None],
        results: Sequence[Any],
        record: Record,
        *,
        is_async: bool,
    ) -> Call:
        call = Call(act, results, record, self._memory.leave_after)
        del act  # and its memory: the traceback of an error keeps this frame
        try:
            if channel not in self._channels:
                self._channels[channel] = Channel(f"nbddp-shm {channel}")
            self._channels[channel].submit(call, at_once=not is_async)
            if not is_async:
                call.wait()
        except BaseException as error:
            self._memory.leave_after(error)
            raise
        return call

    def _refuse_forks(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a process that a rank has forked cannot use the rank's groups")

    def _member(self, rank: int) -> int:
        """Return a rank, if the group has it."""
        if not 0 <= rank < self.size():
            raise ValueError(f"a group of {self.size()} ranks has no rank {rank}")
        return rank

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        """Split a tensor for the ranks, by rows or in equal parts."""
        if sizes:
            return torch.split(tensor, [*sizes])
        if len(tensor) % self.size():
            raise ValueError(f"{len(tensor)} rows are not a multiple of {self.size()} ranks")
        return tensor.tensor_split(self.size())

    def _for_each_rank(self, parts: Any, like: torch.Tensor) -> _Flat:
        """Return one part for each rank of a tensor, or of a list of tensors."""
        size, count = self.size(), like.numel()
        tensors = [parts] if isinstance(parts, torch.Tensor) else parts
        flat = _Flat(tensors)
        expected = [count * size] if isinstance(parts, torch.Tensor) else [count] * size
        if [each.numel() for each in tensors] != expected or any(
            tensor.dtype != like.dtype for tensor in tensors
        ):
            raise ValueError(
                f"expected {size} parts of {count} {_dtype(like)} each, got "
                + ", ".join(f"{each.numel()} {_dtype(each)}" for each in tensors)
            )
        if isinstance(parts, torch.Tensor):
            [whole], step = flat.pieces, like.nbytes
            flat.pieces = [Piece(whole.address + rank * step, step) for rank in range(size)]
        return flat


class _Flat:
    """Contiguous memory for tensors: their own, or that of copies."""

    def __init__(self, tensors: Tensors) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ValueError(
                    f"the backend shm sends only dense tensors on the CPU, not one on "
                    f"{tensor.device} ({tensor.layout}): use --backend gloo or nccl"
                )
        self._tensors = tensors
        self._copies = [
            tensor
            if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            else tensor.detach().resolve_conj().resolve_neg().contiguous()
            for tensor in tensors
        ]
        self.pieces = [Piece(each.data_ptr(), each.nbytes) for each in self._copies]

    def copy_back(self) -> None:
        """Copy what was received into tensors that are not contiguous."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if tensor is not copy:
                with torch.inference_mode():  # else it refuses tensors of such a mode
                    tensor.copy_(copy)


def _inner_backend(rank: int, size: int) -> Any:
    options = FakeProcessGroup.Options()
    if hasattr(options, "error_on_collective"):  # torch 2.9 does not have it
        options.error_on_collective = True
    create = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return create(rank, size, options)


@cache
def _reducing(dtype: torch.dtype, kind: Any) -> Reducing:
    """Return a reduction that torch has for this type.

    Raises:
        ValueError: it has none. The ranks have not yet begun the call, so the group stays usable.
    """
    reducing = Reducing(dtype, kind)
    try:
        with no_dispatch():  # as for the calls themselves
            one, other, out = torch.zeros(3, dtype=dtype, device="cpu")
            reducing.reduce([one, other], out)
    except (KeyError, RuntimeError) as error:
        name = kind.name.lower()
        raise ValueError(f"the backend shm cannot reduce {dtype} by {name}") from error
    return reducing


def _kind(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op


def _root(rank: int) -> str:
    return "" if rank < 0 else f"root {rank}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
