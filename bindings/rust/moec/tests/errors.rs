// SPDX-License-Identifier: Apache-2.0
//! The error cases that every binding runs: tests/errors.json holds one right problem as fields of
//! C structs, and rows that say what is broken in which call and what must come back. Fields are
//! found at the offsets of bindings/api.json.
use moec::{check, sys, Error, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(format!("{ROOT}/{path}")).unwrap()).unwrap()
}

/// Raw structs, each at a fixed address, whose calls succeed until a field is mutated.
struct Problem<'a> {
    file: &'a Value,
    layouts: HashMap<&'a str, &'a Value>,
    structs: HashMap<String, Vec<u64>>,
    memory: Vec<Vec<u64>>,
    context: *mut sys::moec_context,
    layer: *mut sys::moec_layer,
    plan: *mut sys::moec_plan,
    weights: [*mut sys::moec_weights; 2], // bound, unbound
}

impl<'a> Problem<'a> {
    fn new(file: &'a Value, api: &'a Value) -> Result<Self> {
        let rows = api["structs"].as_array().unwrap();
        let mut p = Problem {
            file,
            layouts: rows.iter().map(|row| (row["name"].as_str().unwrap(), row)).collect(),
            structs: HashMap::new(),
            memory: Vec::new(),
            context: null_mut(),
            layer: null_mut(),
            plan: null_mut(),
            weights: [null_mut(); 2],
        };
        for (root, name) in file["structs"].as_object().unwrap() {
            let row = p.layouts[name.as_str().unwrap()];
            let bytes = row["bytes"].as_u64().unwrap();
            p.structs.insert(root.clone(), vec![0; bytes as usize / 8]);
            if row["sized"] == true {
                p.put(&format!("{root}.struct_size"), bytes as i64);
            }
        }
        for (path, value) in file["values"].as_object().unwrap() {
            p.put(path, value.as_i64().unwrap());
        }
        for (path, entry) in file["tensors"].as_object().unwrap() {
            p.tensor(path, entry);
        }
        for (path, root) in file["pointers"].as_object().unwrap() {
            p.put(path, p.address(root.as_str().unwrap()) as i64);
        }
        p.create()?;
        Ok(p)
    }

    /// The handles, and what the forward call takes of them.
    fn create(&mut self) -> Result<()> {
        unsafe {
            check(sys::moec_context_create(null(), &mut self.context))?;
            check(sys::moec_layer_create(self.context, self.at("layer"), &mut self.layer))?;
            check(sys::moec_plan_create(self.context, self.at("plan"), null(), &mut self.plan))?;
            for i in 0..2 {
                let (desc, out) = (self.at("weights"), &mut self.weights[i]);
                check(sys::moec_weights_create(self.context, desc, out))?;
            }
            check(sys::moec_weights_bind(self.weights[0], self.at("set")))?;
            let mut sizes: sys::moec_experts_sizes = std::mem::zeroed();
            sizes.struct_size = std::mem::size_of_val(&sizes) as u32;
            check(sys::moec_layer_query(self.layer, &mut sizes))?;
            let tokens = self.get("forward.x.shape[0]") as usize;
            let bytes = moec::bytes_for(sizes.saved, tokens);
            let saved = self.room(bytes);
            self.put("forward.weights", self.weights[0] as i64);
            self.put("forward.saved.ptr", saved);
            self.put("forward.saved.bytes", bytes as i64);
        }
        Ok(())
    }

    fn address(&self, root: &str) -> *const c_void {
        self.structs[root].as_ptr() as *const c_void
    }

    fn at<T>(&self, root: &str) -> *const T {
        self.address(root) as *const T
    }

    fn room(&mut self, bytes: usize) -> i64 {
        self.memory.push(vec![0; bytes.div_ceil(8)]);
        self.memory.last().unwrap().as_ptr() as i64
    }

    /// Address, bytes and kind of a field such as "forward.x.shape[1]".
    fn field(&self, path: &str) -> (*mut u8, usize, String) {
        let mut parts = path.split('.');
        let root = parts.next().unwrap();
        let mut address = self.address(root) as *mut u8;
        let (mut name, mut bytes) = (self.file["structs"][root].as_str().unwrap(), 0);
        let mut kind = &Value::Null;
        for part in parts {
            let (field_name, index) =
                part.trim_end_matches(']').split_once('[').unwrap_or((part, ""));
            let fields = self.layouts[name]["fields"].as_array().unwrap();
            let field = fields.iter().find(|f| f["name"] == field_name).expect(path);
            let mut offset = field["offset"].as_u64().unwrap() as usize;
            bytes = field["bytes"].as_u64().unwrap() as usize;
            kind = &field["type"];
            if let Ok(index) = index.parse::<usize>() {
                bytes /= kind["count"].as_u64().unwrap() as usize;
                kind = &kind["of"];
                offset += index * bytes;
            }
            address = unsafe { address.add(offset) };
            name = kind["name"].as_str().unwrap_or("");
        }
        (address, bytes, kind["kind"].as_str().unwrap().to_string())
    }

