"""Train a small vision transformer (ViT) on drawn images with frozen query/key projections (Q/K).

python examples/vit.py                      # a minute on a CPU; nothing is downloaded
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import oelm

SIZE = 32


def main(steps: int = 200, batch: int = 32) -> dict[str, float]:
    accuracies = {}
    test_images, test_labels = stripes(256, seed=1)
    for method in ("baseline", "oelm-freeze"):
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=SIZE,
            patch_size=8,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=4,
        )
        model = ViTForImageClassification(config)
        applied = oelm.apply(model, method, seed=42)
        optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3, weight_decay=0.01))
        for step in range(steps):
            images, labels = stripes(batch, seed=1000 + step)
            loss = model(pixel_values=images, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert oelm.audit(model, optimizer).ok
        with torch.inference_mode():
            predicted = model.eval()(pixel_values=test_images).logits.argmax(-1)
        accuracies[method] = float((predicted == test_labels).float().mean())
        print(f"{method:12} {applied.trainable:,} parameters trained, accuracy {accuracies[method]:.3f}")
    return accuracies


def stripes(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images (n, 3, SIZE, SIZE) of stripes at 0, 45, 90 or 135 degrees, and labels 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    phases = 6.28 * torch.rand(n, 1, 1, generator=generator)
    angles = labels.view(n, 1, 1) * torch.pi / 4
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    waves = torch.sin(0.8 * (x * angles.cos() + y * angles.sin()) + phases)  # (n, SIZE, SIZE)
    images = waves[:, None].expand(n, 3, SIZE, SIZE)
    return images + torch.randn(images.shape, generator=generator), labels


if __name__ == "__main__":
    main()
