# SPDX-License-Identifier: Apache-2.0
const log_sink = Ref{Any}(nothing)
const log_lock = Threads.SpinLock()  # unlike a ReentrantLock, it never switches tasks
const log_messages = Tuple{Int32,String}[]
const log_arrived = Ref{Base.AsyncCondition}()

# Runs inside a call of the library, where a task may not be left for another: the message is put
# down for the task of log_arrived.
function receive_log(::Ptr{Cvoid}, level::Int32, message::Ptr{UInt8}, length::Csize_t)
    text = unsafe_string(message, length)
    lock(() -> push!(log_messages, (level, text)), log_lock)
    ccall(:uv_async_send, Cint, (Ptr{Cvoid},), log_arrived[])
    return nothing
end

next_message() = lock(() -> isempty(log_messages) ? nothing : popfirst!(log_messages), log_lock)

function deliver_log(_)
    while (message = next_message()) !== nothing
        log_sink[] === nothing && continue
        try
            Base.invokelatest(log_sink[], message...)  # it may be younger than this task
        catch exception
            @error "the sink of Moec.set_log failed" exception = (exception, catch_backtrace())
        end
    end
end

function start_log(sink, min_level)
    isassigned(log_arrived) || (log_arrived[] = Base.AsyncCondition(deliver_log))
    log_sink[] = sink
    callback = @cfunction(receive_log, Cvoid, (Ptr{Cvoid}, Int32, Ptr{UInt8}, Csize_t))
    return check(Raw.moec_set_log(callback, C_NULL, Int32(min_level)))
end

"""
    set_log(sink, min_level = Raw.MOEC_LOG_DEBUG)

Deliver log messages, from any thread, to `sink(level, text)`; `set_log(nothing)` restores silence.
The library logs at `MOEC_LOG_INFO` and `MOEC_LOG_DEBUG`. The sink runs in a task of its own, one
message after the other, some time after the call that logged: it may wait, and call Moec. Refused
before Julia 1.9, where a call from a thread of the library hangs for ever.
"""
function set_log(sink, min_level = Raw.MOEC_LOG_DEBUG)
    VERSION >= v"1.9" || throw(ArgumentError(
        "set_log: calls from the library's threads need Julia 1.9; in $VERSION they hang"))
    return start_log(sink, min_level)
end

function set_log(::Nothing)
    check(Raw.moec_set_log(C_NULL, C_NULL, Int32(0)))
    log_sink[] = nothing
    return nothing
end
