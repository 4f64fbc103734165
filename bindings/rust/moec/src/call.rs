// SPDX-License-Identifier: Apache-2.0
//! Arguments of the big calls: one builder per C struct, one method per field, each borrowing what
//! it is given.
use crate::error::{sized, Error, Result};
use crate::handle::{Plan, Weights};
use crate::tensor::{Tensor, TensorMut};
use moec_sys as sys;
use std::marker::PhantomData;

/// Which buffers are slices of the host: a device could use them after their borrow has ended.
#[derive(Clone, Copy, Default)]
pub(crate) struct OnHost {
    saved: bool,
    workspace: bool,
}

impl OnHost {
    pub(crate) fn refuse_unless(self, on_cpu: bool, site: &str) -> Result<()> {
        let buffer = match self {
            _ if on_cpu => return Ok(()),
            OnHost { saved: true, .. } => "saved",
            OnHost { workspace: true, .. } => "workspace",
            _ => return Ok(()),
        };
        Err(Error {
            code: sys::MOEC_E_DEVICE,
            native_code: 0,
            site: site.into(),
            message: format!(
                "{site}: {buffer} is a host slice, and the context is not the CPU's; expected \
                 memory of its device, given by {buffer}_on_device"
            ),
        })
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident: $raw:ident {
        $(read: $($read:ident),+;)?
        $(write: $($write:ident),+;)?
        $(set: $($set:ident: $type:ty),+;)?
        $(handle: $($handle:ident: $kind:ty),+;)?
        $(matrices: $($matrices:ident),+;)?
    })*) => {$(
        $(#[$doc])*
        pub struct $name<'a> {
            pub(crate) raw: sys::$raw,
            #[allow(dead_code)] // in calls without buffers
            pub(crate) on_host: OnHost,
            memory: PhantomData<&'a ()>,
        }
        impl Default for $name<'_> {
            fn default() -> Self {
                Self { raw: sized(), on_host: OnHost::default(), memory: PhantomData }
            }
        }
        impl<'a> $name<'a> {
            pub fn new() -> Self {
                Self::default()
            }
            $($(#[doc = concat!("`", stringify!($raw), ".", stringify!($read), "` of `moec.h`.")]
            pub fn $read(mut self, tensor: Tensor<'a>) -> Self {
                self.raw.$read = tensor.raw;
                self
            })+)?
            $($(#[doc = concat!("`", stringify!($raw), ".", stringify!($write), "` of `moec.h`.")]
            pub fn $write(mut self, tensor: TensorMut<'a>) -> Self {
                self.raw.$write = tensor.raw;
                self
            })+)?
            $($(#[doc = concat!("`", stringify!($raw), ".", stringify!($set), "` of `moec.h`.")]
            pub fn $set(mut self, value: $type) -> Self {
                self.raw.$set = value;
                self
            })+)?
            $($(#[doc = concat!("`", stringify!($raw), ".", stringify!($handle), "` of `moec.h`.")]
            pub fn $handle(mut self, handle: &'a $kind) -> Self {
                self.raw.$handle = handle.raw;
                self
            })+)?
            $($(/// Where the gradients of these matrices go.
            pub fn $matrices(mut self, set: &'a WeightGrads<'a>) -> Self {
                self.raw.$matrices = &set.raw;
                self
            })+)?
        }
    )*};
}

macro_rules! buffers {
    ($($name:ident { $($field:ident, $on_device:ident;)+ })*) => {$(
        impl<'a> $name<'a> {
            $(
                /// At least the bytes that the size query says, from any address. Refused by
                /// handles of a device other than the CPU.
                pub fn $field(mut self, bytes: &'a mut [u8]) -> Self {
                    let (ptr, bytes) = (bytes.as_mut_ptr() as *mut _, bytes.len() as u64);
                    self.raw.$field = sys::moec_buffer { ptr, bytes };
                    self.on_host.$field = true;
                    self
                }

                /// The same in device memory.
                ///
                /// # Safety
                /// `address` is valid for `bytes` bytes on the context's device, and nothing else
                /// uses them, until the work queued with this call is done.
                pub unsafe fn $on_device(mut self, address: *mut u8, bytes: usize) -> Self {
                    self.raw.$field =
                        sys::moec_buffer { ptr: address as *mut _, bytes: bytes as u64 };
                    self.on_host.$field = false;
                    self
                }
            )+
        }
    )*};
}

