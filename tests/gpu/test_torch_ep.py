# SPDX-License-Identifier: Apache-2.0
"""moec.torch with an ep on GPUs, over NCCL and over gloo: the layer of one process; the same bits
from both; a captured forward. A rank has a GPU, so that two ranks run where there are two. Run by
`make test-gpu`."""

import subprocess
import sys
from pathlib import Path

import moec
import moec.torch
import pytest
import torch
import torch.distributed as dist

H, I, E, K, T = 64, 48, 6, 2, 40  # noqa: E741

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not moec.devices(moec.DeviceType.CUDA),
    reason="no GPU that both torch and moec see",
)


def descs():
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
    return router, moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K,
                                    shared=moec.Shared.ADD, shared_inter=16)


def batch(size):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, T - 9 * rank, H, generator=generator) for rank in range(size)]


def make_layer(ep=None):
    torch.manual_seed(3)
    full = moec.torch.MoELayer(*descs()).state_dict()
    layer = moec.torch.MoELayer(*descs(), ep=ep).cuda()
    moec.torch.load_full_state_dict(layer, full)
    return layer


def step(layer, x, d_y):
    x = x.cuda().requires_grad_()
    y = layer(x)
    y.backward(d_y.cuda())
    named = {name: p.grad.cpu() for name, p in layer.named_parameters()}
    return {"y": y.detach().cpu(), "d_x": x.grad.cpu(), **named}


def make_ep(comm, scheme=moec.EpScheme.AUTO):
    return moec.torch.EP(comm, moec.EpDesc(hidden=H, max_tokens=T, num_experts=E, top_k=K,
                                           scheme=scheme))


def captured(layer, x):
    """y of a graph of the forward, replayed with x."""
    seen = torch.zeros_like(x, device="cuda")
    with torch.no_grad():
        layer(seen)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(seen)
    seen.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return y.cpu()


def alone(ep):
    """Routed experts without a layer, and the gradient of x."""
    torch.manual_seed(4)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    full = moec.torch.Experts(desc)
    experts = moec.torch.Experts(desc, ep=ep).cuda()
    moec.torch.load_full_state_dict(experts, full.state_dict())
    return experts


def rows_of(experts, x):
    x = x.cuda().requires_grad_()
    logits = torch.randn(len(x), E, generator=torch.Generator().manual_seed(9)).cuda()
    weights, ids = logits.softmax(-1).topk(K)
    y = experts(x, ids, weights)
    y.square().sum().backward()
    return {"rows": y.detach().cpu(), "d_rows": x.grad.cpu()}


def work(rank, size, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=size)
    gloo = dist.new_group(backend="gloo")
    x, d_y = batch(size)[rank]
    ep = make_ep(moec.torch.comm())
    assert ep.describe()["transport"] == "queued" and ep.scheme == moec.EpScheme.PEER
    layer = make_layer(ep)
    found = step(layer, x, d_y)
    assert torch.equal(captured(layer, x), found["y"])
    moec.torch.clip_grad_norm_(layer, 1.0)
    assert moec.torch.full_state_dict(layer)["down"].shape[0] == E

    for comm, transport in ((ep.comm, "queued"),
                            (moec.torch.comm(gloo, device="cuda"), "staged")):
        for scheme in (moec.EpScheme.GATHER, moec.EpScheme.PEER):
            other = make_ep(comm, scheme)
            assert other.describe()["transport"] == transport and other.scheme == scheme
            for name, value in step(make_layer(other), x, d_y).items():
                assert torch.equal(value, found[name]), (name, transport, scheme)
    found |= rows_of(alone(ep), x)
    total = ep.comm.sum(torch.full((3,), rank + 1.0, device="cuda"),
                        stream=torch.cuda.current_stream())
    assert total.tolist() == [size * (size + 1) / 2] * 3
    assert ep.state().status == 0
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_layers_of_ranks_are_that_of_one_process(size, tmp_path):
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(size), str(tmp_path)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for rank in range(size)]
    texts = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)[-4000:]
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    batches = batch(size)
    x, d_y = (torch.cat([one[i] for one in batches]) for i in range(2))
    one = make_layer()
    want = step(one, x, d_y)
    for name in ("y", "d_x"):
        got = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-4)
    down = torch.cat([part["down"] for part in parts])
    torch.testing.assert_close(down, want["down"], rtol=1e-4, atol=1e-4)
    gate = sum(part["gate_weight"] for part in parts)
    torch.testing.assert_close(gate, want["gate_weight"], rtol=1e-3, atol=1e-3)
    rows = [rows_of(alone(None), part[0]) for part in batches]
    for part, expected in zip(parts, rows, strict=True):
        torch.testing.assert_close(part["rows"], expected["rows"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part["d_rows"], expected["d_rows"], rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
