# SPDX-License-Identifier: Apache-2.0
# The arguments that a struct of moec.h has of one type.
const TENSORS = fields_of(Raw.moec_layer_args, Raw.moec_tensor)
const GRADIENTS = fields_of(Raw.moec_layer_grad_args, Raw.moec_tensor)
const EXPERTS_TENSORS = fields_of(Raw.moec_experts_args, Raw.moec_tensor)
const EXPERTS_GRADIENTS = fields_of(Raw.moec_experts_grad_args, Raw.moec_tensor)

"""
    Weights(context, desc::Raw.moec_weights_desc; gate_up, down, gate_up_quant, ...)

Borrow expert matrices, see [`WeightSet`](@ref); the handle keeps the arrays alive.
"""
function Weights(context::Context, desc::Raw.moec_weights_desc; arrays...)
    form, set = Ref(desc), WeightSet(; arrays...)
    make(out) = Raw.moec_weights_create(context.raw, form, out)
    weights = Weights(GC.@preserve(context, created(make, Raw.moec_weights)), set)
    GC.@preserve weights set check(Raw.moec_weights_bind(weights.raw, set.raw))
    return weights
end

"""
    dequantise!(to, weights, matrix, expert)

Write the values of one expert's matrix (`Raw.MOEC_MATRIX_DOWN`, ...; experts count from 0) to an
array of size `(K, N)`, or `(N, K)` where its orientation is IN_OUT; of codes those of the scheme's
formula. Returns `to`.
"""
function dequantise!(to, weights::Weights, matrix, expert; stream = default_stream(to))
    GC.@preserve to weights begin
        target = Ref(Tensor(to).raw)
        check(Raw.moec_weights_dequantise(weights.raw, UInt32(matrix), Int32(expert), target,
                                          stream))
    end
    return to
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

"""
    Experts(context, desc::Raw.moec_experts_desc)

Experts that run on plans.
"""
function Experts(context::Context, desc::Raw.moec_experts_desc)
    form = Ref(desc)
    make(out) = Raw.moec_experts_create(context.raw, form, out)
    return Experts(GC.@preserve(context, created(make, Raw.moec_experts)), nothing)
end

"Exact bytes: `base` and `per_token` of `forward_workspace`, `backward_workspace` and `saved`."
function sizes(layer::Layer)
    out = Ref(Raw.moec_experts_sizes())
    GC.@preserve layer check(Raw.moec_layer_query(layer.raw, out))
    return out[]
end

function sizes(experts::Experts)
    out = Ref(Raw.moec_experts_sizes())
    GC.@preserve experts check(Raw.moec_experts_query(experts.raw, out))
    return out[]
end

bytes_for(size::Raw.moec_size, tokens) = Int(size.base + UInt64(tokens) * size.per_token)

const INPUTS = (TENSORS..., :weights, :shared_weights, :adapters, :saved, :workspace, :rng_offset)

handle_of(::Nothing) = C_NULL
handle_of(handle) = handle.raw

# The caller preserves `given`.
function layer_args(given)
    only_known(keys(given), INPUTS, "argument")
    tensors = (name => Tensor(get(given, name, nothing)).raw for name in TENSORS)
    return Raw.moec_layer_args(; weights = handle_of(given[:weights]),
                               shared_weights = handle_of(get(given, :shared_weights, nothing)),
                               adapters = handle_of(get(given, :adapters, nothing)),
                               rng_offset = UInt64(get(given, :rng_offset, 0)),
                               saved = buffer(get(given, :saved, nothing)),
                               workspace = buffer(get(given, :workspace, nothing)), tensors...)
end

