# SPDX-License-Identifier: Apache-2.0
"""moec path: where the package's library is, for other languages."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import moec

EXAMPLE = "moec path pkgconfig"


class Part(StrEnum):
    """What a program outside Python needs."""

    LIBRARY = "library"
    INCLUDE = "include"
    PKGCONFIG = "pkgconfig"
    CMAKE = "cmake"


PLACES = {
    Part.LIBRARY: "lib/libmoec.so.0",
    Part.INCLUDE: "include",
    Part.PKGCONFIG: "lib/pkgconfig",
    Part.CMAKE: "lib/cmake/moec",
}


def command(
    part: Annotated[Part, typer.Argument(help="What to print the place of.")] = Part.LIBRARY,
) -> None:
    """Print where the package has the library, or the folder of headers, pkg-config or CMake files.

    MOEC_LIBRARY takes the library in Go, Julia and Rust, PKG_CONFIG_PATH `moec path pkgconfig`,
    and CMake -Dmoec_DIR=$(moec path cmake).
    """
    print((Path(moec.__file__).parent / PLACES[part]).resolve(strict=True))
