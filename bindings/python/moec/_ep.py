# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: a communicator of the caller's collectives; tokens to experts and back."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _raw
from ._context import Context, context_of
from ._descriptors import to_raw
from ._enums import DType, EpCallFlags, EpFlags, EpOverflow, EpScheme
from ._errors import MoecError, error_of
from ._handle import Handle, handle_of
from ._tensors import Array, numpy_dtype, set_tensors, stream_handle, tensor

Bytes = np.ndarray[Any, Any]
_int, _pointer, _bytes = ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64
_counts = ctypes.POINTER(ctypes.c_uint64)
_EQUAL = ctypes.CFUNCTYPE(_int, _pointer, _pointer, _pointer, _bytes, _pointer)
_ALONE = ctypes.CFUNCTYPE(_int, _pointer)
_VARIED = ctypes.CFUNCTYPE(_int, _pointer, _pointer, _counts, _counts, _pointer, _counts, _counts,
                           _bytes, _pointer)


def memory_at(address: int | None, num_bytes: int) -> Any:
    """Writable memory of the library, which stays its own."""
    return (ctypes.c_uint8 * num_bytes).from_address(address or 0) if num_bytes else bytearray()


def _view(address: int | None, num_bytes: int) -> Bytes:
    return np.frombuffer(memory_at(address, num_bytes), np.uint8)


