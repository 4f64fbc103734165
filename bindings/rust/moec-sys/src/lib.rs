// SPDX-License-Identifier: Apache-2.0
//! Raw bindings to libmoec, one to one with `moec.h`. The crate `moec` is the safe form.
#![allow(non_camel_case_types, non_upper_case_globals, clippy::all)]
#![cfg_attr(feature = "dynamic", allow(dead_code))]

#[cfg(feature = "buildtime-bindgen")]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
#[cfg(not(feature = "buildtime-bindgen"))]
#[path = "raw_bindings.rs"]
mod bindings;
pub use bindings::*; // with `dynamic`, the functions defined below win over its declarations

#[cfg(feature = "dynamic")]
mod loader {
    use std::sync::OnceLock;

    /// The library, opened once and never closed (its threads may outlive any handle).
    pub fn library() -> &'static libloading::Library {
        static LIBRARY: OnceLock<libloading::Library> = OnceLock::new();
        LIBRARY.get_or_init(|| {
            let name = std::env::var_os("MOEC_LIBRARY").unwrap_or_else(|| "libmoec.so.0".into());
            // SAFETY: libmoec has no constructors with preconditions.
            unsafe { libloading::Library::new(&name) }.unwrap_or_else(|e| {
                panic!(
                    "moec-sys: cannot open {}: {e}; set MOEC_LIBRARY",
                    name.to_string_lossy()
                )
            })
        })
    }
}

#[cfg(feature = "dynamic")]
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
            type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
            static FOUND: std::sync::OnceLock<Function> = std::sync::OnceLock::new();
            let function = FOUND.get_or_init(|| unsafe {
                *crate::loader::library()
                    .get::<Function>(concat!(stringify!($name), "\0").as_bytes())
                    .unwrap_or_else(|e| panic!("moec-sys: {e}"))
            });
            unsafe { function($($arg),*) }
        }
    )*};
}

#[cfg(feature = "dynamic")]
include!("raw_dynamic.rs");
