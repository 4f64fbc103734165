// SPDX-License-Identifier: Apache-2.0
//! Finds libmoec through pkg-config and links its static form, so that programs run from anywhere;
//! MOEC_LINK=shared links libmoec.so instead. Dependants read DEP_MOEC_INCLUDE and DEP_MOEC_LIB.

fn main() {
    for name in ["MOEC_LINK", "MOEC_NO_PKG_CONFIG", "PKG_CONFIG_PATH", "DOCS_RS"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if std::env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let dynamic = cfg!(feature = "dynamic");
    let shared = std::env::var("MOEC_LINK").is_ok_and(|v| v == "shared");
    let found = pkg_config::Config::new()
        .atleast_version("0.1.0")
        .cargo_metadata(!dynamic && shared)
        .statik(!shared)
        .probe("moec");
    let library = match found {
        Ok(library) => library,
        Err(_) if dynamic && !cfg!(feature = "buildtime-bindgen") => return,
        Err(error) => panic!(
            "moec-sys: libmoec was not found: {error}\nSet PKG_CONFIG_PATH to the folder of moec.pc"
        ),
    };
    if let Some(path) = library.include_paths.first() {
        println!("cargo:include={}", path.display());
    }
    if let Some(path) = library.link_paths.first() {
        println!("cargo:lib={}", path.display());
        println!("cargo:rerun-if-changed={}", path.join("libmoec.a").display());
    }
    if !dynamic && !shared {
        for path in &library.link_paths {
            println!("cargo:rustc-link-search=native={}", path.display());
        }
        println!("cargo:rustc-link-lib=static=moec");
        for name in ["stdc++", "pthread", "dl", "m"] {
            println!("cargo:rustc-link-lib={name}");
        }
    }
    #[cfg(feature = "buildtime-bindgen")]
    generate(&library.include_paths);
}

/// The same options made the committed src/raw_bindings.rs; a test compares.
#[cfg(feature = "buildtime-bindgen")]
fn generate(include_paths: &[std::path::PathBuf]) {
    let header = include_paths
        .iter()
        .map(|path| path.join("moec/moec.h"))
        .find(|path| path.exists())
        .expect("moec-sys: moec/moec.h is not in the include paths of moec.pc");
    println!("cargo:rerun-if-changed={}", header.display());
    let mut builder = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .formatter(bindgen::Formatter::Prettyplease)
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .must_use_type("moec_status")
        .allowlist_item("moec_.*|MOEC_.*")
        .clang_args(include_paths.iter().map(|path| format!("-I{}", path.display())));
    // A libclang without its own stddef.h borrows the C compiler's.
    let compiler = std::process::Command::new("cc").arg("-print-file-name=include").output();
    if let Some(folder) = compiler.ok().and_then(|found| String::from_utf8(found.stdout).ok()) {
        builder = builder.clang_arg("-isystem").clang_arg(folder.trim());
    }
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("set by cargo"));
    builder
        .generate()
        .expect("moec-sys: bindgen could not read moec.h")
        .write_to_file(out.join("bindings.rs"))
        .expect("moec-sys: OUT_DIR is not writable");
}
