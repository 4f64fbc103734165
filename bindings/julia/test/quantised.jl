# SPDX-License-Identifier: Apache-2.0
# Every layer of tests/golden/quant_cases.json from the bytes of its checkpoint: y, d_x and
# d_routing_weights, and the values of down bit for bit, on arrays of the host and on arrays that
# the library allocates: of the GPU where MOEC_TEST_DEVICE is cuda.
# Shown once to fail: the scales of the experts in reverse order.
module QuantisedLayers

using Moec, Test
using Moec: Raw
using ..Files
using ..Golden: DEVICE, FOLDER, ON_CUDA, row_error, struct_of

const TYPES = Dict("F64" => Float64, "F32" => Float32, "F16" => Float16,
                   "BF16" => Moec.BFloat16Bits, "F8_E4M3" => Moec.Float8E4M3Bits,
                   "I64" => Int64, "I32" => Int32, "I8" => Int8, "U8" => UInt8)

"A checkpoint's arrays, and where the library finds them."
struct Checkpoint
    arrays::Dict{String,Array}
    place::Function
    experts::Int
end

function Checkpoint(json, place, folder = "quant")
    bytes, header, start = read_parts(joinpath(FOLDER, folder, json["file"] * ".safetensors"))
    part(entry) = bytes[start.+((entry["data_offsets"][1]+1):entry["data_offsets"][2])]
    array(entry) = reshape(collect(reinterpret(TYPES[entry["dtype"]], part(entry))),
                           Tuple(reverse(Int.(entry["shape"]))))
    return Checkpoint(Dict(name => array(entry) for (name, entry) in header), place,
                      json["weights"]["num_experts"])
end

"An array of the file, or of `NAME#KEY` a number of its JSON text."
function one(file, name)
    occursin('#', name) || return file.place(file.arrays[name])
    name, key = split(name, '#')
    return file.place(Float32[parse_json(vec(file.arrays[name]))[key]])
end

"The array of a name of the table, or one for each expert."
named(file, name) = occursin("{e}", name) ?
    [one(file, replace(name, "{e}" => e)) for e in 0:file.experts-1] : one(file, name)

widened(bits) = reinterpret(Float32, UInt32.(reinterpret(UInt16, bits)) .<< 16)

function weights_of(context, file, json)
    given = Dict{Symbol,Any}()
    plain(name) = file.place(collect(widened(file.arrays[name])))  # bf16
    for (name, matrix) in json["matrices"]
        haskey(matrix, "quant") || (given[Symbol(name)] = plain(matrix["data"]); continue)
        quant = (Symbol(k) => v isa String ? named(file, v) : v for (k, v) in matrix["quant"])
        given[Symbol(name)] = named(file, matrix["data"])
        given[Symbol(name, :_quant)] = Moec.Quant(; quant...)
        haskey(matrix, "bias") || continue
        given[Symbol(name, :_bias)] = plain(matrix["bias"])
    end
    return Moec.Weights(context, struct_of(Raw.moec_weights_desc, json["weights"]); given...)
end

"Row errors by name."
function run(context, file, json)
    experts = Moec.Experts(context, struct_of(Raw.moec_experts_desc, json["experts"]))
    x, ids = one(file, "x"), one(file, "ids")
    (hidden, tokens), top_k = size(x), size(ids)[1]
    plan = Moec.Plan(context, Raw.moec_plan_desc(max_tokens = tokens, top_k = Int32(top_k),
                                                 num_experts = Int32(file.experts)))
    Moec.from_topk!(plan, ids, one(file, "weights"))
    room(sizes...) = file.place(fill(NaN32, sizes...))
    y, d_x, d_weights = room(hidden, tokens), room(hidden, tokens), room(top_k, tokens)
    inputs = (plan = plan, weights = weights_of(context, file, json), x = x,
              saved = file.place(zeros(UInt8, Moec.bytes_for(Moec.sizes(experts).saved, tokens))))
    Moec.forward!(experts; inputs..., y = y)
    Moec.backward!(experts, inputs; d_y = one(file, "dy"), d_x = d_x, d_routing_weights = d_weights)
    error(got, name) = row_error(Array(got), vec(file.arrays["ref." * name]), size(got)[1])
    return Dict("y" => error(y, "y"), "d_x" => error(d_x, "dx"),
                "d_routing_weights" => error(d_weights, "dweights"))
end

"The values of down at the file's indices are those of its library, bit for bit."
function values_are_equal(context, file, json)
    weights, desc = weights_of(context, file, json), json["weights"]
    sizes = (desc["inter"], desc["hidden"])
    in_out = haskey(desc, "down_orientation")
    values = map(0:file.experts-1) do e
        to = file.place(fill(NaN32, in_out ? reverse(sizes) : sizes))
        matrix = Array(Moec.dequantise!(to, weights, Raw.MOEC_MATRIX_DOWN, e))
        json["turned"] ? permutedims(matrix) : matrix
    end
    index = file.arrays["dequant.down_proj.index"]
    found = reduce(vcat, vec.(values))[index.+1]
    return reinterpret(UInt32, found) == reinterpret(UInt32, file.arrays["dequant.down_proj.value"])
