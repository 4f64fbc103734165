# SPDX-License-Identifier: Apache-2.0
const log_sink = Ref{Any}(nothing)

function receive_log(::Ptr{Cvoid}, level::Int32, message::Ptr{UInt8}, length::Csize_t)
    sink = log_sink[]
    try
        sink === nothing || sink(level, unsafe_string(message, length))
    catch  # an exception may not unwind through the library
    end
    return nothing
end

"""
    set_log(sink, min_level = Raw.MOEC_LOG_WARN)

Deliver log messages to `sink(level, text)`, from any thread; `set_log(nothing)` restores silence.
The sink must not call Moec. Refused before Julia 1.9, where a call from a thread of the library
hangs for ever.
"""
function set_log(sink, min_level = Raw.MOEC_LOG_WARN)
    VERSION >= v"1.9" || throw(ArgumentError(
        "set_log: calls from the library's threads need Julia 1.9; in $VERSION they hang"))
    log_sink[] = sink
    callback = @cfunction(receive_log, Cvoid, (Ptr{Cvoid}, Int32, Ptr{UInt8}, Csize_t))
    return check(Raw.moec_set_log(callback, C_NULL, Int32(min_level)))
end

function set_log(::Nothing)
    check(Raw.moec_set_log(C_NULL, C_NULL, Int32(0)))
    log_sink[] = nothing
    return nothing
end
