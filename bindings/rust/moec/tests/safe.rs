// SPDX-License-Identifier: Apache-2.0
//! What the safe layer adds: views, half types, plans, threads, drops in any order.
use moec::half::{bf16, f16};
use moec::*;

const T: usize = 5;
const H: usize = 16;

struct Problem {
    x: Vec<f32>,
    gate: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

fn problem() -> Problem {
    let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin() * 0.5).collect();
    Problem {
        x: wave(T * H, 0.7),
        gate: wave(4 * H, 0.3),
        gate_up: wave(4 * 16 * H, 0.11),
        down: wave(4 * H * 8, 0.13),
    }
}

fn layer(context: &Context, dtype: u32) -> Layer {
    let router = RouterDesc::new().num_experts(4).top_k(2).norm(sys::MOEC_NORM_SUM);
    let experts = ExpertsDesc::new().num_experts(4).top_k(2).hidden(H as i64).inter(8).dtype(dtype);
    Layer::new(context, &router, &experts.gate_layout(sys::MOEC_GATE_THEN_UP)).unwrap()
}

fn weights_desc(dtype: u32) -> WeightsDesc {
    let desc = WeightsDesc::new().num_experts(4).hidden(H as i64).inter(8).dtype(dtype);
    desc.gate_layout(sys::MOEC_GATE_THEN_UP)
}

/// y of the problem with every array in element type E.
fn forward<E: Element>(context: &Context, of: impl Fn(f32) -> E, zero: E) -> Vec<E> {
    let p = problem();
    let all = |values: &[f32]| -> Vec<E> { values.iter().map(|&v| of(v)).collect() };
    let (x, gate_up, down) = (all(&p.x), all(&p.gate_up), all(&p.down));
    let set = WeightSet::new()
        .gate_up(Tensor::new(&gate_up, &[4, 16, H]))
        .down(Tensor::new(&down, &[4, H, 8]));
    let weights = Weights::new(context, &weights_desc(E::DTYPE), &set).unwrap();
    let mut y = vec![zero; T * H];
    let mut call = LayerCall::new()
        .weights(&weights)
        .x(Tensor::new(&x, &[T, H]))
        .gate_weight(Tensor::new(&p.gate, &[4, H]))
        .y(TensorMut::new(&mut y, &[T, H]));
    layer(context, E::DTYPE).forward(&mut call, Stream::DEFAULT).unwrap();
    y
}

#[test]
fn half_types_are_near_f32() {
    let context = Context::cpu().unwrap();
    let exact = forward(&context, |v| v, 0.0);
    let largest = exact.iter().fold(0f32, |a, v| a.max(v.abs()));
    let half = forward(&context, f16::from_f32, f16::ZERO);
    let brain = forward(&context, bf16::from_f32, bf16::ZERO);
    for ((&y, h), b) in exact.iter().zip(half).zip(brain) {
        assert!((y - h.to_f32()).abs() < 0.01 * largest, "{y} {h}");
        assert!((y - b.to_f32()).abs() < 0.05 * largest, "{y} {b}");
    }
}

#[test]
fn a_wrong_shape_is_an_error_and_a_wrong_length_a_panic() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    let set = WeightSet::new().gate_up(Tensor::new(&p.gate_up, &[4, 8, 32]));
    let error = Weights::new(&context, &weights_desc(sys::MOEC_F32), &set).err().unwrap();
    assert_eq!((error.code, error.name()), (sys::MOEC_E_SHAPE, "MOEC_E_SHAPE"));
    assert!(std::panic::catch_unwind(|| Tensor::new(&[0f32; 3], &[2, 2])).is_err());
}

#[test]
fn plans_are_saved_and_restored() {
    let context = Context::cpu().unwrap();
    let desc = PlanDesc::new().max_tokens(8).num_experts(4).top_k(2);
    let ids = [0i64, 1, 2, 3, 1, 0];
    let mut plan = Plan::new(&context, &desc).unwrap();
    plan.from_topk(Tensor::new(&ids, &[3, 2]), None, Stream::DEFAULT).unwrap();
    assert_eq!(plan.totals(Stream::DEFAULT).unwrap()[0], 6);
    let saved = plan.save(Stream::DEFAULT).unwrap();
    let mut other = Plan::new(&context, &desc).unwrap();
    other.restore(&saved, Stream::DEFAULT).unwrap();
    assert_eq!(other.save(Stream::DEFAULT).unwrap(), saved);
    let mut damaged = saved.clone();
    *damaged.last_mut().unwrap() ^= 1;
    assert_eq!(other.restore(&damaged, Stream::DEFAULT).unwrap_err().name(), "MOEC_E_CORRUPT");
}

