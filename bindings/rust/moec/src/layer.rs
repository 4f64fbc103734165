// SPDX-License-Identifier: Apache-2.0
use crate::call::{ExpertsCall, ExpertsGradCall, LayerCall, LayerGradCall, RouteCall};
use crate::call::{WeightSet, WeightSetMut};
use crate::error::{check, sized, Result};
use crate::handle::{Adapters, Context, Experts, Layer, Plan, Router, Stream, Weights};
use crate::tensor::{Tensor, TensorMut};
use moec_sys as sys;
use std::ptr::{null, null_mut};

// The rows of the macro come from moec.h: raw_descriptors.rs.
macro_rules! descriptors {
    ($($(#[$doc:meta])* $name:ident: $raw:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty,)+
    })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(sys::$raw);
        impl Default for $name {
            fn default() -> Self {
                Self(sized())
            }
        }
        impl $name {
            pub fn new() -> Self {
                Self::default()
            }
            $($(#[$field_doc])*
            pub fn $field(mut self, value: $type) -> Self {
                self.0.$field = value;
                self
            })+
            /// The C struct.
            pub fn as_raw(&self) -> &sys::$raw {
                &self.0
            }
        }
    )*};
}

include!("raw_descriptors.rs");

impl Router {
    pub fn new(context: &Context, desc: &RouterDesc) -> Result<Self> {
        let mut raw = null_mut();
        check(unsafe { sys::moec_router_create(context.raw, desc.as_raw(), &mut raw) })?;
        Ok(Self::own(raw))
    }

    pub fn route(&self, call: &mut RouteCall<'_>, stream: Stream) -> Result<()> {
        check(unsafe { sys::moec_route_forward(self.raw, &call.raw, stream.0) })
    }
}

impl Plan {
    pub fn new(context: &Context, desc: &PlanDesc) -> Result<Self> {
        let mut raw = null_mut();
        check(unsafe { sys::moec_plan_create(context.raw, desc.as_raw(), null(), &mut raw) })?;
        Ok(Self::own(raw))
    }

    /// Rebuild from ids `[T, K]` (i32 or i64) and routing weights `[T, K]` (f32; `None` = 1).
    ///
    /// ```
    /// use moec::*;
    /// let desc = PlanDesc::new().max_tokens(8).num_experts(4).top_k(2);
    /// let mut plan = Plan::new(&Context::cpu()?, &desc)?;
    /// plan.from_topk(Tensor::new(&[0i64, 2, 1, 2], &[2, 2]), None, Stream::DEFAULT)?;
    /// assert_eq!(plan.totals(Stream::DEFAULT)?, [4, 4, 0, 2]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn from_topk(
        &mut self,
        expert_ids: Tensor<'_>,
        routing_weights: Option<Tensor<'_>>,
        stream: Stream,
    ) -> Result<()> {
        let weights = routing_weights.map(|w| w.raw);
        let weights = crate::handle::optional(weights.as_ref());
        check(unsafe { sys::moec_plan_from_topk(self.raw, &expert_ids.raw, weights, stream.0) })
    }

    /// Rebuild from ids that a rule gives: `sys::MOEC_PLAN_ROUND_ROBIN` is forced balance, for
    /// benchmarks; with `sys::MOEC_PLAN_EQUAL_COUNTS` `x` `[El, C, H]`, seen as `[El * C, H]`, has
    /// `C` rows of each local expert. Routing weights are `[T, K]` (f32; `None` = 1).
    ///
    /// ```
    /// use moec::*;
    /// let desc = PlanDesc::new().max_tokens(8).num_experts(4).top_k(2);
    /// let mut plan = Plan::new(&Context::cpu()?, &desc)?;
    /// plan.from_rule(sys::MOEC_PLAN_ROUND_ROBIN, 8, None, Stream::DEFAULT)?;
    /// assert_eq!(plan.totals(Stream::DEFAULT)?, [16, 16, 0, 4]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn from_rule(
        &mut self,
        rule: u32,
        num_tokens: usize,
        routing_weights: Option<Tensor<'_>>,
        stream: Stream,
    ) -> Result<()> {
        let weights = routing_weights.map(|w| w.raw);
        let weights = crate::handle::optional(weights.as_ref());
        let tokens = num_tokens as i64;
        check(unsafe { sys::moec_plan_from_rule(self.raw, rule, tokens, weights, stream.0) })
    }

    /// Routed rows, rows in use, dropped rows, largest group. Waits for the stream.
    pub fn totals(&self, stream: Stream) -> Result<[i32; 4]> {
        let mut totals = [0; 4];
        check(unsafe { sys::moec_plan_totals_sync(self.raw, totals.as_mut_ptr(), stream.0) })?;
        Ok(totals)
    }

    /// The serialised plan.
    pub fn save(&self, stream: Stream) -> Result<Vec<u8>> {
        let mut need = 0;
        check(unsafe { sys::moec_plan_save_sync(self.raw, null_mut(), 0, &mut need, stream.0) })?;
        let mut bytes = vec![0u8; need as usize];
        check(unsafe {
            sys::moec_plan_save_sync(
                self.raw,
                bytes.as_mut_ptr() as *mut _,
                need,
                &mut need,
                stream.0,
            )
        })?;
        Ok(bytes)
    }

    /// Restore a serialised plan, bit for bit.
    pub fn restore(&mut self, bytes: &[u8], stream: Stream) -> Result<()> {
        let (pointer, count) = (bytes.as_ptr() as *const _, bytes.len() as u64);
        check(unsafe { sys::moec_plan_restore_sync(self.raw, pointer, count, stream.0) })
    }
}

