// SPDX-License-Identifier: Apache-2.0
//! The golden families in memory of a GPU: the library's own, which no other package has to give,
//! and the CUDA driver's, on a stream of ours. `make test-gpu` runs it with
//! --include-ignored; scripts/build_gpu_bindings.sh builds it. peers.rs has ranks of an ep.
#[macro_use]
mod support;
#[path = "support/peers.rs"]
mod peers;
use moec::*;
use std::cell::RefCell;
use std::ffi::c_void;
use support::*;

/// The few calls of the CUDA driver that a test needs; memory is freed with it.
struct Driver {
    context: Context,
    library: libloading::Library,
    stream: *mut c_void,
    held: RefCell<Vec<u64>>,
}

macro_rules! cuda {
    ($driver:expr, $name:ident($($value:expr),*): fn($($type:ty),*)) => {{
        let symbol = concat!(stringify!($name), "\0").as_bytes();
        let status = unsafe {
            let function: libloading::Symbol<unsafe extern "C" fn($($type),*) -> i32> =
                $driver.get(symbol).unwrap();
            function($($value),*)
        };
        assert_eq!(status, 0, stringify!($name));
    }};
}

impl Driver {
    /// None without a driver or a device.
    fn new() -> Option<Self> {
        if device_count(sys::MOEC_CUDA).unwrap() == 0 {
            return None;
        }
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
        let (mut device, mut context, mut stream) =
            (0i32, std::ptr::null_mut(), std::ptr::null_mut());
        cuda!(library, cuInit(0): fn(u32));
        cuda!(library, cuDeviceGet(&mut device, 0): fn(*mut i32, i32));
        cuda!(library, cuDevicePrimaryCtxRetain(&mut context, device): fn(*mut *mut c_void, i32));
        cuda!(library, cuCtxSetCurrent(context): fn(*mut c_void));
        cuda!(library, cuStreamCreate(&mut stream, 1): fn(*mut *mut c_void, u32));
        let of_ours = Context::cuda(0).unwrap();
        Some(Self { context: of_ours, library, stream, held: RefCell::default() })
    }

    fn room(&self, bytes: usize) -> u64 {
        let mut address = 0u64;
        cuda!(self.library, cuMemAlloc_v2(&mut address, bytes.max(1)): fn(*mut u64, usize));
        self.held.borrow_mut().push(address);
        address
    }
}

/// An array in memory of the driver's.
struct Array {
    address: *mut f32,
    shape: Vec<usize>,
}

impl Memory for Driver {
    type Array = Array;
    type Bytes = (*mut u8, usize);
    fn context(&self) -> &Context {
        &self.context
    }
    fn stream(&self) -> Stream {
        // SAFETY: a stream of the driver, destroyed with this.
        unsafe { Stream::from_raw(self.stream) }
    }
    fn array(&self, values: &[f32], shape: &[usize]) -> Array {
        let bytes = std::mem::size_of_val(values);
        let address = self.room(bytes);
        // On the stream that reads it: a copy from pageable memory returns before it has landed.
        cuda!(self.library, cuMemcpyHtoDAsync_v2(address, values.as_ptr(), bytes, self.stream):
              fn(u64, *const f32, usize, *mut c_void));
        Array { address: address as *mut f32, shape: shape.to_vec() }
    }
    fn bytes(&self, count: usize) -> Self::Bytes {
        (self.room(count) as *mut u8, count)
    }
    fn read(array: &Array) -> Tensor<'_> {
        // SAFETY: the driver's memory of that size, alive until the driver is dropped.
        unsafe { Tensor::from_device(array.address, sys::MOEC_CUDA, 0, &array.shape) }
    }
    fn write(array: &mut Array) -> TensorMut<'_> {
        // SAFETY: as above.
        unsafe { TensorMut::from_device(array.address, sys::MOEC_CUDA, 0, &array.shape) }
    }
    fn save<'a>(call: LayerCall<'a>, bytes: &'a mut Self::Bytes) -> LayerCall<'a> {
        // SAFETY: memory of that size, for this call and its backward.
        unsafe { call.saved_on_device(bytes.0, bytes.1) }
    }
    fn values(&self, array: &Array) -> Vec<f32> {
        let mut values = vec![0f32; array.shape.iter().product()];
        let bytes = std::mem::size_of_val(&values[..]);
        cuda!(self.library, cuMemcpyDtoH_v2(values.as_mut_ptr(), array.address as u64, bytes):
              fn(*mut f32, u64, usize));
        values
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for &address in self.held.borrow().iter() {
            cuda!(self.library, cuMemFree_v2(address): fn(u64));
        }
        cuda!(self.library, cuStreamDestroy_v2(self.stream): fn(*mut c_void));
    }
}

