// SPDX-License-Identifier: Apache-2.0
//! Mixture-of-Experts layers: routing, plans, grouped experts, forward and backward, on libmoec.
//!
//! Handles own, tensors borrow, every failed call is an [`Error`] with the library's own words.
//! Shapes: T tokens, H hidden, I intermediate, E experts, K experts per token; see `moec.h`.
#![doc = include_str!("../README.md")]

mod adapters;
mod call;
mod error;
mod handle;
mod layer;
mod memory;
mod quantised;
mod tensor;

pub use adapters::{Adapter, AdapterGrads};
pub use call::*;
pub use error::{check, Error, Result};
pub use half;
pub use handle::{device_count, version, Context, Stream};
pub use handle::{Adapters, Experts, Layer, Plan, Router, Weights};
pub use layer::WeightsDesc;
pub use layer::{bytes_for, Size, WeightsMut};
pub use layer::{AdaptersDesc, ContextDesc, ExpertsDesc, PlanDesc, QuantiseDesc, RouterDesc};
pub use memory::DeviceArray;
pub use moec_sys as sys;
pub use quantised::Quantised;
pub use tensor::{Element, Tensor, TensorMut, F8E4M3, F8E5M2, F8E8M0};
