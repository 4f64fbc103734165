// SPDX-License-Identifier: Apache-2.0
//! The layers of quant_cases.json that have adapters, in PEFT's storage and on plain and quantised
//! experts: y, d_x, d_routing_weights and the gradients of A and B of one adapter, and of two.
//! Merged adapters give the numbers of those beside the matrices.
//! Shown once to fail: the scales of two adapters exchanged.
use crate::quantised::{bind, cases, keep, open, tensor, File};
use crate::support::{experts_desc, floats, row_error, Number};
use moec::*;
use serde_json::Value;

const E: usize = 4;
const H: usize = 96;
const I: usize = 32;
const HERE: Stream = Stream::DEFAULT;

/// A factor as PEFT stores it: A `[rE,K]`, which is `[E,r,K]`; of B `[N,rE]` element (e, n, j) is
/// in column j E + e.
struct Factor {
    name: String,
    values: Vec<f32>,
    shape: [usize; 3],
    strides: [usize; 3],
    columns: usize,
}

impl Factor {
    fn new(file: &File, name: String) -> Self {
        let stored = file.tensor(&name).unwrap().shape().to_vec();
        let (rows, columns) = (stored[0], stored[1]);
        let (shape, strides) = if name.contains("lora_A") {
            ([E, rows / E, columns], [rows / E * columns, columns, 1])
        } else {
            ([E, rows, columns / E], [1, columns, E])
        };
        Self { values: floats(file, &name).unwrap(), name, shape, strides, columns }
    }

    fn read(&self) -> Tensor<'_> {
        Tensor::strided(&self.values, &self.shape, &self.strides)
    }

    fn write(&mut self) -> TensorMut<'_> {
        self.values.fill(f32::NAN);
        TensorMut::strided(&mut self.values, &self.shape, &self.strides)
    }
}

/// A and B of gate_up, A and B of down.
fn factors(file: &File, prefix: &str, end: &str) -> [Factor; 4] {
    [("gate_up", "A"), ("gate_up", "B"), ("down", "A"), ("down", "B")].map(|(matrix, factor)| {
        Factor::new(file, format!("{prefix}.{matrix}_proj.lora_{factor}.{end}"))
    })
}

fn form() -> AdaptersDesc {
    let form = AdaptersDesc::new().num_experts(E as i32).hidden(H as i64).inter(I as i64);
    form.gate_layout(sys::MOEC_GATE_THEN_UP)
}

fn list_of(run: &Value) -> &[Value] {
    run["adapters"].as_array().unwrap()
}

fn bound(context: &Context, file: &File, run: &Value) -> Adapters<'static> {
    let one = |json: &Value| {
        let [a, b, down_a, down_b] =
            keep(factors(file, &format!("lora.{}", json["name"].as_str().unwrap()), "weight"));
        let scale = Number::of(&json["scale"]);
        let adapter = Adapter::new().gate_up(a.read(), b.read(), scale);
        adapter.down(down_a.read(), down_b.read(), scale)
    };
    let list: Vec<_> = list_of(run).iter().map(one).collect();
    Adapters::new(context, &form(), &list).unwrap()
}

struct Problem<'c> {
    context: &'c Context,
    file: File,
    case: Value,
    experts: Experts,
    plan: Plan,
    tokens: usize,
}

impl<'c> Problem<'c> {
    fn new(context: &'c Context, case: &Value) -> Self {
        let file = open("", case);
        let ids = tensor(&file, "ids");
        let (tokens, top_k) = (ids.shape()[0], ids.shape()[1] as i32);
        let desc = PlanDesc::new().max_tokens(tokens).num_experts(E as i32).top_k(top_k);
        let mut plan = Plan::new(context, &desc).unwrap();
        plan.from_topk(ids, Some(tensor(&file, "weights")), HERE).unwrap();
        let experts = Experts::new(context, &experts_desc(&case["experts"])).unwrap();
        Self { context, file, case: case.clone(), experts, plan, tokens: tokens as usize }
    }

    /// y with adapters, or without.
    fn y(&self, weights: &Weights, adapters: Option<&Adapters>, saved: &mut Vec<u8>) -> Vec<f32> {
        let sizes = match adapters {
            Some(adapters) => self.experts.sizes_with(adapters),
            None => self.experts.sizes(),
        };
        *saved = vec![0; bytes_for(sizes.unwrap().saved, self.tokens)];
        let mut y = vec![f32::NAN; self.tokens * H];
        let mut call = ExpertsCall::new().plan(&self.plan).weights(weights).saved(saved);
        call = call.x(tensor(&self.file, "x")).y(TensorMut::new(&mut y, &[self.tokens, H]));
        if let Some(adapters) = adapters {
            call = call.adapters(adapters);
        }
        self.experts.forward(&mut call, HERE).unwrap();
        y
    }

    fn error(&self, got: &[f32], name: &str, columns: usize) -> f64 {
        row_error(got, &floats(&self.file, name).unwrap(), columns)
    }

