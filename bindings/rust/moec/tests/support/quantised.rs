// SPDX-License-Identifier: Apache-2.0
//! Every layer of tests/golden/quant_cases.json from the bytes of its checkpoint, as slices of the
//! host: y, d_x and d_routing_weights, and the values of down bit for bit.
//! Shown once to fail: the scales of two experts exchanged.
use crate::support::{experts_desc, floats, golden, object, row_error, weights_desc, Number};
use moec::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

pub type File = SafeTensors<'static>;
type Tensors = &'static [Tensor<'static>];

/// Lives as long as the process.
pub fn keep<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn dtype_of(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => sys::MOEC_F32,
        Dtype::F16 => sys::MOEC_F16,
        Dtype::BF16 => sys::MOEC_BF16,
        Dtype::I64 => sys::MOEC_I64,
        Dtype::I32 => sys::MOEC_I32,
        Dtype::I8 => sys::MOEC_I8,
        Dtype::U8 => sys::MOEC_U8,
        Dtype::F8_E4M3 => sys::MOEC_F8_E4M3,
        other => panic!("no tensor of {other:?}"),
    }
}

/// A tensor of the file in place, or `NAME#KEY`: a number of its JSON text.
pub fn tensor(file: &File, name: &str) -> Tensor<'static> {
    let (name, key) = name.split_once('#').map_or((name, None), |(n, k)| (n, Some(k)));
    let view = file.tensor(name).unwrap();
    if let Some(key) = key {
        let text: Value = serde_json::from_slice(view.data()).unwrap();
        return Tensor::new(keep([text[key].as_f64().unwrap() as f32]), &[1]);
    }
    Tensor::from_bytes(view.data(), dtype_of(view.dtype()), view.shape())
}

/// The tensor of a name of the table, or one for each expert.
fn tensors(file: &File, name: &Value, experts: i64) -> (Tensors, bool) {
    let name = name.as_str().unwrap();
    let is_list = name.contains("{e}");
    let names = (0..if is_list { experts } else { 1 }).map(|e| name.replace("{e}", &e.to_string()));
    (keep(names.map(|name| tensor(file, &name)).collect::<Vec<_>>()), is_list)
}

/// Sets `$one` to a tensor or `$list` to one for each expert.
macro_rules! set_tensors {
    ($target:expr, $given:expr, $one:ident, $list:ident) => {{
        let (tensors, is_list): (Tensors, bool) = $given;
        if is_list {
            $target.$list(tensors)
        } else {
            $target.$one(tensors[0])
        }
    }};
}

fn quant(file: &File, json: &Value, experts: i64) -> &'static Quant<'static> {
    let mut quant = Quant::new();
    for (key, value) in object(json) {
        let given = || tensors(file, value, experts);
        quant = match key.as_str() {
            "flags" => quant.flags(Number::of(value)),
            "block_n" => quant.block_n(Number::of(value)),
            "block_k" => quant.block_k(Number::of(value)),
            "codebook" => quant.codebook(given().0[0]),
            "scale_book" => quant.scale_book(given().0[0]),
            "scales" => set_tensors!(quant, given(), scales, per_expert_scales),
            "scales2" => set_tensors!(quant, given(), scales2, per_expert_scales2),
            "zeros" => set_tensors!(quant, given(), zeros, per_expert_zeros),
            "scale_offset" => set_tensors!(quant, given(), scale_offset, per_expert_scale_offset),
            "group_index" => set_tensors!(quant, given(), group_index, per_expert_group_index),
            other => panic!("no field {other}"),
        };
    }
    keep(quant)
}

/// The bf16 of a bias, or of a matrix of plain values, as f32.
fn widened(file: &File, name: &Value) -> Tensor<'static> {
    let view = file.tensor(name.as_str().unwrap()).unwrap();
    let value = |bits: &[u8]| half::bf16::from_le_bytes([bits[0], bits[1]]).to_f32();
    Tensor::new(keep(view.data().chunks(2).map(value).collect::<Vec<_>>()), view.shape())
}

