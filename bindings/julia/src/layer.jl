# SPDX-License-Identifier: Apache-2.0
"""
    weight_set(; gate_up, gate, up, down, gate_up_bias, ...) -> (struct, arrays)

Expert matrices or their gradients, each an array of size `(K, N, E)`; absent ones are left out.
"""
function weight_set(; arrays...)
    tensor(name) = Tensor(get(arrays, name, nothing)).raw
    matrix(name) = Raw.moec_matrix(data = tensor(name), bias = tensor(Symbol(name, :_bias)))
    known = (:gate_up, :gate, :up, :down)
    for name in keys(arrays)
        Symbol(replace(String(name), r"_bias$" => "")) in known ||
            throw(ArgumentError(
                "weight_set: unknown matrix $name; known are $known and their _bias"))
    end
    return Raw.moec_weight_set(gate_up = matrix(:gate_up), gate = matrix(:gate), up = matrix(:up),
                               down = matrix(:down)), values(arrays)
end

"""
    Weights(context, desc::Raw.moec_weights_desc; gate_up, down, ...)

Borrow expert matrices; the handle keeps the arrays alive.
"""
function Weights(context::Context, desc::Raw.moec_weights_desc; arrays...)
    form = Ref(desc)
    raw = created(out -> Raw.moec_weights_create(context.raw, form, out), Raw.moec_weights)
    set, owners = weight_set(; arrays...)
    weights = Weights(raw, owners)
    bound = Ref(set)
    check(Raw.moec_weights_bind(raw, bound))
    return weights
end

"""
    Layer(context, router::Raw.moec_router_desc, experts::Raw.moec_experts_desc)

Router and experts in one call.
"""
function Layer(context::Context, router::Raw.moec_router_desc, experts::Raw.moec_experts_desc)
    first, second = Ref(router), Ref(experts)
    GC.@preserve first second begin
        desc = Ref(Raw.moec_layer_desc(router = Base.unsafe_convert(Ptr{Raw.moec_router_desc},
            first),
                                       experts = Base.unsafe_convert(Ptr{Raw.moec_experts_desc},
                                           second)))
        raw = created(out -> Raw.moec_layer_create(context.raw, desc, out), Raw.moec_layer)
    end
    return Layer(raw, nothing)
end

"Exact bytes: `(base, per_token)` of forward workspace, backward workspace and saved."
function sizes(layer::Layer)
    out = Ref(Raw.moec_experts_sizes())
    check(Raw.moec_layer_query(layer.raw, out))
    return out[]
end

bytes_for(size::Raw.moec_size, tokens) = Int(size.base + UInt64(tokens) * size.per_token)

const TENSORS_IN = (:x, :router_x, :gate_weight, :gate_bias, :input_scale, :select_bias,
                    :per_expert_scale, :token_mask, :table, :token_ids, :given_ids, :shared_gate,
                    :shared_gate_bias, :output_bias, :residual, :y, :logits, :expert_ids,
                    :routing_weights, :counts)

buffer(::Nothing) = Raw.moec_buffer()
buffer(bytes::Vector{UInt8}) =
    Raw.moec_buffer(ptr = convert(Ptr{Cvoid}, pointer(bytes)), bytes = UInt64(length(bytes)))

handle_of(::Nothing, T) = Ptr{T}(C_NULL)
handle_of(weights::Weights, T) = weights.raw

function layer_args(weights, shared_weights, saved, workspace, rng_offset, arrays)
    tensors = (name => Tensor(get(arrays, name, nothing)).raw for name in TENSORS_IN)
    for name in keys(arrays)
        name in TENSORS_IN || throw(ArgumentError("unknown tensor $name; known are $TENSORS_IN"))
    end
    return Raw.moec_layer_args(; weights = handle_of(weights, Raw.moec_weights),
                               shared_weights = handle_of(shared_weights, Raw.moec_weights),
                               rng_offset = UInt64(rng_offset), saved = buffer(saved),
                               workspace = buffer(workspace), tensors...)
end

"""
    forward!(layer; weights, x, gate_weight, y, saved = nothing, ...)

Gate, routing, plan and experts; tensors as in `moec_layer_args`, sizes reversed. Returns `y`.
"""
function forward!(layer::Layer; weights, shared_weights = nothing, saved = nothing,
    workspace = nothing,
                  rng_offset = 0, stream = C_NULL, arrays...)
    GC.@preserve arrays saved workspace weights shared_weights begin
        args = Ref(layer_args(weights, shared_weights, saved, workspace, rng_offset, arrays))
        check(Raw.moec_layer_forward(layer.raw, args, stream))
    end
    return arrays[:y]
end

const GRADIENTS = (:d_y, :d_logits_in, :d_x, :d_router_x, :d_gate_weight, :d_gate_bias,
    :d_input_scale,
                   :d_per_expert_scale, :d_shared_gate, :d_shared_gate_bias, :d_output_bias,
                   :d_residual, :d_routing_weights)

"""
    backward!(layer, inputs; d_y, d_x, d_expert_weights = (gate_up = ..., down = ...), ...)

Gradients of the call described by the named tuple `inputs` (the keywords of [`forward!`](@ref),
    `saved`
included); every output that is not given is skipped.
"""
function backward!(layer::Layer, inputs::NamedTuple; d_expert_weights = nothing,
                   d_shared_weights = nothing, flags = 0, workspace = nothing, stream = C_NULL,
                       arrays...)
    own = (:weights, :shared_weights, :saved)
    given = NamedTuple{Tuple(k for k in keys(inputs) if !(k in own))}(inputs)
    saved, weights = get(inputs, :saved, nothing), inputs.weights
    shared = get(inputs, :shared_weights, nothing)
    experts = Ref(weight_set(; something(d_expert_weights, NamedTuple())...)[1])
    shared_set = Ref(weight_set(; something(d_shared_weights, NamedTuple())...)[1])
    pointer_or_null(ref, wanted) = wanted === nothing ? Ptr{Raw.moec_weight_set}(C_NULL) :
                                   Base.unsafe_convert(Ptr{Raw.moec_weight_set}, ref)
    GC.@preserve inputs arrays experts shared_set d_expert_weights d_shared_weights workspace begin
        fwd = Ref(layer_args(weights, shared, saved, nothing, 0, given))
        GC.@preserve fwd begin
            tensors = (name => Tensor(get(arrays, name, nothing)).raw for name in GRADIENTS)
            args = Ref(Raw.moec_layer_grad_args(;
                flags = UInt32(flags),
                forward = Base.unsafe_convert(Ptr{Raw.moec_layer_args}, fwd),
                d_expert_weights = pointer_or_null(experts, d_expert_weights),
                d_shared_weights = pointer_or_null(shared_set, d_shared_weights),
                workspace = buffer(workspace), tensors...))
            check(Raw.moec_layer_backward(layer.raw, args, stream))
        end
    end
    return nothing
end
