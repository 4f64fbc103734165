# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt of the package nvidia-cublas, wherever pip put it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NAME = "libcublasLt.so.13"
BESIDE = Path(__file__).parents[1] / "nvidia/cu13/lib" / NAME  # where the plug-in looks by itself


@cache
def open_cublaslt() -> None:
    """Open it where the plug-in would not find it: in another folder of packages than moec's.

    The plug-in then gets it by its name. One that the process has open already (PyTorch's) stays,
    and without the package the plug-in asks the system's loader.
    """
    if BESIDE.is_file() or _is_open():
        return
    try:
        spec = find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder) / "lib" / NAME
        if library.is_file():
            try:
                ctypes.CDLL(str(library))
            except OSError:  # moec.describe_backend() says that there is none
                continue
            return


def _is_open() -> bool:
    try:
        ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
