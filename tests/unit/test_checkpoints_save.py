"""save_quantized and quantize_checkpoint: round trips, other libraries as judges, and that nothing is half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp4dispatch.checkpoints import FORMATS, load_quantized, open_checkpoint, quantize_checkpoint, save_quantized
from fp4dispatch.errors import CheckpointError
from tests.checkpoint_cases import CONFIGS, ROWS, K, N, Net, dequantised, layer_weight, stored_layer, tensors_of, write

METHODS = ("modelopt", "compressed-tensors", "fp8")
ROW_OF = {
    "modelopt": "modelopt-nvfp4",
    "compressed-tensors": "nvfp4-pack-quantized",
    "fp8": "fp8-tensor",
    "fp8-channel": "fp8-channel",
    "fp8-block": "fp8-block",
}
SAVABLE = {
    "modelopt-nvfp4": ("modelopt", "compressed-tensors"),
    "nvfp4-pack-quantized": ("compressed-tensors", "modelopt"),
    "fp8-tensor": (*METHODS, "fp8-transformers"),
    "fp8-channel": METHODS,
    "fp8-block": ("fp8", "compressed-tensors", "fp8-transformers"),
    "fp8-block-ct": ("compressed-tensors", "fp8"),
}


def loaded(row: str, tmp_path: Path, **kwargs) -> Net:
    model = Net()
    load_quantized(model, write(tmp_path / f"in-{row}", tensors_of(row, **kwargs), CONFIGS[row]))
    return model


@pytest.mark.parametrize(("row", "method"), [(r, m) for r in ROWS for m in SAVABLE[r]])
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_a_saved_model_loads_again_with_the_same_weights(tmp_path, row, method, shard):
    model = loaded(row, tmp_path)
    files = save_quantized(model, tmp_path / "out", method, max_shard_bytes=shard)
    assert (len(files) > 1) == (shard < 10**9)
    again = Net()
    report = load_quantized(again, tmp_path / "out")
    assert report.excluded == ("head",)
    exact = "nvfp4" not in row or method == "modelopt"  # compressed-tensors stores the reciprocal, rounded
    for name in ("up_proj", "down_proj"):
        ours, theirs = getattr(model, name).weights(), getattr(again, name).weights()
        assert torch.equal(ours.weight.view(torch.uint8), theirs.weight.view(torch.uint8))
        assert torch.equal(ours.scale.float(), theirs.scale.float())
        torch.testing.assert_close(
            layer_weight(getattr(again, name)), layer_weight(getattr(model, name)), rtol=0 if exact else 2**-23, atol=0
        )
        if ours.input_scale is not None:
            torch.testing.assert_close(theirs.input_scale, ours.input_scale, rtol=2**-23, atol=0)
    assert torch.equal(again.embed.weight, model.embed.weight)
    assert again.steps.item() == 7


@pytest.mark.parametrize(
    ("row", "method", "static", "expected"),
    [
        ("modelopt-nvfp4", "fp8", True, "'fp8' cannot store 'nvfp4' scaling: use modelopt or compressed-tensors"),
        ("fp8-block", "modelopt", True, "cannot store 'block128'"),
        ("fp8-tensor", "modelopt", False, "needs a static input scale"),
        ("fp8-tensor", "gguf", True, "format 'gguf' is not known"),
    ],
)
def test_what_a_format_cannot_store_is_refused(tmp_path, row, method, static, expected):
    model = loaded(row, tmp_path, static=static)
    with pytest.raises(CheckpointError, match=expected):
        save_quantized(model, tmp_path / "out", method)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"in-{row}"]


def test_a_model_without_quantised_layers_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no quantised layer"):
        save_quantized(Net(), tmp_path / "out")


def test_fused_layers_are_saved_as_their_shards_exactly(tmp_path):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Module()
            self.attn.qkv_proj = nn.Linear(K, 96)

    tensors = {
        "attn.q_proj.bias": torch.ones(48),
        "attn.k_proj.bias": torch.zeros(24),
        "attn.v_proj.bias": torch.ones(24),
    }
    for seed, (name, n) in enumerate((("q_proj", 48), ("k_proj", 24), ("v_proj", 24))):
        tensors |= {f"attn.{name}.{key}": t for key, t in stored_layer("modelopt-nvfp4", n, K, seed).items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"attn.{name}.input_scale"] = torch.tensor(0.5)
    model = Fused()
    load_quantized(model, write(tmp_path / "in", tensors))
    (file,) = save_quantized(model, tmp_path / "out", "modelopt")
    saved = load_file(file)
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(saved[name].float(), tensor.float()), name
    model.attn.other = model.attn.qkv_proj
    del model.attn.qkv_proj
    with pytest.raises(CheckpointError, match="the names of its shards are not known"):
        save_quantized(model, tmp_path / "out2", "modelopt")


# Quantising a directory.


def float_checkpoint(path: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    tensors = {
        "embed.weight": torch.randn(32, K, generator=g).to(dtype),
        "up_proj.weight": torch.randn(N, K, generator=g).to(dtype),
        "up_proj.bias": torch.randn(N, generator=g).to(dtype),
        "down_proj.weight": 3 * torch.randn(K, N, generator=g).to(dtype),
        "down_proj.bias": torch.randn(K, generator=g).to(dtype),
        "steps": torch.tensor(7),
    }
    write(path, tensors)
    (path / "config.json").write_text('{"model_type": "net"}')
    (path / "tokenizer.json").write_text("{}")
    return path, tensors


LINEARS = ("up_proj", "down_proj", "head")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_quantised_directories_load_and_are_close(tmp_path, format, shard):
    source, tensors = float_checkpoint(tmp_path / "in")
    seen = []
    report = quantize_checkpoint(
        source, tmp_path / "out", format, LINEARS, max_shard_bytes=shard, progress=lambda *a: seen.append(a)
    )
    row = ROW_OF[format]
    model = Net()
    loaded_report = load_quantized(model, tmp_path / "out")
    assert {layer.scheme for layer in loaded_report.layers} == {row}
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.nbytes == report.bytes_after < report.bytes_before
        for name in ("up_proj", "down_proj"):
            stored = {k.removeprefix(name + "."): checkpoint.tensor(k) for k in checkpoint if k.startswith(name + ".")}
            expected = dequantised(row, stored)
            torch.testing.assert_close(layer_weight(getattr(model, name)), expected, rtol=2**-23, atol=0)
            error = (expected - tensors[f"{name}.weight"].double()).norm() / tensors[f"{name}.weight"].double().norm()
            assert error < (0.11 if "nvfp4" in row else 0.03)
        widths = {"F32": 4, "BF16": 2, "I64": 8}
        assert all(info.start % widths.get(info.dtype, 1) == 0 for info in map(checkpoint.__getitem__, checkpoint))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "net"
    assert report.skipped == {
        "head": "not in the checkpoint (tied to another weight, or unused)",
        "embed": "not known as a linear layer (1 tensor, 0.01 MB)",
    }
    assert seen[-1][1] == seen[-1][2] == report.bytes_before
    assert len(seen) == len(tensors)


def test_layers_are_left_for_a_reason(tmp_path):
    source, tensors = float_checkpoint(tmp_path / "in")
    tensors |= {"odd.weight": torch.ones(8, 24), "int.weight": torch.ones(8, 16, dtype=torch.int32)}
    save_file(tensors, source / "model.safetensors")
    names = (*LINEARS, "odd", "int")
    report = quantize_checkpoint(source, tmp_path / "out", "modelopt", names, excluded=["down_proj"])
    assert [layer.name for layer in report.layers] == ["up_proj"]
    assert report.skipped["odd"] == "K=24 is not a multiple of 16, which the format needs"
    assert report.skipped["down_proj"] == "excluded"
    assert "expected F32, BF16 or F16" in report.skipped["int"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["down_proj.weight"], tensors["down_proj.weight"])
    config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert config["quantization"]["exclude_modules"] == ["down_proj", "embed", "head", "int", "odd"]


def test_sources_that_cannot_be_quantised_are_refused(tmp_path):
    source, tensors = float_checkpoint(tmp_path / "in")
    with pytest.raises(CheckpointError, match="no linear layer to quantise"):
        quantize_checkpoint(source, tmp_path / "out", "fp8", ["ghost"])
    with pytest.raises(CheckpointError, match="would overwrite the source"):
        quantize_checkpoint(source, source, "fp8", LINEARS, overwrite=True)
    with pytest.raises(CheckpointError, match="would overwrite the source"):
        quantize_checkpoint(source, tmp_path, "fp8", LINEARS, overwrite=True)
    quantize_checkpoint(source, tmp_path / "once", "fp8", LINEARS)
    with pytest.raises(CheckpointError, match="already quantised"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "modelopt", LINEARS)
    for bad in (torch.nan, torch.inf):
        tensors["down_proj.weight"][5, 5] = bad
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"'down_proj\.weight' holds NaN or Inf"):
            quantize_checkpoint(source, tmp_path / "out", "modelopt", LINEARS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "once"]


def test_companions_are_copied_and_weights_are_not(tmp_path):
    source, _ = float_checkpoint(tmp_path / "in")
    for name in ("pytorch_model.bin", "tf_model.h5", "model.onnx", ".hidden", "vocab.txt"):
        (source / name).write_text("x")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../in"}]))
    for folder in ("1_Pooling", "onnx"):
        (source / folder).mkdir()
        (source / folder / "config.json").write_text("{}")
        (source / folder / "pytorch_model.bin").write_text("x")
    quantize_checkpoint(source, tmp_path / "out", "fp8", LINEARS)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
        "modules.json",
        "1_Pooling/config.json",
    }
    assert found == expected


def test_folders_of_a_hugging_face_cache_are_copied(tmp_path):
    """A snapshot is links into ``blobs``, in its folders too; a link to another place is refused there as well."""
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "rev", tmp_path / "models--org--name" / "blobs"
    source, _ = float_checkpoint(tmp_path / "in")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("pooling")
    blobs.mkdir(parents=True)
    for number, file in enumerate(path for path in source.rglob("*") if path.is_file()):
        file.rename(blobs / str(number))
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    quantize_checkpoint(snapshot, tmp_path / "out", "fp8", LINEARS)
    copied = tmp_path / "out" / "1_Pooling" / "config.json"
    assert (copied.read_text(), copied.is_symlink()) == ("pooling", False)
    (tmp_path / "secret").write_text("x")
    (snapshot / "1_Pooling" / "secret").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside its directory"):
        quantize_checkpoint(snapshot, tmp_path / "again", "fp8", LINEARS)


def test_every_chat_template_of_a_tokenizer_is_copied(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    source, _ = float_checkpoint(tmp_path / "in")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "out", "fp8", LINEARS)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.chat_template == tokenizer.chat_template


def test_a_changed_format_leaves_no_old_configuration_behind(tmp_path):
    model = loaded("modelopt-nvfp4", tmp_path)
    save_quantized(model, tmp_path / "a", "modelopt", source_dir=tmp_path / "in-modelopt-nvfp4")
    assert (tmp_path / "a" / "hf_quant_config.json").exists()
    save_quantized(model, tmp_path / "b", "compressed-tensors", source_dir=tmp_path / "a")
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()
    load_quantized(Net(), tmp_path / "b")


# Other libraries as judges.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_decompresses_our_nvfp4_to_the_same_bits(tmp_path, dtype):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    source, tensors = float_checkpoint(tmp_path / "in", dtype)
    quantize_checkpoint(source, tmp_path / "out", "compressed-tensors", LINEARS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    preset = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert scheme.weights == preset.weights
    assert scheme.input_activations is None
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("up_proj", "down_proj"):
        stored = {k.removeprefix(name + "."): t for k, t in saved.items() if k.startswith(name + ".")}
        theirs = compressors.NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]
        # Their order: the scale is divided by the global scale first, in float32; the result is bfloat16.
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = stored["weight_packed"].long()
        q = torch.stack((values[codes & 15], values[codes >> 4]), -1).flatten(1)
        scale = (stored["weight_scale"].float() / stored["weight_global_scale"]).repeat_interleave(16, 1)
        assert torch.equal(theirs, (q * scale).to(theirs.dtype))
        model = Net()
        load_quantized(model, tmp_path / "out")
        ours = layer_weight(getattr(model, name))
        torch.testing.assert_close(ours, theirs.double(), rtol=2**-8, atol=0)  # one bfloat16 rounding
        relative = (theirs.double() - tensors[f"{name}.weight"].double()).norm() / tensors[
            f"{name}.weight"
        ].double().norm()
        assert relative < 0.11


@pytest.mark.parametrize(
    ("row", "preset"),
    [("modelopt-nvfp4", "NVFP4"), ("fp8-tensor", "FP8"), ("fp8-channel", "FP8_DYNAMIC"), ("fp8-block", "FP8_BLOCK")],
)
def test_our_compressed_tensors_configuration_is_their_preset(tmp_path, row, preset):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    save_quantized(loaded(row, tmp_path), tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    ours, theirs = parsed.config_groups["group_0"], quantization.preset_name_to_scheme(preset, ["Linear"])
    skip = {"observer", "observer_kwargs"}  # how it was calibrated; not part of the format
    assert ours.weights.model_dump(exclude=skip) == theirs.weights.model_dump(exclude=skip)
    assert ours.input_activations.model_dump(exclude=skip) == theirs.input_activations.model_dump(exclude=skip)
    assert parsed.ignore == ["head"]


@pytest.mark.parametrize("row", ["modelopt-nvfp4", "fp8-tensor", "fp8-channel"])
@pytest.mark.filterwarnings("ignore")
def test_our_modelopt_configuration_is_what_modelopt_converts_to(tmp_path, row):
    convert = pytest.importorskip("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    save_quantized(loaded(row, tmp_path), tmp_path / "out", "modelopt")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    hf_quant = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    expected = convert(hf_quant)
    if row == "fp8-channel":  # their converter knows this one inside MIXED_PRECISION only
        assert "config_groups" not in expected
        config.pop("config_groups")
    assert config == expected


@pytest.mark.filterwarnings("ignore")
def test_modelopt_dequantises_our_nvfp4_to_the_same_weights(tmp_path):
    tensor_type = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    source, _ = float_checkpoint(tmp_path / "in")
    quantize_checkpoint(source, tmp_path / "out", "modelopt", LINEARS)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    model = Net()
    load_quantized(model, tmp_path / "out")
    for name, shape in (("up_proj", (N, K)), ("down_proj", (K, N))):
        q = tensor_type(torch.Size(shape), torch.float32, saved[f"{name}.weight"])
        theirs = q.dequantize(
            scale=saved[f"{name}.weight_scale"], double_scale=saved[f"{name}.weight_scale_2"], block_sizes={-1: 16}
        )
        torch.testing.assert_close(layer_weight(getattr(model, name)), theirs.double(), rtol=2**-22, atol=0)


# All or nothing.


def test_an_existing_directory_is_kept_unless_overwritten(tmp_path):
    model = loaded("fp8-tensor", tmp_path)
    out = tmp_path / "out"
    save_quantized(model, out, "fp8")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        save_quantized(model, out, "compressed-tensors")
    assert (out / "model.safetensors").read_bytes() == before
    save_quantized(model, out, "compressed-tensors", overwrite=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in-fp8-tensor", "out"]


def test_only_checkpoints_are_ever_overwritten(tmp_path):
    model = loaded("fp8-tensor", tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "file").write_text("x")
    for target in ("home", "link", "file"):
        with pytest.raises(CheckpointError, match="is not a checkpoint directory"):
            save_quantized(model, tmp_path / target, "fp8", overwrite=True)
    assert (home / "thesis.tex").read_text() == "years of work"


def test_a_failure_at_the_last_tensor_leaves_nothing(tmp_path, monkeypatch):
    from fp4dispatch.checkpoints.files import writer

    model = loaded("fp8-tensor", tmp_path)
    real = writer._write

    def failing(file, position, entry, tensor):
        if entry.name == "steps":
            raise OSError(28, "No space left on device")
        real(file, position, entry, tensor)

    monkeypatch.setattr(writer, "_write", failing)
    with pytest.raises(CheckpointError, match=r"No space left on device.*nothing was changed"):
        save_quantized(model, tmp_path / "out", "fp8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in-fp8-tensor"]


QUANTIZE = """
    import resource, sys
    from fp4dispatch.checkpoints import quantize_checkpoint
    if sys.argv[3] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    def progress(name, done, total):
        if sys.argv[3] == "wait" and done > total // 2:
            print("half", flush=True)
            import time; time.sleep(60)
    print("start", flush=True)
    quantize_checkpoint(sys.argv[1], sys.argv[2], "fp8", [str(i) for i in range(4)], progress=progress)
