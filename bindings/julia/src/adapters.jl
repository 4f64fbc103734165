# SPDX-License-Identifier: Apache-2.0
# Low-rank terms beside the matrices of experts (LoRA), and their gradients.
const FACTORS = fieldnames(Raw.moec_adapter)

"""
    Strided(array, sizes, strides)

A view of a dense array whose element `(i, j, ...)`, counted from 0, is at `i strides[1] + j
strides[2] + ...`; sizes reversed, as everywhere. Strides of 0 alone are those of a dense array. The
arguments that may have strides say so in [`Raw`](@ref Moec.Raw).
"""
struct Strided{A<:HostArray}
    array::A
    sizes::Dims
    strides::Dims
    function Strided(array::A, sizes, strides) where {A<:HostArray}
        length(sizes) == length(strides) ||
            throw(ArgumentError("$(length(strides)) strides for $(length(sizes)) sizes"))
        inside = any(iszero, sizes) || (all(strides .>= 0) &&
                 sum(BigInt.(sizes .- 1) .* strides) < length(array))
        inside || throw(ArgumentError("the array has $(length(array)) elements; sizes $sizes " *
                                      "with strides $strides need others"))
        return new{A}(array, sizes, strides)
    end
end

function Tensor(view::Strided{<:HostArray{T}}) where {T}
    data = GC.@preserve view convert(Ptr{Cvoid}, pointer(view.array))  # the Tensor keeps it
    raw, order = describe(data, T, Raw.MOEC_CPU, 0, view.sizes), reverse(view.strides)
    strides = ntuple(i -> i <= length(order) ? Int64(order[i]) : Int64(0), Val(6))
    return Tensor(with_strides(raw, strides), view)
end
with_strides(raw, strides) = Raw.moec_tensor(;
    (name => getfield(raw, name) for name in fieldnames(Raw.moec_tensor))..., strides = strides)

factors(::Nothing, scaled) = Raw.moec_factors()
function factors(given::NamedTuple, scaled)
    only_known(keys(given), scaled ? (:a, :b, :scale) : (:a, :b), "factor")
    return Raw.moec_factors(a = Tensor(get(given, :a, nothing)).raw,
                            b = Tensor(get(given, :b, nothing)).raw,
                            scale = Float32(get(given, :scale, 0)))
end

# The caller preserves `given`.
function adapter(given::NamedTuple, scaled)
    only_known(keys(given), FACTORS, "matrix")
    return Raw.moec_adapter(; (name => factors(get(given, name, nothing), scaled)
                               for name in FACTORS)...)
end

"""
    Adapters(context, desc::Raw.moec_adapters_desc, list)

Adapters (LoRA) for calls, which add all of them, or each token's own where `adapter_ids` are given.
Each of `list` is a named tuple of what it has beside a matrix, such as
`(down = (a = A, b = B, scale = 2),)`, which adds `scale * (x A^T) B^T`: A of size `(K, r, E)`, or
`(K, r, 1)` for all experts, B of size `(r, N, E)`, arrays or [`Strided`](@ref) views. The handle
keeps the arrays alive; their values may change between calls.
"""
function Adapters(context::Context, desc::Raw.moec_adapters_desc, list)
    form, given = Ref(desc), collect(NamedTuple, list)
    make(out) = Raw.moec_adapters_create(context.raw, form, out)
    adapters = Adapters(GC.@preserve(context, created(make, Raw.moec_adapters)), given)
    GC.@preserve adapters given begin
        bound = Raw.moec_adapter[adapter(one, true) for one in given]
        GC.@preserve bound check(
            Raw.moec_adapters_bind(adapters.raw, pointer(bound), Int32(length(bound))))
    end
    return adapters
end

"""
    merge!(weights, adapters)
    unmerge!(weights, adapters)

Add scale B A of all adapters to the arrays of plain weights, with one rounding, or subtract it,
which gives the values before up to that rounding. Returns `weights`.
"""
function Base.merge!(weights::Weights, adapters::Adapters; stream = C_NULL)
    GC.@preserve weights adapters check(
        Raw.moec_adapters_merge(adapters.raw, weights.raw, stream))
    return weights
end
function unmerge!(weights::Weights, adapters::Adapters; stream = C_NULL)
    GC.@preserve weights adapters check(
        Raw.moec_adapters_unmerge(adapters.raw, weights.raw, stream))
    return weights
end

"The C array of gradients; the library reads one for each adapter that is bound."
adapter_grads(::Nothing, _) = Raw.moec_adapter[]
function adapter_grads(list, adapters)
    bound = adapters === nothing || adapters.keep === nothing ? 0 : length(adapters.keep)
    length(list) == bound || throw(ArgumentError(
        "d_adapters has $(length(list)) adapters, and $bound are bound; expected one for each"))
    return Raw.moec_adapter[adapter(one, false) for one in list]
end

"Exact bytes of calls with these adapters."
function sizes(layer::Layer, adapters::Adapters)
    out = Ref(Raw.moec_experts_sizes())
    GC.@preserve layer adapters check(
        Raw.moec_layer_query_adapters(layer.raw, adapters.raw, out))
    return out[]
end

function sizes(experts::Experts, adapters::Adapters)
    out = Ref(Raw.moec_experts_sizes())
    GC.@preserve experts adapters check(
        Raw.moec_experts_query_adapters(experts.raw, adapters.raw, out))
    return out[]
end
