// SPDX-License-Identifier: Apache-2.0
//! Memory of a context's device that the library allocated: a GPU needs no other package.
use crate::error::{check, sized, Result};
use crate::handle::{Context, Stream};
use crate::tensor::{Element, Tensor, TensorMut};
use moec_sys as sys;
use std::marker::PhantomData;

/// A compact, row-major array on a context's device; dropping it gives the memory back.
///
/// ```
/// use moec::*;
/// let context = Context::cpu()?;
/// let mut a = DeviceArray::from_slice(&context, &[1.0f32, 2.0], &[2], Stream::DEFAULT)?;
/// assert_eq!(a.to_vec(Stream::DEFAULT)?, [1.0, 2.0]);
/// a.zero(Stream::DEFAULT)?;
/// assert_eq!(a.to_vec(Stream::DEFAULT)?, [0.0, 0.0]);
/// # Ok::<(), Error>(())
/// ```
pub struct DeviceArray<'c, T: Element> {
    context: &'c Context,
    memory: sys::moec_buffer,
    device: (u32, i32),
    shape: Vec<usize>,
    elements: PhantomData<T>,
}

// SAFETY: an address and a context, which may move between threads and be shared by them.
unsafe impl<T: Element> Send for DeviceArray<'_, T> {}
unsafe impl<T: Element> Sync for DeviceArray<'_, T> {}

impl<'c, T: Element> DeviceArray<'c, T> {
    /// Zeros, from where `stream` is.
    pub fn zeros(context: &'c Context, shape: &[usize], stream: Stream) -> Result<Self> {
        let array = Self::allocate(context, shape)?;
        array.zero_bytes(stream)?;
        Ok(array)
    }

    /// A copy of host memory. Panics if the shape does not have `values.len()` elements.
    pub fn from_slice(
        context: &'c Context,
        values: &[T],
        shape: &[usize],
        stream: Stream,
    ) -> Result<Self> {
        let source = Tensor::new(values, shape);
        let array = Self::allocate(context, shape)?;
        array.copy(&source.raw, &array.tensor().raw, stream)?;
        Ok(array)
    }

    fn allocate(context: &'c Context, shape: &[usize]) -> Result<Self> {
        let mut info: sys::moec_device_info = sized();
        check(unsafe { sys::moec_context_device(context.as_raw(), &mut info) })?;
        let count = shape.iter().try_fold(std::mem::size_of::<T>(), |all, &n| all.checked_mul(n));
        let bytes = count.map_or(u64::MAX, |n| n as u64); // more than any device has
        let mut memory = sys::moec_buffer { ptr: std::ptr::null_mut(), bytes: 0 };
        check(unsafe { sys::moec_buffer_alloc(context.as_raw(), bytes, &mut memory) })?;
        let device = (info.device_type as u32, info.device_id);
        Ok(Self { context, memory, device, shape: shape.to_vec(), elements: PhantomData })
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// As an input of a call.
    pub fn tensor(&self) -> Tensor<'_> {
        let data = self.memory.ptr as *const T;
        // SAFETY: memory of that shape and device, which lives as long as `self`; a free waits for
        // queued work.
        unsafe { Tensor::from_device(data, self.device.0, self.device.1, &self.shape) }
    }

    /// As an output of a call.
    pub fn tensor_mut(&mut self) -> TensorMut<'_> {
        let data = self.memory.ptr as *mut T;
        // SAFETY: as above, and borrowed alone.
        unsafe { TensorMut::from_device(data, self.device.0, self.device.1, &self.shape) }
    }

    /// All bytes, for a call to write.
    pub(crate) fn buffer(&mut self) -> sys::moec_buffer {
        self.memory
    }

    /// Copies host memory in; it has been read when this returns. Panics for another length.
    pub fn copy_from_slice(&mut self, values: &[T], stream: Stream) -> Result<()> {
        let source = Tensor::new(values, &self.shape);
        self.copy(&source.raw, &self.tensor().raw, stream)
    }

    /// The values; waits for the stream.
    pub fn to_vec(&self, stream: Stream) -> Result<Vec<T>> {
        let count = self.shape.iter().product();
        // SAFETY: any bits that the library writes are a value, and zeros are one.
        let mut values = vec![unsafe { std::mem::zeroed::<T>() }; count];
        let target = TensorMut::new(&mut values, &self.shape);
        self.copy(&self.tensor().raw, &target.raw, stream)?;
        Ok(values)
    }

    /// Sets every byte to 0, in the order of the stream.
    pub fn zero(&mut self, stream: Stream) -> Result<()> {
        self.zero_bytes(stream)
    }

    fn zero_bytes(&self, stream: Stream) -> Result<()> {
        let tensor = self.tensor();
        check(unsafe { sys::moec_tensor_zero(self.context.as_raw(), &tensor.raw, stream.0) })
    }

    fn copy(
        &self,
        source: &sys::moec_tensor,
        target: &sys::moec_tensor,
        stream: Stream,
    ) -> Result<()> {
        let context = self.context.as_raw();
        check(unsafe { sys::moec_tensor_copy(context, source, target, stream.0) })
    }
}

impl<T: Element> Drop for DeviceArray<'_, T> {
    fn drop(&mut self) {
        // SAFETY: allocated by this context, given back once.
        let _ = unsafe { sys::moec_buffer_free(self.context.as_raw(), &mut self.memory) };
    }
}