impl<'a> Weights<'a> {
    /// Borrow the matrices of `set` for the lifetime of the handle.
    pub fn new(context: &Context, desc: &WeightsDesc, set: &WeightSet<'a>) -> Result<Self> {
        Self::bind(context, desc, &set.raw)
    }

    fn bind(context: &Context, desc: &WeightsDesc, set: &sys::moec_weight_set) -> Result<Self> {
        let mut raw = null_mut();
        check(unsafe { sys::moec_weights_create(context.raw, desc.as_raw(), &mut raw) })?;
        let weights = Self::own(raw);
        check(unsafe { sys::moec_weights_bind(raw, set) })?;
        Ok(weights)
    }

    /// Write the values of one expert's matrix (`moec_sys::MOEC_MATRIX_DOWN`, ...): `[N,K]`, or
    /// `[K,N]` where its orientation is IN_OUT; of codes those of the scheme's formula.
    pub fn dequantise(
        &self,
        matrix: u32,
        expert: i32,
        to: TensorMut<'_>,
        stream: Stream,
    ) -> Result<()> {
        check(unsafe { sys::moec_weights_dequantise(self.raw, matrix, expert, &to.raw, stream.0) })
    }

    /// Make the packed copy; only for weights declared frozen.
    pub fn pack(&mut self, stream: Stream) -> Result<()> {
        check(unsafe { sys::moec_weights_pack(self.raw, null(), stream.0) })
    }
}

/// [`Weights`] whose matrices [`Adapters::merge`] may change.
pub struct WeightsMut<'a>(Weights<'a>);

impl<'a> WeightsMut<'a> {
    /// Borrow the matrices of `set` for the lifetime of the handle.
    pub fn new(context: &Context, desc: &WeightsDesc, set: WeightSetMut<'a>) -> Result<Self> {
        Weights::bind(context, desc, &set.raw).map(Self)
    }
}

impl<'a> std::ops::Deref for WeightsMut<'a> {
    type Target = Weights<'a>;
    fn deref(&self) -> &Weights<'a> {
        &self.0
    }
}

/// Bytes for T tokens: `base + T * per_token`.
pub type Size = sys::moec_size;

fn sizes(
    query: impl FnOnce(*mut sys::moec_experts_sizes) -> i32,
) -> Result<sys::moec_experts_sizes> {
    let mut out = sized();
    check(query(&mut out))?;
    Ok(out)
}

/// Bytes that `size` says for `num_tokens` tokens.
pub fn bytes_for(size: Size, num_tokens: usize) -> usize {
    (size.base + size.per_token * num_tokens as u64) as usize
}

impl Experts {
    pub fn new(context: &Context, desc: &ExpertsDesc) -> Result<Self> {
        let mut raw = null_mut();
        check(unsafe { sys::moec_experts_create(context.raw, desc.as_raw(), &mut raw) })?;
        Ok(Self::own(raw, context.on_cpu))
    }

    pub fn sizes(&self) -> Result<sys::moec_experts_sizes> {
        sizes(|out| unsafe { sys::moec_experts_query(self.raw, out) })
    }

    /// The same for calls with these adapters.
    pub fn sizes_with(&self, adapters: &Adapters<'_>) -> Result<sys::moec_experts_sizes> {
        sizes(|out| unsafe { sys::moec_experts_query_adapters(self.raw, adapters.raw, out) })
    }

