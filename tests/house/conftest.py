# SPDX-License-Identifier: Apache-2.0
"""Where things are. MOEC_BUILD_DIR is the build under test; without it some tests skip."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "house"))


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def header():
    return ROOT / "capi" / "include" / "moec" / "moec.h"


@pytest.fixture(scope="session")
def build():
    if "MOEC_BUILD_DIR" not in os.environ:
        pytest.skip("MOEC_BUILD_DIR is not set")
    return Path(os.environ["MOEC_BUILD_DIR"])
