# SPDX-License-Identifier: Apache-2.0
"""The SWIG layer beside bindings/api.json: every struct, every number in it at its offset, every
constant and function that the package does not leave out on purpose."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from moec import _raw

API = json.loads((Path(__file__).resolve().parents[2] / "api.json").read_text())
LEFT_OUT = {"moec_allocator", "moec_thread_pool"}  # callbacks into Python from a kernel
NOT_WRAPPED = {"moec_struct_init", "moec_tensor_from_dlpack", "moec_tensor_make", "moec_set_log"}
STRUCTS = [row for row in API["structs"] if row["name"] not in LEFT_OUT]


@pytest.mark.parametrize("row", STRUCTS, ids=lambda row: row["name"])
def test_numbers_are_where_the_header_has_them(row: dict[str, Any]) -> None:
    value = getattr(_raw, row["name"])()
    address = int(value.this)
    if row["sized"]:
        assert value.struct_size == row["bytes"]
    for number, field in enumerate(row["fields"], start=3):
        if field["type"]["kind"] not in ("int", "uint"):
            continue
        data = number.to_bytes(field["bytes"], "little")
        ctypes.memmove(address + field["offset"], data, len(data))
        assert getattr(value, field["name"]) == number, field["name"]


def test_constants_and_functions() -> None:
    for row in API["constants"]:
        assert getattr(_raw, row["name"]) == row["value"], row["name"]
    for name, value in API["macros"].items():
        assert getattr(_raw, name) == value
    missing = {row["name"] for row in API["functions"] if not hasattr(_raw, row["name"])}
    assert missing == NOT_WRAPPED
