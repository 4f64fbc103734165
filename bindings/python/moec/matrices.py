# SPDX-License-Identifier: Apache-2.0
"""The matrices of experts from a checkpoint's tensors by their names, plain or quantised:
read_experts() for a program, collect() for the tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from ._context import Context
from ._enums import DType, MatrixName, Orientation, Scheme
from ._tensors import Array, dtype_of
from ._weights import MATRICES, WEIGHTS, Quant, Weights, WeightSet
from .checkpoint import CheckpointError
from .codes import Coded, find_kind, ignored_of, read_codes
from .family import Layout
from .kinds import has_tensors
from .quant_config import Config, section_of

_FLOATS = (DType.F32, DType.F16, DType.BF16)


class Source(Protocol):
    """Where tensors come from, by the names of a Layout."""

    tensors: Mapping[str, Array]
    config: Config | None
    used: set[str]

    def path(self, name: str) -> str:
        """The full name of a tensor."""
        ...

    def take(self, path: str) -> Array:
        """A plain tensor."""
        ...


@dataclass(frozen=True)
class Published:
    """What read_experts() was given, so that it can read the same tensors again."""

    tensors: Mapping[str, Array]
    """those that were read, named from the stem on"""
    stem: str
    layout: Layout
    config: Config | None


    def read_again(self, tensors: Mapping[str, Array], count: int, hidden: int) -> Matrices:
        """The same of other tensors of these names."""
        full = {self.stem + name: array for name, array in tensors.items()}
        return read_experts(full, self.stem, num_experts=count, hidden=hidden, config=self.config,
                            layouts=(self.layout,))


@dataclass
class Matrices:
    """The matrices of the experts, or of the shared expert, as found: WeightSet field -> tensor
    names (one, or one per expert) and their arrays; codes have a Quant and an entry in `coded`."""

    layout: Layout
    names: dict[str, list[str]]
    arrays: WeightSet
    count: int
    hidden: int
    inter: int
    coded: dict[str, Coded] = field(default_factory=dict)
    published: Published | None = None

    @property
    def is_coded(self) -> bool:
        return bool(self.coded)

    @property
    def kinds(self) -> str:
        """Names of the kinds of codes, for messages."""
        return ", ".join(dict.fromkeys(one.kind.name for one in self.coded.values()))

    def every_array(self) -> Iterable[Array]:
        """Codes, scales, plain matrices and biases."""
        for name in WEIGHTS:
            yield from _flat(getattr(self.arrays, name))
            quant = getattr(self.arrays, f"{name}_quant", None)
            for item in fields(Quant) if quant is not None else ():
                value = getattr(quant, item.name)
                if item.type not in ("int", "QuantFlags"):
                    yield from _flat(value)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.every_array())

    def weights(
        self, context: Context, *, frozen: bool, dtype: Any = None,
        placed: Callable[[Array], Any] | None = None,
    ) -> Weights:
        """Bound to the arrays, or to copies on the context's device. dtype: of the values of codes.
        placed: of an array where the device reads it; None: Context.asarray."""
        put = context.asarray if placed is None else placed

        def place(value: Any) -> Any:
            return [*map(put, value)] if _is_list(value) else put(value)

        held: dict[str, Any] = {}
        for item in fields(WeightSet):
            value = getattr(self.arrays, item.name)
            if isinstance(value, Quant):
                inner = {f.name: getattr(value, f.name) for f in fields(Quant)}
                held[item.name] = Quant(**{
                    name: place(one) if _is_list(one) or hasattr(one, "shape") else one
                    for name, one in inner.items()
                })
            elif value is not None:
                held[item.name] = place(self._bias(item.name, value, dtype))
        schemes = {name: one.scheme for name, one in self.coded.items()}
        first = [schemes[name] for name in MATRICES if name in schemes and name != "down"]
        sizes: dict[str, Any] = {}
        if self.is_coded:
            sizes = {"dtype": dtype, "num_experts": self.count, "hidden": self.hidden,
                     "inter": self.inter}
        return Weights.of(
            context,
            gate_layout=self.layout.gate_layout,
            gate_up_orientation=self.layout.gate_up_orientation,
            down_orientation=self.layout.down_orientation,
            frozen=frozen,
            scheme=first[0] if first else Scheme.NONE,
            down_scheme=schemes.get("down", Scheme.NONE),
            **sizes,
            **held,
        )

    def values(self, context: Context) -> Matrices:
        """The same with plain matrices in fp32 on the host."""
        made = WeightSet()
        for name in self.names:
            setattr(made, name, _in_fp32(getattr(self.arrays, name)))
        if self.is_coded:
            held = self.weights(context, frozen=True, dtype=DType.F32)
            for name in self.coded:
                part = MatrixName[name.upper()]
                setattr(made, name, [np.asarray(held.dequantise(part, e))
                                     for e in range(self.count)])
        return replace(self, arrays=made, coded={})

    def _bias(self, name: str, value: Any, dtype: Any) -> Any:
        """Biases of codes are of the type of the values or f32."""
        if not (self.is_coded and name.endswith("_bias")):
            return value
        return [_widened(v, dtype) for v in value] if _is_list(value) else _widened(value, dtype)

    def named(self, values: WeightSet | None) -> dict[str, Array]:
        """Values of these matrices under their checkpoint names; codes have none."""
        out: dict[str, Array] = {}
        for name, tensors in self.names.items():
            value = getattr(values, name) if values is not None else None
            if value is not None:
                out |= zip(tensors, value if isinstance(value, list) else [value], strict=True)
        return out


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _in_fp32(value: Any) -> Any:
    if _is_list(value):
        return [np.asarray(one, np.float32) for one in value]
    return np.asarray(value, np.float32)


def _flat(value: Any) -> Iterable[Array]:
    if value is not None:
        yield from value if _is_list(value) else [value]


def _widened(array: Array, dtype: Any) -> Array:
    if dtype_of(array) in (DType.F32, dtype_of(dtype)):
        return array
    return array.float() if hasattr(array, "new_tensor") else array.astype("float32")


def collect(
    source: Source, layouts: Sequence[Layout], count: int, hidden: int, what: str
) -> Matrices:
    """The first layout all of whose tensors are there; of layouts with the same names the one that
    the shapes fit."""
    def is_there(layout: Layout) -> bool:
        return all(has_tensors(source.tensors, name) for name in _first(source, layout))

    present = [layout for layout in layouts if is_there(layout)]
    if not present:
        tried = " or ".join(next(iter(_first(source, layout))) for layout in layouts)
        stem = source.path("")
        left = sorted(n for n in source.tensors if n.startswith(stem) and n not in source.used)
        found = ", ".join(left[:4]) or "nothing else"
        raise CheckpointError(f"{what} are missing: no {tried}; found {found}")
    same = [layout for layout in present if layout.names == present[0].names]
    tried_layouts = [_read(source, layout, count) for layout in same]
    fitting = [one for one in tried_layouts if len(same) == 1 or _fits(one, hidden)]
    made = (fitting or tried_layouts)[0]
    source.used |= {full for one in made.coded.values() for names in one.tensors.values()
                    for full in names}
    roles = [names for role, names in _all_names(source, made.layout, count).items()
             if role in made.coded]
    source.used |= {full for names in roles for full in ignored_of(names)}
    return made


def _first(source: Source, layout: Layout) -> dict[str, str]:
    """Names of the first expert's matrices -> what they are."""
    return {source.path(name.format(e=0)): role for role, name in layout.names.items()}


