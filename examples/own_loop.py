"""Use a method in your own training loop: unfreeze Q/K layer by layer, audit the model, save and load it.

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
        # Which layers are unfrozen depends only on the step number, so a resumed run needs no extra state.
        if applied.step(step, STEPS, optimizer):
            print(f"step {step:2}: {applied.qk_trainable:,} of {applied.qk_total:,} Q/K parameters train")
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    report = oelm.audit(model, optimizer)
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        oelm.save(model, folder)
        # The loaded model has the method applied, and the same parameters are frozen.
        oelm.load(folder, model=torch.nn.TransformerEncoder(layer, 3))
    return report


if __name__ == "__main__":
    main()
