# SPDX-License-Identifier: Apache-2.0
# A reader of JSON and of safetensors files: the standard library of Julia 1.5 has neither.
module Files

export parse_json, read_json, read_parts, read_tensors

mutable struct Reader
    text::Vector{UInt8}
    at::Int
end

peek(r::Reader) = r.text[r.at]

function skip_space(r::Reader)
    while r.at <= length(r.text) && peek(r) in b" \n\r\t"
        r.at += 1
    end
end

function next_char(r::Reader)
    skip_space(r)
    c = peek(r)
    r.at += 1
    return c
end

function read_string(r::Reader)
    out = IOBuffer()
    while (c = peek(r)) != UInt8('"')
        if c == UInt8('\\')
            r.at += 1
            c = get(Dict(UInt8('n') => UInt8('\n'), UInt8('t') => UInt8('\t')), peek(r), peek(r))
        end
        write(out, c)
        r.at += 1
    end
    r.at += 1
    return String(take!(out))
end

function read_number(r::Reader)
    first = r.at
    while r.at <= length(r.text) && peek(r) in b"+-.eE0123456789"
        r.at += 1
    end
    text = String(r.text[first:r.at-1])
    whole = tryparse(Int64, text)
    return whole === nothing ? parse(Float64, text) : whole
end

function read_value(r::Reader)
    c = next_char(r)
    c == UInt8('{') && return read_items(r, UInt8('}'), Dict{String,Any}())
    c == UInt8('[') && return read_items(r, UInt8(']'), Any[])
    c == UInt8('"') && return read_string(r)
    for (word, value) in (("true", true), ("false", false), ("null", nothing))
        if c == UInt8(word[1])
            r.at += length(word) - 1
            return value
        end
    end
    r.at -= 1
    return read_number(r)
end

function read_items(r::Reader, last, into)
    skip_space(r)
    if peek(r) == last
        r.at += 1
        return into
    end
    while true
        value = read_value(r)
        if into isa Dict
            next_char(r) == UInt8(':') || error("JSON: a colon is missing at $(r.at)")
            into[value] = read_value(r)
        else
            push!(into, value)
        end
        next_char(r) == last && return into
    end
end

parse_json(text) = read_value(Reader(text, 1))
read_json(path) = parse_json(read(path))

"Of a safetensors file: its bytes, its header, and what is before the tensors."
function read_parts(path)
    bytes = read(path)
    start = 8 + Int(reinterpret(UInt64, bytes[1:8])[1])
    header = parse_json(bytes[9:start])
    delete!(header, "__metadata__")
    return bytes, header, start
end

"name => (shape as stored, values) of the float32 tensors of a file."
function read_tensors(path)
    bytes, header, start = read_parts(path)
    values(entry) = (entry["data_offsets"][1]+1):entry["data_offsets"][2]
    return Dict(name => (shape = Int.(entry["shape"]),
                         values = collect(reinterpret(Float32, bytes[start.+values(entry)])))
                for (name, entry) in header if entry["dtype"] == "F32")
end

end