/// README.md's second program.
#[rustfmt::skip]
fn readme_program() -> Result<f32> {
    let context = Context::cuda(0)?;
    let on = |values: &[f32], shape: &[usize]|
        DeviceArray::from_slice(&context, values, shape, Stream::DEFAULT);
    let (x, gate) = (on(&[0.5; 4 * 64], &[4, 64])?, on(&[0.1; 8 * 64], &[8, 64])?);
    let (gate_up, down) = (on(&[0.01; 8 * 96 * 64], &[8, 96, 64])?,
        on(&[0.02; 8 * 64 * 48], &[8, 64, 48])?);
    let mut y = DeviceArray::<f32>::zeros(&context, &[4, 64], Stream::DEFAULT)?;
    let layer = Layer::new(&context, &RouterDesc::new().num_experts(8).top_k(2),
        &ExpertsDesc::new().num_experts(8).top_k(2).hidden(64).inter(48).dtype(sys::MOEC_F32))?;
    let form = WeightsDesc::new().num_experts(8).hidden(64).inter(48).dtype(sys::MOEC_F32);
    let weights = Weights::new(&context, &form.gate_layout(sys::MOEC_GATE_THEN_UP),
        &WeightSet::new()
        .gate_up(gate_up.tensor()).down(down.tensor()))?;
    let mut call = LayerCall::new().weights(&weights).x(x.tensor())
        .gate_weight(gate.tensor()).y(y.tensor_mut());
    layer.forward(&mut call, Stream::DEFAULT)?;
    let y = y.to_vec(Stream::DEFAULT)?; // waits for the stream
    Ok(y[0])
}

#[test]
fn readme_has_this_program() {
    let squeeze = |text: &str, from: &str, to: &str| -> String {
        let body = text.split_once(from).unwrap().1.split_once(to).unwrap().0;
        body.split_whitespace().collect()
    };
    let page = include_str!("../README.md").split_once("## A GPU").unwrap().1;
    let here = squeeze(include_str!("device.rs"), "readme_program() -> Result<f32> {", "Ok(");
    assert_eq!(squeeze(page, "fn main() -> Result<()> {", "println!"), here);
}

#[test]
#[ignore = "needs a CUDA device"]
fn readme_program_runs() {
    let first = readme_program().unwrap();
    assert!((first - 0.01424).abs() < 1e-4, "{first}"); // as on the CPU
}

#[test]
#[ignore = "needs a CUDA device"]
fn families_in_arrays_of_the_library() {
    let context = Context::cuda(0).unwrap();
    run_all(|| Device(&context));
}

#[test]
#[ignore = "needs a CUDA device"]
fn families_in_memory_of_the_driver() {
    assert!(Driver::new().is_some(), "no CUDA device");
    run_all(|| Driver::new().unwrap());
}

#[test]
#[ignore = "needs a CUDA device"]
fn host_slices_are_refused() {
    let context = Context::cuda(0).unwrap();
    let experts = ExpertsDesc::new().num_experts(4).top_k(2).hidden(64).inter(32);
    let experts = experts.gate_layout(sys::MOEC_GATE_THEN_UP).dtype(sys::MOEC_F32);
    let layer = Layer::new(&context, &RouterDesc::new().num_experts(4).top_k(2), &experts).unwrap();
    let mut workspace = vec![0u8; 1 << 20];
    let mut call = LayerCall::new().workspace(&mut workspace);
    let error = layer.forward(&mut call, Stream::DEFAULT).unwrap_err();
    assert_eq!((error.code, &*error.site), (sys::MOEC_E_DEVICE, "moec_layer_forward"));
    assert!(error.message.contains("workspace is a host slice"), "{error}");
}
