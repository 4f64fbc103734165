// SPDX-License-Identifier: Apache-2.0
//! What the golden tests share: cases.json and the families' files as descriptors and arguments.
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
