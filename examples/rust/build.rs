// SPDX-License-Identifier: Apache-2.0
//! What a crate with C sources of its own does: moec.h is in the folder that moec-sys names.
fn main() {
    let include = std::env::var("DEP_MOEC_INCLUDE").expect("set by moec-sys");
    assert!(std::path::Path::new(&include).join("moec/moec.h").exists(), "no moec.h in {include}");
    assert!(std::env::var_os("DEP_MOEC_LIB").is_some());
}
