// SPDX-License-Identifier: Apache-2.0
// Generated from moec.h by generate.py; do not edit.

calls! {
    /// Logits to expert ids and routing weights.
    RouteCall: moec_route_args {
        read {
            /// `moec_route_args.logits`: `[T,E+Z]` f32|bf16|f16, before the soft-cap
            logits,
            /// `moec_route_args.select_bias`: `[E+Z]` f32, with SELECT_BIAS
            select_bias,
            /// `moec_route_args.per_expert_scale`: `[E+Z]`, with PER_EXPERT_SCALE; f32|bf16|f16
            per_expert_scale,
            /// `moec_route_args.token_mask`: `[T]` u8|bool, optional; 0 = routed nowhere
            token_mask,
            /// `moec_route_args.table`: `[V,K]` i32|i64: SELECT_TABLE
            table,
            /// `moec_route_args.token_ids`: `[T]` i32|i64: SELECT_TABLE
            token_ids,
            /// `moec_route_args.given_ids`: `[T,K]` i32|i64: SELECT_GIVEN
            given_ids,
        }
        write {
            /// `moec_route_args.expert_ids`: `[T,K]` i32; -1 = none
            expert_ids,
            /// `moec_route_args.routing_weights`: `[T,K]` f32; 0 where the id is -1
            routing_weights,
            /// `moec_route_args.scores`: `[T,E+Z]` f32, optional
            scores,
            /// `moec_route_args.counts`: `[E+Z]` i32|i64, optional: += selections per id; i32
            /// saturates
            counts,
        }
    }
    /// Experts on a plan: forward.
    ExpertsCall: moec_experts_args {
        read {
            /// `moec_experts_args.x`: `[T,H]`
            x,
            /// `moec_experts_args.shared_gate`: `[1,H]` or `[2,H]`; dtype of x or f32
            shared_gate,
            /// `moec_experts_args.shared_gate_bias`: `[2]`, SOFTMAX2; dtype of x or f32
            shared_gate_bias,
            /// `moec_experts_args.output_bias`: `[H]`, optional; dtype of x or f32
            output_bias,
            /// `moec_experts_args.residual`: `[T,H]`, optional: added; may be y itself
            residual,
            /// `moec_experts_args.adapter_ids`: `[T]` i32, optional: the only adapter of each
            /// token, an index into what is bound; any other number = none
            adapter_ids,
        }
        write {
            /// `moec_experts_args.y`: `[T,H]`
            y,
        }
        set {
            /// `moec_experts_args.flags`: `moec_experts_flags`
            flags: u32,
        }
        handle {
            /// `moec_experts_args.plan`
            plan: Plan,
            /// `moec_experts_args.weights`
            weights: Weights<'a>,
            /// `moec_experts_args.shared_weights`: with a shared expert; one expert of width
            /// shared_inter
            shared_weights: Weights<'a>,
        }
        buffer {
            /// `moec_experts_args.saved`: unless SAVE_NONE; written in full. At an address that is
            /// no multiple of 4 it takes scratch of its size besides any workspace, in backward,
            /// too
            saved, saved_array, saved_on_device,
            /// `moec_experts_args.workspace`: absent = the context's
            workspace, workspace_array, workspace_on_device,
        }
    }
    /// Experts on a plan: gradients; every output that is not given is skipped.
    ExpertsGradCall: moec_experts_grad_args {
        read {
            /// `moec_experts_grad_args.x`: `[T,H]`
            x,
            /// `moec_experts_grad_args.shared_gate`: `[1,H]` or `[2,H]`; dtype of x or f32
            shared_gate,
            /// `moec_experts_grad_args.shared_gate_bias`: `[2]`, SOFTMAX2; dtype of x or f32
            shared_gate_bias,
            /// `moec_experts_grad_args.d_y`: `[T,H]`
            d_y,
            /// `moec_experts_grad_args.adapter_ids`: `[T]` i32, optional: the only adapter of each
            /// token, an index into what is bound; any other number = none
            adapter_ids,
        }
        write {
            /// `moec_experts_grad_args.d_x`: `[T,H]`; absent = skipped, as each output
            d_x,
            /// `moec_experts_grad_args.d_routing_weights`: `[T,K]` f32; EXPERT_CHOICE: `[P]`, one a
            /// row
            d_routing_weights,
            /// `moec_experts_grad_args.d_shared_gate`: f32 or dtype of x
            d_shared_gate,
            /// `moec_experts_grad_args.d_shared_gate_bias`: f32 or dtype of x
            d_shared_gate_bias,
            /// `moec_experts_grad_args.d_output_bias`: f32 or dtype of x
            d_output_bias,
            /// `moec_experts_grad_args.d_residual`: `[T,H]`
            d_residual,
        }
        set {
            /// `moec_experts_grad_args.flags`: `moec_grad_flags`
            flags: u32,
        }
        handle {
            /// `moec_experts_grad_args.plan`
            plan: Plan,
            /// `moec_experts_grad_args.weights`
            weights: Weights<'a>,
            /// `moec_experts_grad_args.shared_weights`
            shared_weights: Weights<'a>,
        }
        matrices {
            /// `moec_experts_grad_args.d_expert_weights`: in the layout of the bound weights; f32
            /// or their dtype; NULL = frozen
            d_expert_weights,
            /// `moec_experts_grad_args.d_shared_weights`: in the layout of the bound weights; f32
            /// or their dtype; NULL = frozen
            d_shared_weights,
        }
        buffer {
            /// `moec_experts_grad_args.saved`
            saved, saved_array, saved_on_device,
            /// `moec_experts_grad_args.workspace`
            workspace, workspace_array, workspace_on_device,
        }
    }
    /// The whole layer: forward.
    LayerCall: moec_layer_args {
        read {
            /// `moec_layer_args.x`: `[T,H]`
            x,
            /// `moec_layer_args.router_x`: `[T,Hr]`, optional: the router's input when it is not x;
            /// where Hr > H the call may take scratch of the context besides its workspace
            router_x,
            /// `moec_layer_args.gate_weight`: `[E+Z,H]` f32|bf16|f16
            gate_weight,
            /// `moec_layer_args.gate_bias`: `[E+Z]`, with LOGIT_BIAS; dtype of weight or f32
            gate_bias,
            /// `moec_layer_args.input_scale`: `[H]`, RMS_SCALED; dtype of weight or f32
            input_scale,
            /// `moec_layer_args.select_bias`: `[E+Z]` f32, with SELECT_BIAS
            select_bias,
            /// `moec_layer_args.per_expert_scale`: `[E+Z]`, with PER_EXPERT_SCALE; f32|bf16|f16
            per_expert_scale,
            /// `moec_layer_args.token_mask`: `[T]` u8|bool, optional; 0 = routed nowhere
            token_mask,
            /// `moec_layer_args.table`: `[V,K]` i32|i64: SELECT_TABLE
            table,
            /// `moec_layer_args.token_ids`: `[T]` i32|i64: SELECT_TABLE
            token_ids,
            /// `moec_layer_args.given_ids`: `[T,K]` i32|i64: SELECT_GIVEN
            given_ids,
            /// `moec_layer_args.shared_gate`: `[1,H]` or `[2,H]`; dtype of x or f32
            shared_gate,
            /// `moec_layer_args.shared_gate_bias`: `[2]`, SOFTMAX2; dtype of x or f32
            shared_gate_bias,
            /// `moec_layer_args.output_bias`: `[H]`, optional; dtype of x or f32
            output_bias,
            /// `moec_layer_args.residual`: `[T,H]`, optional: added; may be y itself
            residual,
            /// `moec_layer_args.adapter_ids`: `[T]` i32, optional: the only adapter of each token,
            /// an index into what is bound; any other number = none
            adapter_ids,
        }
        write {
            /// `moec_layer_args.y`: `[T,H]`
            y,
            /// `moec_layer_args.logits`: `[T,E+Z]` f32, optional
            logits,
            /// `moec_layer_args.expert_ids`: `[T,K]` i32, optional
            expert_ids,
            /// `moec_layer_args.routing_weights`: `[T,K]` f32, optional
            routing_weights,
            /// `moec_layer_args.counts`: `[E+Z]` i32|i64, optional: as `moec_route_args`
            counts,
        }
        set {
            /// `moec_layer_args.rng_offset`: jitter counter of element (0,0); element (t,h) uses +
            /// t*H + h
            rng_offset: u64,
            /// `moec_layer_args.bound`: with an ep: as in `moec_ep_args`; else 0
            bound: i64,
        }
        handle {
            /// `moec_layer_args.weights`
            weights: Weights<'a>,
            /// `moec_layer_args.shared_weights`
            shared_weights: Weights<'a>,
        }
        buffer {
            /// `moec_layer_args.saved`: unless SAVE_NONE
            saved, saved_array, saved_on_device,
            /// `moec_layer_args.workspace`: absent = the context's
            workspace, workspace_array, workspace_on_device,
        }
    }
    /// The whole layer: gradients; every output that is not given is skipped.
    LayerGradCall: moec_layer_grad_args {
        read {
            /// `moec_layer_grad_args.d_y`: `[T,H]`
            d_y,
            /// `moec_layer_grad_args.d_logits_in`: `[T,E+Z]` f32, optional: from auxiliary losses
            d_logits_in,
        }
        write {
            /// `moec_layer_grad_args.d_x`: `[T,H]`; without router_x, d_x holds both
            d_x,
            /// `moec_layer_grad_args.d_router_x`: `[T,Hr]`; without router_x, d_x holds both
            d_router_x,
            /// `moec_layer_grad_args.d_gate_weight`
            d_gate_weight,
            /// `moec_layer_grad_args.d_gate_bias`
            d_gate_bias,
            /// `moec_layer_grad_args.d_input_scale`
            d_input_scale,
            /// `moec_layer_grad_args.d_per_expert_scale`
            d_per_expert_scale,
            /// `moec_layer_grad_args.d_shared_gate`
            d_shared_gate,
            /// `moec_layer_grad_args.d_shared_gate_bias`
            d_shared_gate_bias,
            /// `moec_layer_grad_args.d_output_bias`
            d_output_bias,
            /// `moec_layer_grad_args.d_residual`
            d_residual,
            /// `moec_layer_grad_args.d_routing_weights`: `[T,K]` f32, optional
            d_routing_weights,
        }
        set {
            /// `moec_layer_grad_args.flags`: `moec_grad_flags`
            flags: u32,
        }
        matrices {
            /// `moec_layer_grad_args.d_expert_weights`
            d_expert_weights,
            /// `moec_layer_grad_args.d_shared_weights`
            d_shared_weights,
        }
        buffer {
            /// `moec_layer_grad_args.workspace`: absent = the context's
            workspace, workspace_array, workspace_on_device,
        }
    }
    /// How the codes of a quantised matrix `[N,K]` become values; `moec_scheme` says which of these
    /// tensors a scheme reads, the others are absent.
    Quant: moec_quant {
        read {
            /// `moec_quant.scales`: `[E,N/block_n,K/block_k]`, rounded up; IN_OUT: `[E,K/.., N/..]`
            scales,
            /// `moec_quant.scales2`: scales of the scales
            scales2,
            /// `moec_quant.zeros`: zero points: shape of scales, or packed
            zeros,
            /// `moec_quant.codebook`: `[16]` f32: the value of each code
            codebook,
            /// `moec_quant.scale_book`: `[256]` f32: the value of each u8 scale
            scale_book,
            /// `moec_quant.scale_offset`: `[1]` f32: added to the scales
            scale_offset,
            /// `moec_quant.group_index`: `[E,K]` i32: the block along K of each input (act-order).
            /// One that is no block counts as k / block_k
            group_index,
        }
        list {
            /// `moec_quant.per_expert_scales`
            per_expert_scales,
            /// `moec_quant.per_expert_scales2`
            per_expert_scales2,
            /// `moec_quant.per_expert_zeros`
            per_expert_zeros,
            /// `moec_quant.per_expert_scale_offset`
            per_expert_scale_offset,
            /// `moec_quant.per_expert_group_index`
            per_expert_group_index,
        }
        set {
            /// `moec_quant.flags`: `moec_quant_flags`
            flags: u32,
            /// `moec_quant.block_n`: values along N and K that share a scale; 0 = as the scheme
            /// says
            block_n: i64,
            /// `moec_quant.block_k`: values along N and K that share a scale; 0 = as the scheme
            /// says
            block_k: i64,
            /// `moec_quant.scale_block`: scales that share an entry of scales2; 0 = as the scheme
            /// says
            scale_block: i64,
        }
    }
}

