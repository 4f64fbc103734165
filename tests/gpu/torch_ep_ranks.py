# SPDX-License-Identifier: Apache-2.0
"""One rank of test_torch_ep.py: torch_ep_ranks.py CASE SCHEME RANK SIZE FOLDER. On the device that
MOEC_TEST_DEVICE names, cuda without it; a rank has a GPU."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import moec
import moec.torch
import torch
import torch.distributed as dist
from moec import _raw
from moec._spec import ROUTED_WEIGHTS
from torch.nn.parallel import DistributedDataParallel

H, I, E, K, T = 64, 48, 9, 2, 40  # noqa: E741
STEPS, REPLAYS = 20, 1000
DEADLINE = 10  # seconds until a rank that died is an error
DEVICE = os.environ.get("MOEC_TEST_DEVICE", "cuda")
SEED = int(os.environ.get("MOEC_TEST_SEED", 7))


# ---- what ranks and one process have alike
def descs():
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
    return router, moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K,
                                    shared=moec.Shared.ADD, shared_inter=16)


def batch(size):
    """x and d_y of each rank, which have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(2, T - 5 * rank, H, generator=generator) for rank in range(size)]


def make_layer(ep=None):
    torch.manual_seed(3)
    full = moec.torch.MoELayer(*descs()).state_dict()
    layer = moec.torch.MoELayer(*descs(), ep=ep).to(DEVICE)
    moec.torch.load_full_state_dict(layer, full)
    return layer


def step(layer, x, d_y):
    x = x.to(DEVICE, copy=True).requires_grad_()
    y = layer(x)
    y.backward(d_y.to(DEVICE))
    named = {name: p.grad.to("cpu", copy=True) for name, p in layer.named_parameters()}
    return {"y": y.detach().cpu(), "d_x": x.grad.cpu(), **named}


def make_experts(ep=None):
    """Routed experts without a layer."""
    torch.manual_seed(4)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    full = moec.torch.Experts(desc)
    experts = moec.torch.Experts(desc, ep=ep).to(DEVICE)
    moec.torch.load_full_state_dict(experts, full.state_dict())
    return experts


def rows_of(experts, x):
    x = x.to(DEVICE, copy=True).requires_grad_()
    logits = torch.randn(len(x), E, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    weights, ids = logits.softmax(-1).topk(K)
    y = experts(x, ids, weights)
    y.square().sum().backward()
    return {"rows": y.detach().cpu(), "d_rows": x.grad.cpu()}


class Model(torch.nn.Module):
    """A layer of experts between two of all ranks."""

    def __init__(self, ep=None):
        super().__init__()
        self.before, self.after = torch.nn.Linear(H, H), torch.nn.Linear(H, H)
        self.experts = moec.torch.MoELayer(*descs(), ep=ep)

    def forward(self, x):
        x = self.before(x)
        return self.after(x + self.experts(x))


def make_model(ep=None):
    torch.manual_seed(5)
    full = Model().state_dict()
    model = Model(ep).to(DEVICE)
    moec.torch.load_full_state_dict(model, full)
    return model


def train(model, x, target, count, size):
    """Losses of STEPS steps: the mean over `count` numbers of all ranks. DDP takes the mean of
    gradients over ranks, so that each rank's loss is its part of the sum times their number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    x, target = x.to(DEVICE), target.to(DEVICE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / count
        (loss * size).backward()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        moec.torch.clip_grad_norm_(model, 0.5)
        optimizer.step()
        losses.append(float(total))
    return losses


# ---- ranks
def make_ep(comm, scheme, **wanted):
    desc = dict(hidden=H, max_tokens=T, num_experts=E, top_k=K, scheme=moec.EpScheme[scheme])
    return moec.torch.EP(comm, moec.EpDesc(**desc | wanted))


def layers(scheme, rank, size, comm, folder):
    """One step of a layer and of experts alone; over NCCL and over gloo; GATHER's bits."""
    x, d_y = batch(size)[rank]
    ep = make_ep(comm, scheme)
    layer = make_layer(ep)
    found = step(layer, x, d_y)
    moec.torch.clip_grad_norm_(layer, 1.0)
    assert moec.torch.full_state_dict(layer)["down"].shape[0] == E
    others = [make_ep(comm, "GATHER")]
    if DEVICE == "cuda" and scheme != "PEER":
        gloo = dist.new_group(backend="gloo")
        others.append(make_ep(moec.torch.comm(gloo, device="cuda"), scheme))
        assert others[0].describe()["transport"] == "queued"
        assert others[1].describe()["transport"] == "staged"
    for other in others:
        for name, value in step(make_layer(other), x, d_y).items():
            assert torch.equal(value, found[name]), (name, other.describe())
    found |= rows_of(make_experts(ep), x)
    total = comm.sum(torch.full((3,), rank + 1.0, device=DEVICE),
                     stream=torch.cuda.current_stream() if DEVICE == "cuda" else None)
    assert total.tolist() == [size * (size + 1) / 2] * 3
    assert ep.state().status == 0
    torch.save(found, folder / f"layers_{rank}.pt")


def training(scheme, rank, size, comm, folder):
    """DDP of all but the experts, which lie on their ranks."""
    model = make_model(make_ep(comm, scheme, grad_scale=1 / size))
    parted = [name for name, _ in model.named_parameters()
              if name.rsplit(".", 1)[-1] in ROUTED_WEIGHTS and name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, parted)
    data = batch(size)
    losses = train(DistributedDataParallel(model), *data[rank], sum(x.numel() for x, _ in data),
                   size)
    state = moec.torch.full_state_dict(model)
    with torch.no_grad():
        y = model(data[rank][0].to(DEVICE)).cpu()
    torch.save((losses, state, y), folder / f"training_{rank}.pt")


def graphs(scheme, rank, size, comm, folder):
    """Replays of a captured step, whose routing changes, beside the same steps called."""
    if DEVICE != "cuda":
        return "a CPU has no graphs"
    layer = make_layer(make_ep(comm, scheme))
    shape = batch(size)[rank][0].shape
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    d_y = torch.randn(shape, device=DEVICE)
    leaves = [x, *layer.parameters()]

    def run():
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, leaves, d_y)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    if scheme == "EXACT":  # it waits for counts: known before anything is captured
        return "EXACT waits for the host"
    with torch.cuda.graph(graph, stream=stream):
        made = run()
    torch.manual_seed(SEED + rank)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    routed = set()
    for replay in range(REPLAYS):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        if replay % 100 == 0:
            routed.add(tuple(layer.route(x)[1].expert_ids.flatten().tolist()))
        for got, want in zip(made, run(), strict=True):
            different += (got != want).any()
    assert len(routed) == REPLAYS // 100
    assert int(different) == 0, f"{int(different)} results of {REPLAYS} replays differ"
    return None


