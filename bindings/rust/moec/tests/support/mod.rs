// SPDX-License-Identifier: Apache-2.0
//! What the golden tests share: cases.json and the families' files as descriptors and arguments,
//! and the run of one case in some memory.
use moec::*;
use safetensors::SafeTensors;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The folder of the vectors: MOEC_GOLDEN_DIR, or the source tree's.
pub fn golden(file: &str) -> String {
    let tree = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/golden");
    format!("{}/{file}", std::env::var("MOEC_GOLDEN_DIR").unwrap_or_else(|_| tree.into()))
}

pub fn cases() -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("cases.json")).unwrap()).unwrap()
}

pub trait Number {
    fn of(value: &Value) -> Self;
}
macro_rules! numbers {
    ($($type:ty),*) => {$(impl Number for $type {
        fn of(value: &Value) -> Self {
            value.as_f64().expect("a number") as $type
        }
    })*};
}
numbers!(i32, i64, u32, f32);

/// Calls the builder's method of each key of a JSON object; a key that is not listed is an error.
macro_rules! by_name {
    ($target:expr, $pairs:expr, $value:expr, $($field:ident),+ $(,)?) => {{
        let mut target = $target;
        for (key, value) in $pairs {
            target = match key.as_str() {
                $(stringify!($field) => target.$field($value(value)),)+
                other => panic!("no field {other}"),
            };
        }
        target
    }};
}

pub fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().expect("an object")
}

pub fn activation(value: &Value) -> sys::moec_activation {
    let number = |key: &str| value.get(key).map_or(0.0, |v| v.as_f64().unwrap());
    sys::moec_activation {
        kind: number("kind") as u32,
        alpha: number("alpha") as f32,
        limit: number("limit") as f32,
        offset: number("offset") as f32,
        beta: number("beta") as f32,
        linear_beta: number("linear_beta") as f32,
        reserved0: 0,
        reserved1: 0,
    }
}

pub fn router_desc(json: &Value) -> RouterDesc {
    by_name!(
        RouterDesc::new(),
        object(json),
        Number::of,
        flags,
        num_experts,
        num_zero_experts,
        top_k,
        logit_precision,
        score,
        score_precision,
        selection,
        num_groups,
        top_groups,
        group_top_m,
        group_fill,
        mixer_eps,
        weight_rule,
        norm,
        norm_eps,
        norm_precision,
        scale,
        weight_precision,
        data_dtype,
    )
}

pub fn experts_desc(json: &Value) -> ExpertsDesc {
    let (nested, plain): (Vec<_>, Vec<_>) = object(json).iter().partition(|(_, v)| v.is_object());
    let desc = by_name!(
        ExpertsDesc::new(),
        plain,
        Number::of,
        hidden,
        inter,
        shared_inter,
        num_experts,
        num_zero_experts,
        top_k,
        gate_layout,
        dtype,
        weight_position,
        shared,
        save,
    );
    by_name!(desc, nested, activation, activation, shared_activation)
}

pub fn weights_desc(json: &Value) -> WeightsDesc {
    by_name!(
        WeightsDesc::new(),
        object(json),
        Number::of,
        num_experts,
        gate_layout,
        hidden,
        inter,
        gate_up_orientation,
        down_orientation,
        dtype,
        gate_up_scheme,
        down_scheme,
    )
}

pub fn floats(file: &SafeTensors, name: &str) -> Option<Vec<f32>> {
    let view = file.tensor(name).ok()?;
    let four = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
    Some(view.data().chunks_exact(4).map(four).collect())
}

/// An argument of the layer: the leading part of a parameter of the file, as a shape.
pub struct Argument {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
    pub reference: Option<Vec<f32>>,
}

pub type Arguments = BTreeMap<String, Argument>;

pub fn arguments(file: &SafeTensors, json: &Value) -> Arguments {
    let one = |(role, entry): (&String, &Value)| {
        let name = entry["tensor"].as_str().unwrap();
        let extents = entry["shape"].as_array().unwrap();
        let shape: Vec<usize> = extents.iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let mut values = floats(file, &format!("p.{name}")).unwrap();
        values.truncate(shape.iter().product());
        let reference = floats(file, &format!("g.{name}"));
        (role.clone(), Argument { shape, values, reference })
    };
    object(json).iter().map(one).collect()
}

