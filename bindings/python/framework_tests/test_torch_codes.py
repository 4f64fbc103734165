# SPDX-License-Identifier: Apache-2.0
"""Modules that hold codes: the library's own y and gradients, and every way in which torch copies,
moves and stores a module. Shown once to fail: scales that .to() converts, experts of a parameter in
the order of text."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moec
import moec.torch
from moec import DType, golden, golden_codes
from moec._tensors import dtype_of
from moec.checkpoint import SafetensorsFile
from moec.golden import row_error

FILES = [path for path in golden.find_files(golden.default_folder()) if path.parent.name == "quant"]
GATED = moec.Activation(kind=moec.ActivationKind.GPTOSS)
STEM = "ckpt.experts."


def read(path: Path) -> moec.Matrices:
    return golden_codes.read(SafetensorsFile(path))


def experts_of(path: Path, **options: Any) -> moec.torch.Experts:
    file, made = SafetensorsFile(path), read(path)
    more = {"activation": GATED} if file.metadata["activation"] == "gptoss" else {}
    desc = moec.ExpertsDesc(hidden=made.hidden, inter=made.inter, num_experts=made.count,
                            top_k=file["ids"].shape[1], **more)
    return moec.torch.Experts(desc, codes=made, **options)


def published(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name.removeprefix(STEM): np.array(file[name]) for name in file if name.startswith(STEM)}


def problem(
    path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    file = SafetensorsFile(path)
    names = ("x", "dy", "weights", "ids")
    x, d_y, weights, ids = (torch.from_numpy(np.array(file[n])).to(device) for n in names)
    return x.to(dtype).requires_grad_(), ids, weights.requires_grad_(), d_y.to(dtype)


def error(got: Any, path: Path, name: str) -> float:
    return row_error(got.detach().float().cpu().numpy(), SafetensorsFile(path)[name])


def raw(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return np.ascontiguousarray(value).tobytes()


def y_of(experts: moec.torch.Experts, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    x, ids, weights, _ = problem(path, dtype)
    with torch.no_grad():
        return experts(x, ids, weights)


GPTOSS = next(path for path in FILES if path.stem == "mxfp4_gptoss")
SOME = [path for path in FILES if path.stem in (
    "mxfp4_gptoss", "bnb_nf4_per_expert_nested", "bnb_nf4_stack_nested", "fp8_block128_partial",
    "gptq_v1_asym_actorder", "ct_int4_g32_asym", "modelopt_nvfp4")]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
some_files = pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)


@each_file
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen"])
def test_values_and_gradients(path: Path, freeze: bool, device: str) -> None:
    library = SafetensorsFile(path).metadata["lib_dtype"]
    experts = experts_of(path).to(device)
    assert all(raw(t) == raw(published(path)[n]) for n, t in experts.state_dict().items())
    if freeze:
        experts.freeze()
    types = {"ref": (torch.float32, DType.F32),
             "ref_lib": (getattr(torch, library), dtype_of(library))}
    for prefix, (dtype, kind) in types.items():
        x, ids, weights, d_y = problem(path, dtype, device)
        y = experts(x, ids, weights)
        y.backward(d_y)
        for name, value in (("y", y), ("dx", x.grad), ("dweights", weights.grad)):
            # A GPU may keep pre-activations in 16 bits: as moec check has it.
            limit = golden_codes.limit_of(name, kind, device == "cuda") or golden.TOLERANCE
            assert error(value, path, f"{prefix}.{name}") <= limit, (prefix, name)
    assert all(p.grad is None and not p.requires_grad for p in experts.parameters())


@each_file
def test_state_dict_is_the_checkpoint(path: Path) -> None:
    """Names, types, shapes and bytes; and back, in place and by assignment."""
    experts, wanted = experts_of(path), published(path)
    state = experts.state_dict()
    assert set(state) == set(wanted)
    for name, value in wanted.items():
        assert raw(state[name]) == raw(value) and list(state[name].shape) == list(value.shape)
        assert str(state[name].dtype).removeprefix("torch.") == value.dtype.name
    y = y_of(experts, path)
    for assign in (False, True):
        other = experts_of(path)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.view(torch.uint8 if parameter.dim() else parameter.dtype).zero_()
        state = {name: value.clone() for name, value in state.items()}
        assert not other.load_state_dict(state, assign=assign).missing_keys
        assert torch.equal(y_of(other, path), y)
    stored = io.BytesIO()
    torch.save(experts.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(y_of(other, path), y)


@some_files
def test_load_in_place_shows_in_the_next_call(path: Path) -> None:
    experts = experts_of(path).freeze()
    y = y_of(experts, path)
    state = {name: value.clone() for name, value in experts.state_dict().items()}
    for name, value in state.items():
        if name.endswith(("scales", "scale", "scale_inv", "absmax")) and value.is_floating_point():
            state[name] = (value.float() / 2).to(value.dtype)
        elif name.endswith(("_scales", ".absmax")):
            state[name] = value // 2
    experts.load_state_dict(state)
    assert not torch.equal(y_of(experts, path), y)


@some_files
def test_conversions_keep_bytes(path: Path) -> None:
    """.to(dtype), .half() and their like are about values, and a copy on a device is exact."""
    experts, wanted = experts_of(path), published(path)
    y, y16 = y_of(experts, path), y_of(experts, path, torch.bfloat16)
    for change in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float(),
                   lambda m: m.double(), lambda m: m.to("cpu", torch.float16),
                   lambda m: m.requires_grad_(False), lambda m: m.share_memory()):
        change(experts)
        assert all(raw(t) == raw(wanted[n]) for n, t in experts.state_dict().items())
        assert torch.equal(y_of(experts, path), y)
        assert torch.equal(y_of(experts, path, torch.bfloat16), y16)
    moved = copy.deepcopy(experts).to("meta")
    assert all(p.is_meta and p.dtype == q.dtype for p, q in zip(
        moved.parameters(), experts.parameters(), strict=True))
    back = moved.to_empty(device="cpu")
    back.load_state_dict(experts.state_dict())
    assert torch.equal(y_of(back, path), y)


@each_file
@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen"])
def test_copies(path: Path, freeze: bool) -> None:
    """By deepcopy and pickle, with memory of their own."""
    experts = experts_of(path)
    if freeze:
        experts.freeze()
    y = y_of(experts, path)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        with torch.no_grad():
            for mine, its in zip(experts.parameters(), other.parameters(), strict=True):
                assert raw(mine) == raw(its) and mine.data_ptr() != its.data_ptr()
        assert torch.equal(y_of(other, path), y)
        with torch.no_grad():
            for parameter in other.parameters():
                if parameter.dtype == torch.float32:
                    parameter.zero_()
        assert torch.equal(y_of(experts, path), y)


@some_files
def test_compiled(path: Path) -> None:
    experts = experts_of(path)
    x, ids, weights, d_y = problem(path)
    y = experts(x, ids, weights)
    y.backward(d_y)
    wanted = x.grad.clone()
    x.grad = None
    again = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, weights)
    again.backward(d_y)
    assert torch.equal(again, y) and torch.equal(x.grad, wanted)


def test_a_graph_of_what_moved_raises() -> None:
    experts = experts_of(GPTOSS)
    call = torch.compile(lambda *a: experts(*a), backend="aot_eager")
    x, ids, weights, _ = (t.detach() for t in problem(GPTOSS))
    y = call(x, ids, weights)
    assert torch.equal(y, y_of(experts, GPTOSS))
    with torch.no_grad():
        experts.gate_up_proj_scales.sub_(1)  # the next call reads them, or says that it cannot
    try:
        assert torch.equal(call(x, ids, weights), y_of(experts, GPTOSS))
    except RuntimeError as raised:
        assert "compile again" in str(raised)


@some_files
def test_autocast(path: Path) -> None:
    experts = experts_of(path)
    x, ids, weights, _ = problem(path)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, ids, weights)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, y_of(experts, path, torch.bfloat16))


@some_files
def test_a_whole_layer(path: Path) -> None:
    """MoELayer holds them below "experts."; its router trains."""
    made, file = read(path), SafetensorsFile(path)
    more = {"activation": GATED} if file.metadata["activation"] == "gptoss" else {}
    desc = moec.ExpertsDesc(hidden=made.hidden, inter=made.inter, num_experts=made.count, top_k=2,
                            **more)
    router = moec.RouterDesc(num_experts=made.count, top_k=2, norm=moec.Norm.SUM)
    layer = moec.torch.MoELayer(router, desc, codes=made, dtype=torch.float32)
    x = problem(path)[0]
    y, routing = layer.route(x)
    y.sum().backward()
    assert layer.gate_weight.grad is not None and layer.gate_weight.grad.abs().sum() > 0
    assert "experts." in "".join(layer.state_dict()) and "gate_weight" in layer.state_dict()
    experts = experts_of(path)
    alone = experts(x.detach(), routing.expert_ids, routing.routing_weights)
    assert row_error(y.detach().numpy(), alone.detach().numpy()) < 1e-6
    other = moec.torch.MoELayer(router, desc, codes=made, dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@each_file
def test_sharded(path: Path, one_rank: Any) -> None:
    """FSDP2 shards them as frozen parameters, and frees what it gathers after each step."""
    experts = experts_of(path)
    y = y_of(experts, path)
    sharded = fully_shard(experts_of(path), mesh=one_rank)
    for _ in range(2):
        x, ids, weights, d_y = problem(path)
        out = sharded(x, ids, weights)
        out.backward(d_y)
        assert torch.equal(out, y) and error(x.grad, path, "ref.dx") < 2e-5
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    full = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    other = experts_of(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(full)
    assert torch.equal(y_of(other, path), y)


@pytest.mark.parametrize("kind", ["bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0", "i32", "i8", "f16"])
def test_types_of_numpy(kind: str) -> None:
    value = np.arange(24, dtype=np.float32).reshape(2, 12).astype(moec.numpy_dtype(kind))
    value.setflags(write=False)
    made = moec.torch._codes._tensor(value)
    assert moec.dtype_of(made) == moec.dtype_of(kind) and raw(made) == raw(value)


def test_more_than_ten_experts() -> None:
    """Numbers of experts are numbers, not text."""
    rng = np.random.default_rng(0)
    tensors = {}
    for e in range(12):
        for part in ("gate", "up", "down"):
            stem = f"{e}.{part}_proj.weight"
            tensors[stem] = rng.integers(-127, 127, (32, 32)).astype(np.int8)
            tensors[f"{stem}_scale"] = np.full((32, 1), 0.01 * (e + 1), np.float32)
    made = moec.read_experts(tensors, num_experts=12, hidden=32)
    desc = moec.ExpertsDesc(hidden=32, inter=32, num_experts=12, top_k=1)
    experts = moec.torch.Experts(desc, codes=made)
    x = torch.randn(12, 32)
    y = experts(x, torch.arange(12)[:, None], torch.ones(12, 1))
    for e in range(12):
        gate, up, down = (torch.from_numpy(
            tensors[f"{e}.{part}_proj.weight"] * tensors[f"{e}.{part}_proj.weight_scale"])
            for part in ("gate", "up", "down"))
        wanted = (torch.nn.functional.silu(x[e] @ gate.T) * (x[e] @ up.T)) @ down.T
        assert row_error(y[e : e + 1].detach().numpy(), wanted[None].numpy()) < 2e-5
        assert raw(experts.down_proj_weight[e]) == raw(tensors[f"{e}.down_proj.weight"])


def test_refusals() -> None:
    made = read(GPTOSS)
    sizes = {"hidden": made.hidden, "inter": made.inter, "num_experts": made.count, "top_k": 2}
    for name in ("hidden", "inter", "num_experts"):
        with pytest.raises(ValueError, match=f"{name} is {sizes[name] * 2}; the codes have"):
            moec.torch.Experts(moec.ExpertsDesc(**sizes | {name: sizes[name] * 2}), codes=made)
    experts = experts_of(GPTOSS)
    state = experts.state_dict()
    lacking = {n: t for n, t in state.items() if n != "down_proj_scales"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "down_proj_scales"'):
        experts.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        experts.load_state_dict(state | {"more": torch.zeros(1)})
    wrong = state | {"down_proj_blocks": state["down_proj_blocks"].float()}
    with pytest.raises(RuntimeError, match=r"down_proj_blocks is of torch.float32; torch.uint8 is"):
        experts.load_state_dict(wrong)
    plain = moec.read_experts({name: np.zeros((2, 32, 32), np.float32) for name in
                               ("gate_up_proj", "down_proj")}, num_experts=2, hidden=32)
    with pytest.raises(TypeError, match=r"what moec.read_experts\(\) makes of a quantised"):
        moec.torch.Experts(moec.ExpertsDesc(hidden=32, inter=32, num_experts=2, top_k=1),
                           codes=plain)
    assert "codes=mxfp4" in repr(experts)
    assert json.loads(SafetensorsFile(GPTOSS).metadata["shape_down_proj"])[0] == made.count
