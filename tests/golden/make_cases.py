# SPDX-License-Identifier: Apache-2.0
"""The families table of the Python package -> cases.json, which every binding's golden test reads.

    python tests/golden/make_cases.py [--check]     (a Python in which moec is installed)

A case holds the non-zero fields of the C descriptors and says which tensor of the family's file is
which argument, as a shape: a tensor of the file may hold more rows than are used (the identity
experts of longcat_flash), and then the gradient of the rest is 0.
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np
from moec import (
    Activation,
    DType,
    ExpertsDescFlags,
    Matrices,
    Orientation,
    Save,
    WeightsDesc,
    golden,
)
from moec.checkpoint import Checkpoint
from moec.model import read_layer

OUTPUT = pathlib.Path(__file__).with_name("cases.json")


def plain(desc):
    """The non-zero fields of a descriptor, as numbers."""
    out = {}
    for field in dataclasses.fields(desc):
        value = getattr(desc, field.name)
        if isinstance(value, Activation):
            value = plain(value)
        elif not isinstance(value, float):
            value = int(value)
        if value:
            out[field.name] = value
    return out


def tensor(name: str, array: np.ndarray):
    return {"tensor": name.removeprefix("p."), "shape": list(array.shape)}


def matrices(held: Matrices, inter: int, hidden: int):
    found = {role: getattr(held.arrays, role) for role in held.names}
    stacks = {role: a if isinstance(a, np.ndarray) else a[0][None] for role, a in found.items()}
    layout = held.layout
    desc = WeightsDesc(
        num_experts=len(stacks["down"]), hidden=hidden, inter=inter, dtype=DType.F32,
        gate_layout=layout.gate_layout, gate_up_orientation=Orientation(layout.gate_up_orientation),
        down_orientation=Orientation(layout.down_orientation),
    )
    bound = {role: tensor(held.names[role][0], stack) for role, stack in stacks.items()}
    return {"desc": plain(desc), "matrices": bound}


def case(path: pathlib.Path):
    spec = read_layer(Checkpoint(path), save=Save.ALL)
    # Whether weights are plain is theirs, not the layer's.
    experts = dataclasses.replace(spec.experts, flags=ExpertsDescFlags.NONE)
    out = {
        "family": path.stem,
        "router": plain(spec.router),
        "experts": plain(experts),
        "inputs": {role: tensor(name, spec.inputs[role]) for role, name in spec.names.items()},
        "weights": matrices(spec.matrices, experts.inter, experts.hidden),
    }
    if spec.shared is not None:
        out["shared_weights"] = matrices(spec.shared, experts.shared_inter, experts.hidden)
    return out


def render(cases):
    """One line for each part of a case."""
    blocks = []
    for one in cases:
        parts = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in one.items())
        blocks.append(f"  {{\n{parts}\n  }}")
    body = ",\n".join(blocks)
    return f'{{\n "tolerance": {golden.TOLERANCE},\n "cases": [\n{body}\n ]\n}}\n'


def main():
    found = golden.find_files(OUTPUT.parent)
    files = [path for path in found
             if path.stem != "load_balancing_loss" and path.parent == OUTPUT.parent]
    text = render([case(path) for path in files])
    if "--check" in sys.argv[1:]:
        if OUTPUT.read_text() != text:
            sys.exit("make_cases.py: cases.json is stale; run make_cases.py")
        return
    OUTPUT.write_text(text)
    print(f"make_cases.py: wrote {len(files)} cases")


if __name__ == "__main__":
    main()
