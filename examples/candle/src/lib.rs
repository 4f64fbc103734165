// SPDX-License-Identifier: Apache-2.0
//! A Mixture-of-Experts layer as a candle operation. It reads each `CpuStorage` in place and is
//! differentiable in all three: x `[T, H]`, the gate `[E, H]`, and the experts as one flat
//! parameter, gate_up `[E, 2I, H]` followed by down `[E, H, I]` (candle operations take three
//! tensors at most).
use candle_core::{bail, CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};
use moec::{sys, Stream, TensorMut, WeightGrads};
use std::sync::{Arc, Mutex};

#[derive(Clone, Copy)]
pub struct Sizes {
    pub hidden: usize,
    pub inter: usize,
    pub experts: usize,
    pub top_k: usize,
}

pub struct MoeLayer {
    context: moec::Context,
    layer: moec::Layer,
    sizes: Sizes,
}

/// One application of the layer: what its forward pass saved is for its own backward pass.
struct Application {
    of: Arc<MoeLayer>,
    saved: Mutex<Vec<u8>>,
}

fn failed(error: moec::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

impl MoeLayer {
    /// Softmax router with normalised weights, SwiGLU experts: Qwen3-MoE's and Mixtral's block.
    pub fn new(sizes: Sizes) -> Result<Arc<Self>> {
        let context = moec::Context::cpu().map_err(failed)?;
        let (count, top_k) = (sizes.experts as i32, sizes.top_k as i32);
        let router = moec::RouterDesc::new().num_experts(count).top_k(top_k);
        let experts = moec::ExpertsDesc::new()
            .num_experts(count)
            .top_k(top_k)
            .hidden(sizes.hidden as i64)
            .inter(sizes.inter as i64)
            .gate_layout(sys::MOEC_GATE_THEN_UP)
            .dtype(sys::MOEC_F32)
            .save(sys::MOEC_SAVE_ALL);
        let layer = moec::Layer::new(&context, &router.norm(sys::MOEC_NORM_SUM), &experts);
        Ok(Arc::new(Self { layer: layer.map_err(failed)?, context, sizes }))
    }

    /// y `[T, H]`.
    pub fn forward(
        self: &Arc<Self>,
        x: &Tensor,
        gate: &Tensor,
        experts: &Tensor,
    ) -> Result<Tensor> {
        x.apply_op3(gate, experts, Application { of: self.clone(), saved: Mutex::default() })
    }

    fn gate_up_len(&self) -> usize {
        2 * self.sizes.experts * self.sizes.inter * self.sizes.hidden
    }

    fn gate_up_shape(&self) -> [usize; 3] {
        [self.sizes.experts, 2 * self.sizes.inter, self.sizes.hidden]
    }

    fn down_shape(&self) -> [usize; 3] {
        [self.sizes.experts, self.sizes.hidden, self.sizes.inter]
    }

    /// The matrices borrowed where they lie, for one call.
    fn weights<'a>(&self, experts: &'a [f32]) -> Result<moec::Weights<'a>> {
        if experts.len() != self.gate_up_len() / 2 * 3 {
            bail!(
                "experts have {} elements; {} expected",
                experts.len(),
                self.gate_up_len() / 2 * 3
            )
        }
        let (gate_up, down) = experts.split_at(self.gate_up_len());
        let desc = moec::WeightsDesc::new()
            .num_experts(self.sizes.experts as i32)
            .hidden(self.sizes.hidden as i64)
            .inter(self.sizes.inter as i64)
            .gate_layout(sys::MOEC_GATE_THEN_UP)
            .dtype(sys::MOEC_F32);
        let set = moec::WeightSet::new()
            .gate_up(moec::Tensor::new(gate_up, &self.gate_up_shape()))
            .down(moec::Tensor::new(down, &self.down_shape()));
        moec::Weights::new(&self.context, &desc, &set).map_err(failed)
    }
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((first, end)) => Ok(&storage.as_slice::<f32>()?[first..end]),
        None => bail!("moec reads contiguous tensors; call contiguous() first"),
    }
}

impl CustomOp3 for Application {
    fn name(&self) -> &'static str {
        "moec"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
        experts: &CpuStorage,
        experts_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x_layout.shape().dims2()?;
        let weights = self.of.weights(slice(experts, experts_layout)?)?;
        let sizes = self.of.layer.sizes().map_err(failed)?;
        let mut saved = self.saved.lock().expect("never poisoned");
        saved.resize(moec::bytes_for(sizes.saved, shape.0), 0);
        let mut y = vec![0f32; shape.0 * shape.1];
        let mut call = moec::LayerCall::new()
            .weights(&weights)
            .x(moec::Tensor::new(slice(x, x_layout)?, &[shape.0, shape.1]))
            .gate_weight(moec::Tensor::new(slice(gate, gate_layout)?, gate_layout.dims()))
            .y(TensorMut::new(&mut y, &[shape.0, shape.1]))
            .saved(&mut saved);
        self.of.layer.forward(&mut call, Stream::DEFAULT).map_err(failed)?;
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gate: &Tensor,
        experts: &Tensor,
        _y: &Tensor,
        d_y: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let d_y = d_y.contiguous()?;
        let held = [x, gate, experts, &d_y].map(Tensor::storage_and_layout);
        let data = |i: usize| match &*held[i].0 {
            Storage::Cpu(storage) => slice(storage, held[i].1),
            _ => bail!("moec-candle runs on the CPU"),
        };
        let (rows, gate_rows) = (x.dims2()?, gate.dims2()?);
        let (rows, gate_rows) = ([rows.0, rows.1], [gate_rows.0, gate_rows.1]);
        let mut d_x = vec![0f32; x.elem_count()];
        let mut d_gate = vec![0f32; gate.elem_count()];
        let mut d_experts = vec![0f32; experts.elem_count()];
        let (d_gate_up, d_down) = d_experts.split_at_mut(self.of.gate_up_len());
        let grads = WeightGrads::new()
            .gate_up(TensorMut::new(d_gate_up, &self.of.gate_up_shape()))
            .down(TensorMut::new(d_down, &self.of.down_shape()));
        let mut saved = self.saved.lock().expect("never poisoned");
        let weights = self.of.weights(data(2)?)?;
        let forward = moec::LayerCall::new()
            .weights(&weights)
            .x(moec::Tensor::new(data(0)?, &rows))
            .gate_weight(moec::Tensor::new(data(1)?, &gate_rows))
            .saved(&mut saved);
        let mut call = moec::LayerGradCall::new()
            .forward(&forward)
            .d_y(moec::Tensor::new(data(3)?, &rows))
            .d_x(TensorMut::new(&mut d_x, &rows))
            .d_gate_weight(TensorMut::new(&mut d_gate, &gate_rows))
            .d_expert_weights(&grads);
        self.of.layer.backward(&mut call, Stream::DEFAULT).map_err(failed)?;
        let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), like.device());
        Ok((Some(tensor(d_x, x)?), Some(tensor(d_gate, gate)?), Some(tensor(d_experts, experts)?)))
    }
}
