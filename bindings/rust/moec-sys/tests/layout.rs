// SPDX-License-Identifier: Apache-2.0
//! The raw bindings beside bindings/api.json, which libclang makes from moec.h: every struct, field
//! and constant; and, with `buildtime-bindgen`, the committed file beside a new one.
use moec_sys as sys;
use serde_json::Value;

fn api() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../api.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

const COMMITTED: &str = include_str!("../src/raw_bindings.rs");

/// bindgen writes sizes, offsets and values as compile-time assertions: they hold for this target
/// because the crate compiles, and here they are compared with what libclang said.
#[test]
fn layouts_and_constants_are_those_of_the_header() {
    let squeezed: String = COMMITTED.split_whitespace().collect::<Vec<_>>().join(" ");
    let (mut structs, mut fields) = (0, 0);
    for row in api()["structs"].as_array().unwrap() {
        let (name, bytes) = (row["name"].as_str().unwrap(), &row["bytes"]);
        let size = format!("::std::mem::size_of::<{name}>() - {bytes}usize");
        assert!(squeezed.contains(&size), "{size}");
        structs += 1;
        for field in row["fields"].as_array().unwrap() {
            let (field_name, offset) = (field["name"].as_str().unwrap(), &field["offset"]);
            let text = format!("::std::mem::offset_of!({name}, {field_name}) - {offset}usize");
            assert!(squeezed.contains(&text), "{text}");
            fields += 1;
        }
    }
    assert!(structs >= 30 && fields >= 300, "{structs} structs, {fields} fields");
    for row in api()["constants"].as_array().unwrap() {
        let text = format!(
            "pub const {}: {} = {};",
            row["name"].as_str().unwrap(),
            row["enum"].as_str().unwrap(),
            row["value"]
        );
        assert!(squeezed.contains(&text), "{text}");
    }
    for row in api()["functions"].as_array().unwrap() {
        let text = format!("pub fn {}(", row["name"].as_str().unwrap());
        assert!(squeezed.contains(&text), "{text}");
    }
}

#[test]
fn the_library_is_the_right_one() {
    sys::load().unwrap();
    assert_eq!(unsafe { sys::moec_abi_version() }, sys::MOEC_ABI_VERSION);
}

/// What the test above says with another MOEC_LIBRARY; a process opens only one.
#[cfg(feature = "dynamic")]
fn load_of(library: &str) -> (bool, String) {
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    if let Some(right) = std::env::var_os("MOEC_LIBRARY").filter(|path| !path.is_empty()) {
        again.env("LD_LIBRARY_PATH", std::path::Path::new(&right).parent().unwrap());
    }
    let run = again.env("MOEC_LIBRARY", library).arg("the_library_is").output().unwrap();
    (run.status.success(), String::from_utf8_lossy(&run.stdout).into_owned())
}

#[cfg(feature = "dynamic")]
#[test]
fn an_empty_name_is_none() {
    let (loaded, text) = load_of("");
    assert!(loaded, "{text}");
}

#[cfg(feature = "dynamic")]
#[test]
fn another_library_is_an_error() {
    let (loaded, text) = load_of("libm.so.6");
    assert!(!loaded && text.contains("libm.so.6 has no moec_abi_version"), "{text}");
}

/// With `dynamic`, too, a size_t is a usize.
#[test]
fn a_struct_is_made_ready() {
    sys::load().unwrap();
    // SAFETY: plain data, and its own size.
    let stats: sys::moec_stats = unsafe {
        let mut stats = std::mem::zeroed();
        sys::moec_struct_init(&mut stats as *mut _ as *mut _, std::mem::size_of_val(&stats));
        stats
    };
    assert_eq!(stats.struct_size as usize, std::mem::size_of_val(&stats));
}

#[cfg(feature = "buildtime-bindgen")]
#[test]
fn committed_bindings_are_current() {
    let fresh = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
    let wanted = format!("// SPDX-License-Identifier: Apache-2.0\n{fresh}");
    if let Some(path) = std::env::var_os("MOEC_REWRITE_BINDINGS") {
        std::fs::write(path, &wanted).unwrap();
    }
    assert!(COMMITTED == wanted, "raw_bindings.rs is stale; run scripts/generate_bindings.sh");
}
