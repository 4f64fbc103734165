# SPDX-License-Identifier: Apache-2.0
# The error cases that every binding runs: tests/errors.json holds one right problem as fields of C
# structs, and rows that say what is broken in which call and what must come back. Fields are found
# at the offsets of bindings/api.json.
module Errors

using Moec, Test
using Moec: Raw
using ..Files

const ROOT = joinpath(@__DIR__, "../../..")

"Structs as bytes whose calls succeed until a field is mutated; vectors do not move."
struct Problem
    file::Dict
    layouts::Dict
    structs::Dict{String,Vector{UInt64}}
    memory::Vector{Vector{UInt64}}
    handles::Dict{Symbol,Any}
end

room(p, bytes) = (push!(p.memory, zeros(UInt64, cld(bytes, 8))); UInt64(pointer(last(p.memory))))
at(p, root, T) = Ptr{T}(pointer(p.structs[root]))

"Address, bytes and kind of a field such as \"forward.x.shape[1]\"."
function field(p, path)
    root, names = Iterators.peel(split(path, '.'))
    address, bytes, kind = pointer(p.structs[root]), 0, Dict("name" => p.file["structs"][root])
    for part in names
        name, index = match(r"^(\w+)(?:\[(\d)\])?$", part).captures
        row = p.layouts[kind["name"]]["fields"][name]
        address, bytes, kind = address + row["offset"], row["bytes"], row["type"]
        index === nothing && continue
        bytes = div(bytes, kind["count"])
        kind = kind["of"]
        address += parse(Int, index) * bytes
    end
    return Ptr{UInt8}(address), bytes, get(kind, "kind", "")
end

function put(p, path, value)
    address, bytes, kind = field(p, path)
    bits = kind == "float" ? UInt64(reinterpret(UInt32, Float32(value))) :
           value isa UInt64 ? value : reinterpret(UInt64, Int64(value))
    for i in 1:bytes
        unsafe_store!(address, (bits >> 8(i - 1)) % UInt8, i)
    end
end

function get_field(p, path)
    address, bytes, _ = field(p, path)
    return sum(UInt64(unsafe_load(address, i)) << 8(i - 1) for i in 1:bytes)
end

function put_tensor(p, path, (dtype, shape))
    put(p, path * ".data", room(p, 4prod(shape)))
    put(p, path * ".dtype", dtype == "f32" ? Raw.MOEC_F32 : Raw.MOEC_I32)
    put(p, path * ".ndim", length(shape))
    put(p, path * ".device_type", Raw.MOEC_CPU)
    foreach(i -> put(p, "$path.shape[$(i - 1)]", shape[i]), 1:length(shape))
end

function Problem(file, layouts)
    p = Problem(file, layouts, Dict(), [], Dict())
    for (root, name) in file["structs"]
        p.structs[root] = zeros(UInt64, div(layouts[name]["bytes"], 8))
        layouts[name]["sized"] && put(p, root * ".struct_size", layouts[name]["bytes"])
    end
    foreach(((path, value),) -> put(p, path, value), file["values"])
    foreach(((path, entry),) -> put_tensor(p, path, entry), file["tensors"])
    foreach(((path, root),) -> put(p, path, UInt64(pointer(p.structs[root]))), file["pointers"])
    p.handles[:context] = context = Moec.Context()
    make(T, create) = Moec.created(out -> create(context.raw, out), T)
    p.handles[:layer] = Moec.Layer(make(Raw.moec_layer, (c, out) ->
        Raw.moec_layer_create(c, at(p, "layer", Raw.moec_layer_desc), out)), nothing)
    p.handles[:plan] = Moec.Plan(make(Raw.moec_plan, (c, out) ->
        Raw.moec_plan_create(c, at(p, "plan", Raw.moec_plan_desc), C_NULL, out)), nothing)
    for name in (:weights, :unbound)
        p.handles[name] = Moec.Weights(make(Raw.moec_weights, (c, out) ->
            Raw.moec_weights_create(c, at(p, "weights", Raw.moec_weights_desc), out)), nothing)
    end
    call(p, "moec_weights_bind")
    tokens = get_field(p, "forward.x.shape[0]")
    bytes = Moec.bytes_for(Moec.sizes(p.handles[:layer]).saved, tokens)
    put(p, "forward.weights", UInt64(p.handles[:weights].raw))
    put(p, "forward.saved.ptr", room(p, bytes))
    put(p, "forward.saved.bytes", bytes)
    return p