/// Where the arrays of a case lie: the host's memory, or a device's.
pub trait Memory {
    type Array;
    /// Room for what a forward saves.
    type Bytes;
    fn context(&self) -> &Context;
    fn stream(&self) -> Stream;
    fn array(&self, values: &[f32], shape: &[usize]) -> Self::Array;
    fn bytes(&self, count: usize) -> Self::Bytes;
    fn read(array: &Self::Array) -> Tensor<'_>;
    fn write(array: &mut Self::Array) -> TensorMut<'_>;
    fn save<'a>(call: LayerCall<'a>, bytes: &'a mut Self::Bytes) -> LayerCall<'a>;
    /// The values, once the stream is done.
    fn values(&self, array: &Self::Array) -> Vec<f32>;
}

/// Memory of a context's device that the library allocates.
pub struct Device<'c>(pub &'c Context);

impl<'c> Memory for Device<'c> {
    type Array = DeviceArray<'c, f32>;
    type Bytes = DeviceArray<'c, u8>;
    fn context(&self) -> &Context {
        self.0
    }
    fn stream(&self) -> Stream {
        Stream::DEFAULT
    }
    fn array(&self, values: &[f32], shape: &[usize]) -> Self::Array {
        DeviceArray::from_slice(self.0, values, shape, self.stream()).unwrap()
    }
    fn bytes(&self, count: usize) -> Self::Bytes {
        DeviceArray::zeros(self.0, &[count], self.stream()).unwrap()
    }
    fn read(array: &Self::Array) -> Tensor<'_> {
        array.tensor()
    }
    fn write(array: &mut Self::Array) -> TensorMut<'_> {
        array.tensor_mut()
    }
    fn save<'a>(call: LayerCall<'a>, bytes: &'a mut Self::Bytes) -> LayerCall<'a> {
        call.saved_array(bytes)
    }
    fn values(&self, array: &Self::Array) -> Vec<f32> {
        array.to_vec(self.stream()).unwrap()
    }
}

type Arrays<M> = BTreeMap<String, <M as Memory>::Array>;

/// NaN everywhere, so that what is not written shows.
fn poisoned<M: Memory>(memory: &M, shape: &[usize]) -> M::Array {
    memory.array(&vec![f32::NAN; shape.iter().product()], shape)
}

fn inputs<M: Memory>(memory: &M, from: &Arguments) -> Arrays<M> {
    from.iter().map(|(role, a)| (role.clone(), memory.array(&a.values, &a.shape))).collect()
}

/// Room for the gradient of each argument that has one.
fn gradients<M: Memory>(memory: &M, of: &Arguments) -> Arrays<M> {
    let wanted = of.iter().filter(|(_, a)| a.reference.is_some());
    wanted.map(|(role, a)| (role.clone(), poisoned(memory, &a.shape))).collect()
}

macro_rules! matrices {
    ($target:expr, $arrays:expr, $value:expr) => {
        by_name!(
            $target,
            $arrays,
            $value,
            gate_up,
            gate_up_bias,
            gate,
            gate_bias,
            up,
            up_bias,
            down,
            down_bias,
        )
    };
}

