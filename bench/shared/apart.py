"""The check of one class as the work of a child process: silent, on one thread, with bounded memory."""

from __future__ import annotations

import logging
import os
import resource
from multiprocessing.connection import Connection

import torch
import transformers

from bench.shared import model_checks

MEMORY = 12 << 30
"""Address space of a child: inputs by rules may ask for more than there is, which is an error of that guess then."""


def quietly(pipe: Connection, model_type: str, name: str) -> None:
    """Check one class and send its row."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    logging.getLogger("fp4dispatch").setLevel(logging.CRITICAL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    pipe.send(model_checks.check(model_type, name).row())
