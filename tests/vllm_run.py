"""Run one prompt through vLLM with several models, one after the other. A script: its interpreter has vLLM.

Its argument is a JSON file: a list of jobs with ``model``, ``out`` and ``options`` of ``vllm.LLM``. For each it writes
the log-probabilities of all tokens at all positions and the new tokens, or the error. vLLM loads the plug-in by itself.

``environment`` of a job sets variables. ``control`` gives each fused layer the one global scale that vLLM takes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

TOKENS = list(range(1, 17))


def take_scales_as_vllm_does() -> None:
    """Let the code of vLLM compute the global scale of each layer; the multiplication stays ours."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

    from fp4dispatch.integrations.vllm.stored import Fp4DispatchLinearMethod

    ours = Fp4DispatchLinearMethod.process_weights_after_loading
    theirs = object.__new__(CompressedTensorsW4A4Fp4)
    theirs.use_a16, theirs.kernel = True, SimpleNamespace(process_weights_after_loading=lambda layer: None)

    def process(self, layer):
        if self.scheme.name == "nvfp4-pack-quantized" and hasattr(layer, "weight_global_scale"):
            copy = SimpleNamespace(
                weight_packed=layer.weight_packed, weight_global_scale=layer.weight_global_scale.detach().clone()
            )
            theirs.process_weights_after_loading(copy)
            layer.weight_global_scale.data.fill_(1 / float(copy.weight_global_scale))
        ours(self, layer)

    Fp4DispatchLinearMethod.process_weights_after_loading = process


def run(model: str, options: dict) -> dict:
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_logprobs": -1}
    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **limits, **options)
    wanted = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    (result,) = llm.generate([{"prompt_token_ids": TOKENS}], wanted)
    (answer,) = result.outputs
    entries = [entry for entry in result.prompt_logprobs if entry is not None] + [answer.logprobs[0]]
    vocabulary = max(entries[0]) + 1
    rows = torch.tensor([[entry[token].logprob for token in range(vocabulary)] for entry in entries])
    return {"logprobs": rows, "tokens": list(answer.token_ids)}


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        print(f"=== {job['name']}", flush=True)
        os.environ.update(job["environment"])
        if job["control"]:
            take_scales_as_vllm_does()
        try:
            found = run(job["model"], job["options"])
        except Exception as error:
            import traceback

            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        torch.save(found, job["out"])
        from vllm.distributed import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
        for name in job["environment"]:
            del os.environ[name]


if __name__ == "__main__":
    main()
