# SPDX-License-Identifier: Apache-2.0
"The bits of bfloat16 numbers; reinterpret an array of `UInt16` to it."
primitive type BFloat16Bits 16 end

"The bits of numbers of 8 bits: e4m3fn, e5m2, and e8m0, powers of two; as BFloat16Bits."
primitive type Float8E4M3Bits 8 end
primitive type Float8E5M2Bits 8 end
primitive type Float8E8M0Bits 8 end

const DTYPES = Dict{DataType,UInt32}(
    Float32 => Raw.MOEC_F32, Float64 => Raw.MOEC_F64, Float16 => Raw.MOEC_F16,
    BFloat16Bits => Raw.MOEC_BF16, Int8 => Raw.MOEC_I8, UInt8 => Raw.MOEC_U8,
    Int32 => Raw.MOEC_I32, Int64 => Raw.MOEC_I64, Bool => Raw.MOEC_BOOL,
    Float8E4M3Bits => Raw.MOEC_F8_E4M3, Float8E5M2Bits => Raw.MOEC_F8_E5M2,
    Float8E8M0Bits => Raw.MOEC_F8_E8M0)

"A tensor of `moec.h` and the array it borrows."
struct Tensor
    raw::Raw.moec_tensor
    owner::Any
end

function describe(data::Ptr{Cvoid}, T::DataType, device_type, device_id, sizes)
    haskey(DTYPES, T) ||
        throw(ArgumentError("element type $T; supported are $(collect(keys(DTYPES)))"))
    length(sizes) <= Raw.MOEC_MAX_DIMS ||
        throw(ArgumentError("$(length(sizes)) dimensions; at most $(Raw.MOEC_MAX_DIMS)"))
    shape = reverse(sizes)
    extents = ntuple(i -> i <= length(shape) ? Int64(shape[i]) : Int64(0), 6)
    return Raw.moec_tensor(data = data, device_type = Int32(device_type),
                           device_id = Int32(device_id), dtype = DTYPES[T],
                           ndim = Int32(length(shape)), shape = extents)
end

const HostArray{T} =
    Union{DenseArray{T},Base.ReinterpretArray{T,N,S,<:DenseArray{S}} where {N,S}}

"View of a dense host array, or a reinterpreted one, of size `(H, T)` as the row-major `[T, H]`."
function Tensor(array::HostArray{T}) where {T}
    data = GC.@preserve array convert(Ptr{Cvoid}, pointer(array))  # the Tensor keeps it
    return Tensor(describe(data, T, Raw.MOEC_CPU, 0, size(array)), array)
end
Tensor(tensor::Tensor) = tensor
Tensor(::Nothing) = Tensor(Raw.moec_tensor(), nothing)

buffer(::Nothing) = Raw.moec_buffer()
function buffer(bytes::Vector{UInt8})
    start = GC.@preserve bytes convert(Ptr{Cvoid}, pointer(bytes))  # callers preserve the vector
    return Raw.moec_buffer(ptr = start, bytes = UInt64(length(bytes)))
end

"The stream that work on an array is queued on when none is given: a CUDA array's task has one."
default_stream(_) = C_NULL
