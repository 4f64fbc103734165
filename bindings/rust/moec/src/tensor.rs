// SPDX-License-Identifier: Apache-2.0
use moec_sys as sys;
use std::marker::PhantomData;

macro_rules! eight_bits {
    ($($(#[$doc:meta])* $name:ident => $dtype:ident),*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(pub u8);
        // SAFETY: one byte, all of whose values are numbers of that type.
        unsafe impl Element for $name { const DTYPE: u32 = sys::$dtype; }
    )*};
}
eight_bits!(
    /// The bits of an e4m3fn number.
    F8E4M3 => MOEC_F8_E4M3,
    /// The bits of an e5m2 number.
    F8E5M2 => MOEC_F8_E5M2,
    /// The bits of an e8m0 number, a power of two.
    F8E8M0 => MOEC_F8_E8M0
);

/// Element types that tensors may have.
///
/// # Safety
/// The type has the size and the bits of an element of `DTYPE` and no padding, and every value that
/// the library may write is one of its own.
///
/// ```
/// #[derive(Clone, Copy)]
/// #[repr(transparent)]
/// struct Brain(u16);
/// // SAFETY: the 16 bits of a bfloat16.
/// unsafe impl moec::Element for Brain {
///     const DTYPE: u32 = moec::sys::MOEC_BF16;
/// }
/// moec::Tensor::new(&[Brain(0x3f80)], &[1]);
/// ```
///
/// ```compile_fail,E0200
/// #[derive(Clone, Copy)]
/// struct Nothing;
/// impl moec::Element for Nothing {
///     const DTYPE: u32 = moec::sys::MOEC_F32;
/// }
/// ```
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const DTYPE: u32;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        // SAFETY: the C type of that name; a bool is written as 0 or 1.
        unsafe impl Element for $type { const DTYPE: u32 = sys::$dtype; }
    )*};
}
elements!(f32 => MOEC_F32, f64 => MOEC_F64, half::f16 => MOEC_F16, half::bf16 => MOEC_BF16,
          i32 => MOEC_I32, i64 => MOEC_I64, i8 => MOEC_I8, u8 => MOEC_U8, bool => MOEC_BOOL);

fn describe(
    data: *mut std::os::raw::c_void,
    dtype: u32,
    device: (u32, i32),
    shape: &[usize],
) -> sys::moec_tensor {
    assert!(
        shape.len() <= sys::MOEC_MAX_DIMS as usize,
        "a tensor has at most {} dimensions",
        sys::MOEC_MAX_DIMS
    );
    // SAFETY: plain data; all-zero means "absent".
    let mut tensor: sys::moec_tensor = unsafe { std::mem::zeroed() };
    tensor.data = data;
    tensor.device_type = device.0 as i32;
    tensor.device_id = device.1;
    tensor.dtype = dtype;
    tensor.ndim = shape.len() as i32;
    for (to, &from) in tensor.shape.iter_mut().zip(shape) {
        *to = from as i64;
    }
    tensor
}

/// Bytes of an element of a type of `moec.h`, which has its bits in bits 8 to 15.
fn element_bytes(dtype: u32) -> usize {
    (dtype >> 8 & 0xff) as usize / 8
}

fn checked_len(len: usize, shape: &[usize]) {
    let wanted: usize = shape.iter().product();
    assert_eq!(len, wanted, "slice has {len} elements, shape {shape:?} needs {wanted}");
}

/// The tensor with strides, in elements. Panics if one of its elements is not among `len`.
fn with_strides(mut tensor: sys::moec_tensor, strides: &[usize], len: usize) -> sys::moec_tensor {
    let shape = &tensor.shape[..tensor.ndim as usize];
    assert_eq!(strides.len(), shape.len(), "one stride for each of {} dimensions", shape.len());
    let ends = shape.iter().zip(strides).map(|(&extent, &stride)| (extent as usize, stride));
    let last = ends.clone().try_fold(0usize, |sum, (extent, stride)| {
        stride.checked_mul(extent.saturating_sub(1)).and_then(|step| sum.checked_add(step))
    });
    let is_empty = shape.contains(&0);
    assert!(
        is_empty || last.is_some_and(|last| last < len),
        "slice has {len} elements, shape {shape:?} with strides {strides:?} needs more"
    );
    for (to, (_, stride)) in tensor.strides.iter_mut().zip(ends) {
        *to = stride as i64;
    }
    tensor
}

/// A borrowed, row-major array that the library reads.
#[derive(Clone, Copy)]
#[repr(transparent)] // a slice of them is a C array
pub struct Tensor<'a> {
    pub(crate) raw: sys::moec_tensor,
    memory: PhantomData<&'a ()>,
}

/// A borrowed, row-major array that the library writes.
#[repr(transparent)]
pub struct TensorMut<'a> {
    pub(crate) raw: sys::moec_tensor,
    memory: PhantomData<&'a mut ()>,
}

