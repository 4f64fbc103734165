// SPDX-License-Identifier: Apache-2.0
//! Quantised, every kind of moec.h: its codes are bound, and the layer of them is that of the
//! values that they stand for; these are near the source. Lists of one tensor an expert.
use moec::*;

const E: usize = 3;
const H: usize = 64;
const I: usize = 32;

/// Kind, flags and how far a value may be from its source, of the largest of its matrix.
const KINDS: [(u32, u32, f32); 10] = [
    (sys::MOEC_QUANTISE_INT8, 0, 0.01),
    (sys::MOEC_QUANTISE_INT8, sys::MOEC_QUANTISE_ASYMMETRIC, 0.01),
    (sys::MOEC_QUANTISE_INT4, 0, 0.1),
    (sys::MOEC_QUANTISE_FP8, 0, 0.05),
    (sys::MOEC_QUANTISE_MXFP8, 0, 0.1),
    (sys::MOEC_QUANTISE_MXFP4, 0, 0.3),
    (sys::MOEC_QUANTISE_NVFP4, 0, 0.2),
    (sys::MOEC_QUANTISE_NVFP4, sys::MOEC_QUANTISE_SCALES2_DIVIDES, 0.2),
    (sys::MOEC_QUANTISE_NF4, sys::MOEC_QUANTISE_NESTED, 0.2),
    (sys::MOEC_QUANTISE_FP4, 0, 0.25),
];

fn wave(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * step).sin() * 0.5).collect()
}

fn form() -> WeightsDesc {
    let desc = WeightsDesc::new().num_experts(E as i32).hidden(H as i64).inter(I as i64);
    desc.gate_layout(sys::MOEC_GATE_THEN_UP).dtype(sys::MOEC_F32)
}

fn forward(context: &Context, weights: &Weights) -> Vec<f32> {
    let router = RouterDesc::new().num_experts(E as i32).top_k(2);
    let experts = ExpertsDesc::new().num_experts(E as i32).top_k(2).hidden(H as i64);
    let experts = experts.inter(I as i64).gate_layout(sys::MOEC_GATE_THEN_UP);
    let layer = Layer::new(context, &router, &experts.dtype(sys::MOEC_F32)).unwrap();
    let (x, gate, mut y) = (wave(5 * H, 0.7), wave(E * H, 0.3), vec![f32::NAN; 5 * H]);
    let mut call = LayerCall::new().weights(weights).x(Tensor::new(&x, &[5, H]));
    call = call.gate_weight(Tensor::new(&gate, &[E, H])).y(TensorMut::new(&mut y, &[5, H]));
    layer.forward(&mut call, Stream::DEFAULT).unwrap();
    y
}

fn values(weights: &Weights, matrix: u32, rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; E * rows * columns];
    for (e, values) in out.chunks_mut(rows * columns).enumerate() {
        let to = TensorMut::new(values, &[rows, columns]);
        weights.dequantise(matrix, e as i32, to, Stream::DEFAULT).unwrap();
    }
    out
}

