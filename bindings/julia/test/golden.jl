# SPDX-License-Identifier: Apache-2.0
# Every model family of tests/golden/cases.json: y and every gradient that its file has, per row, on
# arrays of the host and on arrays that the library allocates: of the GPU where MOEC_TEST_DEVICE is
# cuda, which also runs the page's program for a GPU.
# Shown once to fail: gate and up matrices exchanged are off by more than 0.1.
module Golden

using Moec, Test
using Moec: Raw
using ..Files

const FOLDER = joinpath(@__DIR__, "../../../tests/golden")

"A struct of moec.h with the fields of a JSON object, each converted to its type."
function struct_of(T, fields)
    convert_to(name, value) = value isa Dict ? struct_of(fieldtype(T, name), value) :
                              fieldtype(T, name)(value)
    return T(; (Symbol(k) => convert_to(Symbol(k), v) for (k, v) in fields)...)
end

"Worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm)."
function row_error(got, reference, columns)
    padded = zeros(Float64, length(reference))  # beyond `got`: rows of identity experts
    padded[1:length(got)] .= vec(got)
    rows(values) = reshape(values, columns, :)
    norms(values) = sqrt.(vec(sum(abs2, rows(values), dims = 1)))
    sizes, errors = norms(Float64.(reference)), norms(padded .- reference)
    relative(error, size) = error == 0 ? 0.0 : error / max(size, 0.01 * maximum(sizes))
    return maximum(relative.(errors, sizes))
end

"A case's file, where its arrays lie (`place` makes them from those of the host), its gradients."
struct Case
    file::Dict
    place::Function
    compared::Vector{Pair{String,Any}}
end

function input(case::Case, entry)
    sizes = Tuple(reverse(Int.(entry["shape"])))
    return case.place(reshape(case.file["p." * entry["tensor"]].values[1:prod(sizes)], sizes))
end

"Room for the gradient of an argument; nothing where the file has none."
function gradient(case::Case, entry)
    name = "g." * entry["tensor"]
    haskey(case.file, name) || return nothing
    push!(case.compared, name => case.place(fill(NaN32, Tuple(reverse(Int.(entry["shape"]))))))
    return last(case.compared).second
end

function named(of, entries, prefix = "")
    pairs = [Symbol(prefix, role) => of(entry) for (role, entry) in entries]
    return (; (p for p in pairs if p.second !== nothing)...)
end

function weights_of(context, case::Case, json)
    matrices = named(entry -> input(case, entry), json["matrices"])
    return Moec.Weights(context, struct_of(Raw.moec_weights_desc, json["desc"]); matrices...)
end

"Row errors by tensor name."
function run(context, json, place = identity)
    case = Case(read_tensors(joinpath(FOLDER, json["family"] * ".safetensors")), place, [])
    sizes = Tuple(reverse(case.file["x"].shape))
    array(name) = place(reshape(case.file[name].values, sizes))
    layer = Moec.Layer(context, struct_of(Raw.moec_router_desc, json["router"]),
                       struct_of(Raw.moec_experts_desc, json["experts"]))
    shared = get(json, "shared_weights", nothing)
    inputs = merge(named(entry -> input(case, entry), json["inputs"]), (
        weights = weights_of(context, case, json["weights"]), x = array("x"),
        shared_weights = shared === nothing ? nothing : weights_of(context, case, shared),
        saved = place(zeros(UInt8, Moec.bytes_for(Moec.sizes(layer).saved, sizes[2])))))
    y, d_x = place(fill(NaN32, sizes)), place(fill(NaN32, sizes))
    Moec.forward!(layer; inputs..., y = y)
    room(entries, prefix = "") = named(entry -> gradient(case, entry), entries, prefix)
    Moec.backward!(layer, inputs; d_y = array("dout"), d_x = d_x,
                   d_expert_weights = room(json["weights"]["matrices"]),
                   d_shared_weights = shared === nothing ? nothing : room(shared["matrices"]),
                   room(json["inputs"], "d_")...)
    append!(case.compared, ["y" => y, "g.x" => d_x])
    wanted = count(name -> startswith(name, "g."), keys(case.file)) + 1
    @test length(case.compared) == wanted
    return Dict(name => row_error(Array(got), case.file[name].values, size(got)[1])
                for (name, got) in case.compared)
end

const ON_CUDA = get(ENV, "MOEC_TEST_DEVICE", "cpu") == "cuda"
const DEVICE = ON_CUDA ? Raw.MOEC_CUDA : Raw.MOEC_CPU

@testset "golden families, $kind" for kind in (ON_CUDA ? (:device,) : (:host, :device))
    file = read_json(joinpath(FOLDER, "cases.json"))
    @test length(file["cases"]) == 34
    context = Moec.Context(device_type = DEVICE, num_threads = 2)
    for json in file["cases"]
        place = kind === :host ? identity : array -> Moec.DeviceArray(context, array)
        errors = run(context, json, place)
        @testset "$(json["family"]) $name" for (name, error) in errors
            @test error <= file["tolerance"]
        end
    end
end

const PAGE = joinpath(@__DIR__, "../../../docs/howto/julia.md")

"The program of PAGE after its heading."
function page_program(heading)
    text = split(read(PAGE, String), "## $heading\n"; limit = 2)[2]
    return match(r"```julia\n(.*?)```"s, text)[1]
end

@testset "the page's program on a device" begin  # that of a GPU, on the CPU where there is none
    program = page_program("A GPU")
    ON_CUDA || (program = replace(program, "MOEC_CUDA" => "MOEC_CPU"))
    y = include_string(Module(), program, PAGE)
    @test y isa Array{Float32} && size(y) == (64, 4) && all(isapprox.(y, 0.05695; atol = 1e-5))
end

@testset "the page's program on codes" begin
    values = include_string(Module(), page_program("Quantised experts"), PAGE)
    @test size(values) == (48, 64) && all(isapprox.(values, 0.02; rtol = 1e-5))
end

@testset "exchanged matrices are seen" begin
    file = read_json(joinpath(FOLDER, "cases.json"))
    json = first(c for c in file["cases"] if c["family"] == "qwen3_moe")
    json["weights"]["desc"]["gate_layout"] = Raw.MOEC_UP_THEN_GATE
    @test run(Moec.Context(), json)["y"] > 0.1
end

end
