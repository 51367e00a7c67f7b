"""``from_pretrained`` reads shard by shard: the unquantised model is never in memory as a whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
LOAD = """
import gc, json, sys, threading, time
import torch, transformers
import fp4dispatch
from fp4dispatch.integrations.transformers import Fp4DispatchConfig

def held():
    with open("/proc/self/status") as file:  # without pages of mapped files, which the kernel may drop
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

def peak(load):
    gc.collect()
    before, most, done = held(), [0], []
    def watch():
        while not done:
            most[0] = max(most[0], held())
            time.sleep(0.002)
    thread = threading.Thread(target=watch)
    thread.start()
    model = load()
    done.append(True)
    thread.join()
    return model, most[0] - before

sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 256}
config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
whole = sum(p.numel() * 2 for p in model.parameters())
model.save_pretrained("plain", max_shard_size="20MB")
del model
load = transformers.AutoModelForCausalLM.from_pretrained
first, making = peak(lambda: load("plain", quantization_config=Fp4DispatchConfig()))
first.save_pretrained("stored", max_shard_size="5MB")
size = fp4dispatch.report(first).model_bytes
del first
second, loading = peak(lambda: load("stored"))
print(json.dumps({"whole": whole, "size": size, "making": making, "loading": loading}))
"""


@pytest.mark.slow
def test_peak_memory(tmp_path):
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["size"] < 0.35 * found["whole"]
    assert found["making"] < 0.6 * found["whole"], "the 16-bit model is never there as a whole"
    assert found["loading"] < 1.7 * found["size"], "the quantised model is never there twice"