end

const ALL = read_json(joinpath(FOLDER, "quant_cases.json"))

@testset "layers of codes, $kind" for kind in (ON_CUDA ? (:device,) : (:host, :device))
    context = Moec.Context(device_type = DEVICE, num_threads = 2)
    place = kind === :host ? identity : array -> Moec.DeviceArray(context, array)
    @test length(ALL["cases"]) == 19
    for json in ALL["cases"]
        file = Checkpoint(json, place)
        @testset "$(json["file"]) $name" for (name, error) in run(context, file, json)
            @test error <= ALL["tolerance"]
        end
        @test values_are_equal(context, file, json)
    end
end

error_of(call) =
    try
        call()
        nothing
    catch e
        e
    end

# Scales of another matrix, and what the library says of them.
const WRONG = Dict(
    "mxfp4_gptoss" => ("ckpt.experts.gate_up_proj_scales", "[4,64,3]; expected [4,96,1]"),
    "bnb_nf4_stack_nested" => ("ckpt.experts.gate_up_proj.absmax", "[384]; expected [192]"),
    "fp8_block128_partial" => ("x", "[6,136]; expected [2,2,2]"),
    "awq_gemm_g32" => ("ckpt.experts.{e}.up_proj.scales", "[3,32]; expected [1,96]"))

@testset "wrong scales are refused in the words of the library" begin
    context = Moec.Context()
    for (name, (scales, words)) in WRONG
        json = deepcopy(first(c for c in ALL["cases"] if c["file"] == name))
        json["matrices"]["down"]["quant"]["scales"] = scales
        error = error_of(() -> weights_of(context, Checkpoint(json, identity), json))
        @test error isa Moec.MoecError && error.code == Raw.MOEC_E_SHAPE
        @test occursin(words, error.message)
    end
end

# Each kind of moec.h: how far a value may be from its source, of the largest.
const KINDS = (
    (Raw.MOEC_QUANTISE_INT8, 0, 0.01), (Raw.MOEC_QUANTISE_INT8, Raw.MOEC_QUANTISE_ASYMMETRIC, 0.01),
    (Raw.MOEC_QUANTISE_INT4, 0, 0.1), (Raw.MOEC_QUANTISE_FP8, 0, 0.05),
    (Raw.MOEC_QUANTISE_MXFP8, 0, 0.1), (Raw.MOEC_QUANTISE_MXFP4, 0, 0.3),
    (Raw.MOEC_QUANTISE_NVFP4, 0, 0.2),
    (Raw.MOEC_QUANTISE_NVFP4, Raw.MOEC_QUANTISE_SCALES2_DIVIDES, 0.2),
    (Raw.MOEC_QUANTISE_NF4, Raw.MOEC_QUANTISE_NESTED, 0.2), (Raw.MOEC_QUANTISE_FP4, 0, 0.25))

@testset "quantise, kind $kind $flags" for (kind, flags, limit) in KINDS
    context = Moec.Context()
    wave(sizes...) = reshape(Float32[sin(0.11 * i) / 2 for i in 1:prod(sizes)], sizes)
    source = wave(32, 64, 3)
    up = Moec.quantise(context, wave(64, 32, 3), kind; flags = flags)
    down = Moec.quantise(context, source, kind; flags = flags)
    desc = Raw.moec_weights_desc(num_experts = Int32(3), hidden = 64, inter = 32,
                                 gate_layout = Raw.MOEC_GATE_NONE, dtype = Raw.MOEC_F32,
                                 gate_up_scheme = up.scheme, down_scheme = down.scheme)
    function values_of(codes)
        weights = Moec.Weights(context, desc; up = up.codes, up_quant = up.quant, down = codes,
                               down_quant = down.quant)
        GC.gc(false)
        return cat((Moec.dequantise!(fill(NaN32, 32, 64), weights, Raw.MOEC_MATRIX_DOWN, e)
                    for e in 0:2)...; dims = 3)
    end
    found = values_of(down.codes)
    @test maximum(abs.(found .- source)) <= limit / 2
    @test values_of(Array(down.codes)) == found  # what a file would hold
    @test haskey(down.quant.arrays, :scales)
end

@testset "lists and sources" begin
    context = Moec.Context()
    list = [zeros(Float32, 4, 2) for _ in 1:3]
    @test_throws ArgumentError Moec.WeightSet(up = list, up_bias = list[1:2])
    @test_throws ArgumentError Moec.WeightSet(up = list, up_quant = Moec.Quant(scales = list[1:2]))
    @test_throws ArgumentError Moec.Quant(scales = list, zeros = list[1:2])
    @test_throws ArgumentError Moec.quantise(context, zeros(Float32, 4, 2), Raw.MOEC_QUANTISE_NF4)
    error = error_of(() -> Moec.quantise(context, zeros(Float32, 33, 8, 1),
                                         Raw.MOEC_QUANTISE_MXFP4))
    @test error isa Moec.MoecError && occursin("33", error.message)
end

end
