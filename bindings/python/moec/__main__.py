# SPDX-License-Identifier: Apache-2.0
"""python -m moec: the `moec` command."""

from .cli import main

main()
