"""Run one prompt through vLLM and write the log-probabilities of all tokens at all positions. A script, see the tests.

Its argument is JSON: ``model``, ``out``, and ``options`` of ``vllm.LLM``. It imports nothing of this repository: vLLM
loads the plug-in by itself.
"""

from __future__ import annotations

import json
import sys

import torch

TOKENS = list(range(1, 17))


def main() -> None:
    asked = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        max_model_len=64,
        max_logprobs=-1,
        max_num_seqs=4,
        disable_log_stats=True,
        **asked["options"],
    )
    wanted = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    (result,) = llm.generate([{"prompt_token_ids": TOKENS}], wanted)
    prompt = [entry for entry in result.prompt_logprobs if entry is not None] + [result.outputs[0].logprobs[0]]
    vocabulary = max(prompt[0]) + 1
    rows = torch.tensor([[entry[token].logprob for token in range(vocabulary)] for entry in prompt])
    torch.save({"logprobs": rows, "tokens": list(result.outputs[0].token_ids)}, asked["out"])


if __name__ == "__main__":
    main()