#[test]
fn every_kind_is_bound_and_read() {
    let context = Context::cpu().unwrap();
    let (gate_up, down) = (wave(E * 2 * I * H, 0.11), wave(E * H * I, 0.13));
    for (kind, flags, limit) in KINDS {
        let make = |source: &[f32], n: usize, k: usize| {
            let desc = QuantiseDesc::new().kind(kind).flags(flags).dtype(sys::MOEC_F32);
            let desc = desc.num_experts(E as i64).out_features(n as i64).in_features(k as i64);
            let source = Tensor::new(source, &[E, n, k]);
            Quantised::new(&context, &desc, source, Stream::DEFAULT).unwrap()
        };
        let (first, second) = (make(&gate_up, 2 * I, H), make(&down, H, I));
        let (gate_up_quant, down_quant) = (first.quant(), second.quant());
        let desc = form().gate_up_scheme(first.scheme()).down_scheme(second.scheme());
        let set = WeightSet::new().gate_up(first.codes()).gate_up_quant(&gate_up_quant);
        let set = set.down(second.codes()).down_quant(&down_quant);
        let coded = Weights::new(&context, &desc, &set).unwrap();
        let wide_gate_up = values(&coded, sys::MOEC_MATRIX_GATE_UP, 2 * I, H);
        let wide_down = values(&coded, sys::MOEC_MATRIX_DOWN, H, I);
        for (value, source) in
            wide_gate_up.iter().chain(&wide_down).zip(gate_up.iter().chain(&down))
        {
            assert!((value - source).abs() <= limit * 0.5, "{kind}: {source} became {value}");
        }
        let set = WeightSet::new().gate_up(Tensor::new(&wide_gate_up, &[E, 2 * I, H]));
        let set = set.down(Tensor::new(&wide_down, &[E, H, I]));
        let wide = Weights::new(&context, &form(), &set).unwrap();
        let (y, expected) = (forward(&context, &coded), forward(&context, &wide));
        let largest = expected.iter().fold(0f32, |a, v| a.max(v.abs()));
        assert!(y.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-5 * largest), "{kind}");
        // What a file would hold makes the same weights.
        let bytes = context.read(second.codes(), Stream::DEFAULT).unwrap();
        let shape: Vec<usize> = second.codes().shape().iter().map(|&n| n as usize).collect();
        let again = WeightSet::new().gate_up(first.codes()).gate_up_quant(&gate_up_quant);
        let again = again.down(Tensor::from_bytes(&bytes, second.codes().dtype(), &shape));
        let again = Weights::new(&context, &desc, &again.down_quant(&down_quant)).unwrap();
        assert_eq!(values(&again, sys::MOEC_MATRIX_DOWN, H, I), wide_down);
        assert_eq!(second.arrays()[0].0, "scales");
    }
}

#[test]
fn a_source_that_cannot_be_quantised_is_an_error() {
    let context = Context::cpu().unwrap();
    let desc = QuantiseDesc::new().kind(sys::MOEC_QUANTISE_MXFP4).dtype(sys::MOEC_F32);
    let desc = desc.num_experts(1).out_features(8).in_features(33);
    let source = wave(8 * 33, 0.1);
    let source = Tensor::new(&source, &[1, 8, 33]);
    let error = Quantised::new(&context, &desc, source, Stream::DEFAULT).err().unwrap();
    assert!(error.message.contains("33"), "{error}");
    let source = wave(8 * 64, 0.1);
    let source = Tensor::new(&source, &[1, 8, 64]);
    let desc = desc.in_features(32);
    let error = Quantised::new(&context, &desc, source, Stream::DEFAULT).err().unwrap();
    assert_eq!((error.name(), &*error.site), ("MOEC_E_SHAPE", "moec_quantise"));
}

#[test]
fn lists_of_a_matrix_have_one_length() {
    let arrays: Vec<Vec<f32>> = (0..3).map(|_| vec![0.0; 8]).collect();
    let list: Vec<_> = arrays.iter().map(|a| Tensor::new(a, &[2, 4])).collect();
    let quant = Quant::new().per_expert_scales(&list[..2]);
    let panics = |f: &dyn Fn()| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("no panic")
    };
    panics(&|| {
        let _ = WeightSet::new().up_per_expert(&list).up_quant(&quant);
    });
    panics(&|| {
        let _ = WeightSet::new().up_per_expert(&list).up_per_expert_bias(&list[1..]);
    });
    panics(&|| {
        let _ = Quant::new().per_expert_scales(&list).per_expert_zeros(&list[1..]);
    });
    panics(&|| {
        let _ = Quant::new().per_expert_scales(&[]);
    });
    panics(&|| {
        let _ = Tensor::from_bytes(&[0; 3], sys::MOEC_BF16, &[2]);
    });
}
