# SPDX-License-Identifier: Apache-2.0
# CUDA arrays as tensors, on the task's own stream. Loaded by Julia 1.9 or newer with CUDA.jl.
module MoecCUDAExt

using CUDA: CUDA, DenseCuArray
using Moec

# CuPtr does not convert to Ptr, but the library takes device addresses in the same field. The owner
# of a Tensor and the callers of buffer keep the memory.
address(array) = GC.@preserve array reinterpret(Ptr{Cvoid}, pointer(array))

function Moec.Tensor(array::DenseCuArray{T}) where {T}
    device = CUDA.deviceid(CUDA.device(array))
    raw = Moec.describe(address(array), T, Moec.Raw.MOEC_CUDA, device, size(array))
    return Moec.Tensor(raw, array)
end

function Moec.buffer(bytes::DenseCuArray{UInt8,1})
    return Moec.Raw.moec_buffer(ptr = address(bytes), bytes = UInt64(length(bytes)))
end

Moec.default_stream(::DenseCuArray) = reinterpret(Ptr{Cvoid}, CUDA.stream().handle)

end
