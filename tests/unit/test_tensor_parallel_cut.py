"""What a rank holds of a layer: exact, zero-padded where asked, and refused where a scale block would be split."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp4dispatch import formats
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.integrations.tensor_parallel import Column, ColwiseParallel, Row, RowwiseParallel, parallelize
from fp4dispatch.machine import capture
from fp4dispatch.machine.collectives import Team, team
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.parallel.cut import cut, cut_weights, join_weights, take, unit
from fp4dispatch.models.parallel.layers import cut_layer, group_of, part_of
from fp4dispatch.models.parallel.plan import planned

FORMATS = ("nvfp4", "tensor", "row", "block128")


def layer(fmt, n=256, k=512, **options):
    torch.manual_seed(n + k)
    linear = nn.Linear(k, n)
    return (
        FP4Linear.from_linear(linear, **options)
        if fmt == "nvfp4"
        else FP8Linear.from_linear(linear, scaling=fmt, **options)
    )


def dense(weights):
    if weights.scaling == "nvfp4":
        scale = formats.expand_shards(weights.global_scale, weights.shard_rows).reshape(-1, 1)
        ones = torch.ones(())
        return formats.nvfp4_dequantize(weights.weight, weights.scale, ones, dtype=torch.float32) * scale
    return formats.fp8_dequantize(weights.weight, weights.scale, weights.scaling, torch.float32)


def all_cuts(size, ranks, **options):
    return [cut(size, rank, ranks, **options) for rank in range(ranks)]


@pytest.mark.parametrize("dim", ["N", "K"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_is_the_whole_one_s_exactly(fmt, dim, ranks):
    whole = layer(fmt).weights()
    cuts = all_cuts(256 if dim == "N" else 512, ranks, unit=unit(whole.op, whole.scaling, dim), dim=dim)
    parts = [cut_weights(whole, dim, each) for each in cuts]
    assert torch.equal(torch.cat([dense(part) for part in parts], 0 if dim == "N" else 1), dense(whole))
    for part in parts:
        assert part.weight.is_contiguous()
        assert part.weight.untyped_storage().nbytes() == part.weight.numel()  # the whole tensor can be freed
    joined = join_weights(parts, dim, cuts, whole.shard_rows)
    for name in ("weight", "scale"):
        mine, other = getattr(joined, name), getattr(whole, name)
        assert mine.shape == other.shape
        assert torch.equal(mine.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dim", ["N", "K"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_padding_is_zero_and_can_be_taken_off(fmt, dim):
    n, k = (640, 128) if dim == "N" else (128, 640)
    whole = layer(fmt, n, k).weights()
    step = unit(whole.op, whole.scaling, "K")
    cuts = all_cuts(640, 4, unit=step, pad=True, dim=dim)
    sizes = {each.size for each in cuts}
    assert len(sizes) == 1
    assert sizes.pop() % step == 0
    axis = 0 if dim == "N" else 1
    parts = [cut_weights(whole, dim, each) for each in cuts]
    values = torch.cat([dense(part) for part in parts], axis)
    assert torch.equal(values.narrow(axis, 0, 640), dense(whole))
    assert not values.narrow(axis, 640, values.shape[axis] - 640).any()
    assert torch.equal(dense(join_weights(parts, dim, cuts, whole.shard_rows)), dense(whole))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from([1, 2, 16]), st.booleans()
)
def test_ranks_hold_every_element_once(blocks, ranks, step, pad):
    shards = [step * blocks_of * (1 if pad else ranks) for blocks_of in blocks]
    whole = torch.arange(1, sum(shards) + 1)
    cuts = all_cuts(sum(shards), ranks, unit=step, shards=shards, pad=pad)
    held = torch.cat([take(whole, 0, each) for each in cuts])
    assert sorted(held[held > 0].tolist()) == whole.tolist()
    assert len({each.size for each in cuts}) == 1


@pytest.mark.parametrize(
    ("size", "ranks", "options", "words"),
    [
        (
            96,
            4,
            {"unit": 16, "dim": "K"},
            r"K=96 cannot be cut for 4 ranks: 96/4 = 24 .* 16 of them share a scale.*: 1, 2, 3, 6\.",
        ),
        (18944, 8, {"unit": 128, "dim": "K"}, r"18944/8 = 2368 .*128 of them share a scale.*: 1, 2, 4, 37, 74, 148\."),
        (100, 3, {}, r"100/3 = 33.3333 .*not whole.*1, 2, 4, 5, 10, 20, 25, 50, 100\."),
        (200, 2, {"unit": 128}, r"Numbers of ranks that work: 1\."),
        (64, 2, {"shards": (32, 16)}, r"fused=\[32, 16\] do not add up to N=64"),
        (256, 2, {"shards": (96, 160), "unit": 32}, r"N=96 cannot be cut for 2 ranks"),
    ],
)
def test_other_sizes_are_refused_with_those_that_work(size, ranks, options, words):
    with pytest.raises(InputError, match=words):
        cut(size, 0, ranks, what="the layer", **options)


def test_numbers_that_work_do_work():
    for ranks in (1, 2, 4, 37, 74, 148):
        assert cut(18944, 0, ranks, unit=128).size == 18944 // ranks


@pytest.mark.parametrize("kind", [Column(), Row()])
def test_static_input_scales_are_the_same_on_all_ranks(kind):
    parts = []
    for rank in range(2):
        each = layer("tensor", activation="fp8")
        each.input_scale = torch.tensor(0.25)
        cut_layer(each, part_of(each, kind, Team(None, "", rank, 2), "x"))
        parts.append(each)
    assert [float(each.input_scale) for each in parts] == [0.25, 0.25]


def test_the_bias_of_a_row_layer_is_on_rank_0_alone():
    parts = []
    for rank in range(3):
        each = layer("row", 64, 96)
        bias = each.bias.clone()
        cut_layer(each, part_of(each, Row(), Team(None, "", rank, 3), "x"))
        parts.append(each.bias)
    assert torch.equal(parts[0], bias)
    assert not torch.cat(parts[1:]).any()


def test_a_layer_is_cut_in_place_and_keeps_what_it_had():
    each, seen = layer("nvfp4", name="model.up", activation="bf16"), []
    each.register_forward_hook(lambda *_: seen.append(1))
    keys = set(each.state_dict())
    cut_layer(each, part_of(each, Column(), Team(None, "", 1, 2), "x"))
    assert isinstance(each, FP4Linear)
    assert (each.in_features, each.out_features, each.name, each.activation) == (512, 128, "model.up", "bf16")
    assert set(each.state_dict()) == keys
    assert each(torch.ones(2, 512)).shape == (2, 128)
    assert seen == [1]
    assert "rank 1 of 2, N cut, whole 256x512" in repr(each)


def test_a_layer_on_the_meta_device_can_be_cut():
    each = FP4Linear(512, 256, device="meta")
    cut_layer(each, part_of(each, Row(), Team(None, "", 0, 4), "x"))
    assert (each.weight.shape, each.weight.device.type) == ((256, 64), "meta")


def test_what_cannot_be_cut_is_refused():
    each = layer("nvfp4")
    members = Team(None, "", 0, 2)
    cut_layer(each, part_of(each, Row(), members, "x"))
    with pytest.raises(InputError, match="x is cut already"):
        part_of(each, Row(), members, "x")
    with pytest.raises(InputError, match="x is a Conv1d; need an FP4Linear, FP8Linear or nn"):
        part_of(nn.Conv1d(1, 1, 1), Row(), members, "x")
    with pytest.raises(InputError, match="cannot be pickled"):
        pickle.dumps(each)
    assert copy.deepcopy(each).part.team is members
    with pytest.raises(InputError, match="output_layouts"):
        ColwiseParallel(output_layouts="rows")
    with pytest.raises(InputError, match="input_layouts"):
        RowwiseParallel(input_layouts=0)
    with pytest.raises(InputError, match="init_process_group"):
        team()


def test_groups_of_layers():
    net = nn.Sequential(layer("row"), layer("row"))
    assert group_of(net) is None
    for each, group in zip(net, ("a", "b"), strict=True):
        cut_layer(each, part_of(each, Row(), Team(group, group, 0, 2), "x"))
    with pytest.raises(InputError, match="2 process groups: pass group="):
        group_of(net)
    assert group_of(net[:1]) == "a"


class Attention(nn.Module):
    def __init__(self, heads=8, kv=2):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.config = type("Config", (), {"num_attention_heads": heads, "num_key_value_heads": kv})()


def test_plans():
    net = Attention()
    assert planned(net, {"q_proj": "colwise", "re:o_": Row(split_input=True)}, 2) == {
        "q_proj": Column(),
        "o_proj": Row(split_input=True),
    }
    assert planned(net, {"q_proj": None, "*": RowwiseParallel()}, 2) == {"o_proj": Row()}
    net.tp_plan = {"q_proj": "colwise", "norm": "sequence_parallel", "o_proj": "colwise_gather_output"}
    assert planned(net, "auto", 2) == {"q_proj": Column()}  # a gathered layer of 16 bits, as the head, stays whole
    for plan, words in (
        ({"k_proj": Column()}, "'k_proj' names no linear layer"),
        ({"q_proj": "columns"}, "'q_proj' is 'columns'; need Column"),
        ({"*": None}, "names no linear layer of Attention: nothing"),
        ({}, "need 'auto', or a mapping"),
        ("manual", "plan='manual'; need 'auto'"),
    ):
        with pytest.raises(InputError, match=words):
            planned(net, plan, 2)
    net.tp_plan = {"o_proj": "packed_rowwise"}
    with pytest.raises(InputError, match="'packed_rowwise', which is not supported"):
        planned(net, "auto", 2)
    with pytest.raises(InputError, match="has no tp_plan"):
        planned(nn.Sequential(nn.Linear(2, 2)), "auto", 2)


@pytest.mark.parametrize(
    ("heads", "kv", "words"), [(8, 2, "num_key_value_heads=2 .* use 1, 2 ranks"), (6, 6, "num_attention_heads=6")]
)
def test_heads_are_not_cut(heads, kv, words):
    with pytest.raises(InputError, match=words):
        planned(Attention(heads, kv), {"q_proj": Column(), "o_proj": Row()}, 4)
    planned(Attention(heads, kv), {"q_proj": Column(gather_output=True), "o_proj": Row(split_input=True)}, 4)


def test_nothing_is_cut_during_a_capture(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64))
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="cutting the layers of a model"):
        parallelize(model, None, {"0": "column"})
    assert type(model[0]) is nn.Linear
    assert model[0].weight.shape == (64, 64)
