# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT before 0.19.1 wrote, as files that PEFT reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from .._adapters import Factors
from ..torch._peft_files import CONFIG, KEY, PREFIX, WEIGHTS, WRITTEN, as_stored, is_a_first
from ._packed import STACKS, stored
from ._report import experts_of


def convert_adapter(
    model: nn.Module, folder: str | os.PathLike[str], target: str | os.PathLike[str],
) -> None:
    """Write an adapter that PEFT before 0.19.1 saved into another folder, as PEFT reads it from
    0.19.1 on. Factors of stacks [E,out,in] change: lora_A lay beside the output; of stacks
    [E,in,out] those of 0.19.0, for the same reason. What is of other layers or of single experts
    stays. model: the base, as it is before PeftModel.from_pretrained. Both files are written, and
    nothing else.

    Raises ValueError for the file of another release, and, naming it, for factors that do not fit.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((Path(folder) / CONFIG).read_text())
    version = config.get("peft_version")
    if is_a_first(version) is False:
        raise ValueError(f"moec.transformers: the adapter is of PEFT {version}, which wrote it as "
                         "it is read; one of PEFT before 0.19.1 is needed")
    tensors = load_file(Path(folder) / WEIGHTS)
    modules = experts_of(model)
    changed = 0
    for key in list(tensors):
        match = KEY.match(key.removeprefix(PREFIX))
        module: Any = None if match is None else modules.get(match["path"])
        # PEFT asks so, also of Llama-4's [E,in,out], which do not say what they are.
        is_transposed = bool(getattr(module, "is_transposed", False))
        is_first = is_a_first(version, is_transposed) is not False  # of no release: as 0.18
        if module is None or match["part"] != "A" or is_first == is_transposed:
            continue
        head, _, tail = key.rpartition("lora_A")
        _exchange(module, tensors, key, f"{head}lora_B{tail}", is_transposed)
        changed += 1
    if not changed:
        raise ValueError("moec.transformers: the adapter has no factors of the model's stacks that "
                         f"PEFT exchanged; the model has experts {', '.join(modules) or 'nowhere'}")
    place = Path(target)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    (place / CONFIG).write_text(json.dumps(config | {"peft_version": WRITTEN}, indent=2) + "\n")


def _exchange(
    module: nn.Module, tensors: dict[str, Any], key_a: str, key_b: str, is_transposed: bool,
) -> None:
    a, b = tensors[key_a], tensors.get(key_b)
    stacks = [stack for name in STACKS if (stack := stored(module, name)) is not None]
    wanted = [tuple(stack.shape[1:])[:: -1 if is_transposed else 1] for stack in stacks]
    if b is None or (a.shape[-1], b.shape[0]) not in wanted:
        shown = " or ".join(f"[r E,{first}] and [{second},r E]" for first, second in wanted)
        raise ValueError(f"moec.transformers: {key_a} is {list(a.shape)} beside "
                         f"{None if b is None else list(b.shape)}; {shown} are needed")
    held: Any = Factors.from_peft(a, b, len(stacks[0]), 0.0, exchanged=True)
    tensors[key_a], tensors[key_b] = as_stored(held.a, held.b)
