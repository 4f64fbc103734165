# SPDX-License-Identifier: Apache-2.0
# What the friendly layer adds: finalizers, dense arrays only, names checked, log messages.
module Safe

using Moec, Test
using Moec: Raw

function small(dtype = Raw.MOEC_F32, filled = (sizes...) -> fill(0.1f0, sizes...))
    context = Moec.Context()
    layer = Moec.Layer(context,
        Raw.moec_router_desc(num_experts = Int32(4), top_k = Int32(2)),
        Raw.moec_experts_desc(num_experts = Int32(4), top_k = Int32(2), hidden = 16, inter = 8,
                              gate_layout = Raw.MOEC_GATE_THEN_UP, dtype = dtype))
    desc = Raw.moec_weights_desc(num_experts = Int32(4), hidden = 16, inter = 8,
                                 gate_layout = Raw.MOEC_GATE_THEN_UP, dtype = dtype)
    weights = Moec.Weights(context, desc; gate_up = filled(16, 16, 4), down = filled(8, 16, 4))
    return context, layer, weights
end

arguments(weights) = (weights = weights, x = fill(0.5f0, 16, 5),
                      gate_weight = fill(0.1f0, 16, 4), y = zeros(Float32, 16, 5))

@testset "handles outlive nothing and are closed in any order" begin
    context, layer, weights = small()
    close(context)
    args = arguments(weights)
    first = copy(Moec.forward!(layer; args...))
    for _ in 1:3
        small()
        GC.gc()  # finalizers of the forgotten
    end
    @test Moec.forward!(layer; args...) == first
    close(layer)
    close(layer)
    @test_throws Moec.MoecError Moec.forward!(layer; args...)
end

@testset "device arrays" begin
    context, layer, weights = small()
    args = arguments(weights)
    want = copy(Moec.forward!(layer; args...))
    x, y = Moec.DeviceArray(context, args.x), Moec.DeviceArray{Float32}(context, 16, 5)
    @test size(x) == (16, 5) && eltype(x) == Float32
    @test all(iszero, Array(y))
    Moec.forward!(layer; args..., x = x, y = y)
    @test Array(y) == want
    @test_throws Moec.MoecError copyto!(y, zeros(Float32, 5, 16))
    close(y)
    close(y)
    @test_throws Moec.MoecError Array(y)
    close(context)
    close(x)
end

@testset "codes" begin
    context, layer, weights = small()
    args = arguments(weights)
    wanted = copy(Moec.forward!(layer; args...))
    desc = Raw.moec_weights_desc(num_experts = Int32(4), hidden = 16, inter = 8,
                                 gate_layout = Raw.MOEC_GATE_THEN_UP, dtype = Raw.MOEC_F32,
                                 gate_up_scheme = Raw.MOEC_SCHEME_INT8,
                                 down_scheme = Raw.MOEC_SCHEME_INT8)
    quant(rows) = Moec.Quant(scales = fill(0.05f0, 1, rows, 4),
                             zeros = fill(Int8(3), 1, rows, 4))
    held = Moec.Weights(context, desc; gate_up = fill(Int8(5), 16, 16, 4),
                        down = fill(Int8(5), 8, 16, 4), gate_up_quant = quant(16),
                        down_quant = quant(16))  # (5 - 3) * 0.05
    GC.gc()
    @test isapprox(Moec.forward!(layer; args..., weights = held), wanted)
    @test_throws ArgumentError Moec.Quant(scale = fill(0.05f0, 16, 4))
    @test_throws Moec.MoecError Moec.Weights(context, desc; gate_up = fill(Int8(5), 16, 16, 4),
                                             down = fill(Int8(5), 8, 16, 4))
end

