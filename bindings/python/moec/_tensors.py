# SPDX-License-Identifier: Apache-2.0
"""Arrays of Python as moec_tensor, without copies, and moec_tensor as arrays of Python.

NumPy arrays are read where they lie (bfloat16 through ml_dtypes). Everything else speaks DLPack:
the capsule is borrowed and kept, so the producer's memory stays alive as long as the call, or the
binding, that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import ml_dtypes
import numpy as np

from . import _raw
from ._enums import DeviceType, DType
from ._errors import wrong_state

if TYPE_CHECKING:
    from ._context import Context, DeviceInfo

# The C half directly, where calls are frequent: a proxy object costs as much as a small layer.
_core = _raw._core

Array: TypeAlias = Any
"""A NumPy array, a DeviceArray or any object with __dlpack__ (torch.Tensor, jax.Array, ...)."""

_NUMPY_OF_CODE: dict[int, np.dtype[Any]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F64: np.dtype(np.float64),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.BOOL: np.dtype(np.bool_),
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.F8_E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
}
_CODE_OF_NUMPY = {dtype: code for code, dtype in _NUMPY_OF_CODE.items()}
_CODE_OF_NAME = {dtype.name: DType(code) for code, dtype in _NUMPY_OF_CODE.items()}
_CODE_OF_NAME |= {code.name.lower(): code for code in DType}


def dtype_of(what: Any) -> DType:
    """DType of an array, a NumPy or framework dtype, or a name such as "bf16" or "float32"."""
    what = getattr(what, "dtype", what) if not isinstance(what, (type, np.dtype)) else what
    if isinstance(what, DType):
        return what
    if not isinstance(what, str):
        try:
            return DType(_CODE_OF_NUMPY[np.dtype(what)])
        except (TypeError, KeyError):
            what = str(what).removeprefix("torch.")
    try:
        return _CODE_OF_NAME[what]
    except KeyError:
        names = ", ".join(code.name.lower() for code in DType)
        text = f"moec.dtype_of: {what!r} is not an element type of moec; {names} are"
        raise TypeError(text) from None


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype object for a DType, or anything that dtype_of understands."""
    return _NUMPY_OF_CODE[dtype_of(dtype)]


def stream_handle(stream: Any) -> int:
    """cudaStream_t as an integer, from None, an integer, or a framework's stream object."""
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return int(getattr(stream, "cuda_stream", stream))
    except (TypeError, ValueError):
        text = f"moec: stream is {kind_of(stream)}; None, an address or a stream is needed"
        raise TypeError(text) from None


