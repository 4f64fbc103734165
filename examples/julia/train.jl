# SPDX-License-Identifier: Apache-2.0
# Trains one Mixture-of-Experts layer to shift its input: forward, backward, plain gradient steps.
# The arrays are bound once and change in place: sizes are those of moec.h, reversed.
module Train

using Moec
using Moec: Raw

const T, H, I, E, K = 64, 32, 16, 8, 2  # tokens, hidden, intermediate, experts, experts per token
const STEPS, RATE = 60, 0.3f0

let state = UInt32(1)
    global function random(scale, sizes...)
        next() = (state = state * 0x0019660d + 0x3c6ef35f; scale * ((state >> 8) / 8388608f0 - 1))
        return reshape(Float32[next() for _ in 1:prod(sizes)], sizes)
    end
end

function main()
    x, gate = random(1f0, H, T), random(0.2f0, H, E)
    gate_up, down = random(0.3f0, H, 2I, E), random(0.3f0, I, H, E)
    target = circshift(x, (-1, 0))
    y, d_gate, d_gate_up, d_down = similar(x), similar(gate), similar(gate_up), similar(down)

    context = Moec.Context()
    sizes = (num_experts = Int32(E), hidden = H, inter = I, gate_layout = Raw.MOEC_GATE_THEN_UP,
             dtype = Raw.MOEC_F32)
    layer = Moec.Layer(context,
        Raw.moec_router_desc(num_experts = Int32(E), top_k = Int32(K), norm = Raw.MOEC_NORM_SUM),
        Raw.moec_experts_desc(; sizes..., top_k = Int32(K), save = Raw.MOEC_SAVE_ALL))
    weights = Moec.Weights(context, Raw.moec_weights_desc(; sizes...); gate_up = gate_up,
                           down = down)
    saved = zeros(UInt8, Moec.bytes_for(Moec.sizes(layer).saved, T))
    inputs = (weights = weights, x = x, gate_weight = gate, saved = saved)

    losses = map(1:STEPS) do _
        Moec.forward!(layer; inputs..., y = y)
        Moec.backward!(layer, inputs; d_y = 2 .* (y .- target) ./ T, d_gate_weight = d_gate,
                       d_expert_weights = (gate_up = d_gate_up, down = d_down))
        for (values, gradient) in ((gate, d_gate), (gate_up, d_gate_up), (down, d_down))
            values .-= RATE .* gradient
        end
        return sum(abs2, y .- target) / length(y)
    end
    println("loss $(round(losses[1]; digits = 4)) -> $(round(losses[end]; digits = 4)) ",
            "in $STEPS steps")
    losses[end] < losses[1] / 2 || error("the loss has not halved")
end

main()

end
