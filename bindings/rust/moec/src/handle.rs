// SPDX-License-Identifier: Apache-2.0
//! Owned handles. The library counts references itself, so handles may be dropped in any order.
use crate::error::{check, loaded, sized, Result};
use crate::layer::ContextDesc;
use moec_sys as sys;
use std::marker::PhantomData;
use std::ptr::{null, null_mut};

/// Where work is queued: a `cudaStream_t`, or nothing on the CPU.
#[derive(Clone, Copy)]
pub struct Stream(pub(crate) sys::moec_stream);

impl Stream {
    pub const DEFAULT: Stream = Stream(null_mut());

    /// # Safety
    /// `raw` must be a live stream of the device that it is used with.
    pub unsafe fn from_raw(raw: *mut std::os::raw::c_void) -> Self {
        Stream(raw)
    }
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident $(<$life:lifetime>)?, $raw:ident, $free:ident
     $(, $field:ident: $type:ty)?) => {
        $(#[$doc])*
        pub struct $name $(<$life>)? {
            pub(crate) raw: *mut sys::$raw,
            $(pub(crate) $field: $type,)?
            #[allow(dead_code)]
            borrowed: PhantomData<$(&$life)? ()>,
        }
        // SAFETY: a handle may move between threads; `const` uses are safe from many threads at
        // once.
        unsafe impl $(<$life>)? Send for $name $(<$life>)? {}
        unsafe impl $(<$life>)? Sync for $name $(<$life>)? {}
        impl $(<$life>)? Drop for $name $(<$life>)? {
            fn drop(&mut self) {
                // SAFETY: owned, freed once.
                unsafe { sys::$free(self.raw) }
            }
        }
        impl $(<$life>)? $name $(<$life>)? {
            pub(crate) fn own(raw: *mut sys::$raw $(, $field: $type)?) -> Self {
                Self { raw, $($field,)? borrowed: PhantomData }
            }
            /// The C handle, still owned by `self`.
            pub fn as_raw(&self) -> *mut sys::$raw {
                self.raw
            }
        }
    };
}

handle!(
    /// A device and its scratch memory.
    Context, moec_context, moec_context_free, on_cpu: bool);
handle!(
    /// An immutable router.
    Router, moec_router, moec_router_free);
handle!(
    /// The routing of one batch, sorted by expert.
    Plan, moec_plan, moec_plan_free);
handle!(
    /// Expert matrices, borrowed for `'a`.
    Weights<'a>, moec_weights, moec_weights_free);
handle!(
    /// Adapters (LoRA), whose factors are borrowed for `'a`.
    Adapters<'a>, moec_adapters, moec_adapters_free, count: usize);
handle!(
    /// An immutable set of experts.
    Experts, moec_experts, moec_experts_free, on_cpu: bool);
handle!(
    /// Router and experts in one call.
    Layer, moec_layer, moec_layer_free, on_cpu: bool);

/// How many devices of a type (`moec_sys::MOEC_CPU`, `MOEC_CUDA`) there are; 0 without a driver.
pub fn device_count(device_type: u32) -> Result<i32> {
    loaded()?;
    let mut count = 0;
    check(unsafe { sys::moec_device_count(device_type as i32, &mut count) })?;
    Ok(count)
}

/// The version of the running library, such as "0.1.0".
pub fn version() -> Result<&'static str> {
    loaded()?;
    // SAFETY: static text.
    let text = unsafe { std::ffi::CStr::from_ptr(sys::moec_version_string()) };
    Ok(text.to_str().unwrap_or(""))
}

impl Context {
    /// The CPU, on all usable cores.
    pub fn cpu() -> Result<Self> {
        Self::new(&ContextDesc::new())
    }

    /// A CUDA device.
    pub fn cuda(device_id: i32) -> Result<Self> {
        let device_type = sys::MOEC_CUDA as i32;
        Self::new(&ContextDesc::new().device_type(device_type).device_id(device_id))
    }

    /// One device.
    pub fn new(desc: &ContextDesc) -> Result<Self> {
        // SAFETY: a descriptor made by its methods has neither allocator nor pool.
        unsafe { Self::from_raw(desc.as_raw()) }
    }

    /// A context with the caller's own allocator or thread pool.
    ///
    /// # Safety
    /// `allocator` and `pool` are null or as `moec.h` says, and stay so until the context and all
    /// that was made with it are dropped.
    pub unsafe fn from_raw(desc: &sys::moec_context_desc) -> Result<Self> {
        loaded()?;
        let mut raw = null_mut();
        check(unsafe { sys::moec_context_create(desc, &mut raw) })?;
        let on_cpu = [0, sys::MOEC_CPU as i32].contains(&desc.device_type);
        Ok(Self::own(raw, on_cpu))
    }

    /// Host counters: calls, allocations, bytes of scratch, FLOPs.
    pub fn stats(&self) -> Result<sys::moec_stats> {
        let mut stats = sized();
        check(unsafe { sys::moec_context_stats(self.raw, &mut stats) })?;
        Ok(stats)
    }

    /// Wait for the work queued on `stream`.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        check(unsafe { sys::moec_context_sync(self.raw, stream.0) })
    }
}

pub(crate) fn optional<T>(value: Option<&T>) -> *const T {
    value.map_or(null(), |v| v as *const T)
}