def _all_names(source: Source, layout: Layout, count: int) -> dict[str, list[str]]:
    return {role: [source.path(name.format(e=e)) for e in range(count if "{e}" in name else 1)]
            for role, name in layout.names.items()}


def _fits(made: Matrices, hidden: int) -> bool:
    """x and y are `hidden` wide, and what gate and up make is as wide as what down reads. (Both
    orientations cannot fit: H = 2 I by gate_up and H = I by down exclude each other.)"""
    parts = [role for role in ("gate_up", "up") if getattr(made.arrays, role) is not None]
    made_rows, read = _extents(made, parts[0])
    out, inter = _extents(made, "down")
    return (read, out) == (hidden, hidden) and made_rows == inter * (
        2 if parts[0] == "gate_up" else 1)


def _extents(made: Matrices, role: str) -> tuple[int, int]:
    """N and K of a matrix."""
    orientation = made.layout.down_orientation if role == "down" else (
        made.layout.gate_up_orientation)
    if role in made.coded:
        extents = made.coded[role].extents
    else:
        value = getattr(made.arrays, role)
        extents = tuple((value[0] if _is_list(value) else value).shape[-2:])
    return (extents[1], extents[0]) if orientation == Orientation.IN_OUT else extents


def _read(source: Source, layout: Layout, count: int) -> Matrices:
    """All matrices of a layout; nothing is marked as used but what is plain."""
    names = _all_names(source, layout, count)
    arrays, coded = WeightSet(), dict[str, Coded]()
    for role, pattern in layout.names.items():
        split = "{e}" in pattern or count == 1
        orientation = layout.down_orientation if role == "down" else layout.gate_up_orientation
        kind = None
        if role in MATRICES:
            kind, said = find_kind(source.tensors, names[role][0], source.config)
        if kind is not None:
            one = coded[role] = read_codes(source.tensors, names[role], kind, said, split=split,
                                           count=count, orientation=orientation)
            setattr(arrays, role, one.codes)
            setattr(arrays, f"{role}_quant", one.quant)
            continue
        absent = [name for name in names[role] if name not in source.tensors]
        if absent:
            raise CheckpointError(f"{absent[0]} is missing")
        found = [source.take(name) for name in names[role]]
        value: Any = found if split else found[0]
        if not split:
            value = value.reshape(count, -1, value.shape[-1]) if layout.flat else value[:count]
        setattr(arrays, role, value)
    gates = {role: one for role, one in coded.items() if role != "down"}
    for role, one in gates.items():
        first = next(iter(gates))
        if one.scheme != gates[first].scheme:
            raise CheckpointError(
                f"{names[first][0]} is of {gates[first].kind.name}, {names[role][0]} of "
                f"{one.kind.name}; gate and up have to be of one"
            )
    if gates:
        layout = replace(layout, gate_up_orientation=next(iter(gates.values())).orientation)
    if "down" in coded:
        layout = replace(layout, down_orientation=coded["down"].orientation)
    plain = {role: found for role, found in names.items() if role not in coded}
    made = Matrices(layout, plain, arrays, count, 0, 0, coded)
    made.hidden, made.inter = _extents(made, "down")
    return made


