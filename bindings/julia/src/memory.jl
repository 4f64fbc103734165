# SPDX-License-Identifier: Apache-2.0
"""
    DeviceArray{T}(context, sizes...; stream = C_NULL)
    DeviceArray(context, array; stream = C_NULL)

Zeros, or a copy of `array`, on the context's device, in memory that the library allocated: a GPU
needs no other package. Calls take it like an array; `copyto!` moves values in and out, `Array`
copies them out, `close` gives the memory back.
"""
mutable struct DeviceArray{T,N}
    context::Context
    memory::Base.RefValue{Raw.moec_buffer}
    raw::Raw.moec_tensor
    sizes::NTuple{N,Int}
    function DeviceArray{T,N}(context, memory, raw, sizes) where {T,N}
        array = new(context, memory, raw, sizes)
        finalizer(close, array)
        return array
    end
end

function DeviceArray{T}(context::Context, sizes::Integer...; stream = C_NULL) where {T}
    info = Ref(Raw.moec_device_info())
    memory = Ref(Raw.moec_buffer())
    bytes = UInt64(prod(sizes)) * sizeof(T)
    GC.@preserve context check(Raw.moec_context_device(context.raw, info))
    GC.@preserve context check(Raw.moec_buffer_alloc(context.raw, bytes, memory))
    raw = describe(memory[].ptr, T, info[].device_type, info[].device_id, sizes)
    array = DeviceArray{T,length(sizes)}(context, memory, raw, Int.(sizes))
    GC.@preserve array check(Raw.moec_tensor_zero(context.raw, Ref(raw), stream))
    return array
end
DeviceArray(context::Context, array::HostArray{T}; stream = C_NULL) where {T} =
    copyto!(DeviceArray{T}(context, size(array)...; stream = stream), array; stream = stream)

Base.size(array::DeviceArray) = array.sizes
Base.eltype(::DeviceArray{T}) where {T} = T

"After `close` the tensor is absent."
Tensor(array::DeviceArray) = Tensor(array.raw, array)
buffer(array::DeviceArray{UInt8}) = array.memory[]

function copy_tensor(array::DeviceArray, source, target, stream)
    from, to = Tensor(source), Tensor(target)
    context = array.context
    GC.@preserve array from to context check(
        Raw.moec_tensor_copy(context.raw, Ref(from.raw), Ref(to.raw), stream))
    return target
end
Base.copyto!(target::DeviceArray, source::HostArray; stream = C_NULL) =
    copy_tensor(target, source, target, stream)
Base.copyto!(target::HostArray, source::DeviceArray; stream = C_NULL) =
    copy_tensor(source, source, target, stream)
Base.Array(array::DeviceArray{T}; stream = C_NULL) where {T} =
    copyto!(Array{T}(undef, size(array)), array; stream = stream)

function Base.close(array::DeviceArray)
    context = array.context  # once it is closed, the memory goes back with its last object
    context.raw == C_NULL ||
        GC.@preserve context check(Raw.moec_buffer_free(context.raw, array.memory))
    array.memory[] = Raw.moec_buffer()
    array.raw = Raw.moec_tensor()
    return nothing
end