CASES = {"layers": layers, "training": training, "graphs": graphs}


def work(scheme, rank, size, folder):
    """All cases that live on, each with a file of why it was left out, if it was."""
    join(rank, size, folder / "meet")
    comm = moec.torch.comm()
    try:
        make_ep(comm, scheme)
    except moec.MoecError as error:
        for case in CASES:
            (folder / f"{case}_left_out").write_text(str(error))
        return
    for case, run in CASES.items():
        if why := run(scheme, rank, size, comm, folder):
            (folder / f"{case}_left_out").write_text(why)
    dist.barrier()


# ---- a rank that dies
def join(rank, size, meet):
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{meet}",
                            rank=rank, world_size=size)


def abort_when_late(ep):
    """Kernels of NCCL wait for good: what the ep says of them, and the stream is freed."""
    while ep.state().status == 0:
        time.sleep(0.1)
    state = ep.state()
    print(f"the ep says: {state.message}")
    assert state.status == _raw.MOEC_E_TIMEOUT, state
    assert "waits for another rank" in state.message, state
    ep.comm.abort()


def calls_after(ep, layer, x):
    """The error of calls after a rank has died, and the seconds until it came."""
    begin = time.monotonic()
    by_nccl = DEVICE == "cuda" and ep.scheme != moec.EpScheme.PEER
    watch = threading.Thread(target=abort_when_late, args=(ep,)) if by_nccl else None
    if watch:
        watch.start()
    error = None
    try:
        for _ in range(2):  # what a kernel finds, or waits for, the next call says
            with torch.no_grad():
                layer(x)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    except moec.MoecError as found:
        error = found
    if watch:
        watch.join()
    return error, time.monotonic() - begin


def killed(scheme, rank, size, folder):
    """The last rank dies. The others get an error, and a new group of them has the right layer."""
    join(rank, size, folder / "meet")
    comm = moec.torch.comm()
    try:
        ep = make_ep(comm, scheme)
    except moec.MoecError as error:
        (folder / "killed_left_out").write_text(str(error))
        return
    if DEVICE == "cuda":
        ep = make_ep(comm, scheme, timeout_ms=1000 * DEADLINE // 2)
    layer, (x, d_y) = make_layer(ep), batch(size)[rank]
    step(layer, x, d_y)
    dist.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = calls_after(ep, layer, x.to(DEVICE))
    print(f"after {seconds:.1f} s: {error}; cause: {error and error.__cause__}")
    assert seconds < 2 * DEADLINE, seconds
    assert error and ep.state().status != 0
    if scheme == "PEER":
        assert f"rank {size - 1}" in str(error), error
    dist.destroy_process_group()
    join(rank, size - 1, folder / "meet_again")
    found = step(make_layer(make_ep(moec.torch.comm(), scheme)), x, d_y)
    torch.save(found, folder / f"killed_{rank}.pt")


if __name__ == "__main__":
    case, scheme, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    {"work": work, "killed": killed}[case](scheme, rank, size, Path(sys.argv[5]))
    sys.stdout.flush()
    os._exit(0)  # graphs hold NCCL's communicator: tearing it down may wait for them
