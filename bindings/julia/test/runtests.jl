# SPDX-License-Identifier: Apache-2.0
using Moec, Test

println("Moec on Julia $VERSION with libmoec $(Moec.version())")
include("json.jl")
@testset "Moec" begin
    include("golden.jl")
    include("quantised.jl")
    include("adapters.jl")
    include("errors.jl")
    include("safe.jl")
end