"""


def _big(path: Path) -> Path:
    return write(path, {f"{i}.weight": torch.ones(1024, 1024) for i in range(4)})


def _run(tmp_path: Path, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(QUANTIZE), str(tmp_path / "in"), str(tmp_path / "out"), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_no_output_directory(tmp_path):
    _big(tmp_path / "in")
    process = _run(tmp_path, "wait")
    assert [process.stdout.readline().strip() for _ in range(2)] == ["start", "half"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    left = [p for p in tmp_path.iterdir() if p.name != "in"]
    assert len(left) == 1  # so it was indeed writing
    assert left[0].name.startswith(".out.tmp-")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", "fp8", ["0", "1", "2", "3"])  # and is in nobody's way
    open_checkpoint(tmp_path / "out").close()


def test_a_full_disk_leaves_nothing(tmp_path):
    _big(tmp_path / "in")
    process = _run(tmp_path, "limit")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "CheckpointError" in err
    assert "File too large" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_quantising_holds_about_one_layer_in_memory(tmp_path):
    """Peak anonymous memory of a process, for a model of 16 layers against one of 4 of the same size."""
    code = """
        import sys, threading, time
        from fp4dispatch.checkpoints import quantize_checkpoint
        def rss(): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
        peak, stop = 0, False
        def watch():
            global peak
            while not stop:
                peak = max(peak, rss()); time.sleep(0.001)
        thread = threading.Thread(target=watch); thread.start()
        quantize_checkpoint(sys.argv[1], sys.argv[2], "fp8-channel", [str(i) for i in range(int(sys.argv[3]))])
        stop = True; thread.join(); print(peak)
    """
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that malloc gives back what is freed
    peaks = []
    for layers in (4, 16):
        write(
            tmp_path / f"in{layers}",
            {f"{i}.weight": torch.ones(1024, 2048, dtype=torch.bfloat16) for i in range(layers)},
        )
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(code),
            tmp_path / f"in{layers}",
            tmp_path / f"out{layers}",
            str(layers),
        ]
        peaks.append(1024 * int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout))
    layer = 1024 * 2048 * 2
    assert peaks[1] - peaks[0] < 3 * layer  # the 12 further layers take 12 * layer in the file


def test_files_get_ordinary_permissions(tmp_path):
    mask = os.umask(0o022)
    try:
        save_quantized(loaded("fp8-tensor", tmp_path), tmp_path / "out", "fp8")
    finally:
        os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("method", "shape"), [("modelopt", ()), ("fp8", ()), ("compressed-tensors", (1,))])
def test_single_scales_have_the_shape_that_the_tool_expects(tmp_path, method, shape):
    """transformers refuses a compressed-tensors checkpoint whose per-tensor scales are not [1]."""
    (file,) = save_quantized(loaded("fp8-tensor", tmp_path), tmp_path / "out", method)
    saved = load_file(file)
    assert saved["up_proj.weight_scale"].shape == saved["up_proj.input_scale"].shape == shape