macro_rules! set_matrix {
    ($set:expr, $file:expr, $json:expr, $experts:expr, $data:ident, $list:ident, $bias:ident,
     $quant:ident) => {{
        let set = match $json.get("quant") {
            Some(json) => {
                set_tensors!($set, tensors($file, &$json["data"], $experts), $data, $list)
                    .$quant(quant($file, json, $experts))
            }
            None => $set.$data(widened($file, &$json["data"])),
        };
        match $json.get("bias") {
            Some(name) => set.$bias(widened($file, name)),
            None => set,
        }
    }};
}

fn weight_set(file: &File, json: &Value, experts: i64) -> WeightSet<'static> {
    let mut set = WeightSet::new();
    for (name, m) in object(json) {
        set = match name.as_str() {
            "gate_up" => set_matrix!(
                set,
                file,
                m,
                experts,
                gate_up,
                gate_up_per_expert,
                gate_up_bias,
                gate_up_quant
            ),
            "gate" => {
                set_matrix!(set, file, m, experts, gate, gate_per_expert, gate_bias, gate_quant)
            }
            "up" => set_matrix!(set, file, m, experts, up, up_per_expert, up_bias, up_quant),
            "down" => {
                set_matrix!(set, file, m, experts, down, down_per_expert, down_bias, down_quant)
            }
            other => panic!("no matrix {other}"),
        };
    }
    set
}

pub fn open(folder: &str, case: &Value) -> File {
    let path = golden(&format!("{folder}{}.safetensors", case["file"].as_str().unwrap()));
    SafeTensors::deserialize(keep(std::fs::read(path).unwrap())).unwrap()
}

pub fn bind(context: &Context, file: &File, case: &Value) -> Result<Weights<'static>> {
    let desc = &case["weights"];
    let set = weight_set(file, &case["matrices"], Number::of(&desc["num_experts"]));
    Weights::new(context, &weights_desc(desc), &set)
}

/// Row errors of y, d_x and d_routing_weights.
fn run(context: &Context, file: &File, case: &Value) -> Result<[f64; 3]> {
    let weights = bind(context, file, case)?;
    let experts = Experts::new(context, &experts_desc(&case["experts"]))?;
    let (x, ids, given) = (tensor(file, "x"), tensor(file, "ids"), tensor(file, "weights"));
    let extent = |t: &Tensor, i: usize| t.shape()[i] as usize;
    let (count, hidden, top_k) = (extent(&x, 0), extent(&x, 1), extent(&ids, 1));
    let desc = PlanDesc::new().max_tokens(count as i64).top_k(top_k as i32);
    let number = Number::of(&case["experts"]["num_experts"]);
    let mut plan = Plan::new(context, &desc.num_experts(number))?;
    plan.from_topk(ids, Some(given), Stream::DEFAULT)?;
    let room = |n: usize| vec![f32::NAN; n];
    let (mut y, mut d_x, mut d_given) =
        (room(count * hidden), room(count * hidden), room(count * top_k));
    let mut saved = vec![0; bytes_for(experts.sizes()?.saved, count)];
    let mut call = ExpertsCall::new().plan(&plan).weights(&weights).x(x).saved(&mut saved);
    call = call.y(TensorMut::new(&mut y, &[count, hidden]));
    experts.forward(&mut call, Stream::DEFAULT)?;
    let mut grads = ExpertsGradCall::new().plan(&plan).weights(&weights).x(x).saved(&mut saved);
    grads = grads.d_y(tensor(file, "dy")).d_x(TensorMut::new(&mut d_x, &[count, hidden]));
    grads = grads.d_routing_weights(TensorMut::new(&mut d_given, &[count, top_k]));
    experts.backward(&mut grads, Stream::DEFAULT)?;
    let error = |got: &[f32], name: &str, columns| {
        row_error(got, &floats(file, &format!("ref.{name}")).unwrap(), columns)
    };
    Ok([error(&y, "y", hidden), error(&d_x, "dx", hidden), error(&d_given, "dweights", top_k)])
}

