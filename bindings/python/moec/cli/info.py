# SPDX-License-Identifier: Apache-2.0
"""moec info: what is installed, what this machine has."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .. import _context as api
from .. import shapes
from .._enums import DeviceType
from ..families import FAMILIES
from ._common import console, facts, table, to_bytes

EXAMPLE = "moec info"

# Members of describe_backend() -> how they are called here.
_CUDA = {"state": "state", "why": "why", "plugin": "plug-in", "driver": "driver serves CUDA",
         "needs": "plug-in needs CUDA", "dense_products": "dense products"}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show version, backends, CPU features, devices and known models."""
    devices = api.devices()
    build = api.build_info()
    cuda = api.describe_backend(DeviceType.CUDA)
    if as_json:
        found = [{name: getattr(d, name) for name in d.__slots__} for d in devices]
        text = {"version": api.version(), "abi": api.abi_version(), "build": build, "cuda": cuda}
        print(json.dumps(text | {"devices": found}))
        return
    backends = [
        f"{kind.name.lower()} ({sum(d.device_type == kind for d in devices)} devices)"
        for kind in (DeviceType.CPU, DeviceType.CUDA)
    ]
    rows = {"version": api.version(), "backends": ", ".join(backends)}
    console.print(facts("moec", rows | {key: _text(value) for key, value in build.items()}))
    made = table("devices", "name", "backend", "arch", "cores/SMs", "memory", "free")
    for d in devices:
        made.add_row(d.name, d.backend, d.arch, str(d.multiprocessors), to_bytes(d.total_bytes),
                     to_bytes(d.free_bytes))
    console.print(made)
    console.print(facts("CUDA", {_CUDA[key]: cuda[key] for key in _CUDA if cuda.get(key)}))
    kinds = sorted(name for family in FAMILIES for name in family.model_types)
    console.print(facts("models", {"for synth and bench": ", ".join(shapes.load()),
                                   "model types for run": ", ".join(kinds)}))


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
