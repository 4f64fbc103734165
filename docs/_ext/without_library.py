# SPDX-License-Identifier: Apache-2.0
"""The Python package as its source is, without the compiled library: what pages of reference and
tables need of it are names, signatures and texts."""

import json
import sys
import types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


class Raw(types.ModuleType):
    """Stands for moec._raw: constants as api.json has them, all else as nothing at all."""

    def __init__(self, api):
        super().__init__("moec._raw")
        self._values = api["macros"] | {c["name"]: c["value"] for c in api["constants"]}
        self._core = mock.MagicMock()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        version = self._values
        number = (version["MOEC_VERSION_MAJOR"] << 22 | version["MOEC_VERSION_MINOR"] << 12
                  | version["MOEC_VERSION_PATCH"])
        known = {"moec_version": number, "moec_abi_version": version["MOEC_ABI_VERSION"],
                 "moec_version_string": "0"}
        return mock.MagicMock(name=name, return_value=known.get(name, mock.DEFAULT))


def install():
    """`import moec` works from now on."""
    api = json.loads((ROOT / "bindings/api.json").read_text())
    sys.modules.setdefault("moec._raw", Raw(api))
    package = str(ROOT / "bindings/python")
    if package not in sys.path:
        sys.path.insert(0, package)