/// The values of down at the file's indices are those of its library, bit for bit.
fn check_values(context: &Context, file: &File, case: &Value) {
    let weights = bind(context, file, case).unwrap();
    let extent = |name: &str| case["weights"][name].as_u64().unwrap() as usize;
    let (experts, hidden, inter) = (extent("num_experts"), extent("hidden"), extent("inter"));
    let in_out = case["weights"].get("down_orientation").is_some();
    let [rows, columns] = if in_out { [inter, hidden] } else { [hidden, inter] };
    let mut values = vec![f32::NAN; experts * rows * columns];
    for (e, matrix) in values.chunks_mut(rows * columns).enumerate() {
        let to = TensorMut::new(matrix, &[rows, columns]);
        weights.dequantise(sys::MOEC_MATRIX_DOWN, e as i32, to, Stream::DEFAULT).unwrap();
    }
    let turned = case["turned"].as_bool().unwrap();
    let index = file.tensor("dequant.down_proj.index").unwrap();
    let expected = floats(file, "dequant.down_proj.value").unwrap();
    for (bytes, want) in index.data().chunks(4).zip(expected) {
        let at = i32::from_le_bytes(bytes.try_into().unwrap()) as usize;
        let (e, row, column) = (at / (rows * columns), at / rows % columns, at % rows);
        let at = if turned { (e * rows + column) * columns + row } else { at };
        assert_eq!(values[at].to_bits(), want.to_bits(), "{} {at}", case["file"]);
    }
}

/// Those of the table under a key, and the tolerance.
pub fn cases(key: &str) -> (Vec<Value>, f64) {
    let text = std::fs::read_to_string(golden("quant_cases.json")).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    (file[key].as_array_mut().unwrap().split_off(0), file["tolerance"].as_f64().unwrap())
}

#[test]
fn layers_of_codes_forward_and_backward() {
    let context = Context::new(&ContextDesc::new().num_threads(2)).unwrap();
    let (cases, tolerance) = cases("cases");
    assert_eq!(cases.len(), 19);
    for case in &cases {
        let file = open("quant/", case);
        for (name, error) in
            ["y", "d_x", "d_routing_weights"].iter().zip(run(&context, &file, case).unwrap())
        {
            assert!(error <= tolerance, "{} {name}: row error {error:.2e}", case["file"]);
        }
        check_values(&context, &file, case);
    }
}

/// Scales of another matrix, and what the library says of them.
const WRONG: [(&str, &str, &str); 4] = [
    ("mxfp4_gptoss", "ckpt.experts.gate_up_proj_scales", "[4,64,3]; expected [4,96,1]"),
    ("bnb_nf4_stack_nested", "ckpt.experts.gate_up_proj.absmax", "[384]; expected [192]"),
    ("fp8_block128_partial", "x", "[6,136]; expected [2,2,2]"),
    ("awq_gemm_g32", "ckpt.experts.{e}.up_proj.scales", "[3,32]; expected [1,96]"),
];

#[test]
fn wrong_scales_are_refused_in_the_words_of_the_library() {
    let context = Context::cpu().unwrap();
    let (cases, _) = cases("cases");
    for (name, scales, words) in WRONG {
        let mut case = cases.iter().find(|case| case["file"] == name).unwrap().clone();
        case["matrices"]["down"]["quant"]["scales"] = scales.into();
        let error = bind(&context, &open("quant/", &case), &case).err().expect(name);
        assert_eq!((error.name(), &*error.site), ("MOEC_E_SHAPE", "moec_weights_bind"));
        assert!(error.message.contains("down.quant."), "{error}");
        assert!(error.message.contains(words), "{error}");
    }
}
