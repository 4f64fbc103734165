# SPDX-License-Identifier: Apache-2.0
# Matrices as moec.h has them: values or codes, stacked or one array an expert.
fields_of(T, kind) = Tuple(name for name in fieldnames(T) if fieldtype(T, name) === kind)
const MATRICES = fields_of(Raw.moec_weight_set, Raw.moec_matrix)
const QUANT_ARRAYS = fields_of(Raw.moec_quant, Raw.moec_tensor)

only_known(given, known, what) =
    for name in given
        name in known || throw(ArgumentError("unknown $what $name; known are $known"))
    end

"A vector of arrays: one an expert."
is_list(value) = value isa AbstractVector && !isbitstype(eltype(value))

"The C array of a list; whoever has its address keeps it."
list_of(value) = is_list(value) ? Raw.moec_tensor[Tensor(one).raw for one in value] :
                 Raw.moec_tensor[]
stacked(value) = is_list(value) ? Raw.moec_tensor() : Tensor(value).raw

# The holder keeps the vector.
address_of(list::Vector{T}) where {T} =
    isempty(list) ? Ptr{T}(C_NULL) : GC.@preserve list pointer(list)
address_of(ref::Ref{T}) where {T} = Base.unsafe_convert(Ptr{T}, ref)

"How many arrays the lists of a matrix have; 0 = there is no list."
function common_length(counts, what)
    found = unique(filter(!iszero, collect(counts)))
    length(found) <= 1 && return Int64(isempty(found) ? 0 : first(found))
    throw(ArgumentError("the lists of $what have $(join(found, " and ")) arrays; all need one " *
                        "for each expert"))
end

"""
    Quant(; scales, zeros, ..., block_n = 0, block_k = 0, scale_block = 0, flags = 0)

How the codes of a matrix become values: the arrays and block sizes of [`Raw.moec_quant`](@ref),
sizes reversed; a vector of arrays is one an expert. It keeps the arrays alive.
"""
struct Quant
    raw::Base.RefValue{Raw.moec_quant}
    arrays::NamedTuple
    lists::Vector{Vector{Raw.moec_tensor}}
    count::Int64
end
function Quant(; flags = 0, block_n = 0, block_k = 0, scale_block = 0, arrays...)
    only_known(keys(arrays), QUANT_ARRAYS, "array")
    lists = [list_of(array) for array in values(values(arrays))]
    tensors = (name => stacked(array) for (name, array) in arrays)
    per_expert = (Symbol(:per_expert_, name) => address_of(list)
                  for (name, list) in zip(keys(arrays), lists) if !isempty(list))
    raw = Raw.moec_quant(; flags = UInt32(flags), block_n = Int64(block_n),
                         block_k = Int64(block_k), scale_block = Int64(scale_block), tensors...,
                         per_expert...)
    return Quant(Ref(raw), values(arrays), lists, common_length(length.(lists), "a Quant"))
end

"""
    WeightSet(; gate_up, down, gate_up_bias, gate_up_quant, ...)

Expert matrices or their gradients, each an array of size `(K, N, E)`, or a vector of one array
`(K, N)` an expert; absent ones are left out. A matrix of codes has a [`Quant`](@ref). It keeps the
arrays alive.
"""
struct WeightSet
    raw::Base.RefValue{Raw.moec_weight_set}
    arrays::NamedTuple
    lists::Vector{Vector{Raw.moec_tensor}}
end
function WeightSet(; arrays...)
    parts = (:_bias, :_quant)
    only_known(keys(arrays), (MATRICES..., (Symbol(m, p) for m in MATRICES for p in parts)...),
               "matrix")
    lists = Vector{Raw.moec_tensor}[]
    given(name, part = "") = get(arrays, Symbol(name, part), nothing)
    function matrix(name)
        data, bias, quant = list_of(given(name)), list_of(given(name, :_bias)), given(name, :_quant)
        push!(lists, data, bias)
        inner = quant === nothing ? 0 : quant.count
        return Raw.moec_matrix(data = stacked(given(name)), bias = stacked(given(name, :_bias)),
                               per_expert = address_of(data), per_expert_bias = address_of(bias),
                               count = common_length((length(data), length(bias), inner), name),
                               quant = pointer_to(quant))
    end
    raw = Raw.moec_weight_set(; (name => matrix(name) for name in MATRICES)...)
    return WeightSet(Ref(raw), values(arrays), lists)
end
WeightSet(grads::NamedTuple) = WeightSet(; grads...)
WeightSet(::Nothing) = nothing

pointer_to(::Nothing) = C_NULL
pointer_to(held::Union{Quant,WeightSet}) = address_of(held.raw)

"""
    Quantised

What [`quantise`](@ref) made: `scheme`, the `codes` and their `quant`, whose `arrays` are named as
in `moec.h`. Arrays are [`DeviceArray`](@ref)s of the context: `Array(q.codes)` copies them out.
"""
struct Quantised
    scheme::UInt32
    codes::DeviceArray
    quant::Quant
end

"""
    quantise(context, array, kind; flags = 0, orientation = Raw.MOEC_OUT_IN, scale_dtype = 0,
             block_n = 0, block_k = 0) -> Quantised

Codes and scales of an `array` of size `(K, N, E)`, or `(N, K, E)` where the orientation is IN_OUT.
`kind` is one of `Raw.MOEC_QUANTISE_*`, `flags` are as in [`Raw.moec_quantise_desc`](@ref). Codes
are OUT_IN whatever the orientation, but for NF4 and FP4, which keep it.
"""
function quantise(context::Context, array, kind; flags = 0, orientation = Raw.MOEC_OUT_IN,
                  scale_dtype = 0, block_n = 0, block_k = 0, stream = default_stream(array))
    length(size(array)) == 3 || throw(ArgumentError(
        "quantise: the array has $(length(size(array))) dimensions; 3 are needed, experts last"))
    inner, outer, experts = Int64.(size(array))
    n, k = orientation == Raw.MOEC_IN_OUT ? (inner, outer) : (outer, inner)
    desc = Ref(Raw.moec_quantise_desc(
        flags = UInt32(flags), kind = UInt32(kind), orientation = UInt32(orientation),
        dtype = Tensor(array).raw.dtype, scale_dtype = UInt32(scale_dtype), num_experts = experts,
        out_features = n, in_features = k, block_n = Int64(block_n), block_k = Int64(block_k)))
    info, form = Ref(Raw.moec_quantise_info()), Ref(Raw.moec_quant())
    GC.@preserve context check(Raw.moec_quantise_query(context.raw, desc, info, form))
    codes = like(context, info[].codes, stream)
    there = filter(name -> getfield(form[], name).dtype != 0, collect(QUANT_ARRAYS))
    arrays = (; (name => like(context, getfield(form[], name), stream) for name in there)...)
    quant = Quant(; flags = form[].flags, block_n = form[].block_n, block_k = form[].block_k,
                  scale_block = form[].scale_block, arrays...)
    GC.@preserve context array codes quant desc begin
        args = Ref(Raw.moec_quantise_args(desc = address_of(desc), source = Tensor(array).raw,
                                          codes = Tensor(codes).raw, quant = pointer_to(quant)))
        check(Raw.moec_quantise(context.raw, args, stream))
    end
    return Quantised(info[].scheme, codes, quant)
end

"Room for a tensor that has a type and a shape."
function like(context, tensor, stream)
    T = first(kind for (kind, dtype) in DTYPES if dtype == tensor.dtype)
    sizes = reverse(Int.(tensor.shape[1:tensor.ndim]))
    return DeviceArray{T}(context, sizes...; stream = stream)
end
