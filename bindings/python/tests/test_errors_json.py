# SPDX-License-Identifier: Apache-2.0
"""The error cases that every binding runs: tests/errors.json holds one right problem as fields of
C structs, and rows that say what is broken in which call and what must come back. Fields are found
at the offsets of bindings/api.json."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moec
from moec import _raw

ROOT = Path(__file__).resolve().parents[3]
FILE = json.loads((ROOT / "tests/errors.json").read_text())
API = json.loads((ROOT / "bindings/api.json").read_text())
STRUCTS = {s["name"]: {f["name"]: f for f in s["fields"]} for s in API["structs"]}
TOKENS = FILE["tensors"]["forward.x"][1][0]
DTYPES = {"f32": (np.float32, moec.DType.F32), "i32": (np.int32, moec.DType.I32)}


class Problem:
    """Raw structs whose calls succeed until a field is mutated."""

    def __init__(self, context: moec.Context) -> None:
        self.arrays: list[np.ndarray] = []
        self.raw = {root: getattr(_raw, name)() for root, name in FILE["structs"].items()}
        for path, value in FILE["values"].items():
            self.put(path, value)
        for path, (dtype, shape) in FILE["tensors"].items():
            self.tensor(path, shape, *DTYPES[dtype])
        for path, root in FILE["pointers"].items():
            self.put(path, int(self.raw[root].this))
        self.context = context.raw
        self.layer = _raw.moec_layer_create(self.context, self.raw["layer"])
        self.unbound = _raw.moec_weights_create(self.context, self.raw["weights"])
        self.weights = _raw.moec_weights_create(self.context, self.raw["weights"])
        self.plan = _raw.moec_plan_create(self.context, self.raw["plan"], None)
        _raw.moec_weights_bind(self.weights, self.raw["set"])
        self.put("forward.weights", int(self.weights))
        sizes = _raw.moec_experts_sizes()
        _raw.moec_layer_query(self.layer, sizes)
        saved = np.zeros(sizes.saved.base + TOKENS * sizes.saved.per_token, "u1")
        self.arrays.append(saved)
        self.put("forward.saved.ptr", saved.ctypes.data)
        self.put("forward.saved.bytes", saved.nbytes)

    def field(self, path: str) -> tuple[int, int, str]:
        """Address, bytes and kind of a field such as "forward.x.shape[1]"."""
        root, *names = path.split(".")
        address, kind = int(self.raw[root].this), {"name": FILE["structs"][root]}
        size = 0
        for part in names:
            name, index = re.fullmatch(r"(\w+)(?:\[(\d)\])?", part).groups()
            row = STRUCTS[kind["name"]][name]
            address, size, kind = address + row["offset"], row["bytes"], row["type"]
            if index is not None:
                size, kind = size // kind["count"], kind["of"]
                address += int(index) * size
        return address, size, kind.get("kind", "")

    def put(self, path: str, value: float) -> None:
        address, size, kind = self.field(path)
        as_float = kind == "float"
        whole = 0 if as_float else value % 256**size
        data = struct.pack("<f", value) if as_float else whole.to_bytes(size, "little")
        ctypes.memmove(address, data, size)

    def get(self, path: str) -> int:
        address, size, _ = self.field(path)
        return int.from_bytes(ctypes.string_at(address, size), "little")

    def tensor(self, path: str, shape: list[int], numpy_type: Any, dtype: int) -> None:
        array = np.zeros(shape, numpy_type)
        self.arrays.append(array)
        self.put(f"{path}.data".removeprefix("."), array.ctypes.data)
        for name, value in {"dtype": dtype, "ndim": len(shape), "device_type": 1}.items():
            self.put(f"{path}.{name}", value)
        for i, extent in enumerate(shape):
            self.put(f"{path}.shape[{i}]", extent)

    def mutate(self, mutation: dict[str, Any]) -> None:
        for path, value in mutation.items():
            if value == "unbound":
                value = int(self.unbound)
            self.put(path, self.get(value) if isinstance(value, str) else value)

    def close(self) -> None:
        _raw.moec_layer_free(self.layer)
        _raw.moec_plan_free(self.plan)
        for weights in (self.weights, self.unbound):
            _raw.moec_weights_free(weights)

    def call(self, name: str) -> None:
        raw = self.raw
        made = {
            "moec_context_create": lambda: _raw.moec_context_create(raw["context"]),
            "moec_layer_create": lambda: _raw.moec_layer_create(self.context, raw["layer"]),
            "moec_weights_create": lambda: _raw.moec_weights_create(self.context, raw["weights"]),
            "moec_weights_bind": lambda: _raw.moec_weights_bind(self.weights, raw["set"]),
            "moec_plan_create": lambda: _raw.moec_plan_create(self.context, raw["plan"], None),
            "moec_plan_from_topk": lambda: _raw.moec_plan_from_topk(
                self.plan, raw["ids"], None, 0),
            "moec_plan_totals_sync": lambda: _raw.moec_plan_totals_sync(self.plan, 0),
            "moec_layer_forward": lambda: _raw.moec_layer_forward(self.layer, raw["forward"], 0),
            "moec_layer_backward": lambda: _raw.moec_layer_backward(self.layer, raw["grads"], 0),
        }[name]()
        if name.endswith("_create"):
            getattr(_raw, name.replace("_create", "_free"))(made)


def test_row_count() -> None:
    assert len(FILE["rows"]) == 71


def test_the_problem_itself_is_right(context: moec.Context) -> None:
    problem = Problem(context)
    for name in dict.fromkeys(row["call"] for row in FILE["rows"]):
        if name != "moec_plan_totals_sync":  # its mistake is the call itself
            problem.call(name)
    problem.close()


@pytest.mark.parametrize(
    "row", FILE["rows"], ids=lambda row: f"{row['call']}-{','.join(row['mutation']) or 'as_is'}"
)
def test_error(context: moec.Context, row: dict[str, Any]) -> None:
    problem = Problem(context)
    if row["call"] == "moec_layer_backward":
        problem.call("moec_layer_forward")
    problem.mutate(row["mutation"])
    with pytest.raises(moec.MoecError) as caught:
        problem.call(row["call"])
    error = caught.value
    assert (error.name, error.site) == (row["code"], row["site"]), str(error)
    assert str(error).startswith(row["site"])
    problem.close()
