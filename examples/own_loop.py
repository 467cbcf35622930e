"""Use a method in your own training loop: thaw Q/K layer by layer, audit, save and load.

python examples/own_loop.py
"""

import tempfile

import torch

import oelm

STEPS = 30


def main() -> oelm.AuditReport:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3)
    applied = oelm.apply(model, "oelm-gradual", seed=1)
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3, weight_decay=0.01, qk_lr=3e-4))

    x = torch.randn(8, 6, 32)
    for step in range(STEPS):
        if applied.step(step, STEPS, optimizer):  # depends on the step alone, so a resumed run just goes on
            print(f"step {step:2}: {applied.qk_trainable:,} of {applied.qk_total:,} Q/K parameters train")
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    report = oelm.audit(model, optimizer)
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        oelm.save(model, folder)
        oelm.load(
            folder, model=torch.nn.TransformerEncoder(layer, 3)
        )  # with its method, and frozen as before
    return report


if __name__ == "__main__":
    main()
