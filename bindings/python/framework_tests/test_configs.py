# SPDX-License-Identifier: Apache-2.0
"""config.json as transformers understands it, for every model type of the families table."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from moec.checkpoint import flat_config
from moec.families import BY_MODEL_TYPE
from moec.family import Family, Key
from moec.model import NUM_EXPERTS, TOP_K, ZERO_EXPERTS

CLASSES = transformers.CONFIG_MAPPING
ABSENT = {"minimax_text_01", "kimi_k2", "mimo_v2", "bailing_moe", "bailing_moe_v2", "klear",
          "Klear"}


def keys_of(family: Family) -> list[Key]:
    rows = (family.router, family.experts, family.activation, family.shared_activation or {},
            {"shared_count": family.shared_count})
    found = [value for row in rows for value in row.values() if isinstance(value, Key)]
    return [NUM_EXPERTS, TOP_K, ZERO_EXPERTS, *found]


def value_of(key: Key, config: dict[str, Any]) -> Any:
    """A layer's value, or that the key must be given."""
    try:
        return key.read(config, 0)
    except ValueError as error:
        return str(error)


def test_which_types_have_a_class() -> None:
    assert {name for name in BY_MODEL_TYPE if name not in CLASSES} == ABSENT


@pytest.mark.parametrize("model_type", sorted(set(BY_MODEL_TYPE) - ABSENT))
def test_defaults(model_type: str) -> None:
    """A key that config.json lacks has the value of a new config object."""
    config = CLASSES[model_type]()
    reference = flat_config(config.to_dict())
    del reference["model_type"]  # what follows is the class's word alone
    for key in keys_of(BY_MODEL_TYPE[model_type]):
        got = value_of(key, {"model_type": model_type})
        assert got == value_of(key, reference), key.names


@pytest.mark.parametrize("model_type", sorted(set(BY_MODEL_TYPE) - ABSENT))
def test_null_is_false(model_type: str) -> None:
    """Of a key that says yes or no: the reference asks whether it is true."""
    reference = flat_config(CLASSES[model_type]().to_dict())
    for key in keys_of(BY_MODEL_TYPE[model_type]):
        for name in key.names:
            if isinstance(reference.get(name), bool):
                null, no = ({"model_type": model_type, name: value} for value in (None, False))
                assert value_of(key, null) == value_of(key, no), name


@pytest.mark.parametrize("model_type", sorted(set(BY_MODEL_TYPE) - ABSENT))
def test_nested_types(model_type: str) -> None:
    """The type that the language part of a config names is a row, and the same one."""
    reference = flat_config(CLASSES[model_type]().to_dict())
    assert BY_MODEL_TYPE[reference["model_type"]] is BY_MODEL_TYPE[model_type]
