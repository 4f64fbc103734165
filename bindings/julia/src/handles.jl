# SPDX-License-Identifier: Apache-2.0
# Owned handles. Finalizers run in any order on any thread: the library allows both.
for (name, raw, release) in ((:Context, :moec_context, :moec_context_free),
                             (:Plan, :moec_plan, :moec_plan_free),
                             (:Weights, :moec_weights, :moec_weights_free),
                             (:Layer, :moec_layer, :moec_layer_free))
    @eval begin
        mutable struct $name
            raw::Ptr{Raw.$raw}
            keep::Any
            function $name(raw::Ptr{Raw.$raw}, keep)
                handle = new(raw, keep)
                finalizer(close, handle)
                return handle
            end
        end
        function Base.close(handle::$name)
            Raw.$release(handle.raw)
            handle.raw = C_NULL
            handle.keep = nothing
            return nothing
        end
    end
end

function created(make, ::Type{T}) where {T}
    out = Ref{Ptr{T}}(C_NULL)
    check(make(out))
    return out[]
end

"""
    Context(; device_type = Raw.MOEC_CPU, device_id = 0, num_threads = 0)

A device and its scratch memory.
"""
function Context(; device_type = Raw.MOEC_CPU, device_id = 0, num_threads = 0)
    desc = Ref(Raw.moec_context_desc(device_type = Int32(device_type), device_id = Int32(device_id),
                                     num_threads = Int32(num_threads)))
    return Context(created(out -> Raw.moec_context_create(desc, out), Raw.moec_context), nothing)
end

"Devices of a type; 0 without a driver."
function device_count(device_type)
    count = Ref(Int32(0))
    check(Raw.moec_device_count(Int32(device_type), count))
    return Int(count[])
end

version() = unsafe_string(Raw.moec_version_string())
synchronize(context::Context, stream = C_NULL) = check(Raw.moec_context_sync(context.raw, stream))
