// SPDX-License-Identifier: Apache-2.0
//! Low-rank terms beside the matrices of experts (LoRA), and their gradients.
use crate::call::{ExpertsCall, ExpertsGradCall, LayerCall, LayerGradCall};
use crate::error::{check, Error, Result};
use crate::handle::{Adapters, Context, Stream};
use crate::layer::{AdaptersDesc, WeightsMut};
use crate::tensor::{Tensor, TensorMut};
use moec_sys as sys;
use std::marker::PhantomData;
use std::ptr::null_mut;

macro_rules! adapters {
    ($($(#[$doc:meta])* $name:ident of $tensor:ident {
        $($(#[$matrix_doc:meta])* $matrix:ident $(($scale:ident))?,)+
    })*) => {$(
        $(#[$doc])*
        #[repr(transparent)] // a slice of them is a C array
        pub struct $name<'a> {
            raw: sys::moec_adapter,
            memory: PhantomData<&'a ()>,
        }
        impl Default for $name<'_> {
            fn default() -> Self {
                // SAFETY: plain data; all-zero means "absent".
                Self { raw: unsafe { std::mem::zeroed() }, memory: PhantomData }
            }
        }
        impl<'a> $name<'a> {
            pub fn new() -> Self {
                Self::default()
            }
            $($(#[$matrix_doc])*
            pub fn $matrix(mut self, a: $tensor<'a>, b: $tensor<'a> $(, $scale: f32)?) -> Self {
                (self.raw.$matrix.a, self.raw.$matrix.b) = (a.raw, b.raw);
                $(self.raw.$matrix.scale = $scale;)?
                self
            })+
        }
    )*};
}

adapters! {
    /// The terms of one adapter: a matrix `[N,K]` of every expert adds `scale * (x A^T) B^T`. Those
    /// of matrices that are not given are absent. A is `[E,r,K]`, or `[1,r,K]` for all experts; B
    /// is `[E,N,r]`; f32, f16 or bf16, also [`Tensor::strided`].
    Adapter of Tensor {
        /// N = 2I, in the order of the adapters' `gate_layout`; K = H
        gate_up(scale),
        /// N = I, K = H
        gate(scale),
        /// N = I, K = H
        up(scale),
        /// N = H, K = I
        down(scale),
    }
    /// Where the gradients of an adapter go: f32 or of the type of their factor. Those that are not
    /// given are skipped.
    AdapterGrads of TensorMut {
        /// Those of A and B of [`Adapter::gate_up`].
        gate_up,
        /// Those of A and B of [`Adapter::gate`].
        gate,
        /// Those of A and B of [`Adapter::up`].
        up,
        /// Those of A and B of [`Adapter::down`].
        down,
    }
}

impl<'a> Adapters<'a> {
    /// Borrow the factors of `list` for the lifetime of the handle. Calls add all of them, or each
    /// token's own where `adapter_ids` are given.
    ///
    /// ```
    /// use moec::*;
    /// let (a, b) = ([0.1f32; 4 * 2 * 8], [0f32; 4 * 16 * 2]);
    /// let form = AdaptersDesc::new().num_experts(4).hidden(16).inter(8)
    ///     .gate_layout(sys::MOEC_GATE_THEN_UP);
    /// let down = || (Tensor::new(&a, &[4, 2, 8]), Tensor::new(&b, &[4, 16, 2]));
    /// let adapter = Adapter::new().down(down().0, down().1, 2.0);
    /// Adapters::new(&Context::cpu()?, &form, &[adapter])?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn new(context: &Context, desc: &AdaptersDesc, list: &[Adapter<'a>]) -> Result<Self> {
        let mut raw = null_mut();
        check(unsafe { sys::moec_adapters_create(context.raw, desc.as_raw(), &mut raw) })?;
        let adapters = Self::own(raw, list.len());
        let first = list.as_ptr() as *const sys::moec_adapter;
        let count = i32::try_from(list.len()).unwrap_or(i32::MAX); // more than there may be
        check(unsafe { sys::moec_adapters_bind(raw, first, count) })?;
        Ok(adapters)
    }

    /// Add scale B A of all of them to plain matrices, with one rounding. What [`Weights::pack`]
    /// copied before is not changed.
    ///
    /// [`Weights::pack`]: crate::Weights::pack
    pub fn merge(&self, weights: &mut WeightsMut<'_>, stream: Stream) -> Result<()> {
        check(unsafe { sys::moec_adapters_merge(self.raw, weights.raw, stream.0) })
    }

    /// Subtract what [`Self::merge`] added, which gives the values before up to its rounding.
    pub fn unmerge(&self, weights: &mut WeightsMut<'_>, stream: Stream) -> Result<()> {
        check(unsafe { sys::moec_adapters_unmerge(self.raw, weights.raw, stream.0) })
    }
}

/// How many adapters a call has, and gradients of adapters: the library reads as many as are bound.
#[derive(Clone, Copy, Default)]
pub(crate) struct AdapterCounts {
    pub(crate) bound: usize,
    gradients: Option<usize>,
}

impl AdapterCounts {
    pub(crate) fn refuse_unless_equal(self, site: &str) -> Result<()> {
        let Self { bound, gradients } = self;
        match gradients {
            Some(given) if given != bound => Err(Error {
                code: sys::MOEC_E_SHAPE,
                native_code: 0,
                site: site.into(),
                message: format!(
                    "{site}: d_adapters has {given} adapters, and {bound} are bound; expected one \
                     for each"
                ),
            }),
            _ => Ok(()),
        }
    }
}

macro_rules! with_adapters {
    ($($call:ident),+) => {$(impl<'a> $call<'a> {
        /// Adapters of the routed experts; their buffers have the sizes of `sizes_with`.
        pub fn adapters(mut self, adapters: &'a Adapters<'a>) -> Self {
            (self.raw.adapters, self.adapters.bound) = (adapters.raw, adapters.count);
            self
        }
    })+};
}
with_adapters!(ExpertsCall, ExpertsGradCall, LayerCall);

macro_rules! with_adapter_grads {
    ($($call:ident),+) => {$(impl<'a> $call<'a> {
        /// Where the gradients of the adapters go: one for each that is bound, in their order.
        pub fn d_adapters(mut self, list: &'a [AdapterGrads<'a>]) -> Self {
            self.raw.d_adapters = list.as_ptr() as *const sys::moec_adapter;
            self.adapters.gradients = Some(list.len());
            self
        }
    })+};
}
with_adapter_grads!(ExpertsGradCall, LayerGradCall);
