// SPDX-License-Identifier: Apache-2.0
use moec_sys as sys;
use std::ffi::CStr;
use std::os::raw::c_char;

/// A failed call, in the library's own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// One of `moec_sys::MOEC_E_*`.
    pub code: i32,
    /// The driver's, the system's or a callback's number; 0 if none.
    pub native_code: i32,
    /// The C entry point.
    pub site: String,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The code's name, such as `MOEC_E_SHAPE`.
    ///
    /// ```
    /// use moec::*;
    /// let error = Context::new(&ContextDesc::new().num_threads(-1)).err().unwrap();
    /// assert_eq!(error.name(), "MOEC_E_INVALID_ARG");
    /// assert_eq!(error.site, "moec_context_create");
    /// ```
    pub fn name(&self) -> &'static str {
        if sys::load().is_err() {
            return "MOEC_E_ABI"; // the only error without a library
        }
        // SAFETY: always a static, NUL-terminated text.
        unsafe { CStr::from_ptr(sys::moec_status_name(self.code)) }
            .to_str()
            .unwrap_or("MOEC_E_UNKNOWN")
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.message, self.name())
    }
}

impl std::error::Error for Error {}

fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&b| b as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The status of a raw call as a `Result`. The library keeps its last error per thread: call this
/// on the thread that made the call, before any other call.
pub fn check(status: sys::moec_status) -> Result<()> {
    if status >= 0 {
        return Ok(());
    }
    let mut info: sys::moec_error_info = sized();
    // SAFETY: `info` is a valid sized struct.
    let _ = unsafe { sys::moec_last_error(&mut info) };
    Err(Error {
        code: status,
        native_code: info.native_code,
        site: text(&info.site),
        message: text(&info.message),
    })
}

/// libmoec found, of this ABI and not too old.
pub(crate) fn loaded() -> Result<()> {
    sys::load().map_err(|message| Error {
        code: sys::MOEC_E_ABI,
        native_code: 0,
        site: "moec_abi_version".into(),
        message,
    })
}

/// A zeroed struct whose first field is its own size.
pub(crate) fn sized<T: Copy>() -> T {
    // SAFETY: the C structs are plain data for which zero is a valid value, and start with a u32.
    unsafe {
        let mut value: T = std::mem::zeroed();
        *(&mut value as *mut T as *mut u32) = std::mem::size_of::<T>() as u32;
        value
    }
}
