# SPDX-License-Identifier: Apache-2.0
"""INT8 in channels with zero points, by compressed-tensors: ct_int8_channel_asym.safetensors.

    python tests/golden/make_int8_asym.py     (a Python with compressed-tensors 0.20 and torch)

Tensors as in formats/ct_int8_channel.safetensors, which is symmetric.
"""

import importlib.metadata
import pathlib

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import save_file

OUTPUT = pathlib.Path(__file__).parent / "formats" / "ct_int8_channel_asym.safetensors"
SEED, E, N, K = 20261126, 2, 40, 48
TYPES = {"": torch.float32, "bf16.": torch.bfloat16}


def matrices():
    """Matrices whose channels have centres other than 0, one of zeros and one of one sign."""
    generator = torch.Generator().manual_seed(SEED)
    w = 0.5 * torch.randn(E, N, K, generator=generator)
    w += torch.linspace(-1, 1, N).reshape(1, N, 1)
    w[1, 3] = 0
    w[1, 4] = w[1, 4].abs() + 0.25
    return w.to(torch.bfloat16).float()


def main():
    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    tensors, values = {"w": matrices()}, {}
    for prefix, dtype in TYPES.items():
        values[prefix] = []
        for e, w in enumerate(matrices().to(dtype)):
            low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
            scale, zero = calculate_qparams(low, high, args)
            state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
            packed = compressor.compress(state, scheme)
            values[prefix].append(compressor.decompress(dict(packed), scheme)["weight"])
            for name, tensor in packed.items():
                tensors[f"{prefix}{e}.{name}"] = tensor.contiguous().clone()
    tensors["dequant_fp32"] = torch.stack(values[""])
    tensors["bf16.dequant"] = torch.stack(values["bf16."])
    version = importlib.metadata.version
    save_file(tensors, OUTPUT, {
        "format": "ct_int8_channel_asym", "seed": str(SEED), "torch": version("torch"),
        "compressed_tensors": version("compressed-tensors"), "compressor": "int-quantized",
    })


if __name__ == "__main__":
    main()
