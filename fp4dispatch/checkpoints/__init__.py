"""Quantised checkpoints: ModelOpt, compressed-tensors and Hugging Face FP8, loaded and saved as safetensors.

``load_quantized`` and ``save_quantized`` work on models, ``quantize_checkpoint`` turns one directory into another,
``open_checkpoint`` looks into one.
"""

from fp4dispatch.checkpoints.files.reader import Checkpoint, TensorInfo, open_checkpoint
from fp4dispatch.checkpoints.load import LoadedLayer, LoadReport, load_quantized
from fp4dispatch.checkpoints.quantize import (
    FORMATS,
    QuantizedLayer,
    QuantizeFormat,
    QuantizeReport,
    quantize_checkpoint,
)
from fp4dispatch.checkpoints.save import SaveFormat, save_quantized

__all__ = [
    "FORMATS",
    "Checkpoint",
    "LoadReport",
    "LoadedLayer",
    "QuantizeFormat",
    "QuantizeReport",
    "QuantizedLayer",
    "SaveFormat",
    "TensorInfo",
    "load_quantized",
    "open_checkpoint",
    "quantize_checkpoint",
    "save_quantized",
]