    /// Row errors of one run.
    fn run(&self, run: &Value) -> Vec<(String, f64)> {
        let reference = run["reference"].as_str().unwrap();
        let weights = bind(self.context, &self.file, &self.case).unwrap();
        let adapters = bound(self.context, &self.file, run);
        let mut saved = vec![];
        let y = self.y(&weights, Some(&adapters), &mut saved);
        let (tokens, top_k) = (self.tokens, tensor(&self.file, "ids").shape()[1] as usize);
        let mut d_x = vec![f32::NAN; tokens * H];
        let mut d_given = vec![f32::NAN; tokens * top_k];
        let names = list_of(run).iter().map(|json| json["name"].as_str().unwrap());
        let mut d_factors: Vec<_> =
            names.map(|n| factors(&self.file, &format!("{reference}.{n}"), "grad")).collect();
        let grads: Vec<_> = d_factors
            .iter_mut()
            .map(|[a, b, down_a, down_b]| {
                let grads = AdapterGrads::new().gate_up(a.write(), b.write());
                grads.down(down_a.write(), down_b.write())
            })
            .collect();
        let mut call = ExpertsGradCall::new().plan(&self.plan).weights(&weights);
        call = call.x(tensor(&self.file, "x")).d_y(tensor(&self.file, "dy")).saved(&mut saved);
        call = call.d_x(TensorMut::new(&mut d_x, &[tokens, H])).adapters(&adapters);
        call = call.d_routing_weights(TensorMut::new(&mut d_given, &[tokens, top_k]));
        self.experts.backward(&mut call.d_adapters(&grads), HERE).unwrap();
        let error = |got: &[f32], name: &str, columns| {
            let name = format!("{reference}.{name}");
            let error = self.error(got, &name, columns);
            (name, error)
        };
        let mut errors =
            vec![error(&y, "y", H), error(&d_x, "dx", H), error(&d_given, "dweights", top_k)];
        for factor in d_factors.iter().flatten() {
            let error = self.error(&factor.values, &factor.name, factor.columns);
            errors.push((factor.name.clone(), error));
        }
        errors
    }
}

#[test]
fn adapters_forward_and_backward() {
    let context = Context::new(&ContextDesc::new().num_threads(2)).unwrap();
    let (cases, tolerance) = cases("adapters");
    let mut compared = 0;
    for case in &cases {
        let problem = Problem::new(&context, case);
        for run in case["runs"].as_array().unwrap() {
            for (name, error) in problem.run(run) {
                compared += 1;
                assert!(error <= tolerance, "{} {name}: row error {error:.2e}", case["file"]);
            }
        }
    }
    assert_eq!((cases.len(), compared), (2, 4 * 3 + 5 * 4));
}

/// The bf16 matrices of the first case as f32.
fn plain(file: &File) -> [Vec<f32>; 2] {
    ["gate_up", "down"].map(|name| {
        let view = file.tensor(&format!("ckpt.experts.{name}_proj")).unwrap();
        let value = |bits: &[u8]| half::bf16::from_le_bytes([bits[0], bits[1]]).to_f32();
        view.data().chunks(2).map(value).collect()
    })
}

#[test]
fn merged_adapters_are_those_beside_the_matrices() {
    let context = Context::cpu().unwrap();
    let (cases, tolerance) = cases("adapters");
    let problem = Problem::new(&context, &cases[0]);
    let both = &cases[0]["runs"][2];
    let adapters = bound(&context, &problem.file, both);
    let original = plain(&problem.file);
    let mut matrices = original.clone();
    let [gate_up, down] = &mut matrices;
    let set = WeightSetMut::new()
        .gate_up(TensorMut::new(gate_up, &[E, 2 * I, H]))
        .down(TensorMut::new(down, &[E, H, I]));
    let form = WeightsDesc::new().num_experts(E as i32).hidden(H as i64).inter(I as i64);
    let form = form.dtype(sys::MOEC_F32).gate_layout(sys::MOEC_GATE_THEN_UP);
    let mut weights = WeightsMut::new(&context, &form, set).unwrap();
    adapters.merge(&mut weights, HERE).unwrap();
    let y = problem.y(&weights, None, &mut vec![]);
    assert!(problem.error(&y, "ref_lora_ab.y", H) <= tolerance);
    adapters.unmerge(&mut weights, HERE).unwrap();
    drop(weights);
    for (matrix, before) in matrices.iter().zip(&original) {
        assert!(row_error(matrix, before, matrix.len()) <= 1e-6);
    }
}

#[test]
fn wrong_adapters_are_refused() {
    let context = Context::cpu().unwrap();
    let (cases, _) = cases("adapters");
    let problem = Problem::new(&context, &cases[1]);
    let [_, _, a, b] = factors(&problem.file, "lora.a", "weight");
    let refused = |adapter: Adapter, words: &str| {
        let error = Adapters::new(&context, &form(), &[adapter]).err().unwrap();
        assert_eq!(error.site, "moec_adapters_bind");
        assert!(error.message.contains(words), "{error}");
    };
    refused(Adapter::new().down(b.read(), a.read(), 2.0), "list[0].down.a");
    refused(Adapter::new().up(a.read(), b.read(), 2.0), "list[0].up.a");
    refused(Adapter::new().down(a.read(), b.read(), 0.0), "list[0].down.scale is 0");
    assert!(Adapters::new(&context, &form(), &[]).is_err());
    // As many gradients as adapters: the library could not know.
    let weights = bind(&context, &problem.file, &cases[1]).unwrap();
    let adapters = bound(&context, &problem.file, &cases[1]["runs"][0]);
    let call = ExpertsGradCall::new().plan(&problem.plan).weights(&weights).adapters(&adapters);
    let error = problem.experts.backward(&mut call.d_adapters(&[]), HERE).unwrap_err();
    assert_eq!((error.name(), &*error.site), ("MOEC_E_SHAPE", "moec_experts_backward"));
    assert!(error.message.contains("d_adapters has 0 adapters, and 1 are bound"), "{error}");
    // Strides that leave the slice.
    let outside = || Tensor::strided(&[0f32; 6], &[2, 3], &[3, 2]);
    assert!(std::panic::catch_unwind(outside).is_err());
    Tensor::strided(&[0f32; 6], &[2, 3], &[1, 2]);
}