/// (tensor, row error) of y, x and every parameter of a case.
pub fn run<M: Memory>(memory: &M, case: &Value) -> Result<Vec<(String, f64)>> {
    let context = memory.context();
    let family = case["family"].as_str().unwrap();
    let bytes = std::fs::read(golden(&format!("{family}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let shape = file.tensor("x").unwrap().shape().to_vec();
    let upload = |name: &str| memory.array(&floats(&file, name).unwrap(), &shape);
    let (x, d_y) = (upload("x"), upload("dout"));
    let (mut y, mut d_x) = (poisoned(memory, &shape), poisoned(memory, &shape));

    let shared_json = case.get("shared_weights");
    let around = arguments(&file, &case["inputs"]);
    let routed = arguments(&file, &case["weights"]["matrices"]);
    let shared = shared_json.map_or(Arguments::new(), |s| arguments(&file, &s["matrices"]));
    let [given, matrices, shared_matrices] = [&around, &routed, &shared].map(|a| inputs(memory, a));
    let set = matrices!(WeightSet::new(), &matrices, M::read);
    let shared_set = matrices!(WeightSet::new(), &shared_matrices, M::read);
    let weights = Weights::new(context, &weights_desc(&case["weights"]["desc"]), &set)?;
    let shared_weights = shared_json
        .map(|s| Weights::new(context, &weights_desc(&s["desc"]), &shared_set))
        .transpose()?;
    let layer =
        Layer::new(context, &router_desc(&case["router"]), &experts_desc(&case["experts"]))?;

    let mut forward = LayerCall::new().weights(&weights).x(M::read(&x)).y(M::write(&mut y));
    if let Some(shared_weights) = &shared_weights {
        forward = forward.shared_weights(shared_weights);
    }
    let mut saved = memory.bytes(bytes_for(layer.sizes()?.saved, shape[0]));
    forward = M::save(forward, &mut saved);
    let mut forward = by_name!(
        forward,
        &given,
        M::read,
        gate_weight,
        gate_bias,
        select_bias,
        shared_gate,
        output_bias,
    );
    layer.forward(&mut forward, memory.stream())?;

    let [mut d_around, mut d_routed, mut d_shared] =
        [&around, &routed, &shared].map(|a| gradients(memory, a));
    let grads = matrices!(WeightGrads::new(), &mut d_routed, M::write);
    let shared_grads = matrices!(WeightGrads::new(), &mut d_shared, M::write);
    let mut backward = LayerGradCall::new().forward(&forward).d_y(M::read(&d_y));
    backward = backward.d_x(M::write(&mut d_x)).d_expert_weights(&grads);
    if shared_json.is_some() {
        backward = backward.d_shared_weights(&shared_grads);
    }
    let renamed = d_around.iter_mut().map(|(role, array)| (format!("d_{role}"), array));
    let mut backward = by_name!(
        backward,
        renamed,
        M::write,
        d_gate_weight,
        d_gate_bias,
        d_shared_gate,
        d_output_bias,
    );
    layer.backward(&mut backward, memory.stream())?;
    context.synchronize(memory.stream())?;

    let error = |array: &M::Array, reference: &[f32], shape: &[usize]| {
        row_error(&memory.values(array), reference, *shape.last().unwrap())
    };
    let expected = |name: &str| floats(&file, name).unwrap();
    let mut errors = vec![
        ("y".to_string(), error(&y, &expected("y"), &shape)),
        ("x".to_string(), error(&d_x, &expected("g.x"), &shape)),
    ];
    for (got, wanted) in [(&d_around, &around), (&d_routed, &routed), (&d_shared, &shared)] {
        for (role, array) in got {
            let Argument { shape, reference, .. } = &wanted[role];
            errors.push((role.clone(), error(array, reference.as_ref().unwrap(), shape)));
        }
    }
    let names = file.names();
    let compared = names.iter().filter(|n| n.starts_with("g.")).count();
    assert_eq!(errors.len(), compared + 1, "{family}: every gradient of the file is compared");
    Ok(errors)
}

/// Every case, each in memory of its own.
pub fn run_all<M: Memory>(memory: impl Fn() -> M) {
    let file = cases();
    let (cases, tolerance) =
        (file["cases"].as_array().unwrap(), file["tolerance"].as_f64().unwrap());
    assert_eq!(cases.len(), 34);
    for case in cases {
        for (tensor, error) in run(&memory(), case).unwrap() {
            assert!(error <= tolerance, "{} {tensor}: row error {error:.2e}", case["family"]);
        }
    }
}

/// Worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm); NaN is infinite.
pub fn row_error(got: &[f32], reference: &[f32], columns: usize) -> f64 {
    let padded = got.iter().chain(std::iter::repeat(&0.0)).take(reference.len());
    let got: Vec<f32> = padded.copied().collect(); // rows of identity experts
    let norm = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>().sqrt();
    let rows = |values: &[f32]| -> Vec<Vec<f64>> {
        values.chunks(columns).map(|r| r.iter().map(|&v| f64::from(v)).collect()).collect()
    };
    let (got, reference) = (rows(&got), rows(reference));
    let floor = 0.01 * reference.iter().map(|r| norm(r)).fold(0.0, f64::max);
    let error = |(g, r): (&Vec<f64>, &Vec<f64>)| {
        let difference: Vec<f64> = g.iter().zip(r).map(|(a, b)| a - b).collect();
        let error = norm(&difference);
        if error == 0.0 {
            0.0
        } else {
            error / norm(r).max(floor)
        }
    };
    let worst = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
    got.iter().zip(&reference).map(error).fold(0.0, worst)
}