@testset "arguments" begin
    _, layer, weights = small()
    args = arguments(weights)
    @test_throws ArgumentError Moec.forward!(layer; args..., gate_wieght = args.gate_weight)
    @test_throws ArgumentError Moec.Tensor(fill(1im, 2, 2))
    @test_throws MethodError Moec.Tensor(view(zeros(Float32, 4, 4), 1:2, :))
    @test_throws MethodError Moec.Tensor(reinterpret(Int32, view(zeros(Float32, 4, 4), 1:2, :)))
    error = try
        Moec.forward!(layer; merge(args, (x = zeros(Float32, 15, 5),))...)
    catch e
        e
    end
    @test error.code == Raw.MOEC_E_SHAPE
    @test occursin("MOEC_E_SHAPE", sprint(showerror, error))
end

@testset "reinterpreted arrays are read and written in place" begin
    bits(value) = UInt16(reinterpret(UInt32, value) >> 16)
    half(sizes...) = reinterpret(Moec.BFloat16Bits, fill(bits(0.125f0), sizes...))
    _, layer, weights = small(Raw.MOEC_BF16, half)
    y = zeros(UInt16, 16, 5)
    Moec.forward!(layer; weights = weights, x = half(16, 5), gate_weight = fill(0.1f0, 16, 4),
                  y = reinterpret(Moec.BFloat16Bits, y))
    gate = 16 * 0.125f0^2  # and up; two of four equal experts
    wanted = 2 / 4 * 8 * 0.125f0 * gate^2 / (1 + exp(-gate))
    @test all(v -> isapprox(reinterpret(Float32, UInt32(v) << 16), wanted; rtol = 0.02), y)
end

@testset "plans" begin
    context, _, _ = small()
    desc = Raw.moec_plan_desc(max_tokens = 8, num_experts = Int32(4), top_k = Int32(2))
    plan = Moec.from_rule!(Moec.Plan(context, desc), Moec.Raw.MOEC_PLAN_ROUND_ROBIN, 2)
    @test Moec.totals(plan).routed == 4 && Moec.totals(plan).largest == 1
    plan = Moec.from_topk!(Moec.Plan(context, desc), Int64[0 2; 1 3])
    @test Moec.totals(plan).routed == 4
end

@testset "devices and streams" begin
    @test Moec.device_count(Raw.MOEC_CPU) == 1
    @test Moec.device_count(Raw.MOEC_CUDA) >= 0
    @test Moec.synchronize(Moec.Context(), Ptr{Cvoid}(2)) === nothing
end

@testset "log callbacks" begin
    if VERSION < v"1.9"  # a thread of the library that calls back would hang for ever
        @test_throws ArgumentError Moec.set_log((level, text) -> nothing)
    else
        @test Moec.set_log((level, text) -> nothing) === nothing
    end
    @test Moec.set_log(nothing) === nothing
end

# On every Julia: what is logged here is logged by this thread.
@testset "log messages" begin
    got = String[]
    log(text) = GC.@preserve text Moec.receive_log(C_NULL, Raw.MOEC_LOG_INFO % Int32, pointer(text),
                                                   Csize_t(sizeof(text)))
    install(sink) = VERSION < v"1.9" ? Moec.start_log(sink, Raw.MOEC_LOG_DEBUG) : Moec.set_log(sink)
    arrived(count) = timedwait(() -> length(got) == count, 10.0) === :ok
    install((level, text) -> (yield(); push!(got, text)))
    Moec.Context()
    foreach(log, ("one", "two", "three"))
    @test isempty(got)  # no sink runs inside a call
    @test arrived(4)
    @test occursin("context on", got[1])
    @test got[2:4] == ["one", "two", "three"]
    install(@eval (level, text) -> push!($got, uppercase(text)))  # younger than the task
    log("four")
    @test arrived(5)
    @test got[5] == "FOUR"
    install((level, text) -> text == "bad" ? error(text) : push!(got, text))
    foreach(log, ("bad", "good"))
    @test_logs (:error, r"set_log") Moec.deliver_log(nothing)
    @test got[6] == "good"
    Moec.set_log(nothing)
    Moec.Context()
    yield()
    @test length(got) == 6
end

end