class _Given:
    """Tensors of a program, named from a stem on."""

    def __init__(self, tensors: Mapping[str, Array], stem: str, config: Config | None) -> None:
        self.tensors, self.stem, self.config = tensors, stem, config
        self.used: set[str] = set()

    def path(self, name: str) -> str:
        return self.stem + name.removeprefix("experts.")

    def take(self, path: str) -> Array:
        self.used.add(path)
        array = self.tensors[path]
        if dtype_of(array) not in _FLOATS:
            raise CheckpointError(f"{path} is {array.dtype}; F32, F16 and BF16 can be run")
        return array


def read_experts(
    tensors: Mapping[str, Array], stem: str = "", *, num_experts: int, hidden: int,
    config: Config | None = None, layouts: Sequence[Layout] | None = None,
) -> Matrices:
    """The experts of a checkpoint by the names of its tensors, plain or quantised:
    Matrices.weights() binds them.

    tensors  name -> NumPy array, or torch tensor; nothing is copied
    stem     what stands before the experts' own names: "model.layers.3.mlp.experts."
    config   config.json's content, which has to agree with the tensors; None: the tensors alone
             say what they are
    layouts  how the family names them; None: that of the config's model_type, else the usual ones

    Raises CheckpointError, naming the tensor, for one that is missing, left over or of no known
    kind, and where the config says something else.
    """
    from . import families  # a table, which nothing else here needs

    if layouts is None:
        known = families.BY_MODEL_TYPE.get(str((config or {}).get("model_type")))
        layouts = families.USUAL if known is None else known.layouts
    given = _Given(tensors, stem, config)
    made = collect(given, layouts, num_experts, hidden, "the experts")
    if made.hidden != hidden:
        raise CheckpointError(
            f"{stem or 'the experts'}: down has {made.hidden} outputs; {hidden} are expected"
        )
    read = {n.removeprefix(stem): tensors[n] for n in sorted(given.used) if n in tensors}
    about = None if config is None else {"quantization_config": section_of(config)}
    made.published = Published(read, stem, made.layout, about)
    left = sorted(n for n in tensors if stem and n.startswith(stem) and n not in given.used)
    if left:
        raise CheckpointError(f"there is no place for {', '.join(left[:3])}")
    return made
