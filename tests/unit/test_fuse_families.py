"""Every decoder of Transformers that small sizes can build computes the same when its projections are fused."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import fp4dispatch

transformers = pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.arange(3, 19).view(2, 8)
LARGE = 3_000_000
"""Parameters from which on a class did not take the small sizes."""


def decoders():
    """Yield the models that build and run: others need sizes of their own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    for name in sorted(set(NAMES.values())):
        with suppress(Exception):  # of the model's own code, before anything of ours
            kind = getattr(transformers, name)
            config = kind.config_class(**SIZES)
            with torch.device("meta"):
                if sum(p.numel() for p in kind(config).parameters()) > LARGE:
                    continue
            torch.manual_seed(0)
            model = kind(config).eval()
            with torch.no_grad():
                model(input_ids=IDS)
            yield name, model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def test_every_decoder_computes_the_same():
    fused = {}
    for name, model in decoders():
        if not any(path.endswith((".q_proj", ".gate_proj")) for path, _ in model.named_modules()):
            continue
        fp4dispatch.replace_linears(model)
        want, keys = logits(model), set(model.state_dict())
        report = fp4dispatch.fuse(model)
        fused[name] = len(report.fused)
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5, msg=f"{name}: {report}")
        assert set(model.state_dict()) == keys, name
    assert sum(count > 0 for count in fused.values()) >= 50, fused
