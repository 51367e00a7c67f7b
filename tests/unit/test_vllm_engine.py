"""Checkpoints that the tools themselves wrote, through vLLM from the prompt to the predictions."""

from __future__ import annotations

import pytest
import torch

from tests import tiny_models, vllm_cases
from tests.transformers_cases import compressed, in_blocks, modelopt, plain, reference, rewritten, source
from tests.vllm_cases import Job, kl

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_cases.interpreter()[0], reason=vllm_cases.interpreter()[1] or "vllm is there"),
    pytest.mark.filterwarnings("ignore"),
]
LLAMA, QWEN2, QWEN3 = (f"{name} for engines" for name in ("Llama", "Qwen2", "Qwen3"))
BLOCKS = "Llama in blocks"
LIMIT = 5e-4
OURS = {"quantization": "fp4dispatch", "dtype": "bfloat16"}
EAGER = OURS | {"enforce_eager": True}

STORED = {
    "llama-modelopt": lambda: (LLAMA, modelopt(LLAMA)),
    "qwen2-modelopt": lambda: (QWEN2, modelopt(QWEN2)),
    "qwen3-modelopt-w4a16": lambda: (QWEN3, modelopt(QWEN3, "W4A16_NVFP4_CFG")),
    "llama-modelopt-mlp-only": lambda: (LLAMA, modelopt(LLAMA, "NVFP4_MLP_ONLY_CFG")),
    "llama-modelopt-fp8": lambda: (LLAMA, modelopt(LLAMA, "FP8_DEFAULT_CFG")),
    "llama-modelopt-fp8-channel": lambda: (LLAMA, modelopt(LLAMA, "FP8_PER_CHANNEL_PER_TOKEN_CFG")),
    "llama-compressed": lambda: (LLAMA, compressed(LLAMA)),
    "qwen3-compressed-w4a4": lambda: (QWEN3, compressed(QWEN3, "NVFP4")),
    "llama-compressed-ignore": lambda: (LLAMA, compressed(LLAMA, ignore=("lm_head", "re:.*layers\\.0\\..*"))),
    "llama-compressed-fp8": lambda: (LLAMA, compressed(LLAMA, "FP8")),
    "llama-blocks": lambda: (BLOCKS, in_blocks(BLOCKS)),
    "llama-compressed-fp8-dynamic": lambda: (LLAMA, compressed(LLAMA, "FP8_DYNAMIC")),
}
"""Name of a job -> the model, and the checkpoint that a tool wrote."""


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager")
    head = rewritten(modelopt(LLAMA), folder / "head", ignore=["lm_head", "model.layers.0.self_attn.k_proj"])
    single = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
    old = rewritten(in_blocks(BLOCKS), folder / "single", **single)
    jobs = [Job(name, str(make()[1]), EAGER) for name, make in STORED.items()]
    jobs += [
        Job("on-the-fly", str(plain(LLAMA)), EAGER),
        Job("on-the-fly-fp8", str(plain(LLAMA)), EAGER | _asked(format="fp8_row", exclude=["lm_head", "*.up_proj"])),
        Job("part-of-a-fused-layer", str(head), EAGER),
        Job("unsupported", str(old), EAGER),
        Job("named", str(modelopt(LLAMA)), EAGER, {"FP4_GEMM_BACKEND": "w4a16"}),
        Job("unknown", str(modelopt(LLAMA)), EAGER, {"FP4_GEMM_BACKEND": "w4a61"}),
        Job("control", str(compressed(LLAMA)), EAGER, control=True),  # the last: it changes the process
    ]
    return vllm_cases.run(folder, jobs)


def _asked(**request):
    return {"hf_overrides": {"quantization_config": {"quant_method": "fp4dispatch", **request}}}


@pytest.mark.parametrize("name", STORED)
def test_predictions_are_those_of_the_exact_weights(eager, name):
    model, path = STORED[name]()
    expected = reference(model, path)
    found = kl(eager[0][name], expected)
    assert found < LIMIT
    original = torch.log_softmax(tiny_models.logits(source(model, torch.float32))[0], -1)
    assert kl({"logprobs": original}, expected) > 4 * LIMIT, "the control: the unquantised model is told from it"


def test_one_global_scale_for_a_fused_layer_is_told_from_the_exact_ones(eager):
    assert kl(eager[0]["control"], reference(LLAMA, compressed(LLAMA))) > 20 * LIMIT


def test_decisions_are_in_the_log_of_vllm(eager):
    log = eager[1]["llama-modelopt"]
    assert "INFO" in next(line for line in log.splitlines() if "nvfp4_gemm any M N=256 K=128" in line)
    assert "reference (bf16 activations), auto" in log
    assert log.count("runs on the slow reference backend") == 4, "one WARNING a shape: qkv, o, gate_up and down"


def test_on_the_fly(eager):
    import fp4dispatch

    for name, fmt, exclude in (
        ("on-the-fly", "nvfp4", ("lm_head",)),
        ("on-the-fly-fp8", "fp8_row", ("lm_head", "*.up_proj")),
    ):
        expected = source(LLAMA)
        fp4dispatch.replace_linears(expected, fmt, exclude=exclude)
        if name == "on-the-fly":
            assert kl(eager[0][name], expected.float()) < LIMIT
            assert kl(eager[0][name], source(LLAMA, torch.float32)) > 20 * LIMIT
    assert "vLLM fuses 2 layers, which need one format" in eager[0]["on-the-fly-fp8"]["error"]
    assert "model.layers.0.mlp.up_proj: not quantised" in eager[0]["on-the-fly-fp8"]["error"]


def test_what_cannot_be_run_is_refused_by_name(eager):
    part = eager[0]["part-of-a-fused-layer"]["error"]
    assert "CheckpointUnsupportedError: model.layers.0.self_attn.qkv_proj: vLLM fuses 3 layers" in part
    assert "k_proj: not quantised" in part
    assert "q_proj: modelopt-nvfp4" in part
    unsupported = eager[0]["unsupported"]["error"]
    assert "the format fp8-tensor-inv of fp8 is not supported in vLLM" in unsupported
    assert "expected modelopt-nvfp4, nvfp4-pack-quantized, fp8-tensor, fp8-channel, fp8-block" in unsupported


def test_a_backend_that_the_environment_names_is_honoured_or_refused(eager):
    assert 'BackendUnsupportedError: backend="w4a16" was requested by FP4_GEMM_BACKEND' in eager[0]["named"]["error"]
    assert "FP4_GEMM_BACKEND='w4a61' is not a backend. Did you mean w4a16?" in eager[0]["unknown"]["error"]


def test_compiled_in_processes_of_vllm(tmp_path):
    """The default of vLLM: an engine in its own process, compiled."""
    path = compressed(QWEN3)
    found, logs = vllm_cases.run(tmp_path, [Job("compiled", str(path), OURS)], processes=True)
    assert kl(found["compiled"], reference(QWEN3, path)) < LIMIT
    assert "reference (bf16 activations)" in logs["compiled"]
    assert "Warming up model for the compilation" in logs["compiled"]


def test_two_ranks(tmp_path):
    path = compressed(LLAMA)
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}  # by default each rank wants a NUMA node of its own
    job = Job("two", str(path), EAGER | {"tensor_parallel_size": 2}, cores)
    found, _ = vllm_cases.run(tmp_path, [job], processes=True)
    assert kl(found["two"], reference(LLAMA, path)) < LIMIT
