"""Every block of docs/tensor-parallel.md runs, on two processes and a tiny model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transformers_cases import modelopt

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
END = "\nimport sys\nsys.stdout.flush()\ndist.barrier()\nos._exit(0)\n"


def test_every_block_is_python():
    assert {kind for kind, _ in BLOCKS} == {"python"}
    assert len(BLOCKS) == 4


def test_snippets_run(tmp_path):
    code = "\n".join(body for _, body in BLOCKS).replace('"MODELOPT_DIR"', repr(str(modelopt("Llama")))) + END
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (out, err) in enumerate(said):
        assert ranks[number].returncode == 0, err
        assert "RowFP4Linear(" in out
        assert f"rank {number} of 2, K cut" in out
        assert "torch.Size([1, 4, 128])" in out
        assert "ColumnFP8Linear(" in out
        assert out.endswith("saved\n")
    assert (tmp_path / "OUT" / "model.safetensors").exists()