#[test]
fn handles_are_shared_between_threads_and_dropped_in_any_order() {
    let context = Context::new(&ContextDesc::new().num_threads(1)).unwrap();
    let expected = forward(&context, |v| v, 0.0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(forward(&context, |v| v, 0.0), expected));
        }
    });
    let orphan = layer(&context, sys::MOEC_F32);
    drop(context);
    assert!(orphan.sizes().unwrap().forward_workspace.base > 0);
}

#[test]
fn device_addresses_are_not_host_memory() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    // SAFETY: never read: the context refuses memory of another device first.
    let x = unsafe { Tensor::from_device(8 as *const f32, sys::MOEC_CUDA, 0, &[T, H]) };
    let set = WeightSet::new()
        .gate_up(Tensor::new(&p.gate_up, &[4, 16, H]))
        .down(Tensor::new(&p.down, &[4, H, 8]));
    let weights = Weights::new(&context, &weights_desc(sys::MOEC_F32), &set).unwrap();
    let mut y = vec![0f32; T * H];
    let mut call = LayerCall::new()
        .weights(&weights)
        .x(x)
        .gate_weight(Tensor::new(&p.gate, &[4, H]))
        .y(TensorMut::new(&mut y, &[T, H]));
    let error = layer(&context, sys::MOEC_F32).forward(&mut call, Stream::DEFAULT).unwrap_err();
    assert_eq!(error.name(), "MOEC_E_DEVICE");
}

/// Router, plan and experts one by one give what the layer gives, forward and backward, also from
/// a packed copy of weights declared frozen.
#[test]
fn the_parts_are_the_layer() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    let dot =
        |t: usize, e: usize| -> f32 { (0..H).map(|h| p.x[t * H + h] * p.gate[e * H + h]).sum() };
    let logits: Vec<f32> = (0..T * 4).map(|i| dot(i / 4, i % 4)).collect();
    let (mut ids, mut routing) = (vec![0i32; T * 2], vec![0f32; T * 2]);
    let desc = RouterDesc::new().num_experts(4).top_k(2).norm(sys::MOEC_NORM_SUM);
    let mut route = RouteCall::new()
        .logits(Tensor::new(&logits, &[T, 4]))
        .expert_ids(TensorMut::new(&mut ids, &[T, 2]))
        .routing_weights(TensorMut::new(&mut routing, &[T, 2]));
    Router::new(&context, &desc).unwrap().route(&mut route, Stream::DEFAULT).unwrap();

    let plan_desc = PlanDesc::new().max_tokens(T as i64).num_experts(4).top_k(2);
    let mut plan = Plan::new(&context, &plan_desc).unwrap();
    let weights_of_slots = Tensor::new(&routing, &[T, 2]);
    plan.from_topk(Tensor::new(&ids, &[T, 2]), Some(weights_of_slots), Stream::DEFAULT).unwrap();
    let experts_desc = ExpertsDesc::new().num_experts(4).top_k(2).hidden(H as i64).inter(8);
    let experts_desc = experts_desc.dtype(sys::MOEC_F32).save(sys::MOEC_SAVE_ALL);
    let experts_desc = experts_desc.gate_layout(sys::MOEC_GATE_THEN_UP);
    let experts = Experts::new(&context, &experts_desc).unwrap();
    let set = WeightSet::new()
        .gate_up(Tensor::new(&p.gate_up, &[4, 16, H]))
        .down(Tensor::new(&p.down, &[4, H, 8]));
    let frozen = weights_desc(sys::MOEC_F32).flags(sys::MOEC_WEIGHTS_FROZEN);
    let mut weights = Weights::new(&context, &frozen, &set).unwrap();
    weights.pack(Stream::DEFAULT).unwrap();

    let sizes = experts.sizes().unwrap();
    let mut saved = vec![0u8; bytes_for(sizes.saved, T)];
    let mut workspace = vec![0u8; bytes_for(sizes.forward_workspace, T)];
    let (mut y, mut d_x) = (vec![0f32; T * H], vec![0f32; T * H]);
    let call = || ExpertsCall::new().plan(&plan).weights(&weights).x(Tensor::new(&p.x, &[T, H]));
    let mut forward_call =
        call().y(TensorMut::new(&mut y, &[T, H])).saved(&mut saved).workspace(&mut workspace);
    experts.forward(&mut forward_call, Stream::DEFAULT).unwrap();
    for (&got, expected) in y.iter().zip(forward(&context, |v| v, 0.0)) {
        assert!((got - expected).abs() < 1e-5, "{got} {expected}");
    }
    let mut backward = ExpertsGradCall::new()
        .plan(&plan)
        .weights(&weights)
        .x(Tensor::new(&p.x, &[T, H]))
        .d_y(Tensor::new(&y, &[T, H]))
        .saved(&mut saved)
        .d_x(TensorMut::new(&mut d_x, &[T, H]));
    experts.backward(&mut backward, Stream::DEFAULT).unwrap();
    assert!(d_x.iter().any(|&v| v != 0.0));
}

