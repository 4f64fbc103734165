# SPDX-License-Identifier: Apache-2.0
"""
Mixture-of-Experts layers on libmoec: routing, plans, grouped experts, forward and backward.

Arrays are passed without copies: a row-major `[T, H]` of `moec.h` is a Julia array of size `(H,
    T)`, so
every size is given reversed. Failed calls throw [`MoecError`](@ref) with the library's own words.
"""
module Moec

using Libdl

const LIB = "libmoec.so.0"
const libmoec_handle = Ref{Ptr{Cvoid}}(C_NULL)

module Raw
import ..LIB
include("raw.jl")
end
using .Raw

include("error.jl")
include("tensor.jl")
include("handles.jl")
include("layer.jl")

function __init__()
    # An absolute path first: afterwards the loader finds the same library by its SONAME.
    path = get(ENV, "MOEC_LIBRARY", LIB)
    libmoec_handle[] = dlopen(path)
end

end
