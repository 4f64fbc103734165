// SPDX-License-Identifier: Apache-2.0
//! What the programs of this crate share: numbers at random, and a task to learn.

/// `count` numbers between -scale and scale, which `state` decides.
pub fn random(count: usize, scale: f32, state: &mut u32) -> Vec<f32> {
    let mut next = || {
        *state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        scale * ((*state >> 8) as f32 / 8388608.0 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

/// The mean of (y - target)^2, target[t][h] = x[t][h + 1] of tokens of `hidden`; fills d_y.
pub fn loss_of(hidden: usize, x: &[f32], y: &[f32], d_y: &mut [f32]) -> f32 {
    let tokens = x.len() / hidden;
    let mut sum = 0.0;
    for (i, (y, d)) in y.iter().zip(d_y).enumerate() {
        let error = y - x[i / hidden * hidden + (i + 1) % hidden];
        sum += error * error;
        *d = 2.0 * error / tokens as f32;
    }
    sum / x.len() as f32
}