/// Tensors of a safetensors file start at any multiple of their element: each array here starts one
/// element after an aligned one.
#[test]
fn element_aligned_arrays_are_accepted() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    let shifted = |values: &[f32]| [&[0.0], values].concat();
    let (x, gate) = (shifted(&p.x), shifted(&p.gate));
    let (gate_up, down) = (shifted(&p.gate_up), shifted(&p.down));
    let set = WeightSet::new()
        .gate_up(Tensor::new(&gate_up[1..], &[4, 16, H]))
        .down(Tensor::new(&down[1..], &[4, H, 8]));
    let weights = Weights::new(&context, &weights_desc(sys::MOEC_F32), &set).unwrap();
    let mut y = vec![0f32; T * H + 1];
    let mut call = LayerCall::new()
        .weights(&weights)
        .x(Tensor::new(&x[1..], &[T, H]))
        .gate_weight(Tensor::new(&gate[1..], &[4, H]))
        .y(TensorMut::new(&mut y[1..], &[T, H]));
    layer(&context, sys::MOEC_F32).forward(&mut call, Stream::DEFAULT).unwrap();
    assert_eq!(y[1..], forward(&context, |v| v, 0.0));
}

#[cfg(feature = "ndarray")]
#[test]
fn ndarray_views_are_read_and_written_in_place() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    let x = ndarray::Array2::from_shape_vec((T, H), p.x.clone()).unwrap();
    let mut y = ndarray::Array2::<f32>::zeros((T, H));
    let set = WeightSet::new()
        .gate_up(Tensor::new(&p.gate_up, &[4, 16, H]))
        .down(Tensor::new(&p.down, &[4, H, 8]));
    let weights = Weights::new(&context, &weights_desc(sys::MOEC_F32), &set).unwrap();
    let mut call = LayerCall::new()
        .weights(&weights)
        .x(Tensor::from_view(x.view()))
        .gate_weight(Tensor::new(&p.gate, &[4, H]))
        .y(TensorMut::from_view(y.view_mut()));
    layer(&context, sys::MOEC_F32).forward(&mut call, Stream::DEFAULT).unwrap();
    assert_eq!(y.into_raw_vec_and_offset().0, forward(&context, |v| v, 0.0));
    let turned = x.t();
    assert!(std::panic::catch_unwind(|| Tensor::from_view(turned)).is_err());
}

#[test]
fn device_arrays_serve_calls() {
    let (context, p) = (Context::cpu().unwrap(), problem());
    let on = |values: &[f32], shape: &[usize]| {
        DeviceArray::from_slice(&context, values, shape, Stream::DEFAULT).unwrap()
    };
    let (gate_up, down) = (on(&p.gate_up, &[4, 16, H]), on(&p.down, &[4, H, 8]));
    let set = WeightSet::new().gate_up(gate_up.tensor()).down(down.tensor());
    let weights = Weights::new(&context, &weights_desc(sys::MOEC_F32), &set).unwrap();
    let (x, gate) = (on(&p.x, &[T, H]), on(&p.gate, &[4, H]));
    let mut y = DeviceArray::<f32>::zeros(&context, &[T, H], Stream::DEFAULT).unwrap();
    let mut call = LayerCall::new()
        .weights(&weights)
        .x(x.tensor())
        .gate_weight(gate.tensor())
        .y(y.tensor_mut());
    layer(&context, sys::MOEC_F32).forward(&mut call, Stream::DEFAULT).unwrap();
    assert_eq!(y.to_vec(Stream::DEFAULT).unwrap(), forward(&context, |v| v, 0.0));
    y.copy_from_slice(&p.x, Stream::DEFAULT).unwrap();
    assert_eq!(y.to_vec(Stream::DEFAULT).unwrap(), p.x);
    y.zero(Stream::DEFAULT).unwrap();
    assert!(y.to_vec(Stream::DEFAULT).unwrap().iter().all(|&v| v == 0.0));
    assert!(DeviceArray::<f32>::zeros(&context, &[usize::MAX, 8], Stream::DEFAULT).is_err());
}
