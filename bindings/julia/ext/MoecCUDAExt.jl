# SPDX-License-Identifier: Apache-2.0
# CUDA arrays as tensors, on the task's own stream. Loaded by Julia 1.9 or newer with CUDA.jl.
module MoecCUDAExt

using CUDA: CUDA, DenseCuArray
using Moec

# CuPtr does not convert to Ptr: the library takes device addresses in the same field.
address(array) = reinterpret(Ptr{Cvoid}, pointer(array))

function Moec.Tensor(array::DenseCuArray{T}) where {T}
    data = GC.@preserve array address(array)  # the Tensor keeps the array
    device = CUDA.deviceid(CUDA.device(array))
    return Moec.Tensor(Moec.describe(data, T, Moec.Raw.MOEC_CUDA, device, size(array)), array)
end

function Moec.buffer(bytes::DenseCuArray{UInt8,1})
    start = GC.@preserve bytes address(bytes)  # callers preserve the vector
    return Moec.Raw.moec_buffer(ptr = start, bytes = UInt64(length(bytes)))
end

Moec.default_stream(::DenseCuArray) = reinterpret(Ptr{Cvoid}, CUDA.stream().handle)

end
