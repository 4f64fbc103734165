# SPDX-License-Identifier: Apache-2.0
"""Values of bitsandbytes' codes at every size of its blocks: of a stack whose rows and experts end
within blocks, as the library dequantises it, bit for bit; and its bytes by moec.quantise. Shown
once to fail: the scales of the next block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moec

bnb = pytest.importorskip("bitsandbytes.functional")

E, N, K = 3, 37, 53  # no multiple of 16: there bitsandbytes' AVX-512 kernel reads wrong scales


def quant_of(state: Any) -> moec.Quant:
    nested: dict[str, Any] = {}
    if state.nested:
        nested = {"scale_book": state.state2.code.numpy(), "scales2": state.state2.absmax.numpy(),
                  "scale_offset": np.array([state.offset], np.float32)}
    return moec.Quant(scales=state.absmax.numpy(), codebook=state.code.numpy(),
                      block_k=state.blocksize, **nested)


@torch.compiler.set_stance("force_eager")  # bitsandbytes would compile a kernel of each size
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_values_are_the_librarys(block: int, name: str, nested: bool) -> None:
    values = torch.randn(E, N, K, generator=torch.Generator().manual_seed(block))
    codes, state = bnb.quantize_4bit(values, blocksize=block, quant_type=name,
                                     compress_statistics=nested)
    with moec.Context() as context:
        weights = moec.Weights.of(
            context, gate_layout=moec.GateLayout.NONE, scheme=moec.Scheme.CODEBOOK4,
            down_scheme=moec.Scheme.NONE, dtype="f32", up=codes.numpy(), up_quant=quant_of(state),
            down=np.zeros((E, K, N), np.float32))
        got = [np.asarray(weights.dequantise(moec.MatrixName.UP, e)) for e in range(E)]
        made = moec.quantise(context, values.numpy(), name, block_k=block)
        np.testing.assert_array_equal(np.stack(got), bnb.dequantize_4bit(codes, state).numpy())
        if not nested:  # of whose scales one between two may be the other
            assert np.asarray(made.codes).tobytes() == codes.numpy().tobytes()
            assert np.asarray(made.quant.scales).tobytes() == state.absmax.numpy().tobytes()
