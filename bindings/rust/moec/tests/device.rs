// SPDX-License-Identifier: Apache-2.0
//! The golden families in device memory that the CUDA driver gives, on a stream of ours.
//! `make test-gpu` runs it with --include-ignored; scripts/build_gpu_bindings.sh builds it.
#[macro_use]
mod support;
use moec::*;
use safetensors::SafeTensors;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use support::*;

/// The few calls of the CUDA driver that a test needs; memory is freed with it.
struct Driver {
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
        Some(Self { library, stream, held: RefCell::default() })
    }

    fn room(&self, bytes: usize) -> *mut u8 {
        let mut address = 0u64;
        cuda!(self.library, cuMemAlloc_v2(&mut address, bytes.max(1)): fn(*mut u64, usize));
        self.held.borrow_mut().push(address);
        address as *mut u8
    }

    fn to_device(&self, values: &[f32]) -> *mut u8 {
        let (address, bytes) = (self.room(4 * values.len()), 4 * values.len());
        cuda!(self.library, cuMemcpyHtoD_v2(address as u64, values.as_ptr(), bytes):
              fn(u64, *const f32, usize));
        address
    }

    fn to_host(&self, address: *const u8, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        cuda!(self.library, cuMemcpyDtoH_v2(values.as_mut_ptr(), address as u64, 4 * count):
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

/// An array on the device.
struct Array {
    address: *mut u8,
    shape: Vec<usize>,
}

impl Array {
    fn count(&self) -> usize {
        self.shape.iter().product()
    }
    fn read(&self) -> Tensor<'_> {
        // SAFETY: the driver's memory of that size, alive until the driver is dropped.
        unsafe { Tensor::from_device(self.address as *const f32, sys::MOEC_CUDA, 0, &self.shape) }
    }
    fn write(&self) -> TensorMut<'_> {
        // SAFETY: as above; each array is written by one argument only.
        unsafe { TensorMut::from_device(self.address as *mut f32, sys::MOEC_CUDA, 0, &self.shape) }
    }
}

type Arrays = BTreeMap<String, Array>;

fn uploaded(driver: &Driver, from: &Arguments) -> Arrays {
    let one = |(role, a): (&String, &Argument)| {
        (role.clone(), Array { address: driver.to_device(&a.values), shape: a.shape.clone() })
    };
    from.iter().map(one).collect()
}

/// NaN everywhere, so that what is not written shows.
fn poisoned(driver: &Driver, shape: &[usize]) -> Array {
    let count = shape.iter().product();
    Array { address: driver.to_device(&vec![f32::NAN; count]), shape: shape.to_vec() }
}

fn gradients(driver: &Driver, of: &Arguments) -> Arrays {
    let wanted = of.iter().filter(|(_, a)| a.reference.is_some());
    wanted.map(|(role, a)| (role.clone(), poisoned(driver, &a.shape))).collect()
}

fn matrices(arrays: &Arrays) -> WeightSet<'_> {
    by_name!(
        WeightSet::new(),
        arrays,
        Array::read,
        gate_up,
        gate_up_bias,
        gate,
        gate_bias,
        up,
        up_bias,
        down,
        down_bias,
    )
}

fn d_matrices(arrays: &Arrays) -> WeightGrads<'_> {
    by_name!(
        WeightGrads::new(),
        arrays,
        Array::write,
        gate_up,
        gate_up_bias,
        gate,
        gate_bias,
        up,
        up_bias,
        down,
        down_bias,
    )
}

