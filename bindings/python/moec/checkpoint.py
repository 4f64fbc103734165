# SPDX-License-Identifier: Apache-2.0
"""Safetensors files and folders, mapped into memory: a tensor is read when it is used.

Format: 8-byte little-endian length, JSON header, data. The header is checked against the file's
size first; errors are CheckpointError, which names the file and what was found.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NOT_JSON = (ValueError, RecursionError)  # what json.loads raises
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


OUTPUT = {"made_by": "moec run"}
"""metadata of files that lie in a folder without being part of its checkpoint"""


class CheckpointError(Exception):
    """A file or folder that is not what its format says, or lacks what is asked for."""


class SafetensorsFile(Mapping[str, np.ndarray]):
    """One file: name -> read-only array over the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped: {error}") from None
        self._entries, self.metadata = self._read_header()

    def _read_header(self) -> tuple[dict[str, Any], dict[str, str]]:
        size = len(self._map)
        length = struct.unpack("<Q", self._map[:8])[0] if size >= 8 else _MAX_HEADER
        if length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{self.path}: not a safetensors file: header past the end")
        try:
            header = json.loads(self._map[8 : 8 + length])
            metadata = dict(header.pop("__metadata__", {}))
            for name, entry in header.items():
                self._check(name, entry, size - 8 - length)
        except (*_NOT_JSON, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: damaged header: {error}") from None
        self._start = 8 + length
        return header, metadata

    @staticmethod
    def _check(name: str, entry: Any, data_bytes: int) -> None:
        begin, end = entry["data_offsets"]
        if any(type(n) is not int or n < 0 for n in (begin, end, *entry["shape"])):
            raise ValueError(f"{name} has the shape {entry['shape']}, the bytes {begin}..{end}")
        if entry["dtype"] not in _DTYPES:
            return  # refused when it is read: other tensors may be all that is wanted
        needed = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        if not (0 <= begin <= end <= data_bytes and end - begin == needed):
            raise ValueError(f"{name} claims bytes {begin}..{end} of {data_bytes}, needs {needed}")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            kind = entry["dtype"]
            raise CheckpointError(f"{self.path}: {name} is {kind}, which is not supported")
        count = math.prod(entry["shape"])
        offset = self._start + entry["data_offsets"][0]
        flat = np.frombuffer(self._map, np.uint8, count * dtype.itemsize, offset)
        if offset % dtype.itemsize:  # writers that do not sort by size leave some so
            flat = flat.copy()
        try:
            return flat.view(dtype).reshape(entry["shape"])
        except (ValueError, OverflowError):  # 65 dimensions, or 0 rows of 2^70
            raise CheckpointError(f"{self.path}: {name} has the shape {entry['shape']}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Checkpoint(Mapping[str, np.ndarray]):
    """A file, or a folder of files (sharded or not), as one mapping of tensors.

    config: what config.json beside the weights says, or a golden file's metadata.
    """

    def __init__(self, path: str | Path, config: str | Path | None = None) -> None:
        self.path = Path(path)
        self._files = self._open_files()
        self.is_golden = "family" in self._files[0].metadata
        self._owner = self._place()
        self.config = self._read_config(Path(config) if config is not None else None)

    @property
    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    def _open_files(self) -> list[SafetensorsFile]:
        if self.path.is_file():
            return [SafetensorsFile(self.path)]
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such file or folder")
        files = [SafetensorsFile(file) for file in sorted(self.path.glob("*.safetensors"))]
        files = [file for file in files if not file.metadata.items() >= OUTPUT.items()]
        if not files:
            kinds = sorted({f.suffix for f in self.path.iterdir() if f.suffix}) or ["nothing"]
            raise CheckpointError(f"{self.path}: no *.safetensors file; found {', '.join(kinds)}")
        return files

    def _place(self) -> dict[str, SafetensorsFile]:
        """The file of each tensor: model.safetensors alone, else what the index says (the order of
        transformers), whatever other files have. A tensor that is not where the index says is a
        missing shard. Without either no two files may have the same tensor."""
        whole = [file for file in self._files if file.path.name == "model.safetensors"]
        index = self.path / "model.safetensors.index.json"
        if whole or not index.is_file():
            return self._place_once(whole or self._files)
        try:
            entries = json.loads(index.read_text())["weight_map"].items()
            placed = {name: str(file) for name, file in entries}
        except (*_NOT_JSON, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: damaged: {error}") from None
        files = {file.path.name: file for file in self._files}
        missing = sorted({file for name, file in placed.items() if name not in files.get(file, ())})
        if missing:
            raise CheckpointError(f"{self.path}: shards are missing: {', '.join(missing[:4])}")
        return {name: files[file] for name, file in placed.items()}

    def _place_once(self, files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
        placed: dict[str, SafetensorsFile] = {}
        for file in files:
            twice = next((name for name in file if name in placed), None)
            if twice is not None:
                raise CheckpointError(
                    f"{self.path}: {placed[twice].path.name} and {file.path.name} "
                    f"both have {twice}; give one of the files instead of the folder"
                )
            placed |= dict.fromkeys(file, file)
        return placed

    def _read_config(self, path: Path | None) -> dict[str, Any]:
        text = self._files[0].metadata.get("config") if path is None else None
        folder = self.path if self.path.is_dir() else self.path.parent
        path = self._files[0].path if text is not None else path or folder / "config.json"
        try:
            config = json.loads(path.read_text() if text is None else text)
        except OSError:
            raise CheckpointError(f"{path}: not there; give the model's config.json") from None
        except (*_NOT_JSON, TypeError) as error:
            raise CheckpointError(f"{path}: the config is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{path}: holds {type(config).__name__}, not an object")
        return flat_config(config | self._read_modelopt(folder, config))

    @staticmethod
    def _read_modelopt(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """The quantization_config that modelopt may write into a file of its own."""
        path = folder / "hf_quant_config.json"
        if "quantization_config" in config or not path.is_file():
            return {}
        try:
            section = dict(json.loads(path.read_text())["quantization"])
        except (*_NOT_JSON, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged: {error!r}") from None
        return {"quantization_config": {"quant_method": "modelopt"} | section}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._owner[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model: text_config and ffn_config lifted to the top."""
    for nested in ("text_config", "ffn_config"):
        if isinstance(config.get(nested), dict):
            kept = {"model_type": config.get("model_type")} if "model_type" in config else {}
            inner = {key: value for key, value in config[nested].items()
                     if value is not None or key not in config}
            config = config | kept | inner
            if nested == "ffn_config":
                config |= kept  # its own model_type names the part, not the model
    return config


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Write one safetensors file, the largest elements first, so that all are aligned; returns its
    bytes. A file of this name is replaced at the end: arrays may be mapped from it."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = path.resolve()
    replaces = target.is_file() or not target.exists()  # not a device or a pipe
    made = target.with_name(f".moec-{os.getpid()}.part") if replaces else target
    try:
        with made.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in tensors.values():
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if replaces:
            made.replace(target)
    except BaseException as error:
        if replaces:
            made.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of the file that was asked for
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    return 8 + len(text) + offset
