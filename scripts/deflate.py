# SPDX-License-Identifier: Apache-2.0
"""deflate.py WHEEL...: write each wheel anew, as small as deflate makes it."""

import sys
import zipfile
from pathlib import Path

for name in sys.argv[1:]:
    path, smaller = Path(name), Path(name + ".part")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(smaller, "w") as new:
        for info in old.infolist():
            new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED, 9)
    smaller.replace(path)
