// SPDX-License-Identifier: Apache-2.0
//! Arguments of the big calls: one builder per C struct, one method per field, each borrowing what
//! it is given.
use crate::adapters::AdapterCounts;
use crate::error::{sized, Error, Result};
use crate::handle::{Plan, Weights};
use crate::memory::DeviceArray;
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
                 memory of its device, given by {buffer}_array or {buffer}_on_device"
            ),
        })
    }
}

/// How many tensors the lists of a matrix have, `so_far` and `more`; 0 = there is no list.
fn joined(so_far: i64, more: i64) -> i64 {
    assert!(
        so_far == 0 || more == 0 || so_far == more,
        "a list has {more} tensors, another one of its matrix {so_far}"
    );
    so_far.max(more)
}

fn length_of<T>(list: &[T]) -> i64 {
    assert!(!list.is_empty(), "a list has 0 tensors; one for each expert is needed");
    list.len() as i64
}

// The rows of the macros come from moec.h: raw_calls.rs.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident: $raw:ident {
        $(read { $($(#[$read_doc:meta])* $read:ident,)+ })?
        $(write { $($(#[$write_doc:meta])* $write:ident,)+ })?
        $(list { $($(#[$list_doc:meta])* $list:ident,)+ })?
        $(set { $($(#[$set_doc:meta])* $set:ident: $type:ty,)+ })?
        $(handle { $($(#[$handle_doc:meta])* $handle:ident: $kind:ty,)+ })?
        $(matrices { $($(#[$matrices_doc:meta])* $matrices:ident,)+ })?
        $(buffer { $($(#[$buffer_doc:meta])* $buffer:ident, $array:ident, $on_device:ident,)+ })?
    })*) => {$(
        $(#[$doc])*
        pub struct $name<'a> {
            pub(crate) raw: sys::$raw,
            #[allow(dead_code)] // in calls without buffers
            pub(crate) on_host: OnHost,
            #[allow(dead_code)] // in calls without adapters
            pub(crate) adapters: AdapterCounts,
            #[allow(dead_code)] // in calls without lists
            count: i64,
            memory: PhantomData<&'a ()>,
        }
        impl Default for $name<'_> {
            fn default() -> Self {
                let (on_host, adapters) = Default::default();
                Self { raw: sized(), on_host, adapters, count: 0, memory: PhantomData }
            }
        }
        impl<'a> $name<'a> {
            pub fn new() -> Self {
                Self::default()
            }
            $($($(#[$read_doc])*
            pub fn $read(mut self, tensor: Tensor<'a>) -> Self {
                self.raw.$read = tensor.raw;
                self
            })+)?
            $($($(#[$write_doc])*
            pub fn $write(mut self, tensor: TensorMut<'a>) -> Self {
                self.raw.$write = tensor.raw;
                self
            })+)?
            $($($(#[$list_doc])*
            ///
            /// One tensor an expert. Panics if another list has another length.
            pub fn $list(mut self, tensors: &'a [Tensor<'a>]) -> Self {
                self.count = joined(self.count, length_of(tensors));
                self.raw.$list = tensors.as_ptr() as *const sys::moec_tensor;
                self
            })+)?
            $($($(#[$set_doc])*
            pub fn $set(mut self, value: $type) -> Self {
                self.raw.$set = value;
                self
            })+)?
            $($($(#[$handle_doc])*
            pub fn $handle(mut self, handle: &'a $kind) -> Self {
                self.raw.$handle = handle.raw;
                self
            })+)?
            $($($(#[$matrices_doc])*
            ///
            /// Where the gradients of these matrices go.
            pub fn $matrices(mut self, set: &'a WeightGrads<'a>) -> Self {
                self.raw.$matrices = &set.raw;
                self
            })+)?
            $($($(#[$buffer_doc])*
            ///
            /// At least the bytes that the size query says, from any address. Refused by handles
            /// of a device other than the CPU.
            pub fn $buffer(mut self, bytes: &'a mut [u8]) -> Self {
                let (ptr, bytes) = (bytes.as_mut_ptr() as *mut _, bytes.len() as u64);
                self.raw.$buffer = sys::moec_buffer { ptr, bytes };
                self.on_host.$buffer = true;
                self
            }

            /// The same in memory of the context's device that the library allocated.
            pub fn $array(mut self, bytes: &'a mut DeviceArray<'_, u8>) -> Self {
                self.raw.$buffer = bytes.buffer();
                self.on_host.$buffer = false;
                self
            }

            /// The same in other memory of the device.
            ///
            /// # Safety
            /// `address` is valid for `bytes` bytes on the context's device, and nothing else
            /// uses them, until the work queued with this call is done.
            pub unsafe fn $on_device(mut self, address: *mut u8, bytes: usize) -> Self {
                self.raw.$buffer = sys::moec_buffer { ptr: address as *mut _, bytes: bytes as u64 };
                self.on_host.$buffer = false;
                self
            })+)?
        }
    )*};
}

impl<'a> LayerGradCall<'a> {
    /// The forward call's inputs and its saved buffer; its outputs are not used.
    pub fn forward(mut self, call: &'a LayerCall<'a>) -> Self {
        self.raw.forward = &call.raw;
        self.on_host.saved = call.on_host.saved;
        self.adapters.bound = call.adapters.bound;
        self
    }
}

macro_rules! weight_sets {
    ($($(#[$doc:meta])* $name:ident of $tensor:ident {
        tensors { $($(#[$tensor_doc:meta])* $method:ident: $matrix:ident.$field:ident,)* }
        lists of $array:ty { $($(#[$list_doc:meta])* $list:ident: $owner:ident.$lists:ident,)* }
        $(parts { $($(#[$part_doc:meta])* $set:ident: $of:ident.$part:ident = $kind:ident,)* })?
    })*) => {$(
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
            $($(#[$tensor_doc])*
            pub fn $method(mut self, tensor: $tensor<'a>) -> Self {
                self.raw.$matrix.$field = tensor.raw;
                self
            })*
            $($(#[$list_doc])*
            ///
            /// One tensor an expert. Panics if another list of the matrix has another length.
            pub fn $list(mut self, tensors: $array) -> Self {
                self.raw.$owner.count = joined(self.raw.$owner.count, length_of(tensors));
                self.raw.$owner.$lists = tensors.as_ptr() as *const sys::moec_tensor;
                self
            })*
            $($($(#[$part_doc])*
            ///
            /// Panics if its lists and those of the matrix differ in length.
            pub fn $set(mut self, part: &'a $kind<'a>) -> Self {
                self.raw.$of.count = joined(self.raw.$of.count, part.count);
                self.raw.$of.$part = &part.raw;
                self
            })*)?
        }
    )*};
}

include!("raw_calls.rs");
