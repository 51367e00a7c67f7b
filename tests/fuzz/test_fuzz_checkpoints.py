"""A bounded run of the checkpoint fuzzer, and of the header parser on its own."""

from __future__ import annotations

import json
import struct
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4dispatch.checkpoints.files.reader import DTYPE_BITS, read_header
from fp4dispatch.checkpoints.files.strict_json import parse_object
from fp4dispatch.errors import CheckpointError
from tests.fuzz.damage import corpus, feed

BOUNDED = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


def test_damaged_checkpoints_are_refused_or_load_and_never_touch_the_model():
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=600, **BOUNDED)
    @given(st.binary(min_size=24, max_size=120))
    def run(data: bytes) -> None:
        outcomes[feed(data)] += 1

    run()
    assert outcomes.total() >= 600
    assert outcomes[False] > 300, "the damage must be damage"
    assert outcomes[True] > 20, "and not all of it, or nothing beyond the first check is reached"


def test_the_undamaged_corpus_loads():
    from fp4dispatch.checkpoints import load_quantized
    from tests.checkpoint_cases import Net

    assert len(corpus()) == 12
    for _, path in corpus():
        assert load_quantized(Net(), path).layers


sizes = st.one_of(st.integers(-2, 20), st.integers(), st.floats(), st.booleans(), st.none())
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(sorted(DTYPE_BITS)), st.text(max_size=3)),
        "shape": st.lists(sizes, max_size=10),
        "data_offsets": st.lists(sizes, max_size=3),
    }
)


def test_any_header_is_refused_or_describes_the_file_exactly(tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=2000, **BOUNDED)
    @given(
        st.one_of(
            st.dictionaries(st.text(max_size=4), entries, max_size=3).map(lambda d: json.dumps(d).encode()),
            st.lists(st.integers(0, 6), max_size=4).map(_valid_header),
            st.binary(max_size=40),
        ),
        st.integers(0, 30),
        st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    )
    def run(header: bytes, data: int, length: int | None) -> None:
        file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + b"\0" * data)
        try:
            infos, _ = read_header(file)
        except CheckpointError as refusal:
            outcomes[False] += str(file) in str(refusal)
            return
        outcomes[True] += 1
        claimed = struct.unpack("<Q", file.read_bytes()[:8])[0]
        assert sum(info.nbytes for info in infos) == file.stat().st_size - 8 - claimed

    run()
    assert outcomes[True] > 20
    assert outcomes.total() >= 2000, "every refusal names the file"


def _valid_header(counts: list[int]) -> bytes:
    header, offset = {}, 0
    for number, count in enumerate(counts):
        header[str(number)] = {"dtype": "U8", "shape": [count], "data_offsets": [offset, offset + count]}
        offset += count
    return json.dumps(header).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=1000, **BOUNDED)
@given(st.one_of(json_values.map(lambda v: json.dumps(v).encode()), st.binary(max_size=60)))
def test_json_is_parsed_or_refused(raw):
    try:
        value = parse_object(raw, "x")
    except CheckpointError:
        return
    assert value == json.loads(raw)
