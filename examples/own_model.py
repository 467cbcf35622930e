"""Use oelm with your own attention class and your own method, and save the model without its frozen tensors.

python examples/own_model.py
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import oelm


class TinyAttention(nn.Module):
    """Attention with one weight matrix for q, k and v; its rows are in the order [q1; k1; v1; q2; ...]."""

    def __init__(self, width: int = 32, n: int = 4) -> None:
        super().__init__()
        self.n, self.mix, self.out = n, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).unflatten(-1, (self.n, -1)).transpose(1, 2).chunk(3, dim=-1)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def main() -> None:
    oelm.register_attention(TinyAttention, fused="mix", layout="per-head", num_heads="n")
    mine = oelm.register_method(replace(oelm.methods()["oelm-freeze"], name="example-gain-2", gain=2.0))

    model = nn.Sequential(TinyAttention(), TinyAttention())
    print(oelm.apply(model, mine, seed=7))
    with tempfile.TemporaryDirectory() as folder:
        oelm.save(model, folder, compact=True)  # oelm.load rebuilds frozen random tensors from the seed
        print(sum(f.stat().st_size for f in Path(folder).iterdir()), "bytes on disk")
        same = oelm.load(folder, model=nn.Sequential(TinyAttention(), TinyAttention()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    print(oelm.audit(same))


if __name__ == "__main__":
    main()
