# SPDX-License-Identifier: Apache-2.0
# Owned handles. Finalizers run in any order on any thread: the library allows both.
for (name, raw, release) in ((:Context, :moec_context, :moec_context_free),
                             (:Plan, :moec_plan, :moec_plan_free),
                             (:Weights, :moec_weights, :moec_weights_free),
                             (:Adapters, :moec_adapters, :moec_adapters_free),
                             (:Experts, :moec_experts, :moec_experts_free),
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

"Wait for the work queued on the stream."
synchronize(context::Context, stream = C_NULL) =
    GC.@preserve context check(Raw.moec_context_sync(context.raw, stream))

"""
    Plan(context, desc::Raw.moec_plan_desc)

The routing of one batch, sorted by expert; filled by [`from_topk!`](@ref).
"""
function Plan(context::Context, desc::Raw.moec_plan_desc)
    form = Ref(desc)
    make(out) = Raw.moec_plan_create(context.raw, form, C_NULL, out)
    return Plan(GC.@preserve(context, created(make, Raw.moec_plan)), nothing)
end

"""
    from_topk!(plan, expert_ids, routing_weights = nothing)

Rebuild the plan from ids of size `(K, T)` (`Int32` or `Int64`) and routing weights (`Float32`;
none = 1).
"""
function from_topk!(plan::Plan, expert_ids, routing_weights = nothing;
                    stream = default_stream(expert_ids))
    GC.@preserve plan expert_ids routing_weights begin
        ids, given = Ref(Tensor(expert_ids).raw), Ref(Tensor(routing_weights).raw)
        optional = routing_weights === nothing ? C_NULL : given
        check(Raw.moec_plan_from_topk(plan.raw, ids, optional, stream))
    end
    return plan
end

"""
    from_rule!(plan, rule, num_tokens, routing_weights = nothing)

Rebuild the plan from ids that a rule gives: `Raw.MOEC_PLAN_ROUND_ROBIN` is forced balance, for
benchmarks; `Raw.MOEC_PLAN_EQUAL_COUNTS` gives each local expert as many tokens, one expert after
the other. Routing weights are of size `(K, T)` (`Float32`; none = 1). On a GPU `stream` is that of
the calls that use the plan.
"""
function from_rule!(plan::Plan, rule, num_tokens, routing_weights = nothing;
                    stream = default_stream(routing_weights))
    GC.@preserve plan routing_weights begin
        given = Ref(Tensor(routing_weights).raw)
        optional = routing_weights === nothing ? C_NULL : given
        check(Raw.moec_plan_from_rule(plan.raw, rule, num_tokens, optional, stream))
    end
    return plan
end

"Routed rows, rows in use, dropped rows and the largest group. Waits for the stream."
function totals(plan::Plan, stream = C_NULL)
    out = zeros(Int32, 4)
    GC.@preserve plan check(Raw.moec_plan_totals_sync(plan.raw, out, stream))
    return (; zip((:routed, :rows, :dropped, :largest), out)...)
end
