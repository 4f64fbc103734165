// SPDX-License-Identifier: Apache-2.0
//! Every model family of tests/golden/cases.json: y and every gradient that its file has, per row.
//! Shown once to fail: gate and up matrices exchanged are off by more than 0.1.
#[macro_use]
mod support;
use moec::*;
use serde_json::Value;
use std::cell::RefCell;
use support::*;

/// The host's memory, given to the library as slices.
#[derive(Default)]
struct Host {
    held: RefCell<Vec<Box<[f32]>>>,
    saved: RefCell<Vec<Box<[u8]>>>,
}

impl Memory for Host {
    fn context(&self) -> Result<Context> {
        Context::new(&ContextDesc::new().num_threads(2))
    }
    fn stream(&self) -> Stream {
        Stream::DEFAULT
    }
    fn array(&self, values: &[f32], shape: &[usize]) -> Array {
        let mut held: Box<[f32]> = values.into();
        let address = held.as_mut_ptr();
        self.held.borrow_mut().push(held);
        Array { address, shape: shape.to_vec() }
    }
    fn read<'a>(&self, array: &'a Array) -> Tensor<'a> {
        // SAFETY: a box of that size, held until this is dropped.
        let values = unsafe { std::slice::from_raw_parts(array.address, array.count()) };
        Tensor::new(values, &array.shape)
    }
    fn write<'a>(&self, array: &'a Array) -> TensorMut<'a> {
        // SAFETY: as above; each array is written by one argument only.
        let values = unsafe { std::slice::from_raw_parts_mut(array.address, array.count()) };
        TensorMut::new(values, &array.shape)
    }
    fn save<'a>(&'a self, call: LayerCall<'a>, bytes: usize) -> LayerCall<'a> {
        let mut saved = self.saved.borrow_mut();
        saved.push(vec![0; bytes].into());
        let address = saved.last_mut().unwrap().as_mut_ptr();
        // SAFETY: held until this is dropped, and nobody else's.
        call.saved(unsafe { std::slice::from_raw_parts_mut(address, bytes) })
    }
    fn values(&self, array: &Array) -> Vec<f32> {
        // SAFETY: as in read.
        unsafe { std::slice::from_raw_parts(array.address, array.count()) }.to_vec()
    }
}

#[test]
fn families_forward_and_backward() {
    run_all(Host::default);
}

#[test]
fn exchanged_matrices_are_seen() {
    let file = cases();
    let named = |c: &&Value| c["family"] == "qwen3_moe";
    let mut case = file["cases"].as_array().unwrap().iter().find(named).unwrap().clone();
    case["weights"]["desc"]["gate_layout"] = sys::MOEC_UP_THEN_GATE.into();
    assert!(run(&Host::default(), &case).unwrap()[0].1 > 0.1);
}
