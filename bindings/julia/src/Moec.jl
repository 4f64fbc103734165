# SPDX-License-Identifier: Apache-2.0
"""
Mixture-of-Experts layers on libmoec: routing, plans, grouped experts, forward and backward.

Arrays are passed without copies: a row-major `[T, H]` of `moec.h` is a Julia array of size
`(H, T)`, so every size is given reversed. Failed calls throw [`MoecError`](@ref) with the library's
own words.
"""
module Moec

using Libdl
using Pkg.Artifacts: ensure_artifact_installed

const LIB = "libmoec.so.0"

module Raw
import ..LIB
include("raw.jl")
end
using .Raw

include("error.jl")
include("tensor.jl")
include("handles.jl")
include("memory.jl")
include("quant.jl")
include("adapters.jl")
include("layer.jl")
include("log.jl")

# MOEC_LIBRARY; else the library of the release's archive, which Artifacts.toml names and which is
# downloaded once; else, in a source tree without that file, what the loader finds.
function library_path()
    named = get(ENV, "MOEC_LIBRARY", "")
    isempty(named) || return named
    artifacts = joinpath(dirname(@__DIR__), "Artifacts.toml")
    isfile(artifacts) || return LIB
    return joinpath(ensure_artifact_installed("libmoec", artifacts), "lib", LIB)
end

# Once the library is open, the loader finds the same one by its SONAME.
function __init__()
    path = library_path()
    try
        dlopen(path)
    catch failure
        error("Moec: ", failure.msg, "; set MOEC_LIBRARY")
    end
    abi, version = Raw.moec_abi_version(), Raw.moec_version()
    built = Raw.MOEC_VERSION_MAJOR << 22 | Raw.MOEC_VERSION_MINOR << 12 | Raw.MOEC_VERSION_PATCH
    abi == Raw.MOEC_ABI_VERSION && version >= built && return nothing
    needed = join((Raw.MOEC_VERSION_MAJOR, Raw.MOEC_VERSION_MINOR, Raw.MOEC_VERSION_PATCH), '.')
    error("Moec: $path is $(Moec.version()) with ABI $abi; $needed or later with ABI ",
          "$(Raw.MOEC_ABI_VERSION) is needed")
end

end
