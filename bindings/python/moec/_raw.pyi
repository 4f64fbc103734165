# SPDX-License-Identifier: Apache-2.0
# The generated module is moec.h as it is; its types are checked at run time, by SWIG.
from typing import Any

def __getattr__(name: str) -> Any: ...
