"""Show the bytes that each rank holds under FSDP2: weights, gradients and optimizer state.

python examples/fsdp_bytes.py        # two processes on this CPU
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

import oelm

RANKS = 2
ROW = "{:12} {:>9} {:>9} {:>16}"


def local_bytes(tensor: torch.Tensor | None) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    shard = getattr(tensor, "to_local", lambda: tensor)()
    return shard.numel() * shard.element_size()


def measure(method: str) -> tuple[int, int, int]:
    """Return the bytes on this rank after one step: weights, gradients, state of AdamW."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4)
    oelm.apply(model, method, seed=42)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))
    model(torch.randn(2, 8, 64)).square().mean().backward()
    optimizer.step()
    assert oelm.audit(model, optimizer).ok
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.grad is None and p not in optimizer.state for p in frozen)
    state = [t for values in optimizer.state.values() for n, t in values.items() if n != "step"]
    return (
        sum(map(local_bytes, model.parameters())),
        sum(local_bytes(p.grad) for p in model.parameters()),
        sum(map(local_bytes, state)),
    )


def rank_main(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    lines = [ROW.format(method, *measure(method)) for method in ("baseline", "oelm-freeze")]
    if rank == 0:
        print(ROW.format("bytes", "weights", "gradients", "optimizer state"), *lines, sep="\n", flush=True)
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
