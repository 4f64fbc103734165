# SPDX-License-Identifier: Apache-2.0
# What the friendly layer adds: finalizers, dense arrays only, names checked, callbacks refused.
module Safe

using Moec, Test
using Moec: Raw

function small()
    context = Moec.Context()
    layer = Moec.Layer(context,
        Raw.moec_router_desc(num_experts = Int32(4), top_k = Int32(2)),
        Raw.moec_experts_desc(num_experts = Int32(4), top_k = Int32(2), hidden = 16, inter = 8,
                              gate_layout = Raw.MOEC_GATE_THEN_UP, dtype = Raw.MOEC_F32))
    desc = Raw.moec_weights_desc(num_experts = Int32(4), hidden = 16, inter = 8,
                                 gate_layout = Raw.MOEC_GATE_THEN_UP, dtype = Raw.MOEC_F32)
    weights = Moec.Weights(context, desc; gate_up = fill(0.1f0, 16, 16, 4),
                           down = fill(0.1f0, 8, 16, 4))
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

@testset "arguments" begin
    _, layer, weights = small()
    args = arguments(weights)
    @test_throws ArgumentError Moec.forward!(layer; args..., gate_wieght = args.gate_weight)
    @test_throws ArgumentError Moec.Tensor(fill(1im, 2, 2))
    @test_throws MethodError Moec.Tensor(view(zeros(Float32, 4, 4), 1:2, :))
    @test Moec.Tensor(reinterpret(Moec.BFloat16Bits, zeros(UInt16, 3)) |> collect).raw.dtype ==
          Raw.MOEC_BF16
    error = try
        Moec.forward!(layer; merge(args, (x = zeros(Float32, 15, 5),))...)
    catch e
        e
    end
    @test error.code == Raw.MOEC_E_SHAPE
    @test occursin("MOEC_E_SHAPE", sprint(showerror, error))
end

@testset "plans" begin
    context, _, _ = small()
    desc = Raw.moec_plan_desc(max_tokens = 8, num_experts = Int32(4), top_k = Int32(2))
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

end
