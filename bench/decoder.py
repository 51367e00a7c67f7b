"""A whole decoder in bfloat16, FP8 and NVFP4: tokens per second, memory and what happens to the logits, in one table.

The model has the layer sizes of Llama-3.1-8B and random weights: nothing is downloaded. They are normal, 0.02, but for
the embedding (1) and what writes to the residual stream (0.02 / sqrt(2 layers), as GPT-2 starts): a layer then changes
the stream by little, as trained ones do, while with 0.02 everywhere a random network multiplies the smallest error,
that of another bfloat16 kernel included, with each layer. Its linear layers are replaced by ``replace_linears``, one
decoder layer after the other; attention, norms, embedding and the head stay bfloat16. Decoding is greedy, with Hugging
Face's static cache, one CUDA graph a step, timed if its logits have the bits of the same steps without a graph. Prefill
runs without one. Attention is PyTorch's without cuDNN's, whose decode steps have other bits each time.

    python -m bench.decoder --json out.json --commit HASH
    python -m bench.decoder --tiny --device cpu            # a small model, no graph: that the script works

``--compile`` compiles the steps with ``torch.compile`` (``shared/compiled_step.py``) for every format, bf16 too. Their
logits are compared with those of eager steps, and a step in a graph must have the bits of a compiled one without.
Prefill stays eager. ``--fuse`` and ``--head`` then add up: fused, then the same model with its head quantised.

    python -m bench.decoder --compile --fuse --head --batches 1 16 --json out.json --commit HASH

A format is a name that ``replace_linears`` takes, with ``:bf16`` or ``:fp8`` to pin the activation, and ``+fuse`` for
one layer in place of q, k and v and one in place of gate and up, and ``+head`` to quantise the head too. ``--fuse`` and
``--head`` measure each format without and with it, in the same run. ``--compact`` first
keeps what a layer drops by default (``keep_stored=True``) and drops it (``fp4dispatch.compact``) before anything is
timed: the table then has the memory with and without it. Logits that are not bit for bit what they were print WRONG.
``replace_peak_gb`` is the most that was allocated while the linear layers were replaced.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fp4dispatch
from bench.shared import commandline, compiled_step
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import relative_error
from fp4dispatch.benchmark.reports import records
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.tune.timing import Sample, summarise

SIZES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"""
TINY = SIZES | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
INIT_STD = 0.02
PROMPT = 128
"""Tokens that are in the cache before decoding starts."""
PROBE = (4, 128)
"""Sequences and tokens whose logits are compared."""
CHECKED_STEPS = 3
REPEATS = 5
COMPILED_REPEATS = 3
TOLERANCE = {"bf16": 0.05, "fp8": 0.2}
"""Largest relative error of compiled steps' logits against eager ones, by the activations of the layers.

Compiled code rounds less often, and FP8 activations round the difference up. With 32 layers of 256 on a CPU, whose
weights were 4 times as large, it was 0.024, and 0.086 with FP8; without one attention or MLP of the 32, 0.10 to 0.9,
and 0.35 to 1.4.
"""


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """Leave out cuDNN's attention: one query a sequence gives other bits from call to call (torch 2.11, H200).

    Logits of bfloat16 were 0.5 to 1.4 % apart by it, and of NVFP4 up to 3.1 %; the same bits each time without it.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point parameters in another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(
    sizes: dict[str, Any], device: torch.device, seed: int = 0, family: str = "Llama", std: float = INIT_STD
) -> nn.Module:
    """Return the bfloat16 model, made on the device; the same weights for the same seed."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="sdpa", tie_word_embeddings=False)
    with torch.device(device), default_dtype(torch.bfloat16):
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    into_residual = std / math.sqrt(2 * sizes["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif "embed_tokens" in name:
            parameter.normal_(0.0, 1.0, generator=generator)
        else:
            writes = "o_proj" in name or "down_proj" in name
            parameter.normal_(0.0, into_residual if writes else std, generator=generator)
    return model


def variants(formats: Sequence[str], *, fuse: bool, head: bool, each: bool = True) -> list[str]:
    """Return the formats, each followed by those with fused layers and a quantised head where that is asked for.

    ``each``: with only the head quantised too, where both are asked for.
    """
    more = ["", *(["+fuse"] if fuse else []), *(["+head"] if head and (each or not fuse) else [])]
    more += ["+fuse+head"] if fuse and head else []
    return list(dict.fromkeys(f"{fmt}{way}" for fmt in formats for way in ([""] if fmt == "bf16" else more)))


def quantise(model: nn.Module, fmt: str, *, keep_stored: bool = False) -> dict[str, int]:
    """Replace the linear layers, one decoder layer at a time; return how many layers each choice of backends runs.

    Where decoder layers are quantised already, only the head may be replaced.
    """
    kind, *ways = fmt.split("+")
    unknown = set(ways) - {"fuse", "head"}
    if unknown:
        raise SystemExit(f"format {fmt!r}: {', '.join(sorted(unknown))} is not known; add +fuse or +head")
    name, _, activation = kind.partition(":")
    if name == "bf16":
        return {}
    options: dict[str, Any] = {"activation": activation or "any", "keep_stored": keep_stored}
    for layer in () if isinstance(model.model.layers[0].self_attn.o_proj, QuantizedLinear) else model.model.layers:
        report = fp4dispatch.replace_linears(layer, name, fuse="fuse" in ways, **options)
        if report.fusing.left:
            raise SystemExit(f"format {fmt!r}: {report.fusing}")
    if "head" in ways:
        fp4dispatch.replace_linears(model, name, lm_head=True, **options)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return dict(Counter(layer.backend_text() for layer in layers))


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of every parameter and buffer, shared memory once."""
    stores = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(stores.values())


# -------------------------------------------------------------------------------------------------------------- timing


def elapsed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def rate(tokens: int, work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> dict[str, float]:
    """Return tokens per second: the median and the spread, after one run that does not count."""
    work()
    times: Sample = summarise([elapsed(work, device) * 1e6 for _ in range(repeats)])
    return {"tokens_per_s": tokens / (times.us * 1e-6), "spread": times.spread}


class Decoder:
    """Greedy decoding of a batch with a static cache; the state lives in tensors, so that a graph can replay a step."""

    def __init__(self, model: nn.Module, prompts: Tensor, room: int, *, compiled: bool = False) -> None:
        from transformers import StaticCache

        self.model, self.prompts = model, prompts
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.token = prompts.new_zeros(prompts.shape[0], 1)
        vocabulary = model.config.vocab_size
        self.logits = torch.zeros(prompts.shape[0], vocabulary, device=prompts.device, dtype=model.dtype)
        self.step: Callable[[], None] = self.eager_step
        if compiled:
            self.start()  # allocates the cache
            self.step = compiled_step.CompiledStep(model, self.cache, self.token, self.logits)

    def start(self) -> None:
        """Forget everything but the prompt, and choose the first token."""
        self.cache.reset()
        self._advance(self.prompts)

    def eager_step(self) -> None:
        """Feed the last token and choose the next one."""
        self._advance(self.token)

    def _advance(self, tokens: Tensor) -> None:
        out = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.logits.copy_(out.logits[:, -1])
        self.token.copy_(self.logits.argmax(-1, keepdim=True))

    def captured(self) -> Callable[[], None]:
        """Return a step as one CUDA graph; it continues from whatever state there is."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def run_steps(decoder: Decoder, step: Callable[[], object], steps: int) -> list[tuple[Tensor, Tensor]]:
    """Start and run steps; return logits and token of each."""
    decoder.start()
    found = []
    for _ in range(steps):
        step()
        found.append((decoder.logits.float().clone(), decoder.token.clone()))
    return found


def difference(a: Sequence[tuple[Tensor, Tensor]], b: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the worst relative error of the logits as long as every token before was the same."""
    worst = 0.0
    for (x, token_x), (y, token_y) in zip(a, b, strict=True):
        worst = max(worst, relative_error(x, y))
        if not torch.equal(token_x, token_y):
            break
    return worst


def decode(
    model: nn.Module, batch: int, steps: int, device: torch.device, vocabulary: int, compiled: bool = False
) -> dict[str, Any]:
    """Check a decode step against the same steps without a graph, then time it.

    ``off``: how far logits with a graph are from those without; ``eager_off``: two runs without one from each other.
    Neither may differ by a bit. ``compiled``: how compiled steps, which these all are then, compare with eager ones.
    """
    generator = torch.Generator(device)
    generator.manual_seed(batch)
    prompts = torch.randint(vocabulary, (batch, PROMPT), device=device, generator=generator)
    room = PROMPT + max(steps, CHECKED_STEPS) + 2
    room += -room % 8 if compiled else 0  # or each layer pads the mask
    decoder = Decoder(model, prompts, room, compiled=compiled)
    more = {"compiled": compare(decoder, activations(model, batch))} if compiled else {}
    eager = run_steps(decoder, decoder.step, CHECKED_STEPS)
    again = difference(run_steps(decoder, decoder.step, CHECKED_STEPS), eager)
    graph = device.type == "cuda"
    step = decoder.captured() if graph else decoder.step
    off = difference(run_steps(decoder, step, CHECKED_STEPS), eager)
    result: dict[str, Any] = {
        "batch": batch,
        "steps": steps,
        "graph": graph,
        "off": off,
        "eager_off": again,
        "status": "ok",
    } | more
    right = more.get("compiled", {"right": True})["right"]
    if off != 0 or again != 0 or not right or not all(bool(logits.isfinite().all()) for logits, _ in eager):
        return result | {"status": "WRONG"}

    def work() -> None:
        for _ in range(steps):
            step()

    times = []
    for repeat in range((COMPILED_REPEATS if compiled else REPEATS) + 1):
        decoder.start()
        took = elapsed(work, device)
        times += [took] if repeat else []
    sample = summarise([1e6 * t for t in times])
    return result | {"tokens_per_s": batch * steps / statistics.median(times), "spread": sample.spread}


def compare(decoder: Decoder, activation: str) -> dict[str, Any]:
    """Compile a step; return how it compares with eager ones, and what it cost."""
    eager = run_steps(decoder, decoder.eager_step, CHECKED_STEPS)
    before, began = compiled_step.compilations(), time.perf_counter()
    decoder.step()
    cost = {"seconds": time.perf_counter() - began, "compilations": compiled_step.compilations() - before}
    found = compiled_step.against_eager(decoder.start, decoder.step, decoder.token, decoder.logits, eager)
    limit = TOLERANCE[activation]
    return found | cost | {"tolerance": limit, "right": found["off"] <= limit and found["greedy"]}


def activations(model: nn.Module, tokens: int) -> str:
    """Return ``fp8`` where a layer quantises the activations of this number of tokens, else ``bf16``."""
    formats = set()
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            spec = layer.bind().spec
            formats.add(spec.routes[spec.index(tokens)].activation)
    return "bf16" if formats <= {"bf16"} else "fp8"


def prefill(model: nn.Module, tokens: int, device: torch.device, vocabulary: int) -> dict[str, Any]:
    """Time one prompt, head on its last token."""
    prompt = torch.randint(vocabulary, (1, tokens), device=device)
    return {"tokens": tokens} | rate(tokens, lambda: model(input_ids=prompt, use_cache=False, logits_to_keep=1), device)


def probe(model: nn.Module, device: torch.device, vocabulary: int) -> Tensor:
    """Return the logits of the probe, f32 [sequences * tokens, vocabulary]."""
    generator = torch.Generator(device)
    generator.manual_seed(7)
    tokens = torch.randint(vocabulary, PROBE, device=device, generator=generator)
    return torch.cat([model(input_ids=row.unsqueeze(0), use_cache=False).logits.float()[0] for row in tokens])


def against(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """Return how far logits are from the reference's: relative error, mean cosine, top-1 agreement, mean KL (nats)."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    return {
        "relative_error": relative_error(logits, reference),
        "cosine": float(nn.functional.cosine_similarity(logits, reference).mean()),
        "top1": float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
    }


# ----------------------------------------------------------------------------------------------------------------- run


class Models:
    """The model of the last format: the next one may be the same with its head quantised."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.sizes = TINY if arguments.tiny else SIZES
        self.format, self.model = "", None

    def get(self, fmt: str) -> tuple[nn.Module, dict[str, int], dict[str, float]]:
        """Return the model in a format, how many layers each choice of backends runs, and the peak of replacing."""
        model = self.model if self.arguments.compile and fmt == f"{self.format}+head" else None
        self.format, self.model = fmt, None
        if model is None:
            self._free()
            model = build(self.sizes, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        backends = quantise(model, fmt, keep_stored=self.arguments.compact)
        gc.collect()
        peak = {}
        if self.device.type == "cuda":
            peak = {"replace_peak_gb": torch.cuda.max_memory_allocated(self.device) / 1e9}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.model = model
        return model, backends, peak

    def _free(self) -> None:
        if self.arguments.compile:
            compiled_step.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def run_format(
    fmt: str, arguments: argparse.Namespace, models: Models, reference: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    """Build, quantise and measure the model in one format; return the result and the logits of the probe."""
    device, vocabulary = models.device, models.sizes["vocab_size"]
    began = time.perf_counter()
    model, backends, peak = models.get(fmt)
    built = time.perf_counter() - began
    logits = probe(model, device, vocabulary)
    result: dict[str, Any] = {
        "format": fmt,
        "backends": backends,
        "weights_gb": held_bytes(model) / 1e9,
        "logits": against(logits, logits if reference is None else reference),
    }
    result |= peak
    if backends:
        fp4dispatch.warmup(model, tokens=[*arguments.batches, *([arguments.prefill] if arguments.prefill else [])])
    if backends and arguments.compact:
        result["compact"] = compacted(model, logits, lambda: probe(model, device, vocabulary))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    if arguments.prefill:
        result["prefill"] = prefill(model, arguments.prefill, device, vocabulary)
    more = (True,) if arguments.compile else ()
    result["decode"] = [decode(model, batch, arguments.steps, device, vocabulary, *more) for batch in arguments.batches]
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return result | {"build_s": built, "seconds": time.perf_counter() - began}, logits


def compacted(model: nn.Module, before: Tensor, logits: Callable[[], Tensor]) -> dict[str, Any]:
    """Drop weights that are held twice; return what is held then, and whether the logits are still ``before``."""
    fp4dispatch.compact(model)
    if before.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"weights_gb": held_bytes(model) / 1e9, "same": torch.equal(logits(), before)}


def table(document: dict[str, Any]) -> str:
    """Return the results as a Markdown table; speeds also as multiples of the first format's."""
    first = document["formats"][0]
    batches = [d["batch"] for d in first["decode"]]
    compact = any("compact" in each for each in document["formats"])
    head = ["format", "weights GB", *(["compacted GB"] if compact else []), "peak GB"]
    head += [f"decode b{b}, tok/s" for b in batches]
    head += [f"prefill {first['prefill']['tokens']}, tok/s"] if "prefill" in first else []
    head += ["logits error", "cosine", "top-1", "KL"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for each in document["formats"]:
        cells = [each["format"], f"{each['weights_gb']:.3g}"]
        cells += [_memory(each.get("compact"))] if compact else []
        cells.append(f"{each['peak_gb']:.1f}" if "peak_gb" in each else "-")
        for mine, base in zip(each["decode"], first["decode"], strict=True):
            cells.append(_speed(mine, base) if mine["status"] == "ok" else "WRONG")
        logits = each["logits"]
        cells += [_speed(each["prefill"], first["prefill"])] if "prefill" in first else []
        cells += [f"{logits['relative_error']:.4f}", f"{logits['cosine']:.4f}"]
        cells += [f"{logits['top1']:.3f}", f"{logits['kl']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _memory(compact: dict[str, Any] | None) -> str:
    if compact is None:
        return "-"
    return f"{compact['weights_gb']:.3g}" if compact["same"] else "WRONG"


def _speed(mine: dict[str, Any], base: dict[str, Any]) -> str:
    ratio = f" ({mine['tokens_per_s'] / base['tokens_per_s']:.2f}x)" if base.get("tokens_per_s") else ""
    return f"{mine['tokens_per_s']:.0f}{ratio}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_row", "nvfp4"], help="the first is the reference")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt that is timed; 0: none")
    parser.add_argument("--compile", action="store_true", help="compile the decode steps with torch.compile")
    parser.add_argument("--fuse", action="store_true", help="measure each format with fused layers too")
    parser.add_argument("--head", action="store_true", help="measure each format with a quantised head too")
    parser.add_argument("--compact", action="store_true", help="hold weights twice first, and drop them before timing")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--device", help="cuda or cpu; the GPU where torch sees one, by default")
    return commandline.parse(parser, words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure every format; 1 where a decode step is wrong."""
    arguments = parse(words)
    card = machine.card(arguments.device)
    facts = machine.facts(card, arguments.commit)
    document: dict[str, Any] = {"tiny": arguments.tiny, "prompt": PROMPT, "formats": []}
    document |= {"compiled": True} if arguments.compile else {}
    failed, reference = {}, None
    models = Models(arguments, card.device)
    with torch.inference_mode(), repeatable_attention():
        for fmt in variants(arguments.formats, fuse=arguments.fuse, head=arguments.head, each=not arguments.compile):
            try:
                result, logits = run_format(fmt, arguments, models, reference)
            except Exception as error:  # what was measured before is kept, and other formats may run
                traceback.print_exc()
                failed[fmt] = str(error).partition("\n")[0]
                continue
            reference = logits if reference is None else reference
            document["formats"].append(result)
            print(f"{fmt}: {result['seconds']:.0f} s, of it building {result['build_s']:.0f} s", flush=True)
            for backend, count in result["backends"].items():
                print(f"  {count} layers: {backend}", flush=True)
            for each in result["decode"]:
                print(f"  {step_text(each)}", flush=True)
            if arguments.json:
                subject = "compiled" if arguments.compile else ""
                records.write(arguments.json, "decoder", facts, document, subject)
    if document["formats"]:
        print(table(document))
    for fmt, error in failed.items():
        print(f"FAILED: {fmt}: {error}")
    wrong = [
        (each["format"], d["batch"]) for each in document["formats"] for d in each["decode"] if d["status"] != "ok"
    ]
    if wrong:
        print(f"WRONG: a step in a graph or compiled differs from the same step without: {wrong}")
    changed = [each["format"] for each in document["formats"] if not each.get("compact", {"same": True})["same"]]
    if changed:
        print(f"WRONG: compact() changed the logits: {changed}")
    return 1 if wrong or changed or failed else 0


def step_text(step: dict[str, Any]) -> str:
    """Return what a decode step did, in one line."""
    text = f"batch {step['batch']}: {step['status']}"
    if "tokens_per_s" in step:
        text += f", {step['tokens_per_s']:.0f} tok/s"
    if "compiled" in step:
        found = step["compiled"]
        text += f", compiled in {found['seconds']:.0f} s ({found['compilations']} graphs), off by {found['off']:.4f} "
        text += f"(at most {found['tolerance']}), {found['same_tokens']:.0%} of tokens as without"
    return text


if __name__ == "__main__":
    raise SystemExit(main())
