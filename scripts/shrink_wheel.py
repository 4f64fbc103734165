# SPDX-License-Identifier: Apache-2.0
"""shrink_wheel.py WHEEL...: write each wheel anew, as small as deflate makes it."""

import sys
import zipfile
from pathlib import Path

import deflate


class Compressor:
    """What zipfile asks of zlib, by libdeflate, which searches further."""

    def __init__(self):
        self.data = bytearray()

    def compress(self, data):
        self.data += data
        return b""

    def flush(self):
        return deflate.deflate_compress(self.data, 12)


for name in sys.argv[1:]:
    path, smaller = Path(name), Path(name + ".part")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(smaller, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            info.compress_type = zipfile.ZIP_DEFLATED
            with new.open(info, "w") as member:
                if member._compressor is None:
                    sys.exit("shrink_wheel.py: zipfile compresses in another way than it did")
                member._compressor = Compressor()
                member.write(data)
    smaller.replace(path)
