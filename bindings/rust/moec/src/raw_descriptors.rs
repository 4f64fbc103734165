// SPDX-License-Identifier: Apache-2.0
// Generated from moec.h by generate.py; do not edit.

descriptors! {
    /// A device and how the context uses it.
    ContextDesc: moec_context_desc {
        /// `moec_context_desc.flags`: `moec_context_flags`
        flags: u32,
        /// `moec_context_desc.device_type`: 0, 0 = the CPU
        device_type: i32,
        /// `moec_context_desc.device_id`: 0, 0 = the CPU
        device_id: i32,
        /// `moec_context_desc.math`: `moec_math_mode`
        math: u32,
        /// `moec_context_desc.num_threads`: CPU: 0 = affinity mask and cgroup quota
        num_threads: i32,
        /// `moec_context_desc.workspace_limit`: bytes of scratch the context may hold; 0 = no limit
        workspace_limit: u64,
    }
    /// What a router computes; constants are `moec_sys::MOEC_*`, zero fields are defaults.
    RouterDesc: moec_router_desc {
        /// `moec_router_desc.flags`: `moec_router_flags`
        flags: u32,
        /// `moec_router_desc.num_experts`: E >= 1
        num_experts: i32,
        /// `moec_router_desc.num_zero_experts`: Z >= 0
        num_zero_experts: i32,
        /// `moec_router_desc.top_k`: 1 \<= K \<= E+Z
        top_k: i32,
        /// `moec_router_desc.input`: `moec_router_input`
        input: u32,
        /// `moec_router_desc.rms_eps`: RMS_SCALED: 0 = 1e-6
        rms_eps: f32,
        /// `moec_router_desc.jitter`: multiply x by U(1-j,1+j); 0 = off; \< 1
        jitter: f32,
        /// `moec_router_desc.logit_precision`: `moec_precision`; DATA rounds the logits to
        /// data_dtype
        logit_precision: u32,
        /// `moec_router_desc.logit_softcap`: cap * tanh(z / cap); 0 = off
        logit_softcap: f32,
        /// `moec_router_desc.score`: `moec_score`
        score: u32,
        /// `moec_router_desc.score_precision`: `moec_precision`
        score_precision: u32,
        /// `moec_router_desc.selection`: `moec_select`
        selection: u32,
        /// `moec_router_desc.num_groups`: GROUP_TOPK: num_groups divides E+Z; >= 1
        num_groups: i32,
        /// `moec_router_desc.top_groups`: GROUP_TOPK: num_groups divides E+Z; >= 1
        top_groups: i32,
        /// `moec_router_desc.group_top_m`: group score = sum of its m best; 0|1 = the best one
        group_top_m: i32,
        /// `moec_router_desc.group_fill`: `moec_group_fill`
        group_fill: u32,
        /// `moec_router_desc.mixer_eps`: SPARSE_MIXER threshold; > 0
        mixer_eps: f32,
        /// `moec_router_desc.weight_rule`: `moec_weight_rule`
        weight_rule: u32,
        /// `moec_router_desc.norm`: `moec_norm`
        norm: u32,
        /// `moec_router_desc.norm_eps`: norm_eps 0 = none; NORM_P: norm_p 0 = 1
        norm_eps: f32,
        /// `moec_router_desc.norm_p`: norm_eps 0 = none; NORM_P: norm_p 0 = 1
        norm_p: f32,
        /// `moec_router_desc.norm_precision`: `moec_precision` of weight rule and normalisation
        norm_precision: u32,
        /// `moec_router_desc.scale`: routed scaling factor; 0 = 1
        scale: f32,
        /// `moec_router_desc.weight_precision`: `moec_precision` of the result
        weight_precision: u32,
        /// `moec_router_desc.slot_order`: `moec_slot_order`
        slot_order: u32,
        /// `moec_router_desc.data_dtype`: dtype of PREC_DATA steps; 0 = fp32
        data_dtype: u32,
        /// `moec_router_desc.seed`: jitter: Philox4x32-10 key
        seed: u64,
    }
    /// What the experts compute.
    ExpertsDesc: moec_experts_desc {
        /// `moec_experts_desc.flags`: `moec_experts_desc_flags`
        flags: u32,
        /// `moec_experts_desc.hidden`: H
        hidden: i64,
        /// `moec_experts_desc.inter`: I
        inter: i64,
        /// `moec_experts_desc.shared_inter`: Is; 0 without shared expert
        shared_inter: i64,
        /// `moec_experts_desc.num_experts`: E, all ranks together
        num_experts: i32,
        /// `moec_experts_desc.num_zero_experts`: Z: ids in [E,E+Z) add w * x
        num_zero_experts: i32,
        /// `moec_experts_desc.top_k`: K; 0 for EXPERT_CHOICE plans
        top_k: i32,
        /// `moec_experts_desc.expert_begin`: local range, as in the plan; 0, 0 = all
        expert_begin: i32,
        /// `moec_experts_desc.expert_end`: local range, as in the plan; 0, 0 = all
        expert_end: i32,
        /// `moec_experts_desc.align`: as in the plan
        align: i32,
        /// `moec_experts_desc.max_rows_base`: EXPERT_CHOICE: El * capacity; else 0
        max_rows_base: i64,
        /// `moec_experts_desc.gate_layout`: only NONE or not: MOEC_GATE_NONE for a plain MLP
        gate_layout: u32,
        /// `moec_experts_desc.dtype`: of x, y and residual: f32, f16, bf16
        dtype: u32,
        /// `moec_experts_desc.activation`
        activation: sys::moec_activation,
        /// `moec_experts_desc.shared_activation`
        shared_activation: sys::moec_activation,
        /// `moec_experts_desc.weight_position`
        weight_position: u32,
        /// `moec_experts_desc.combine`
        combine: u32,
        /// `moec_experts_desc.act_rounding`
        act_rounding: u32,
        /// `moec_experts_desc.shared`
        shared: u32,
        /// `moec_experts_desc.save`
        save: u32,
        /// `moec_experts_desc.output_scale`: of the routed sum; 0 = 1
        output_scale: f32,
    }
    /// How expert matrices lie in memory.
    WeightsDesc: moec_weights_desc {
        /// `moec_weights_desc.flags`: `moec_weights_flags`
        flags: u32,
        /// `moec_weights_desc.num_experts`: El; 1 for a shared expert
        num_experts: i32,
        /// `moec_weights_desc.gate_layout`: `moec_gate_layout`
        gate_layout: u32,
        /// `moec_weights_desc.hidden`: H
        hidden: i64,
        /// `moec_weights_desc.inter`: I
        inter: i64,
        /// `moec_weights_desc.gate_up_orientation`: `moec_orientation` of gate_up, gate and up
        gate_up_orientation: u32,
        /// `moec_weights_desc.down_orientation`
        down_orientation: u32,
        /// `moec_weights_desc.dtype`: f32, f16, bf16: of values, and what codes stand for
        dtype: u32,
        /// `moec_weights_desc.bias_dtype`: 0 = dtype; or f32
        bias_dtype: u32,
        /// `moec_weights_desc.gate_up_scheme`: `moec_scheme`
        gate_up_scheme: u32,
        /// `moec_weights_desc.down_scheme`: `moec_scheme`
        down_scheme: u32,
    }
    /// Bounds and rules of a plan.
    PlanDesc: moec_plan_desc {
        /// `moec_plan_desc.max_tokens`: bound on T; fixes every buffer size
        max_tokens: i64,
        /// `moec_plan_desc.num_experts`: E, all ranks together
        num_experts: i32,
        /// `moec_plan_desc.num_zero_experts`: Z
        num_zero_experts: i32,
        /// `moec_plan_desc.top_k`: K; EXPERT_CHOICE: 0
        top_k: i32,
        /// `moec_plan_desc.kind`: `moec_plan_kind`
        kind: u32,
        /// `moec_plan_desc.expert_begin`: local range; 0, 0 = all
        expert_begin: i32,
        /// `moec_plan_desc.expert_end`: local range; 0, 0 = all
        expert_end: i32,
        /// `moec_plan_desc.align`: rows of each expert rounded up to it; 0|1 = none; power of two
        align: i32,
        /// `moec_plan_desc.drop`: `moec_drop`; needs a capacity
        drop: u32,
        /// `moec_plan_desc.capacity`: rows kept per expert; 0 = by capacity_factor or dropless
        capacity: i64,
        /// `moec_plan_desc.capacity_factor`: capacity = ceil(T*K/E * factor); 0 = off
        capacity_factor: f32,
    }
    /// Of what matrices a set of adapters may have terms.
    AdaptersDesc: moec_adapters_desc {
        /// `moec_adapters_desc.num_experts`: El, as in the weights
        num_experts: i32,
        /// `moec_adapters_desc.gate_layout`: of gate_up's N, need not be the weights'; SPLIT: no
        /// gate_up; NONE: up
        gate_layout: u32,
        /// `moec_adapters_desc.hidden`: H
        hidden: i64,
        /// `moec_adapters_desc.inter`: I
        inter: i64,
    }
    /// What codes are made, and of which weights.
    QuantiseDesc: moec_quantise_desc {
        /// `moec_quantise_desc.flags`: `moec_quantise_flags`
        flags: u32,
        /// `moec_quantise_desc.kind`: `moec_quantise_kind`
        kind: u32,
        /// `moec_quantise_desc.orientation`: `moec_orientation` of the source. NF4 and FP4 keep the
        /// order of the source; other codes are OUT_IN
        orientation: u32,
        /// `moec_quantise_desc.dtype`: of the source: f32, f16, bf16
        dtype: u32,
        /// `moec_quantise_desc.scale_dtype`: INT8, INT4, FP8: dtype (0) or f32; the arithmetic is
        /// of this type, too. Others: 0
        scale_dtype: u32,
        /// `moec_quantise_desc.num_experts`: E
        num_experts: i64,
        /// `moec_quantise_desc.out_features`: N
        out_features: i64,
        /// `moec_quantise_desc.in_features`: K
        in_features: i64,
        /// `moec_quantise_desc.block_n`: 0, or as kind says
        block_n: i64,
        /// `moec_quantise_desc.block_k`: 0, or as kind says
        block_k: i64,
    }
}