weight_sets! {
    /// The matrices of a set of experts.
    WeightSet of Tensor {
        tensors {
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up: gate_up.data,
            /// `[E,N]`, optional; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_bias: gate_up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT: N = I, K = H
            gate: gate.data,
            /// `[E,N]`, optional; SPLIT: N = I, K = H
            gate_bias: gate.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT, NONE: N = I, K = H
            up: up.data,
            /// `[E,N]`, optional; SPLIT, NONE: N = I, K = H
            up_bias: up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; N = H, K = I
            down: down.data,
            /// `[E,N]`, optional; N = H, K = I
            down_bias: down.bias,
        }
        lists of &'a [Tensor<'a>] {
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; GATE_THEN_UP,
            /// UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_per_expert: gate_up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; GATE_THEN_UP, UP_THEN_GATE,
            /// INTERLEAVED: N = 2I, K = H
            gate_up_per_expert_bias: gate_up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT: N = I, K =
            /// H
            gate_per_expert: gate.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT: N = I, K = H
            gate_per_expert_bias: gate.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT, NONE: N =
            /// I, K = H
            up_per_expert: up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT, NONE: N = I, K = H
            up_per_expert_bias: up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; N = H, K = I
            down_per_expert: down.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; N = H, K = I
            down_per_expert_bias: down.per_expert_bias,
        }
        parts {
            /// codes: their scales; NULL = plain values. Copied at bind; GATE_THEN_UP,
            /// UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_quant: gate_up.quant = Quant,
            /// codes: their scales; NULL = plain values. Copied at bind; SPLIT: N = I, K = H
            gate_quant: gate.quant = Quant,
            /// codes: their scales; NULL = plain values. Copied at bind; SPLIT, NONE: N = I, K = H
            up_quant: up.quant = Quant,
            /// codes: their scales; NULL = plain values. Copied at bind; N = H, K = I
            down_quant: down.quant = Quant,
        }
    }
    /// The same of plain values, which adapters may be merged into.
    WeightSetMut of TensorMut {
        tensors {
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up: gate_up.data,
            /// `[E,N]`, optional; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_bias: gate_up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT: N = I, K = H
            gate: gate.data,
            /// `[E,N]`, optional; SPLIT: N = I, K = H
            gate_bias: gate.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT, NONE: N = I, K = H
            up: up.data,
            /// `[E,N]`, optional; SPLIT, NONE: N = I, K = H
            up_bias: up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; N = H, K = I
            down: down.data,
            /// `[E,N]`, optional; N = H, K = I
            down_bias: down.bias,
        }
        lists of &'a mut [TensorMut<'a>] {
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; GATE_THEN_UP,
            /// UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_per_expert: gate_up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; GATE_THEN_UP, UP_THEN_GATE,
            /// INTERLEAVED: N = 2I, K = H
            gate_up_per_expert_bias: gate_up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT: N = I, K =
            /// H
            gate_per_expert: gate.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT: N = I, K = H
            gate_per_expert_bias: gate.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT, NONE: N =
            /// I, K = H
            up_per_expert: up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT, NONE: N = I, K = H
            up_per_expert_bias: up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; N = H, K = I
            down_per_expert: down.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; N = H, K = I
            down_per_expert_bias: down.per_expert_bias,
        }
    }
    /// Where the gradients of a set of experts go; those that are not given are skipped.
    WeightGrads of TensorMut {
        tensors {
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up: gate_up.data,
            /// `[E,N]`, optional; GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_bias: gate_up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT: N = I, K = H
            gate: gate.data,
            /// `[E,N]`, optional; SPLIT: N = I, K = H
            gate_bias: gate.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; SPLIT, NONE: N = I, K = H
            up: up.data,
            /// `[E,N]`, optional; SPLIT, NONE: N = I, K = H
            up_bias: up.bias,
            /// `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and
            /// shape that the scheme says; N = H, K = I
            down: down.data,
            /// `[E,N]`, optional; N = H, K = I
            down_bias: down.bias,
        }
        lists of &'a mut [TensorMut<'a>] {
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; GATE_THEN_UP,
            /// UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
            gate_up_per_expert: gate_up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; GATE_THEN_UP, UP_THEN_GATE,
            /// INTERLEAVED: N = 2I, K = H
            gate_up_per_expert_bias: gate_up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT: N = I, K =
            /// H
            gate_per_expert: gate.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT: N = I, K = H
            gate_per_expert_bias: gate.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; SPLIT, NONE: N =
            /// I, K = H
            up_per_expert: up.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; SPLIT, NONE: N = I, K = H
            up_per_expert_bias: up.per_expert_bias,
            /// instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied; N = H, K = I
            down_per_expert: down.per_expert,
            /// instead of bias: `count` tensors `[N]`; array copied; N = H, K = I
            down_per_expert_bias: down.per_expert_bias,
        }
    }
}
