"""Fine-tune a classifier with frozen query and key projections (Q/K) in the Hugging Face Trainer.

python examples/fine_tune.py                       # a tiny random BERT, takes seconds
python examples/fine_tune.py path/or/hub-id        # your own pretrained encoder
"""

import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

import oelm

TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}


def main(pretrained: str | None = None) -> oelm.AuditReport:
    if pretrained:
        model = AutoModelForSequenceClassification.from_pretrained(
            pretrained,
            num_labels=2,
            dtype="float32",  # by default transformers keeps the file's dtype, and few CPUs train in bf16
        )
    else:
        model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=200, **TINY))
    applied = oelm.apply(model, "freeze-pretrained" if pretrained else "oelm-freeze", seed=42)
    print(applied)

    callback = oelm.OELMCallback()
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output, max_steps=20, learning_rate=1e-3, use_cpu=True, report_to=[], save_steps=10
        )
        Trainer(model, args, train_dataset=toy_data(), callbacks=[callback]).train()
    print(callback.report)
    return callback.report


def toy_data() -> list[dict[str, torch.Tensor]]:
    """Return rows of random token ids; the label says whether the first id is above 100."""
    ids = torch.randint(5, 200, (160, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] > 100).long()} for row in ids]


if __name__ == "__main__":
    main(*sys.argv[1:2])
