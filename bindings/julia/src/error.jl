# SPDX-License-Identifier: Apache-2.0
"A failed call: its code (`Moec.Raw.MOEC_E_*`), entry point and message."
struct MoecError <: Exception
    code::Int32
    native_code::Int32
    site::String
    message::String
end

function Base.showerror(io::IO, e::MoecError)
    print(io, e.message, " (", unsafe_string(Raw.moec_status_name(e.code)), ")")
end

text(bytes::NTuple{N,UInt8}) where {N} = String(collect(Iterators.takewhile(!=(0x00), bytes)))

# The error is the OS thread's: read it in the same breath, without yielding.
function check(status::Int32)
    status >= 0 && return nothing
    info = Ref(Raw.moec_error_info())
    Raw.moec_last_error(info)
    throw(MoecError(status, info[].native_code, text(info[].site), text(info[].message)))
end