calls! {
    /// Logits to expert ids and routing weights.
    RouteCall: moec_route_args {
        read: logits, select_bias, per_expert_scale, token_mask, table, token_ids, given_ids;
        write: expert_ids, routing_weights, scores, counts;
    }
    /// Experts on a plan: forward.
    ExpertsCall: moec_experts_args {
        read: x, shared_gate, shared_gate_bias, output_bias, residual;
        write: y;
        handle: plan: Plan, weights: Weights<'a>, shared_weights: Weights<'a>;
    }
    /// Experts on a plan: gradients; every output that is not given is skipped.
    ExpertsGradCall: moec_experts_grad_args {
        read: x, shared_gate, shared_gate_bias, d_y;
        write: d_x, d_routing_weights, d_shared_gate, d_shared_gate_bias, d_output_bias, d_residual;
        set: flags: u32;
        handle: plan: Plan, weights: Weights<'a>, shared_weights: Weights<'a>;
        matrices: d_expert_weights, d_shared_weights;
    }
    /// The whole layer: forward.
    LayerCall: moec_layer_args {
        read: x, router_x, gate_weight, gate_bias, input_scale, select_bias, per_expert_scale,
            token_mask,
              table, token_ids, given_ids, shared_gate, shared_gate_bias, output_bias, residual;
        write: y, logits, expert_ids, routing_weights, counts;
        set: rng_offset: u64;
        handle: weights: Weights<'a>, shared_weights: Weights<'a>;
    }
    /// The whole layer: gradients; every output that is not given is skipped.
    LayerGradCall: moec_layer_grad_args {
        read: d_y, d_logits_in;
        write: d_x, d_router_x, d_gate_weight, d_gate_bias, d_input_scale, d_per_expert_scale,
            d_shared_gate,
               d_shared_gate_bias, d_output_bias, d_residual, d_routing_weights;
        set: flags: u32;
        matrices: d_expert_weights, d_shared_weights;
    }
}

buffers! {
    ExpertsCall { saved, saved_on_device; workspace, workspace_on_device; }
    ExpertsGradCall { saved, saved_on_device; workspace, workspace_on_device; }
    LayerCall { saved, saved_on_device; workspace, workspace_on_device; }
    LayerGradCall { workspace, workspace_on_device; }
}

impl<'a> LayerGradCall<'a> {
    /// The forward call's inputs and its saved buffer; its outputs are not used.
    pub fn forward(mut self, call: &'a LayerCall<'a>) -> Self {
        self.raw.forward = &call.raw;
        self.on_host.saved = call.on_host.saved;
        self
    }
}

macro_rules! weight_sets {
    ($($(#[$doc:meta])* $name:ident of $tensor:ident { $($matrix:ident, $bias:ident;)* })*) => {$(
        $(#[$doc])*
        pub struct $name<'a> {
            pub(crate) raw: sys::moec_weight_set,
            memory: PhantomData<&'a ()>,
        }
        impl Default for $name<'_> {
            fn default() -> Self {
                Self { raw: sized(), memory: PhantomData }
            }
        }
        impl<'a> $name<'a> {
            pub fn new() -> Self {
                Self::default()
            }
            $(pub fn $matrix(mut self, matrix: $tensor<'a>) -> Self {
                self.raw.$matrix.data = matrix.raw;
                self
            }
            pub fn $bias(mut self, bias: $tensor<'a>) -> Self {
                self.raw.$matrix.bias = bias.raw;
                self
            })*
        }
    )*};
}

weight_sets! {
    /// The matrices of a set of experts.
    WeightSet of Tensor {
        gate_up, gate_up_bias; gate, gate_bias; up, up_bias; down, down_bias;
    }
    /// Where the gradients of a set of experts go; those that are not given are skipped.
    WeightGrads of TensorMut {
        gate_up, gate_up_bias; gate, gate_bias; up, up_bias; down, down_bias;
    }
}
