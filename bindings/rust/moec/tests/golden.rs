// SPDX-License-Identifier: Apache-2.0
//! Every model family of tests/golden/cases.json: y and every gradient that its file has, per row,
//! on slices of the host and on arrays that the library allocates.
//! Shown once to fail: gate and up matrices exchanged are off by more than 0.1.
#[macro_use]
mod support;
#[path = "support/adapters.rs"]
mod adapters;
#[path = "support/quantised.rs"]
mod quantised;
use moec::*;
use serde_json::Value;
use support::*;

/// The host's memory, given to the library as slices.
struct Host(Context);

impl Host {
    fn new() -> Self {
        Self(Context::new(&ContextDesc::new().num_threads(2)).unwrap())
    }
}

impl Memory for Host {
    type Array = (Vec<f32>, Vec<usize>);
    type Bytes = Vec<u8>;
    fn context(&self) -> &Context {
        &self.0
    }
    fn stream(&self) -> Stream {
        Stream::DEFAULT
    }
    fn array(&self, values: &[f32], shape: &[usize]) -> Self::Array {
        (values.to_vec(), shape.to_vec())
    }
    fn bytes(&self, count: usize) -> Vec<u8> {
        vec![0; count]
    }
    fn read(array: &Self::Array) -> Tensor<'_> {
        Tensor::new(&array.0, &array.1)
    }
    fn write(array: &mut Self::Array) -> TensorMut<'_> {
        TensorMut::new(&mut array.0, &array.1)
    }
    fn save<'a>(call: LayerCall<'a>, bytes: &'a mut Vec<u8>) -> LayerCall<'a> {
        call.saved(bytes)
    }
    fn values(&self, array: &Self::Array) -> Vec<f32> {
        array.0.clone()
    }
}

#[test]
fn families_forward_and_backward() {
    run_all(Host::new);
}

#[test]
fn families_in_arrays_of_the_library() {
    let context = Context::cpu().unwrap();
    run_all(|| Device(&context));
}

#[test]
fn exchanged_matrices_are_seen() {
    let file = cases();
    let named = |c: &&Value| c["family"] == "qwen3_moe";
    let mut case = file["cases"].as_array().unwrap().iter().find(named).unwrap().clone();
    case["weights"]["desc"]["gate_layout"] = sys::MOEC_UP_THEN_GATE.into();
    assert!(run(&Host::new(), &case).unwrap()[0].1 > 0.1);
}
