// SPDX-License-Identifier: Apache-2.0
//! Codes and scales of plain weights, made by the library in memory that it allocated.
use crate::call::Quant;
use crate::error::{check, sized, Result};
use crate::handle::{Context, Stream};
use crate::layer::QuantiseDesc;
use crate::tensor::Tensor;
use moec_sys as sys;

/// Between the arrays of a `Quantised`: more than any element, and a line of memory.
const ALIGNMENT: usize = 256;

/// A matrix of codes with its scales, on the context's device; dropping it gives the memory back.
///
/// ```
/// use moec::*;
/// let context = Context::cpu()?;
/// let values: Vec<f32> = (0..2 * 8 * 64).map(|i| (i as f32).sin()).collect();
/// let desc = QuantiseDesc::new().kind(sys::MOEC_QUANTISE_NF4).dtype(sys::MOEC_F32)
///     .num_experts(2).out_features(8).in_features(64);
/// let source = Tensor::new(&values, &[2, 8, 64]);
/// let codes = Quantised::new(&context, &desc, source, Stream::DEFAULT)?;
/// assert_eq!(codes.scheme(), sys::MOEC_SCHEME_CODEBOOK4);
/// assert_eq!(context.read(codes.codes(), Stream::DEFAULT)?.len(), 2 * 8 * 64 / 2);
/// # Ok::<(), Error>(())
/// ```
pub struct Quantised<'c> {
    context: &'c Context,
    memory: sys::moec_buffer,
    codes: sys::moec_tensor,
    quant: sys::moec_quant,
    scheme: u32,
}

// SAFETY: addresses and a context, which may move between threads and be shared by them.
unsafe impl Send for Quantised<'_> {}
unsafe impl Sync for Quantised<'_> {}

fn arrays(quant: &mut sys::moec_quant) -> [&mut sys::moec_tensor; 7] {
    [
        &mut quant.scales,
        &mut quant.scales2,
        &mut quant.zeros,
        &mut quant.codebook,
        &mut quant.scale_book,
        &mut quant.scale_offset,
        &mut quant.group_index,
    ]
}

impl<'c> Quantised<'c> {
    /// Quantise `source`: `[E,N,K]`, or `[E,K,N]` where the orientation is IN_OUT. Codes are OUT_IN
    /// whatever the source, but for NF4 and FP4, which keep its order.
    pub fn new(
        context: &'c Context,
        desc: &QuantiseDesc,
        source: Tensor<'_>,
        stream: Stream,
    ) -> Result<Self> {
        let (mut info, mut quant): (sys::moec_quantise_info, sys::moec_quant) = (sized(), sized());
        let raw = context.as_raw();
        check(unsafe { sys::moec_quantise_query(raw, desc.as_raw(), &mut info, &mut quant) })?;
        let memory = sys::moec_buffer { ptr: std::ptr::null_mut(), bytes: 0 };
        let mut made = Self { context, memory, codes: info.codes, quant, scheme: info.scheme };
        made.allocate()?;
        let mut args: sys::moec_quantise_args = sized();
        (args.desc, args.quant) = (desc.as_raw(), &made.quant);
        (args.source, args.codes) = (source.raw, made.codes);
        check(unsafe { sys::moec_quantise(raw, &args, stream.0) })?;
        Ok(made)
    }

    /// One allocation for the codes and what is beside them.
    fn allocate(&mut self) -> Result<()> {
        let size = |tensor: &sys::moec_tensor| {
            Tensor::borrowed(*tensor).bytes().div_ceil(ALIGNMENT) * ALIGNMENT
        };
        let beside: usize = arrays(&mut self.quant).iter().map(|tensor| size(tensor)).sum();
        let bytes = (size(&self.codes) + beside) as u64;
        let mut memory = self.memory;
        check(unsafe { sys::moec_buffer_alloc(self.context.as_raw(), bytes, &mut memory) })?;
        self.memory = memory;
        let mut info: sys::moec_device_info = sized();
        check(unsafe { sys::moec_context_device(self.context.as_raw(), &mut info) })?;
        let mut at = memory.ptr as *mut u8;
        for tensor in std::iter::once(&mut self.codes).chain(arrays(&mut self.quant)) {
            if tensor.dtype != 0 {
                (tensor.device_type, tensor.device_id) = (info.device_type, info.device_id);
                tensor.data = at as *mut _;
                at = at.wrapping_add(size(tensor));
            }
        }
        Ok(())
    }

    /// The `moec_scheme` that reads the codes: that of `WeightsDesc`.
    pub fn scheme(&self) -> u32 {
        self.scheme
    }

    pub fn codes(&self) -> Tensor<'_> {
        Tensor::borrowed(self.codes)
    }

    /// The scales and what else the scheme reads.
    pub fn quant(&self) -> Quant<'_> {
        let mut quant = Quant::new();
        quant.raw = self.quant;
        quant
    }

    /// The arrays of [`Self::quant`] by their names in `moec.h`, for a file.
    pub fn arrays(&self) -> Vec<(&'static str, Tensor<'_>)> {
        let named = [
            ("scales", self.quant.scales),
            ("scales2", self.quant.scales2),
            ("zeros", self.quant.zeros),
            ("codebook", self.quant.codebook),
            ("scale_book", self.quant.scale_book),
            ("scale_offset", self.quant.scale_offset),
        ];
        let there = named.into_iter().filter(|(_, tensor)| tensor.dtype != 0);
        there.map(|(name, tensor)| (name, Tensor::borrowed(tensor))).collect()
    }
}

impl Drop for Quantised<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this context, given back once; nothing was where it failed.
        let _ = unsafe { sys::moec_buffer_free(self.context.as_raw(), &mut self.memory) };
    }
}

impl Context {
    /// The bytes of a tensor of any device, in their order; waits for the stream.
    pub fn read(&self, tensor: Tensor<'_>, stream: Stream) -> Result<Vec<u8>> {
        // 64-bit words: aligned for every element
        let mut words = vec![0u64; tensor.bytes().div_ceil(8)];
        let mut target = tensor.raw;
        target.data = words.as_mut_ptr() as *mut _;
        (target.byte_offset, target.strides) = (0, Default::default());
        (target.device_type, target.device_id) = (sys::MOEC_CPU as i32, 0);
        check(unsafe { sys::moec_tensor_copy(self.as_raw(), &tensor.raw, &target, stream.0) })?;
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).take(tensor.bytes());
        Ok(bytes.collect())
    }
}