/// (tensor, row error) of y, x and every parameter.
fn run(driver: &Driver, case: &Value) -> Result<Vec<(String, f64)>> {
    let stream = unsafe { Stream::from_raw(driver.stream) };
    let context = Context::cuda(0)?;
    let bytes = std::fs::read(golden(&format!("{}.safetensors", case["family"].as_str().unwrap())))
        .unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let shape = file.tensor("x").unwrap().shape().to_vec();
    let upload = |name: &str| Array {
        address: driver.to_device(&floats(&file, name).unwrap()),
        shape: shape.clone(),
    };
    let (x, d_y) = (upload("x"), upload("dout"));
    let (y, d_x) = (poisoned(driver, &shape), poisoned(driver, &shape));
    let inputs = arguments(&file, &case["inputs"]);
    let routed = arguments(&file, &case["weights"]["matrices"]);
    let shared_json = case.get("shared_weights");
    let shared = shared_json.map_or(Arguments::new(), |s| arguments(&file, &s["matrices"]));
    let (given, on_device) = (uploaded(driver, &inputs), uploaded(driver, &routed));
    let shared_on_device = uploaded(driver, &shared);
    let (set, shared_set) = (matrices(&on_device), matrices(&shared_on_device));
    let weights = Weights::new(&context, &weights_desc(&case["weights"]["desc"]), &set)?;
    let shared_weights = shared_json
        .map(|s| Weights::new(&context, &weights_desc(&s["desc"]), &shared_set))
        .transpose()?;
    let layer =
        Layer::new(&context, &router_desc(&case["router"]), &experts_desc(&case["experts"]))?;
    let saved_bytes = bytes_for(layer.sizes()?.saved, shape[0]);

    let mut forward = LayerCall::new().weights(&weights).x(x.read()).y(y.write());
    if let Some(shared_weights) = &shared_weights {
        forward = forward.shared_weights(shared_weights);
    }
    // SAFETY: memory of that size, for this call and its backward.
    forward = unsafe { forward.saved_on_device(driver.room(saved_bytes), saved_bytes) };
    let mut forward = by_name!(
        forward,
        &given,
        Array::read,
        gate_weight,
        gate_bias,
        select_bias,
        shared_gate,
        output_bias,
    );
    layer.forward(&mut forward, stream)?;

    let d_inputs = gradients(driver, &inputs);
    let (d_routed, d_shared) = (gradients(driver, &routed), gradients(driver, &shared));
    let (grads, shared_grads) = (d_matrices(&d_routed), d_matrices(&d_shared));
    let backward = LayerGradCall::new().forward(&forward).d_y(d_y.read()).d_x(d_x.write());
    let backward = backward.d_expert_weights(&grads);
    let backward =
        if shared_json.is_some() { backward.d_shared_weights(&shared_grads) } else { backward };
    let renamed = d_inputs.iter().map(|(role, array)| (format!("d_{role}"), array));
    let mut backward = by_name!(
        backward,
        renamed,
        Array::write,
        d_gate_weight,
        d_gate_bias,
        d_shared_gate,
        d_output_bias,
    );
    layer.backward(&mut backward, stream)?;
    context.synchronize(stream)?;

    let host = |a: &Array| driver.to_host(a.address, a.count());
    let expected = |name: &str| floats(&file, name).unwrap();
    let mut errors = vec![
        ("y".to_string(), row_error(&host(&y), &expected("y"), shape[1])),
        ("x".to_string(), row_error(&host(&d_x), &expected("g.x"), shape[1])),
    ];
    for (got, wanted) in [(&d_inputs, &inputs), (&d_routed, &routed), (&d_shared, &shared)] {
        for (role, array) in got {
            let reference = wanted[role].reference.as_ref().unwrap();
            let columns = *array.shape.last().unwrap();
            errors.push((role.clone(), row_error(&host(array), reference, columns)));
        }
    }
    Ok(errors)
}

#[test]
#[ignore = "needs a CUDA device"]
fn families_in_device_memory() {
    assert!(Driver::new().is_some(), "no CUDA device");
    let file = cases();
    let tolerance = file["tolerance"].as_f64().unwrap();
    for case in file["cases"].as_array().unwrap() {
        let driver = Driver::new().unwrap();
        for (tensor, error) in run(&driver, case).unwrap() {
            assert!(error <= tolerance, "{} {tensor}: row error {error:.2e}", case["family"]);
        }
    }
}
