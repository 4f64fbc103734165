# SPDX-License-Identifier: Apache-2.0
# The layers of quant_cases.json that have adapters, in PEFT's storage and on plain and quantised
# experts: y, d_x, d_routing_weights and the gradients of A and B of one adapter, and of two, on
# arrays of the host.
# Shown once to fail: the scales of two adapters exchanged.
module AdaptersOfLayers

using Moec, Test
using Moec: Raw
using ..Golden: row_error, struct_of
using ..QuantisedLayers: ALL, Checkpoint, error_of, one, weights_of

const E, H, I = 4, 96, 32
const FORM = Raw.moec_adapters_desc(num_experts = Int32(E), hidden = H, inter = I,
                                    gate_layout = Raw.MOEC_GATE_THEN_UP)

"A factor as PEFT stores it: A [rE,K], which is [E,r,K]; of B [N,rE] (e, n, j) is in column jE + e."
function peft(array, is_b)
    columns, rows = size(array)
    is_b && return Moec.Strided(array, (div(columns, E), rows, E), (E, columns, 1))
    rank = div(rows, E)
    return Moec.Strided(array, (columns, rank, E), (1, columns, rank * columns))
end

"The factors of a matrix; `of` makes each from the array of a name."
matrix(of, prefix, name, last; scale...) =
    (a = peft(of("$prefix.$(name)_proj.lora_A.$last"), false),
     b = peft(of("$prefix.$(name)_proj.lora_B.$last"), true), scale...)
both(of, prefix, last; scale...) = (gate_up = matrix(of, prefix, "gate_up", last; scale...),
                                    down = matrix(of, prefix, "down", last; scale...))

adapters_of(context, file, run) = Moec.Adapters(context, FORM,
    [both(name -> file.arrays[name], "lora.$(a["name"])", "weight"; scale = a["scale"])
     for a in run["adapters"]])

function problem(context, json)
    file = Checkpoint(json, identity, "")
    experts = Moec.Experts(context, struct_of(Raw.moec_experts_desc, json["experts"]))
    top_k, tokens = size(file.arrays["ids"])
    plan = Moec.Plan(context, Raw.moec_plan_desc(max_tokens = tokens, top_k = Int32(top_k),
                                                 num_experts = Int32(E)))
    Moec.from_topk!(plan, file.arrays["ids"], file.arrays["weights"])
    inputs = (plan = plan, weights = weights_of(context, file, json), x = file.arrays["x"])
    return file, experts, inputs
end

"The inputs with adapters and room for what is saved, and y."
function forward(experts, inputs, adapters)
    given = adapters === nothing ? (experts,) : (experts, adapters)
    bytes = Moec.bytes_for(Moec.sizes(given...).saved, size(inputs.x)[2])
    inputs = merge(inputs, (saved = zeros(UInt8, bytes), adapters = adapters))
    return inputs, Moec.forward!(experts; inputs..., y = fill(NaN32, size(inputs.x)))
end

"Row errors by name."
function errors_of(context, json, run)
    file, experts, inputs = problem(context, json)
    inputs, y = forward(experts, inputs, adapters_of(context, file, run))
    reference, made = run["reference"], Dict{String,Array{Float32}}()
    room(name) = made[name] = fill(NaN32, size(file.arrays[name]))
    d_x, d_weights = room("$reference.dx"), room("$reference.dweights")
    grads = [both(room, "$reference.$(a["name"])", "grad") for a in run["adapters"]]
    Moec.backward!(experts, inputs; d_y = file.arrays["dy"], d_x = d_x, d_adapters = grads,
                   d_routing_weights = d_weights)
    made["$reference.y"] = y
    return Dict(name => row_error(got, vec(file.arrays[name]), size(got)[1])
                for (name, got) in made)
end

@testset "adapters of $(json["file"]), $(run["reference"])" for json in ALL["adapters"],
                                                                 run in json["runs"]
    found = errors_of(Moec.Context(num_threads = 2), json, run)
    @test length(found) == 3 + 4 * length(run["adapters"])
    @testset "$name" for (name, error) in found
        @test error <= ALL["tolerance"]
    end
end

@testset "merged adapters" begin
    context = Moec.Context()
    json, coded = ALL["adapters"]
    file, experts, inputs = problem(context, json)
    adapters = adapters_of(context, file, json["runs"][3])
    wanted = vec(file.arrays["ref_lora_ab.y"])
    @test merge!(inputs.weights, adapters) === inputs.weights
    @test row_error(last(forward(experts, inputs, nothing)), wanted, H) <= ALL["tolerance"]
    Moec.unmerge!(inputs.weights, adapters)
    @test row_error(last(forward(experts, inputs, adapters)), wanted, H) <= ALL["tolerance"]
    _, _, inputs = problem(context, coded)
    error = error_of(() -> merge!(inputs.weights, adapters))
    @test error isa Moec.MoecError && error.code == Raw.MOEC_E_UNSUPPORTED
end

@testset "wrong adapters" begin
    context, json = Moec.Context(), ALL["adapters"][2]
    file, experts, inputs = problem(context, json)
    right = both(name -> file.arrays[name], "lora.a", "weight"; scale = 2).down
    message(given) = error_of(() -> Moec.Adapters(context, FORM, [given])).message
    @test occursin("list[0].down.a", message((down = (a = right.b, b = right.a, scale = 2),)))
    @test occursin("list[0].up.a", message((up = right,)))
    @test occursin("list[0].down.scale is 0", message((down = (a = right.a, b = right.b),)))
    @test error_of(() -> Moec.Adapters(context, FORM, [])) isa Moec.MoecError
    @test_throws ArgumentError Moec.Adapters(context, FORM, [(lower = right,)])
    @test_throws ArgumentError Moec.Strided(zeros(Float32, 6), (3, 2), (2, 3))
    # As many gradients as adapters: the library could not know.
    inputs, _ = forward(experts, inputs, adapters_of(context, file, json["runs"][1]))
    error = error_of(() -> Moec.backward!(experts, inputs; d_y = inputs.x, d_adapters = []))
    @test error isa ArgumentError && occursin("has 0 adapters, and 1 are bound", error.msg)
end

end
