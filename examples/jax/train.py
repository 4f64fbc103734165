# SPDX-License-Identifier: Apache-2.0
"""Train one Mixture-of-Experts layer to shift its input: moec.jax under jit and grad."""

import jax
import jax.numpy as jnp
import moec
import moec.jax

T, H, I, E, K = 64, 32, 16, 8, 2  # tokens, hidden, intermediate, experts, experts per token
STEPS, RATE = 60, 0.3
ROUTER = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
EXPERTS = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)


def loss_of(parameters, x):
    y = moec.jax.layer(x, parameters, router=ROUTER, experts=EXPERTS)
    return jnp.square(y - jnp.roll(x, -1, axis=1)).mean()


@jax.jit
def step(parameters, x):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x)
    return jax.tree.map(lambda p, g: p - RATE * H * g, parameters, gradients), loss


def main():
    shapes = {"gate_weight": (E, H), "gate_up": (E, 2 * I, H), "down": (E, H, I)}
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes) + 1)
    parameters = {name: 0.2 * jax.random.normal(key, shape)
                  for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    x = jax.random.uniform(keys[-1], (T, H), minval=-1)
    losses = []
    for _ in range(STEPS):
        parameters, loss = step(parameters, x)
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