def kind_of(value: Any) -> str:
    """What a message calls a value of the wrong kind."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Described)) or hasattr(value, "__dlpack__")


def _no_array(name: str, value: Any) -> TypeError:
    return TypeError(
        f"moec: {name} is {kind_of(value)}; a NumPy array or a DLPack object is needed"
    )


def _no_dtype(name: str, dtype: Any) -> TypeError:
    names = ", ".join(code.name.lower() for code in DType)
    return TypeError(f"moec: {name} has dtype {dtype}; {names} exist")


def require(**arrays: Any) -> None:
    """Raise, naming the argument, for what is no array whose extents and dtype can be read."""
    for name, array in arrays.items():
        if not _is_array(array):
            raise _no_array(name, array)
        if not array.shape:
            raise ValueError(f"moec: {name} has 0 dimensions; at least 1 is needed")
        if isinstance(array, np.ndarray) and array.dtype not in _CODE_OF_NUMPY:
            raise _no_dtype(name, array.dtype)


def tensor(
    array: Array, keep: list[Any], name: str = "array", *, write: bool = False, stream: int = 0
) -> Any:
    """moec_tensor of `array`, the argument `name`; what must outlive its use is appended to
    `keep`."""
    raw = _core.new_moec_tensor()
    if isinstance(array, np.ndarray):
        _from_numpy(raw, array, name, write)
        keep.append(array)
    elif isinstance(array, Described):
        array.describe(raw)
        keep.append(array)
    elif hasattr(array, "__dlpack__"):
        keep.append(_from_dlpack(raw, array, write, stream))
    else:
        raise _no_array(name, array)
    return raw


def _from_numpy(raw: Any, array: np.ndarray[Any, Any], name: str, write: bool) -> None:
    code = _CODE_OF_NUMPY.get(array.dtype)
    if code is None:
        raise _no_dtype(name, array.dtype)
    if write and not array.flags.writeable:
        raise BufferError(f"{name} is read-only; an output must be writable")
    _core.tensor_from_numpy(raw, array.__array_struct__, code)


def _from_dlpack(raw: Any, array: Array, write: bool, stream: int) -> Any:
    if getattr(array, "requires_grad", False):
        array = array.detach()  # moec computes gradients itself, outside the framework's tape
    if write and type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise BufferError("arrays of jax are read-only; an output must be writable")
    request: dict[str, Any] = {"max_version": (1, 0)}
    if array.__dlpack_device__()[0] == DeviceType.CUDA:
        request["stream"] = stream or 1  # DLPack's name for the default stream
    try:
        capsule = array.__dlpack__(**request)
    except TypeError:  # a producer from before DLPack 1.0
        del request["max_version"]
        capsule = array.__dlpack__(**request)
    _core.tensor_from_capsule(raw, capsule, write)
    return capsule


def set_tensors(
    raw: Any, keep: list[Any], *, write: bool = False, stream: int = 0, **arrays: Array | None
) -> None:
    """Fill the named tensor fields of a struct; None leaves a field absent."""
    struct = type(raw).__name__
    for name, array in arrays.items():
        if array is not None:
            put = getattr(_core, f"{struct}_{name}_set")
            put(raw, tensor(array, keep, name, write=write, stream=stream))


def tensor_array(
    arrays: Sequence[Array], keep: list[Any], name: str, *, write: bool = False, stream: int = 0
) -> Any:
    """C array of tensors, as per_expert pointers and per-layer logits want it."""
    items = _raw.tensor_array(len(arrays))
    for index, array in enumerate(arrays):
        items[index] = tensor(array, keep, f"{name}[{index}]", write=write, stream=stream)
    keep.append(items)
    return items.cast()


def buffer(
    array: Array, keep: list[Any], name: str, *, write: bool = True, stream: int = 0
) -> Any:
    """moec_buffer over all bytes of an array. Raises LayoutError: a buffer has no strides."""
    view = tensor(array, keep, name, write=write, stream=stream)
    _raw.moec_tensor_check(view)
    raw = _raw.moec_buffer()
    raw.ptr = _raw.tensor_describe(view)[0]
    raw.bytes = _raw.moec_tensor_bytes(view)
    return raw


class Described:
    """An array that fills a moec_tensor itself."""

    shape: tuple[int, ...]
    dtype: Any

    def describe(self, raw: Any) -> None:
        raise NotImplementedError


class DeviceArray(Described):
    """Memory of a context's device that the library allocated (Context.empty, zeros, array): a
    compact array that every call takes and that outputs beside it are made of. So NumPy is all
    that a GPU needs.

    numpy() and numpy.asarray() copy the values out. The memory is given back by close(), by
    `with`, or by the garbage collector; on CUDA that waits for the device. A DeviceArray cannot be
    copied or pickled. Other libraries read it by __cuda_array_interface__.
    """

    def __init__(self, context: Context, shape: Sequence[int], dtype: Any) -> None:
        self._memory = _raw.moec_buffer()
        self.context = context
        self.shape = tuple(int(extent) for extent in shape)
        self.dtype = numpy_dtype(dtype)
        _raw.moec_buffer_alloc(context.raw, self.nbytes, self._memory)

    @property
    def device(self) -> DeviceInfo:
        return self.context.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def describe(self, raw: Any) -> None:
        """Fill a moec_tensor. Raises StateError after close() of this array or its context."""
        if self._memory is None or self.context.raw is None:
            raise wrong_state("DeviceArray", "already closed")
        _core.tensor_from_parts(raw, self._memory.ptr, dtype_of(self.dtype),
                                self.context.device_type, self.context.device_id, self.shape)

    def copy_from(self, values: Array, *, stream: Any = None) -> Self:
        """Copy values of this shape and dtype in, in the order of the stream. Host memory that is
        not pinned has been read when this returns."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        source = tensor(values, keep, "values", stream=handle)
        _core.moec_tensor_copy(self.context.raw, source, tensor(self, keep), handle)
        return self

    def numpy(self, out: np.ndarray[Any, Any] | None = None, *, stream: Any = None) -> Any:
        """The values as a NumPy array; waits for the stream."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        result = np.empty(self.shape, self.dtype) if out is None else out
        target = tensor(result, keep, "out", write=True)
        _core.moec_tensor_copy(self.context.raw, tensor(self, keep), target, handle)
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """What numpy.asarray() asks for: numpy(), in the order of the default stream."""
        if copy is False:
            raise ValueError("moec: the values of a DeviceArray cannot be read without a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else self.context.name
        return f"<moec.DeviceArray {list(self.shape)} {self.dtype} on {state}>"

    def zero(self, *, stream: Any = None) -> Self:
        """Set every byte to 0, in the order of the stream."""
        _core.moec_tensor_zero(self.context.raw, tensor(self, []), stream_handle(stream))
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.context.device_type != DeviceType.CUDA:
            raise AttributeError("__cuda_array_interface__")
        if self._memory is None:
            raise wrong_state("DeviceArray", "already closed")
        return {"data": (self._memory.ptr, False), "shape": self.shape, "version": 3,
                "typestr": self.dtype.str}

    def close(self) -> None:
        """Give the memory back now; further calls do nothing."""
        memory, self._memory = self._memory, None
        if memory is not None and self.context._pointer is not None:
            _core.moec_buffer_free(self.context._pointer, memory)

    def __reduce__(self) -> Any:
        raise TypeError("moec: a DeviceArray owns memory; it cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "context"):  # else __init__ raised before
            self.close()


def empty(shape: Sequence[int], dtype: Any, like: Array) -> Array:
    """Uninitialised array beside `like`: the same framework and device."""
    if isinstance(like, DeviceArray):
        return like.context.empty(shape, dtype)
    if hasattr(like, "new_empty"):  # torch
        import torch  # type: ignore[import-not-found, unused-ignore]

        name = "uint8" if dtype_of(dtype) == DType.U8 else numpy_dtype(dtype).name
        return like.new_empty(tuple(shape), dtype=getattr(torch, name), requires_grad=False)
    if isinstance(like, np.ndarray) or like.__dlpack_device__()[0] == DeviceType.CPU:
        return np.empty(tuple(shape), numpy_dtype(dtype))
    kind = type(like).__name__
    raise TypeError(f"moec: memory beside a {kind} is the caller's to allocate; pass the outputs")


def zeros(shape: Sequence[int], dtype: Any, like: Array) -> Array:
    """As empty(), filled with zeros."""
    array = empty(shape, dtype, like)
    if isinstance(array, DeviceArray):
        return array.zero()
    array[...] = 0
    return array


class _Borrowed:
    """Array-interface view of library memory that keeps its owner alive."""

    def __init__(self, raw: Any, owner: Any) -> None:
        address, code, device_type, _, shape = _raw.tensor_describe(raw)
        host = device_type == DeviceType.CPU
        interface = {
            "data": (address, host),  # torch refuses read-only memory on a device
            "shape": shape,
            "typestr": numpy_dtype(DType(code)).str,
            "version": 3,
        }
        self.owner = owner
        setattr(self, "__array_interface__" if host else "__cuda_array_interface__", interface)


def borrow(raw: Any, owner: Any) -> Any:
    """Read-only view of a tensor that `owner` holds: NumPy on the CPU, else an object with
    __cuda_array_interface__."""
    view = _Borrowed(raw, owner)
    return np.asarray(view) if hasattr(view, "__array_interface__") else view
