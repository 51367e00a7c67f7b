"""Fuzz the checkpoint loader with coverage guidance, by hand (the tests run a bounded number of inputs)::

    pip install atheris
    python -m tests.fuzz.fuzz_checkpoint -max_total_time=600

Ends with an error and the input on anything but success or CheckpointError. Other libFuzzer options work too.
"""

import sys

import atheris

with atheris.instrument_imports(include=["fp4dispatch.checkpoints"]):
    from tests.fuzz import damage


def one_input(data: bytes) -> None:
    damage.feed(data)


def main() -> None:
    damage.corpus()
    atheris.Setup([*sys.argv, "-max_len=256", "-timeout=20"], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
