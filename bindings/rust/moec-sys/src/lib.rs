// SPDX-License-Identifier: Apache-2.0
#![doc = include_str!("../README.md")]
#![allow(non_camel_case_types, non_upper_case_globals, clippy::all)]
#![cfg_attr(feature = "dynamic", allow(dead_code))]

use std::ffi::CStr;
use std::sync::OnceLock;

#[cfg(feature = "buildtime-bindgen")]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
#[cfg(not(feature = "buildtime-bindgen"))]
#[rustfmt::skip]
#[path = "raw_bindings.rs"]
mod bindings;
pub use bindings::*; // with `dynamic`, the functions defined below win over its declarations

/// Make sure that the library can be used: found (with `dynamic`), of this ABI, and not older than
/// these bindings. Call it before anything else; later calls cost nothing.
pub fn load() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(check_library).clone()
}

fn check_library() -> Result<(), String> {
    let name = loader::open()?;
    // SAFETY: functions without preconditions; the version is a static text.
    let (abi, version, text) =
        unsafe { (moec_abi_version(), moec_version(), CStr::from_ptr(moec_version_string())) };
    let built = MOEC_VERSION_MAJOR << 22 | MOEC_VERSION_MINOR << 12 | MOEC_VERSION_PATCH;
    if abi == MOEC_ABI_VERSION && version >= built {
        return load_plugin();
    }
    Err(format!(
        "moec-sys: {name} is {} with ABI {abi}; {MOEC_VERSION_MAJOR}.{MOEC_VERSION_MINOR}.\
         {MOEC_VERSION_PATCH} or later with ABI {MOEC_ABI_VERSION} is needed",
        text.to_string_lossy()
    ))
}

/// The CUDA plug-in that the feature `cuda` built: [`load`] opens it where it lies. A program that
/// goes to another machine takes the file along, beside itself.
pub const CUDA_PLUGIN: Option<&str> = option_env!("MOEC_CUDA_PLUGIN");

fn load_plugin() -> Result<(), String> {
    let Some(path) = CUDA_PLUGIN.filter(|path| std::path::Path::new(path).exists()) else {
        return Ok(()); // the library looks for one itself
    };
    let text = std::ffi::CString::new(path).map_err(|_| format!("moec-sys: a NUL in {path}"))?;
    // SAFETY: a path that ends in NUL, before any context.
    match unsafe { moec_backend_load(text.as_ptr()) } {
        MOEC_OK => Ok(()),
        status => Err(format!("moec-sys: {path}: status {status}")),
    }
}

#[cfg(not(feature = "dynamic"))]
mod loader {
    pub fn open() -> Result<String, String> {
        Ok("the linked libmoec".into())
    }
}

#[cfg(feature = "dynamic")]
mod loader {
    use std::sync::OnceLock;

    fn name() -> std::ffi::OsString {
        let set = std::env::var_os("MOEC_LIBRARY").filter(|name| !name.is_empty());
        set.unwrap_or_else(|| "libmoec.so.0".into())
    }

    /// The library, opened once and never closed (its threads may outlive any handle).
    pub fn library() -> &'static Result<libloading::Library, String> {
        static LIBRARY: OnceLock<Result<libloading::Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(|| {
            // SAFETY: libmoec has no constructors with preconditions.
            unsafe { libloading::Library::new(name()) }.map_err(|error| {
                let name = name();
                format!(
                    "moec-sys: cannot open {}: {error}; set MOEC_LIBRARY",
                    name.to_string_lossy()
                )
            })
        })
    }

    /// Its name, once it has what tells its version.
    pub fn open() -> Result<String, String> {
        let library = library().as_ref().map_err(Clone::clone)?;
        let name = name().to_string_lossy().into_owned();
        for symbol in ["moec_abi_version", "moec_version", "moec_version_string"] {
            // SAFETY: the address is not used.
            unsafe { library.get::<*const ()>(symbol.as_bytes()) }.map_err(|_| {
                format!("moec-sys: {name} has no {symbol}; another version is needed")
            })?;
        }
        Ok(name)
    }
}

#[cfg(feature = "dynamic")]
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        /// As in `moec.h`. Panics where the library cannot be opened: call [`load`] first.
        pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
            type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
            static FOUND: OnceLock<Function> = OnceLock::new();
            let function = FOUND.get_or_init(|| {
                let library = crate::loader::library().as_ref().unwrap_or_else(|e| panic!("{e}"));
                unsafe { library.get::<Function>(concat!(stringify!($name), "\0").as_bytes()) }
                    .map(|symbol| *symbol)
                    .unwrap_or_else(|e| panic!("moec-sys: {e}"))
            });
            unsafe { function($($arg),*) }
        }
    )*};
}

#[cfg(feature = "dynamic")]
include!("raw_dynamic.rs");
