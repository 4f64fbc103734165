# SPDX-License-Identifier: Apache-2.0
# The arguments that a struct of moec.h has of one type.
fields_of(T, kind) = Tuple(name for name in fieldnames(T) if fieldtype(T, name) === kind)
const MATRICES = fields_of(Raw.moec_weight_set, Raw.moec_matrix)
const TENSORS = fields_of(Raw.moec_layer_args, Raw.moec_tensor)
const GRADIENTS = fields_of(Raw.moec_layer_grad_args, Raw.moec_tensor)

only_known(given, known, what) =
    for name in given
        name in known || throw(ArgumentError("unknown $what $name; known are $known"))
    end

"""
    weight_set(; gate_up, gate, up, down, gate_up_bias, ...) -> Raw.moec_weight_set

Expert matrices or their gradients, each an array of size `(K, N, E)`; absent ones are left out. The
caller keeps the arrays alive.
"""
function weight_set(; arrays...)
    only_known(keys(arrays), (MATRICES..., (Symbol(m, :_bias) for m in MATRICES)...), "matrix")
    tensor(name) = Tensor(get(arrays, name, nothing)).raw
    matrix(name) = Raw.moec_matrix(data = tensor(name), bias = tensor(Symbol(name, :_bias)))
    return Raw.moec_weight_set(; (name => matrix(name) for name in MATRICES)...)
end

"""
    Weights(context, desc::Raw.moec_weights_desc; gate_up, down, ...)

Borrow expert matrices; the handle keeps the arrays alive.
"""
function Weights(context::Context, desc::Raw.moec_weights_desc; arrays...)
    form = Ref(desc)
    make(out) = Raw.moec_weights_create(context.raw, form, out)
    weights = Weights(GC.@preserve(context, created(make, Raw.moec_weights)), values(arrays))
    bound = Ref(weight_set(; arrays...))
    GC.@preserve weights check(Raw.moec_weights_bind(weights.raw, bound))
    return weights
end

"""
    Layer(context, router::Raw.moec_router_desc, experts::Raw.moec_experts_desc)

Router and experts in one call.
"""
function Layer(context::Context, router::Raw.moec_router_desc, experts::Raw.moec_experts_desc)
    first, second = Ref(router), Ref(experts)
    GC.@preserve context first second begin
        desc = Ref(Raw.moec_layer_desc(router = address_of(first), experts = address_of(second)))
        make(out) = Raw.moec_layer_create(context.raw, desc, out)
        return Layer(created(make, Raw.moec_layer), nothing)
    end
end

address_of(ref::Ref{T}) where {T} = Base.unsafe_convert(Ptr{T}, ref)

"Exact bytes: `base` and `per_token` of `forward_workspace`, `backward_workspace` and `saved`."
function sizes(layer::Layer)
    out = Ref(Raw.moec_experts_sizes())
    GC.@preserve layer check(Raw.moec_layer_query(layer.raw, out))
    return out[]
end

bytes_for(size::Raw.moec_size, tokens) = Int(size.base + UInt64(tokens) * size.per_token)

const INPUTS = (TENSORS..., :weights, :shared_weights, :saved, :workspace, :rng_offset)

handle_of(::Nothing) = Ptr{Raw.moec_weights}(C_NULL)
handle_of(weights::Weights) = weights.raw

# The caller preserves `given`.
function layer_args(given)
    only_known(keys(given), INPUTS, "argument")
    tensors = (name => Tensor(get(given, name, nothing)).raw for name in TENSORS)
    return Raw.moec_layer_args(; weights = handle_of(given[:weights]),
                               shared_weights = handle_of(get(given, :shared_weights, nothing)),
                               rng_offset = UInt64(get(given, :rng_offset, 0)),
                               saved = buffer(get(given, :saved, nothing)),
                               workspace = buffer(get(given, :workspace, nothing)), tensors...)
end

"""
    forward!(layer; weights, x, gate_weight, y, saved = nothing, ...)

Gate, routing, plan and experts; arguments as in [`Raw.moec_layer_args`](@ref), sizes reversed.
Returns `y`.
"""
function forward!(layer::Layer; x, y, stream = default_stream(x), inputs...)
    given = merge(values(inputs), (x = x, y = y))
    GC.@preserve layer given begin
        args = Ref(layer_args(given))
        check(Raw.moec_layer_forward(layer.raw, args, stream))
    end
    return y
end

"""
    backward!(layer, inputs; d_y, d_x, d_expert_weights = (gate_up = ..., down = ...), ...)

Gradients of the call that the named tuple `inputs` describes (the keywords of [`forward!`](@ref),
`saved` among them); every output of [`Raw.moec_layer_grad_args`](@ref) that is not given is
skipped.
"""
function backward!(layer::Layer, inputs::NamedTuple; d_expert_weights = nothing,
                   d_shared_weights = nothing, flags = 0, workspace = nothing,
                   stream = default_stream(inputs.x), arrays...)
    only_known(keys(arrays), GRADIENTS, "gradient")
    set_of(grads) = Ref(grads === nothing ? Raw.moec_weight_set() : weight_set(; grads...))
    optional(set, grads) = grads === nothing ? Ptr{Raw.moec_weight_set}(C_NULL) : address_of(set)
    GC.@preserve layer inputs arrays d_expert_weights d_shared_weights workspace begin
        forward = Ref(layer_args(inputs))
        experts, shared = set_of(d_expert_weights), set_of(d_shared_weights)
        tensors = (name => Tensor(get(arrays, name, nothing)).raw for name in GRADIENTS)
        GC.@preserve forward experts shared begin
            args = Ref(Raw.moec_layer_grad_args(;
                flags = UInt32(flags), forward = address_of(forward),
                d_expert_weights = optional(experts, d_expert_weights),
                d_shared_weights = optional(shared, d_shared_weights),
                workspace = buffer(workspace), tensors...))
            check(Raw.moec_layer_backward(layer.raw, args, stream))
        end
    end
    return nothing
end