    fn put_bytes(&self, path: &str, value: &[u8]) {
        let (address, bytes, _) = self.field(path);
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), address, bytes) }
    }

    fn put(&self, path: &str, value: i64) {
        self.put_bytes(path, &value.to_le_bytes());
    }

    fn get(&self, path: &str) -> i64 {
        let (address, bytes, _) = self.field(path);
        let mut value = [0u8; 8];
        unsafe { std::ptr::copy_nonoverlapping(address, value.as_mut_ptr(), bytes) }
        i64::from_le_bytes(value)
    }

    fn tensor(&mut self, path: &str, entry: &Value) {
        let dtype = if entry[0] == "f32" { sys::MOEC_F32 } else { sys::MOEC_I32 };
        let shape: Vec<i64> =
            entry[1].as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
        let data = self.room(4 * shape.iter().product::<i64>() as usize);
        self.put(&format!("{path}.data"), data);
        self.put(&format!("{path}.dtype"), dtype.into());
        self.put(&format!("{path}.ndim"), shape.len() as i64);
        self.put(&format!("{path}.device_type"), sys::MOEC_CPU.into());
        for (i, extent) in shape.iter().enumerate() {
            self.put(&format!("{path}.shape[{i}]"), *extent);
        }
    }

    fn mutate(&self, path: &str, value: &Value) {
        match value {
            Value::String(s) if s == "unbound" => self.put(path, self.weights[1] as i64),
            Value::String(other) => self.put(path, self.get(other)),
            _ if self.field(path).2 == "float" => {
                self.put_bytes(path, &(value.as_f64().unwrap() as f32).to_le_bytes())
            }
            _ => self.put(path, value.as_i64().unwrap()),
        }
    }

    fn call(&self, name: &str) -> Result<()> {
        let (mut context, mut layer) = (null_mut(), null_mut());
        let (mut weights, mut plan, mut totals) = (null_mut(), null_mut(), [0; 4]);
        unsafe {
            let made = match name {
                "moec_context_create" => sys::moec_context_create(self.at("context"), &mut context),
                "moec_layer_create" => {
                    sys::moec_layer_create(self.context, self.at("layer"), &mut layer)
                }
                "moec_weights_create" => {
                    sys::moec_weights_create(self.context, self.at("weights"), &mut weights)
                }
                "moec_weights_bind" => sys::moec_weights_bind(self.weights[0], self.at("set")),
                "moec_plan_create" => {
                    sys::moec_plan_create(self.context, self.at("plan"), null(), &mut plan)
                }
                "moec_plan_from_topk" => {
                    sys::moec_plan_from_topk(self.plan, self.at("ids"), null(), null_mut())
                }
                "moec_plan_totals_sync" => {
                    sys::moec_plan_totals_sync(self.plan, totals.as_mut_ptr(), null_mut())
                }
                "moec_layer_forward" => {
                    sys::moec_layer_forward(self.layer, self.at("forward"), null_mut())
                }
                "moec_layer_backward" => {
                    sys::moec_layer_backward(self.layer, self.at("grads"), null_mut())
                }
                other => panic!("no call {other}"),
            };
            let result = check(made); // before the frees: nothing may come between
            sys::moec_context_free(context);
            sys::moec_layer_free(layer);
            sys::moec_weights_free(weights);
            sys::moec_plan_free(plan);
            result
        }
    }
}

impl Drop for Problem<'_> {
    fn drop(&mut self) {
        unsafe {
            sys::moec_layer_free(self.layer);
            sys::moec_plan_free(self.plan);
            self.weights.iter().for_each(|&w| sys::moec_weights_free(w));
            sys::moec_context_free(self.context);
        }
    }
}

#[test]
fn errors_of_every_row() {
    sys::load().unwrap();
    let (file, api) = (read("tests/errors.json"), read("bindings/api.json"));
    let rows = file["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 71);
    for row in rows {
        let problem = Problem::new(&file, &api).unwrap();
        let call = row["call"].as_str().unwrap();
        if call == "moec_layer_backward" {
            problem.call("moec_layer_forward").unwrap();
        }
        for (path, value) in row["mutation"].as_object().unwrap() {
            problem.mutate(path, value);
        }
        let error: Error = problem.call(call).expect_err(&row.to_string());
        assert_eq!(error.name(), row["code"], "{row}: {error}");
        assert_eq!(error.site, row["site"], "{row}: {error}");
        assert!(error.message.starts_with(call), "{error}");
    }
}

#[test]
fn the_problem_itself_is_right() {
    sys::load().unwrap();
    let (file, api) = (read("tests/errors.json"), read("bindings/api.json"));
    let problem = Problem::new(&file, &api).unwrap();
    for row in file["rows"].as_array().unwrap() {
        let call = row["call"].as_str().unwrap();
        if call != "moec_plan_totals_sync" {
            problem.call(call).unwrap(); // the mistake of that row is the call itself
        }
    }
}