    pub fn forward(&self, call: &mut ExpertsCall<'_>, stream: Stream) -> Result<()> {
        call.on_host.refuse_unless(self.on_cpu, "moec_experts_forward")?;
        check(unsafe { sys::moec_experts_forward(self.raw, &call.raw, stream.0) })
    }

    pub fn backward(&self, call: &mut ExpertsGradCall<'_>, stream: Stream) -> Result<()> {
        call.on_host.refuse_unless(self.on_cpu, "moec_experts_backward")?;
        call.adapters.refuse_unless_equal("moec_experts_backward")?;
        check(unsafe { sys::moec_experts_backward(self.raw, &call.raw, stream.0) })
    }
}

impl Layer {
    pub fn new(context: &Context, router: &RouterDesc, experts: &ExpertsDesc) -> Result<Self> {
        let mut desc: sys::moec_layer_desc = sized();
        (desc.router, desc.experts) = (router.as_raw(), experts.as_raw());
        let mut raw = null_mut();
        check(unsafe { sys::moec_layer_create(context.raw, &desc, &mut raw) })?;
        Ok(Self::own(raw, context.on_cpu))
    }

    pub fn sizes(&self) -> Result<sys::moec_experts_sizes> {
        sizes(|out| unsafe { sys::moec_layer_query(self.raw, out) })
    }

    /// The same for calls with these adapters.
    pub fn sizes_with(&self, adapters: &Adapters<'_>) -> Result<sys::moec_experts_sizes> {
        sizes(|out| unsafe { sys::moec_layer_query_adapters(self.raw, adapters.raw, out) })
    }

    pub fn forward(&self, call: &mut LayerCall<'_>, stream: Stream) -> Result<()> {
        call.on_host.refuse_unless(self.on_cpu, "moec_layer_forward")?;
        check(unsafe { sys::moec_layer_forward(self.raw, &call.raw, stream.0) })
    }

    pub fn backward(&self, call: &mut LayerGradCall<'_>, stream: Stream) -> Result<()> {
        call.on_host.refuse_unless(self.on_cpu, "moec_layer_backward")?;
        call.adapters.refuse_unless_equal("moec_layer_backward")?;
        check(unsafe { sys::moec_layer_backward(self.raw, &call.raw, stream.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU may use a buffer after the call, when a slice's borrow has ended. The layers here are
    /// the CPU's, and only said not to be: the refusal comes before the library.
    #[test]
    fn host_slices_are_refused_on_a_device() {
        let context = Context::cpu().unwrap();
        let experts = ExpertsDesc::new().num_experts(4).top_k(2).hidden(16).inter(8);
        let experts = experts.gate_layout(sys::MOEC_GATE_THEN_UP).dtype(sys::MOEC_F32);
        let router = RouterDesc::new().num_experts(4).top_k(2);
        let mut layer = Layer::new(&context, &router, &experts).unwrap();
        let mut experts = Experts::new(&context, &experts).unwrap();
        (layer.on_cpu, experts.on_cpu) = (false, false);
        let (mut saved, mut workspace) = ([0u8; 8], [0u8; 8]);
        let refused = |result: Result<()>, site: &str, buffer: &str| {
            let error = result.unwrap_err();
            assert_eq!((error.name(), &*error.site), ("MOEC_E_DEVICE", site));
            assert!(error.message.starts_with(&format!("{site}: {buffer} is a host slice")));
        };
        let here = Stream::DEFAULT;
        let mut call = LayerCall::new().workspace(&mut workspace);
        refused(layer.forward(&mut call, here), "moec_layer_forward", "workspace");
        let mut call = ExpertsCall::new().saved(&mut saved);
        refused(experts.forward(&mut call, here), "moec_experts_forward", "saved");
        let mut call = ExpertsGradCall::new().workspace(&mut workspace);
        refused(experts.backward(&mut call, here), "moec_experts_backward", "workspace");
        let forward = LayerCall::new().saved(&mut saved);
        let mut call = LayerGradCall::new().forward(&forward);
        refused(layer.backward(&mut call, here), "moec_layer_backward", "saved");
        // SAFETY: never used: the call lacks its tensors.
        let mut call = unsafe { forward.saved_on_device(8 as *mut u8, 8) };
        assert_ne!(layer.forward(&mut call, here).unwrap_err().code, sys::MOEC_E_DEVICE);
    }
}