impl<'a> Tensor<'a> {
    /// View of host memory. Panics if the shape does not have `data.len()` elements.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Self {
        checked_len(data.len(), shape);
        Self {
            raw: describe(data.as_ptr() as *mut _, T::DTYPE, (sys::MOEC_CPU, 0), shape),
            memory: PhantomData,
        }
    }

    /// View of host memory whose element (i, j, ...) is at i `strides[0]` + j `strides[1]` + ...;
    /// strides of 0 alone are those of a compact array. Panics if an element lies outside of
    /// `data`. The arguments that may have strides say so in `moec.h`.
    ///
    /// ```
    /// let turned = moec::Tensor::strided(&[0f32; 6], &[2, 3], &[1, 2]);
    /// ```
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Self {
        let raw = describe(data.as_ptr() as *mut _, T::DTYPE, (sys::MOEC_CPU, 0), shape);
        Self { raw: with_strides(raw, strides, data.len()), memory: PhantomData }
    }

    /// View of the bytes of an array of type `dtype` (`moec_sys::MOEC_BF16`, ...), such as those of
    /// a checkpoint's file. Panics if the shape has another number of bytes.
    ///
    /// ```
    /// let codes = moec::Tensor::from_bytes(&[0x38, 0x40], moec::sys::MOEC_F8_E4M3, &[1, 2]);
    /// assert_eq!((codes.dtype(), codes.shape()), (moec::sys::MOEC_F8_E4M3, &[1i64, 2][..]));
    /// ```
    pub fn from_bytes(data: &'a [u8], dtype: u32, shape: &[usize]) -> Self {
        let wanted = shape.iter().product::<usize>() * element_bytes(dtype);
        assert_eq!(data.len(), wanted, "{} bytes; shape {shape:?} needs {wanted}", data.len());
        Self {
            raw: describe(data.as_ptr() as *mut _, dtype, (sys::MOEC_CPU, 0), shape),
            memory: PhantomData,
        }
    }

    /// One of `moec_sys::MOEC_F32` and its like; 0 = absent.
    pub fn dtype(&self) -> u32 {
        self.raw.dtype
    }

    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.ndim as usize]
    }

    pub(crate) fn borrowed(raw: sys::moec_tensor) -> Self {
        Self { raw, memory: PhantomData }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.shape().iter().product::<i64>() as usize * element_bytes(self.raw.dtype)
    }

    /// View of memory on a device.
    ///
    /// # Safety
    /// `data` must be valid for reads of the whole shape on that device until the work queued with
    /// it is done.
    pub unsafe fn from_device<T: Element>(
        data: *const T,
        device_type: u32,
        device_id: i32,
        shape: &[usize],
    ) -> Self {
        Self {
            raw: describe(data as *mut _, T::DTYPE, (device_type, device_id), shape),
            memory: PhantomData,
        }
    }
}

impl<'a> TensorMut<'a> {
    /// View of host memory. Panics if the shape does not have `data.len()` elements.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Self {
        checked_len(data.len(), shape);
        Self {
            raw: describe(data.as_mut_ptr() as *mut _, T::DTYPE, (sys::MOEC_CPU, 0), shape),
            memory: PhantomData,
        }
    }

    /// View of host memory whose element (i, j, ...) is at i `strides[0]` + j `strides[1]` + ...;
    /// strides of 0 alone are those of a compact array. Panics if an element lies outside of
    /// `data`. The arguments that may have strides say so in `moec.h`.
    ///
    /// ```
    /// let turned = moec::TensorMut::strided(&mut [0f32; 6], &[2, 3], &[1, 2]);
    /// ```
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Self {
        let raw = describe(data.as_mut_ptr() as *mut _, T::DTYPE, (sys::MOEC_CPU, 0), shape);
        Self { raw: with_strides(raw, strides, data.len()), memory: PhantomData }
    }

    /// View of memory on a device.
    ///
    /// # Safety
    /// As [`Tensor::from_device`], and nothing else may use the memory meanwhile.
    pub unsafe fn from_device<T: Element>(
        data: *mut T,
        device_type: u32,
        device_id: i32,
        shape: &[usize],
    ) -> Self {
        Self {
            raw: describe(data as *mut _, T::DTYPE, (device_type, device_id), shape),
            memory: PhantomData,
        }
    }
}

#[cfg(feature = "ndarray")]
mod views {
    use super::*;
    use ndarray::{ArrayView, ArrayViewMut, Dimension};

    impl<'a> Tensor<'a> {
        /// View of an array in standard (row-major) layout; panics for another layout.
        pub fn from_view<T: Element, D: Dimension>(view: ArrayView<'a, T, D>) -> Self {
            let shape = view.shape().to_vec();
            let data = view.to_slice().expect("the array is not in standard layout");
            Self::new(data, &shape)
        }
    }

    impl<'a> TensorMut<'a> {
        /// View of an array in standard (row-major) layout; panics for another layout.
        pub fn from_view<T: Element, D: Dimension>(view: ArrayViewMut<'a, T, D>) -> Self {
            let shape = view.shape().to_vec();
            let data = view.into_slice().expect("the array is not in standard layout");
            Self::new(data, &shape)
        }
    }
}
