// SPDX-License-Identifier: Apache-2.0
//! Finds libmoec through pkg-config, or builds it (feature `vendored`), and links its static form:
//! programs run from anywhere; MOEC_LINK=shared links libmoec.so instead. Dependants read
//! DEP_MOEC_INCLUDE and DEP_MOEC_LIB.
use std::path::PathBuf;

/// Where the library is.
struct Library {
    include_paths: Vec<PathBuf>,
    link_paths: Vec<PathBuf>,
}

fn main() {
    for name in ["MOEC_LINK", "MOEC_NO_PKG_CONFIG", "PKG_CONFIG_PATH", "DOCS_RS", "MOEC_NVCC"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if std::env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let dynamic = cfg!(feature = "dynamic"); // nothing is linked, nothing is built
    let shared = std::env::var("MOEC_LINK").is_ok_and(|v| v == "shared");
    let found = if cfg!(feature = "vendored") && !dynamic {
        assert!(!shared, "moec-sys: MOEC_LINK=shared is not for what is vendored");
        Ok(vendored())
    } else {
        installed(dynamic, shared)
    };
    let library = match found {
        Ok(library) => library,
        Err(_) if dynamic && !cfg!(feature = "buildtime-bindgen") => return,
        Err(error) => panic!(
            "moec-sys: libmoec was not found: {error}\nSet PKG_CONFIG_PATH to the folder of \
             moec.pc, or use the feature vendored, which builds the library"
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

fn installed(dynamic: bool, shared: bool) -> Result<Library, String> {
    let found = pkg_config::Config::new()
        .atleast_version("0.1.0")
        .cargo_metadata(!dynamic && shared)
        .statik(!shared)
        .probe("moec");
    let (include_paths, link_paths) =
        found.map(|at| (at.include_paths, at.link_paths)).map_err(|error| error.to_string())?;
    Ok(Library { include_paths, link_paths })
}

/// Builds the sources in `vendor`, which are links to those of the repository, with the plug-in
/// where the feature `cuda` is on.
#[cfg(feature = "vendored")]
fn vendored() -> Library {
    let source = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let source = source.join("vendor");
    println!("cargo:rerun-if-changed={}", source.display());
    let cuda = cfg!(feature = "cuda");
    let mut config = cmake::Config::new(&source);
    config.profile("Release").define("CMAKE_INSTALL_LIBDIR", "lib");
    config.define("MOEC_CUDA", if cuda { "ON" } else { "OFF" });
    if cuda {
        config.define("CMAKE_CUDA_COMPILER", nvcc());
    }
    let prefix = config.build();
    if cuda {
        let plugin = prefix.join("lib/libmoec_cuda.so.0");
        println!("cargo:cuda_plugin={}", plugin.display());
        println!("cargo:rustc-env=MOEC_CUDA_PLUGIN={}", plugin.display());
    }
    Library { include_paths: vec![prefix.join("include")], link_paths: vec![prefix.join("lib")] }
}

/// What compiles the plug-in: MOEC_NVCC, else the nvcc on PATH.
#[cfg(feature = "vendored")]
fn nvcc() -> PathBuf {
    let name = PathBuf::from(std::env::var_os("MOEC_NVCC").unwrap_or_else(|| "nvcc".into()));
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&folders).map(|at| at.join(&name)).find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "moec-sys: the feature cuda needs nvcc of CUDA 13, and {} was not found\n\
             Set MOEC_NVCC to its path",
            name.display()
        )
    })
}

#[cfg(not(feature = "vendored"))]
fn vendored() -> Library {
    unreachable!("without the feature vendored")
}

/// The same options made the committed src/raw_bindings.rs; a test compares.
#[cfg(feature = "buildtime-bindgen")]
fn generate(include_paths: &[PathBuf]) {
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
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("set by cargo"));
    builder
        .generate()
        .expect("moec-sys: bindgen could not read moec.h")
        .write_to_file(out.join("bindings.rs"))
        .expect("moec-sys: OUT_DIR is not writable");
}
