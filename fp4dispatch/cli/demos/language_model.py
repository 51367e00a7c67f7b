"""``fp4dispatch demo``: a language model before and after its linear layers are quantised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli.demos import smollm2, tables, text_quality
from fp4dispatch.cli.demos.text_quality import TextQuality
from fp4dispatch.machine.progress import Progress

if TYPE_CHECKING:
    import torch

    from fp4dispatch.formats import Calibration

QUESTION = "What is the capital of France?"
TOKENS = 1024
"""Tokens of the licence that are predicted: the model was trained on 2,048 at a time."""
WORDS = {"cpu": 16, "cuda": 48}
"""Tokens of an answer at most. The reference backend on a CPU unpacks all weights for each of them."""


@dataclass(frozen=True)
class Bound:
    """Required quality: KL divergence from the original in nats, and perplexity relative to the original's."""

    kl: float
    perplexity: float


# Measured with the reference backend on a CPU, on this text: see docs/accuracy.md. The bounds leave room for another
# backend's rounding and for FP4 activations; tests/unit/test_demo.py plants faults that miss them.
BOUNDS = {
    "nvfp4": Bound(0.75, 1.6),
    "fp8": Bound(0.15, 1.1),
    "fp8_row": Bound(0.15, 1.1),
    "fp8_block": Bound(0.15, 1.1),
}


@dataclass(frozen=True)
class Side:
    """What one of the two models did: its answer, quality on the text, and tokens per second."""

    answer: str
    quality: TextQuality
    read_per_s: float
    written_per_s: float


def run(
    fmt: str, calibrate: Calibration, question: str, device: torch.device, quiet: bool
) -> tuple[dict[str, Any], str]:
    """Quantise and compare; return the result as plain data and as text. ``ok`` says whether it is within the bound."""
    import torch

    from fp4dispatch.machine.system import current
    from fp4dispatch.models.model_report import report as report_of
    from fp4dispatch.models.replace import replace_linears, warmup

    file, licence = smollm2.gguf_file(), smollm2.licence()
    with Progress("demo", 7, quiet=quiet) as progress, torch.inference_mode():
        progress.note(f"loading {smollm2.NAME}")
        tokenizer, model = smollm2.load(file, device)
        ids = smollm2.token_ids(tokenizer, licence, TOKENS)
        progress.step()
        sixteen_bit = _bytes_in_16_bits(model)
        before, original = look(tokenizer, model, question, ids, None, progress)
        progress.note(f"quantising to {fmt}")
        replaced = replace_linears(model, fmt, calibrate=calibrate)
        if device.type == "cuda":
            warmup(model, tokens=[1, len(ids)])
        progress.step()
        after, _ = look(tokenizer, model, question, ids, original, progress)
        found = report_of(model)
    bound = BOUNDS[fmt]
    misses = missed(before.quality, after.quality, bound)
    result: dict[str, Any] = {
        "model": smollm2.NAME,
        "format": fmt,
        "calibrate": calibrate,
        "device": str(device),
        "machine": str(current()),
        "question": question,
        "text": f"{len(ids):,} tokens of the Apache licence",
        "before": asdict(before),
        "after": asdict(after),
        "bytes": {
            "model before": sixteen_bit,
            "model after": _bytes_in_16_bits(model),
            "layers before": sum(layer.n * layer.k * 2 for layer in replaced.layers),
            "layers after": replaced.bytes_after,
        },
        "report": found.to_dict(),
        "bound": asdict(bound),
        "misses": misses,
        "ok": not misses,
    }
    return result, tables.render(result)


def missed(before: TextQuality, after: TextQuality, bound: Bound) -> list[str]:
    """Return one sentence per bound that is not met; NaN meets none."""
    found = {
        "KL divergence": (after.kl, bound.kl),
        "perplexity over the original's": (after.perplexity / before.perplexity, bound.perplexity),
    }
    return [f"{what} is {value:.3f}, at most {most}" for what, (value, most) in found.items() if not value <= most]


def look(
    tokenizer: Any,
    model: Any,
    question: str,
    ids: torch.Tensor,
    original: torch.Tensor | None,
    progress: Progress,
) -> tuple[Side, torch.Tensor]:
    """Ask, and let the model predict the text; return what was found, and the logits."""
    which = "original" if original is None else "quantised"
    progress.note(f"the {which} model reads")
    if model.device.type == "cpu":
        text_quality.logits(model, ids[:8])  # what is done once: starting threads, first touch of the weights
    logits, reading_s = _timed(lambda: text_quality.logits(model, ids), model.device)
    progress.step()
    progress.note(f"the {which} model answers")
    (answer, written), writing_s = _timed(lambda: ask(tokenizer, model, question), model.device)
    progress.step()
    quality = text_quality.quality(logits, ids, original)
    return Side(answer, quality, len(ids) / reading_s, written / writing_s), logits


def ask(tokenizer: Any, model: Any, question: str) -> tuple[str, int]:
    """Return the answer, written greedily, and how many tokens that took."""
    import torch

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    limit = WORDS[model.device.type]
    with torch.inference_mode():
        out = model.generate(**prompt, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    new = out[0, prompt["input_ids"].shape[1] :]
    cut = "" if int(new[-1]) == tokenizer.eos_token_id else " ..."
    return tokenizer.decode(new, skip_special_tokens=True).strip() + cut, len(new)


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return what a call returns, and its seconds; on a GPU those of the second call, as the first one prepares."""
    import torch

    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    found = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - start


def _bytes_in_16_bits(model: Any) -> int:
    """Return the bytes of a model, its float32 tensors counted as bfloat16: on a CPU they are float32 for speed."""
    import torch

    from fp4dispatch.models.quantized_linear import QuantizedLinear
    from fp4dispatch.models.replacing.replaceable import model_bytes

    quantised = {
        id(t) for m in model.modules() if isinstance(m, QuantizedLinear) for t in (*m.buffers(), *m.parameters())
    }
    wide = {
        id(t): t.numel() * 2
        for t in (*model.parameters(), *model.buffers())
        if t.dtype == torch.float32 and id(t) not in quantised
    }
    return int(model_bytes(model) - sum(wide.values()))