"""
    forward!(layer; weights, x, gate_weight, y, saved = nothing, ...)

Gate, routing, plan and experts; arguments as in [`Raw.moec_layer_args`](@ref), sizes reversed,
with [`Adapters`](@ref) as `adapters`. Returns `y`.
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
skipped. `d_adapters` is a list as that of [`Adapters`](@ref), without scales.
"""
function backward!(layer::Layer, inputs::NamedTuple; d_expert_weights = nothing,
                   d_shared_weights = nothing, d_adapters = nothing, flags = 0,
                   workspace = nothing, stream = default_stream(inputs.x), arrays...)
    only_known(keys(arrays), GRADIENTS, "gradient")
    experts, shared = WeightSet(d_expert_weights), WeightSet(d_shared_weights)
    GC.@preserve layer inputs arrays d_adapters workspace begin
        list = adapter_grads(d_adapters, get(inputs, :adapters, nothing))
        forward = Ref(layer_args(inputs))
        tensors = (name => Tensor(get(arrays, name, nothing)).raw for name in GRADIENTS)
        GC.@preserve forward experts shared list begin
            args = Ref(Raw.moec_layer_grad_args(;
                flags = UInt32(flags), forward = address_of(forward),
                d_expert_weights = pointer_to(experts), d_shared_weights = pointer_to(shared),
                d_adapters = address_of(list), workspace = buffer(workspace), tensors...))
            check(Raw.moec_layer_backward(layer.raw, args, stream))
        end
    end
    return nothing
end

const EXPERTS_INPUTS = (EXPERTS_TENSORS..., :plan, :weights, :shared_weights, :adapters, :saved,
                        :workspace, :flags)

# What the arguments of forward and of backward share; the caller preserves `given`.
experts_fields(given) = (plan = given[:plan].raw, weights = handle_of(given[:weights]),
                         shared_weights = handle_of(get(given, :shared_weights, nothing)),
                         adapters = handle_of(get(given, :adapters, nothing)),
                         saved = buffer(get(given, :saved, nothing)))

tensors_of(names, given) = (name => Tensor(get(given, name, nothing)).raw for name in names)

"""
    forward!(experts; plan, weights, x, y, saved = nothing, ...)

Experts on a plan; arguments as in [`Raw.moec_experts_args`](@ref), sizes reversed, with
[`Adapters`](@ref) as `adapters`. Returns `y`.
"""
function forward!(experts::Experts; x, y, stream = default_stream(x), inputs...)
    given = merge(values(inputs), (x = x, y = y))
    only_known(keys(given), EXPERTS_INPUTS, "argument")
    GC.@preserve experts given begin
        args = Ref(Raw.moec_experts_args(;
            flags = UInt32(get(given, :flags, 0)),
            workspace = buffer(get(given, :workspace, nothing)),
            experts_fields(given)..., tensors_of(EXPERTS_TENSORS, given)...))
        check(Raw.moec_experts_forward(experts.raw, args, stream))
    end
    return y
end

"""
    backward!(experts, inputs; d_y, d_x, d_expert_weights = (gate_up = ..., down = ...), ...)

Gradients of the call that the named tuple `inputs` describes (the keywords of [`forward!`](@ref),
`saved` among them); every output of [`Raw.moec_experts_grad_args`](@ref) that is not given is
skipped. `d_adapters` is a list as that of [`Adapters`](@ref), without scales.
"""
function backward!(experts::Experts, inputs::NamedTuple; d_expert_weights = nothing,
                   d_shared_weights = nothing, d_adapters = nothing, flags = 0,
                   workspace = nothing, stream = default_stream(inputs.x), arrays...)
    only_known(keys(inputs), EXPERTS_INPUTS, "argument")
    only_known(keys(arrays), EXPERTS_GRADIENTS, "gradient")
    routed, shared = WeightSet(d_expert_weights), WeightSet(d_shared_weights)
    read = filter(name -> haskey(inputs, name), collect(EXPERTS_GRADIENTS))  # x, the shared gate
    given = merge((; (name => inputs[name] for name in read)...), values(arrays))
    GC.@preserve experts inputs given routed shared d_adapters workspace begin
        list = adapter_grads(d_adapters, get(inputs, :adapters, nothing))
        args = Ref(Raw.moec_experts_grad_args(;
            flags = UInt32(flags), workspace = buffer(workspace),
            d_expert_weights = pointer_to(routed), d_shared_weights = pointer_to(shared),
            d_adapters = address_of(list), experts_fields(inputs)...,
            tensors_of(EXPERTS_GRADIENTS, given)...))
        GC.@preserve list check(Raw.moec_experts_backward(experts.raw, args, stream))
    end
    return nothing
end