class Comm(Handle):
    """N ranks whose bytes the caller moves: processes, or threads with a context each. Arrays are
    uint8, of host memory, also where the context is a GPU's: then rows pass through it, and calls
    wait. Comm.from_nccl() needs neither:

    - ``all_gather(send [n], recv [N,n])``: ``recv[r]`` is what rank r sends.
    - ``all_to_all(send [N,n], recv [N,n])``: ``recv[r]`` is what rank r sends to this rank.
    - ``all_to_all_v(send, send_sizes, recv, recv_sizes)``: the same with a size for each rank, one
      part after the other; EpScheme.EXACT needs it.
    - ``abort()``: ends what waits in the others, which raise. abort() of the comm needs it.

    What one raises breaks the comm, and is the cause of the MoecError; TimeoutError says that a
    deadline has passed.
    """

    _free = _raw._core.moec_comm_free

    def __init__(
        self, context: Context, rank: int, size: int,
        all_gather: Callable[[Bytes, Bytes], Any],
        all_to_all: Callable[[Bytes, Bytes], Any],
        all_to_all_v: Callable[[Bytes, list[int], Bytes, list[int]], Any] | None = None,
        abort: Callable[[], Any] | None = None,
    ) -> None:
        self._begin(context, rank, size)

        def gather(user: Any, send: Any, recv: Any, count: int, stream: Any) -> int:
            return self._run(all_gather, lambda: (
                _view(send, count), _view(recv, size * count).reshape(size, count)))

        def exchange(user: Any, send: Any, recv: Any, count: int, stream: Any) -> int:
            return self._run(all_to_all, lambda: tuple(
                _view(at, size * count).reshape(size, count) for at in (send, recv)))

        def exchange_parts(user: Any, send: Any, send_bytes: Any, send_at: Any, recv: Any,
                           recv_bytes: Any, recv_at: Any, unit: int, stream: Any) -> int:
            assert all_to_all_v is not None
            return self._run(all_to_all_v, lambda: (
                *self._parts(send, send_bytes, send_at), *self._parts(recv, recv_bytes, recv_at)))

        def end(user: Any) -> int:
            assert abort is not None
            return self._run(abort, tuple)

        # The library calls them as long as an ep lives, which keeps this object.
        self._functions = (_EQUAL(gather), _EQUAL(exchange), _VARIED(exchange_parts), _ALONE(end))
        given = (True, True, all_to_all_v is not None, abort is not None)
        callbacks = _raw.moec_comm_callbacks()
        _raw.set_callbacks(callbacks, *(
            ctypes.cast(function, _pointer).value if is_given else 0
            for function, is_given in zip(self._functions, given, strict=True)))
        desc = _raw.moec_comm_desc()
        desc.rank, desc.size = rank, size
        self._pointer = _raw.moec_comm_create(context_of(context), desc, callbacks)

    def _begin(self, context: Context, rank: int, size: int) -> None:
        self.context, self.rank, self.size = context, rank, size
        self.group: Any = None  # of a framework, whose collectives take tensors of this device
        self.group_device: Any = None
        self._cause: BaseException | None = None
        self._abort: Callable[[], Any] | None = None  # where the library's own does nothing

    @classmethod
    def from_nccl(
        cls, context: Context, nccl_comm: int, rank: int, size: int,
        abort: Callable[[], Any] | None = None,
    ) -> Comm:
        """Of a ncclComm_t (its address) of NCCL, which stays the caller's and outlives this: calls
        are queued on streams and may be captured. Its functions are those of the libnccl that the
        process has loaded. abort() is ncclCommAbort, or `abort` where another library owns the
        communicator and has a call for that."""
        self = cls.__new__(cls)
        self._begin(context, rank, size)
        self._abort = abort
        status, pointer = _raw.comm_from_nccl(context_of(context), nccl_comm, abort is not None)
        if status:
            why = {int(_raw.MOEC_E_UNSUPPORTED): "the process has loaded no libnccl.so.2",
                   int(_raw.MOEC_E_DEVICE): "its GPU is not the context's"}
            raise error_of(status, 0, 0, _raw.moec_status_name(status), "moec_comm_from_nccl",
                           "moec.Comm.from_nccl: " + why.get(status, "NCCL refused it"))
        self._pointer = pointer
        return self

    def _parts(self, address: Any, sizes: Any, places: Any) -> tuple[Bytes, list[int]]:
        own = [sizes[r] for r in range(self.size)]
        if any(own[r] and places[r] != sum(own[:r]) for r in range(self.size)):
            raise ValueError("moec.Comm: parts that do not follow each other")
        return _view(address, sum(own)), own

    def _run(self, function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> int:
        try:
            function(*arguments())
        except TimeoutError as error:
            self._cause = error
            return int(_raw.MOEC_E_TIMEOUT)
        except BaseException as error:
            self._cause = error
            return 1
        return 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A collective call: its MoecError has the cause that a callback raised."""
        try:
            yield
        except MoecError as error:
            cause, self._cause = self._cause, None
            if cause is None:
                raise
            raise error from cause

    def abort(self) -> None:
        """Give up the other ranks, of which one may be dead: what waits for it ends, on streams and
        in other threads, and the comm and its eps raise from then on. Not collective.
        Raises UnsupportedError where the callbacks have no abort."""
        with self.calling():
            _raw.moec_comm_abort(self.raw)
        if self._abort is not None:
            self._abort()

    def sum(self, array: Array, *, stream: Any = None) -> Array:
        """array (f32, i32, i64) = the sum over all ranks, in rank order. Collective."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        with self.calling():
            _raw.moec_comm_sum(
                self.raw, tensor(array, keep, "array", write=True, stream=handle), handle)
        return array


@dataclass(frozen=True, kw_only=True, slots=True)
class EpDesc:
    """What all ranks agree on (moec_ep_desc). max_tokens: of one rank. grad_scale: the gradients of
    experts are this much, 0 = 1; 1 / N beside the mean of data-parallel gradients. timeout_ms: how
    long a rank waits for another with PEER, and of comms that queue, how long nothing may end;
    max_blocks: of PEER."""

    hidden: int
    max_tokens: int
    num_experts: int
    top_k: int
    num_zero_experts: int = 0
    scheme: EpScheme = EpScheme.AUTO
    dtype: DType | str = DType.F32
    partial_dtype: DType | str | int = 0
    pair_rows: int = 0
    overflow: EpOverflow = EpOverflow.REPORT
    grad_scale: float = 0.0
    flags: EpFlags = EpFlags.NONE
    timeout_ms: int = 0
    max_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Guests:
    """Tokens that came to this rank: views of the EP's memory, until the next dispatch, with PEER
    until the combine."""

    rows: Any
    """[G,H] as x; a row without an id may hold anything"""
    beside: Any
    """[G,H] with x_beside, else None"""
    ids: Any
    """[G,K] i32; -1: no expert of this rank"""
    weights: Any
    """[G,K] f32"""
    partial: Any
    """[G,H]: combine() reads what was written here"""
    total_tokens: int
    """of all ranks; -1: the host does not know it, for the comm queues or the scheme is PEER"""


@dataclass(frozen=True, slots=True)
class EpState:
    """Counters of an EP (moec_ep_state)."""

    status: int
    calls: int
    rows_needed: int
    rows_dropped: int
    bytes_sent: int
    bytes_received: int
    message: str
    """what broke the EP, naming the rank or the call; else empty"""


class EP(Handle):
    """Tokens to the ranks of their experts, and sums of partial rows back. Every rank makes it, and
    calls dispatch() and combine(), in one order.

    expert_begin  [N+1] rank r owns the experts from expert_begin[r] to expert_begin[r + 1]; None:
                  as even as can be

    Raises MismatchError on all ranks where they disagree.
    """

    _free = _raw._core.moec_ep_free

    def __init__(
        self, comm: Comm, desc: EpDesc, expert_begin: Sequence[int] | None = None
    ) -> None:
        self.comm, self.desc = comm, desc
        raw = to_raw(desc, _raw.moec_ep_desc)
        if expert_begin is not None:
            if len(expert_begin) != comm.size + 1:
                raise ValueError(f"moec.EP: expert_begin has {len(expert_begin)} numbers; the comm "
                                 f"has {comm.size} ranks and needs {comm.size + 1}")
            ranges = (ctypes.c_int32 * len(expert_begin))(*expert_begin)
            _raw.set_expert_begin(raw, ctypes.addressof(ranges))
        with comm.calling():
            self._pointer = _raw.moec_ep_create(handle_of("comm", comm, Comm), raw)
        info = _raw.moec_ep_info()
        _raw.moec_ep_query(self.raw, info)
        self.scheme = EpScheme(info.scheme)
        self.experts = range(info.expert_begin, info.expert_end)
        """of this rank"""
        self.max_guests, self.memory = int(info.max_guests), int(info.memory)

    def dispatch(
        self, x: Array, expert_ids: Array, routing_weights: Array | None = None, *,
        x_beside: Array | None = None, bound: int = 0, stream: Any = None,
    ) -> Guests:
        """Send x [T,H], ids and weights [T,K], and x_beside [T,H]. Also the backward of combine: x
        is d_y. bound: T of no rank is larger, equal on all; 0 = max_tokens. The views are NumPy
        arrays, of the CPU alone: on a GPU take dispatch_raw()."""
        raw = self.dispatch_raw(x, expert_ids, routing_weights, x_beside=x_beside, bound=bound,
                                stream=stream)
        views = (_array(view) for view in (raw.guests, raw.guests_beside, raw.guest_ids,
                                           raw.guest_weights, raw.partial))
        return Guests(*views, int(raw.total_tokens))

    def dispatch_raw(
        self, x: Array, expert_ids: Array, routing_weights: Array | None = None, *,
        x_beside: Array | None = None, bound: int = 0, stream: Any = None,
    ) -> Any:
        """As dispatch(), with the struct of views."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        args = _raw.moec_ep_args()
        args.bound = bound
        set_tensors(args, keep, stream=handle, x=x, expert_ids=expert_ids,
                    routing_weights=routing_weights, x_beside=x_beside)
        with self.comm.calling():
            _raw.moec_ep_dispatch(self.raw, args, handle)
        return args

    def combine(
        self, y: Array | None = None, *, d_guest_weights: Array | None = None,
        d_routing_weights: Array | None = None, flags: EpCallFlags = EpCallFlags.NONE,
        stream: Any = None,
    ) -> None:
        """Write y [T,H], the sums of the partial rows of the last dispatch's T tokens; with
        d_guest_weights [G,K] also d_routing_weights [T,K]. Also the backward of dispatch: y is
        d_x."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        args = _raw.moec_ep_args()
        args.flags = flags
        set_tensors(args, keep, stream=handle, d_guest_weights=d_guest_weights)
        set_tensors(args, keep, write=True, stream=handle, y=y,
                    d_routing_weights=d_routing_weights)
        with self.comm.calling():
            _raw.moec_ep_combine(self.raw, args, handle)

    def state(self) -> EpState:
        raw = _raw.moec_ep_state()
        _raw.moec_ep_poll(self.raw, raw)
        return EpState(*(getattr(raw, name) for name in EpState.__slots__))

    def describe(self) -> dict[str, Any]:
        """Scheme and why, ranks, ranges, bytes."""
        text = bytearray(_raw.moec_ep_describe(self.raw, None))
        _raw.moec_ep_describe(self.raw, text)
        found: dict[str, Any] = json.loads(bytes(text).rstrip(b"\0"))
        return found


def _array(raw: Any) -> Any:
    """A view of the library's memory; None where there is none."""
    address, code, _, _, shape = _raw.tensor_describe(raw)
    if not shape:
        return None
    dtype = numpy_dtype(DType(code))
    count = int(np.prod(shape))
    return np.frombuffer(memory_at(address, count * dtype.itemsize), dtype).reshape(shape)