end

function mutate(p, path, value)
    value == "unbound" && return put(p, path, UInt64(p.handles[:unbound].raw))
    put(p, path, value isa String ? get_field(p, value) : value)
end

function call(p, name)
    h, C = p.handles, C_NULL
    raw(handle) = h[handle].raw
    made(T, free, create) = free(Moec.created(create, T))
    calls = Dict(
        "moec_context_create" => () -> made(Raw.moec_context, Raw.moec_context_free, out ->
            Raw.moec_context_create(at(p, "context", Raw.moec_context_desc), out)),
        "moec_layer_create" => () -> made(Raw.moec_layer, Raw.moec_layer_free, out ->
            Raw.moec_layer_create(raw(:context), at(p, "layer", Raw.moec_layer_desc), out)),
        "moec_weights_create" => () -> made(Raw.moec_weights, Raw.moec_weights_free, out ->
            Raw.moec_weights_create(raw(:context), at(p, "weights", Raw.moec_weights_desc), out)),
        "moec_plan_create" => () -> made(Raw.moec_plan, Raw.moec_plan_free, out ->
            Raw.moec_plan_create(raw(:context), at(p, "plan", Raw.moec_plan_desc), C, out)),
        "moec_weights_bind" => () -> Moec.check(
            Raw.moec_weights_bind(raw(:weights), at(p, "set", Raw.moec_weight_set))),
        "moec_plan_from_topk" => () -> Moec.check(
            Raw.moec_plan_from_topk(raw(:plan), at(p, "ids", Raw.moec_tensor), C, C)),
        "moec_plan_totals_sync" => () -> Moec.totals(h[:plan]),
        "moec_layer_forward" => () -> Moec.check(
            Raw.moec_layer_forward(raw(:layer), at(p, "forward", Raw.moec_layer_args), C)),
        "moec_layer_backward" => () -> Moec.check(
            Raw.moec_layer_backward(raw(:layer), at(p, "grads", Raw.moec_layer_grad_args), C)))
    GC.@preserve p calls[name]()
end

status_name(error) = unsafe_string(Raw.moec_status_name(error.code))

file = read_json(joinpath(ROOT, "tests/errors.json"))
rows = read_json(joinpath(ROOT, "bindings/api.json"))["structs"]
layouts = Dict(s["name"] => merge(s, Dict("fields" => Dict(f["name"] => f for f in s["fields"])))
               for s in rows)

@testset "layouts" begin
    @test length(rows) == length(Raw.LAYOUT) >= 30
    for (row, (T, bytes, offsets)) in zip(rows, Raw.LAYOUT)
        @test string(nameof(T)) == row["name"]
        @test sizeof(T) == row["bytes"] == bytes
        fields = row["fields"]
        @test [Int(fieldoffset(T, i)) for i in 1:fieldcount(T)] == [f["offset"] for f in fields]
        @test [string(n) for n in fieldnames(T)] == [f["name"] for f in fields]
    end
end

@testset "error rows" begin
    @test length(file["rows"]) == 71
    for row in file["rows"]
        p = Problem(file, layouts)
        row["call"] == "moec_layer_backward" && call(p, "moec_layer_forward")
        foreach(((path, value),) -> mutate(p, path, value), row["mutation"])
        error = try
            call(p, row["call"])
        catch e
            e
        end
        @test error isa Moec.MoecError
        @test (status_name(error), error.site) == (row["code"], row["site"])
    end
end

@testset "the problem itself is right" begin
    p = Problem(file, layouts)
    for name in unique(row["call"] for row in file["rows"])
        name == "moec_plan_totals_sync" || call(p, name)  # its mistake is the call itself
    end
    @test true
end

end
