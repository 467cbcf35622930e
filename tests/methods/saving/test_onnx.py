"""The ONNX export of docs/howto/share.md computes the same as the model with its method."""

import numpy as np
import pytest
import torch
from tiny_models import outputs, trained_model
from transformers import AutoModelForSequenceClassification


@pytest.mark.slow
def test_a_saved_model_exports_to_onnx(tmp_path):
    reason = "pip install onnx onnxscript onnxruntime"
    for library in ("onnx", "onnxscript"):
        pytest.importorskip(library, reason=reason)
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    model = trained_model("bert", "oelm-plus").eval()
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))  # as in `outputs`
    torch.onnx.export(plain, (ids,), tmp_path / "model.onnx", input_names=["input_ids"], dynamo=True)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(None, {"input_ids": ids.numpy()})
    np.testing.assert_allclose(logits, outputs(model).detach().numpy(), atol=1e-4)
