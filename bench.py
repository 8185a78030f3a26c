"""How fast? Tables of one run: compare within a table, never figures of two machines or two days.

    python bench.py                  all parts, at most ten minutes on two cores
    python bench.py --quick          fewer repeats and smaller sizes, about a minute
    python bench.py --only=generate  one part: step, length, generate, peers

Each time is a median of repeats, and what is compared takes turns, so that a busy moment of the
machine meets all alike. "peers" are other packages' models, if they are installed:
pip install timm g-mlp-pytorch mlp-mixer-pytorch. Everything goes to out/bench.json, too.
"""
import concurrent.futures
import json
import multiprocessing
import re
import shlex
import statistics
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F

import train_common as common
import train_lm
import train_mlm
from gmlp import GMLPImageClassifier, GMLPLanguageModel
from mixer import EncoderImageClassifier

V = 65  # characters of Shakespeare
# The language models of equal parameters (within 5 %, without those that a mask zeroes): what
# train_lm.py's laptop preset needs to be told beside --model, in window 128.
MODELS = {
    "gMLP, Toeplitz W": dict(model="gmlp"),
    "gMLP, free W": dict(model="gmlp", toeplitz=False, d_ffn=472),
    "aMLP": dict(model="amlp"),
    # the paper's, with two hidden units a token where it must not look ahead
    "Mixer": dict(model="mixer", toeplitz=False, d_ffn=256, d_token=None),
    "Transformer": dict(model="transformer"),
}


def language_model(name, n, causal=True):
    """The model of that name for a window of n."""
    changes = MODELS[name]
    if not causal:  # no weight is zeroed, and the Mixer's token MLP is smaller
        widths = {"gMLP, free W": 424, "Mixer": 320}
        changes = changes | (dict(d_ffn=widths[name]) if name in widths else {})
    presets = train_lm.PRESETS
    s = presets["laptop"] | presets.get(f"laptop/{changes['model']}", {}) | changes
    script = train_lm if causal else train_mlm
    kind, args = script.describe_model(types.SimpleNamespace(**s | dict(seq_len=n)), V)
    return kind(**args)


# --------------------------------------------------------------------------------- measuring


def training_step(model, x, y, s):
    """A call that takes one whole step: forward, backward, clipping, AdamW (for all, though some
    presets take Muon)."""
    model = model.to(s.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = common.compiled(model, s) if s.compile else model

    def step():
        with common.autocast(s):
            logits = forward(x)  # (B, n, V) or (B, V)
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def language_step(name, batch, n, s, causal=True):
    ids = torch.randint(V, (batch, n), device=s.device)
    return training_step(language_model(name, n, causal), ids, ids, s)


def image_step(model, batch, s):
    x = torch.randn(batch, 3, 32, 32, device=s.device)
    return training_step(model, x, torch.randint(10, (batch,), device=s.device), s)


def seconds_of(call, s):
    common.finish(s.device)
    begin = time.perf_counter()
    call()
    common.finish(s.device)
    return time.perf_counter() - begin


def in_turns(calls, s, repeats=None):
    """{name: call} -> {name: seconds of each repeat}, after a call each to warm up."""
    for call in calls.values():
        seconds_of(call, s)
    seconds = {name: [] for name in calls}
    for _ in range(repeats or s.repeats):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call, s))
    return seconds


def medians(seconds):
    return {name: statistics.median(each) for name, each in seconds.items()}


def memory_of(*case):
    """MiB that three training steps take at most, with weights and optimizer, measured in a process
    of its own; None where the system (not Linux) does not tell."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(memory_here, *case).result()
        except concurrent.futures.process.BrokenProcessPool:  # killed, for want of memory
            return None


def memory_here(name, batch, n, s, causal=True):
    torch.set_num_threads(s.threads)
    if s.device.startswith("cuda"):
        def peak():
            return torch.cuda.max_memory_allocated(s.device) / 2**20
    else:
        def peak():
            found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
            if not found:
                raise OSError("some containers leave the line out")
            return int(found[1]) / 1024
    try:
        (torch.randn(64, 64, device=s.device) @ torch.randn(64, 64, device=s.device)).sum().item()
        before = peak()
        step = language_step(name, batch, n, s, causal)
        for _ in range(3):
            step()
        return peak() - before
    except OSError:
        return None


# -------------------------------------------------------------------------------- the parts


def bench_step(s):
    """Training step (AdamW) of the language models at equal parameters, windows of 128."""
    batch, n = 128 if s.device.startswith("cuda") else 8, 128
    seconds = medians(in_turns({name: language_step(name, batch, n, s) for name in MODELS}, s))
    return [dict(model=name, params=sum(p.numel() for p in language_model(name, n).parameters()),
                 ms=seconds[name] * 1e3, tokens_per_s=batch * n / seconds[name],
                 MiB=None if s.quick else memory_of(name, batch, n, s)) for name in MODELS]


def bench_length(s):
    """The same models, reading both ways, on longer windows: milliseconds and peak memory of a
    training step, of about 4,096 characters in all rows, and times scaled to exactly as many."""
    rows = []
    for n in (64, 256) if s.quick else (64, 128, 196, 256, 512, 1024):
        batch = 4096 // n
        names = [name for name in MODELS if name != "aMLP"]
        calls = {name: language_step(name, batch, n, s, causal=False) for name in names}
        seconds = medians(in_turns(calls, s, 3))
        for name in names:
            rows.append(dict(n=n, batch=batch, model=name,
                             ms=seconds[name] * 1e3 * 4096 / (batch * n),
                             MiB=None if s.quick else memory_of(name, batch, n, s, False)))
    return rows


def bench_generate(s):
    """Writing one text, and eight at once: milliseconds a step, which writes a character of each,
    when nearly a whole window stands before it."""
    rows = []
    for texts, n in ((1, 128),) if s.quick else ((1, 128), (1, 512), (1, 1024), (8, 512)):
        for name in ("gMLP, Toeplitz W", "gMLP, free W", "Transformer"):
            model, count = language_model(name, n).to(s.device), 16
            prompt = torch.randint(V, (texts, n - count - 1), device=s.device)

            def uncached(length, ids=prompt, model=model):
                for _ in range(length):
                    token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)  # (texts, 1)
                    ids = torch.cat([ids, token], dim=1)

            def cached(length, ids=prompt, model=model):
                model.generate(ids, length, temperature=0)
            kinds = dict(uncached=uncached)
            if name != "Transformer":  # ours has no cache
                kinds["cached"] = cached

            def write(way, length):
                with torch.no_grad(), common.autocast(s):
                    way(length)
            calls = {(kind, length): lambda length=length, way=way: write(way, length)
                     for kind, way in kinds.items() for length in (1, count + 1)}
            seconds = medians(in_turns(calls, s, 3))  # less that of the prompt
            ms = {kind: (seconds[kind, count + 1] - seconds[kind, 1]) / count * 1e3
                  for kind in kinds}
            rows.append(dict(
                texts=texts, window=n, model=name, uncached_ms=ms["uncached"],
                cached_ms=ms.get("cached"),
                times_faster=ms["uncached"] / ms["cached"] if "cached" in ms else None))
    return rows


def bench_peers(s):
    """Training steps of ours and of other packages: same shapes, batch and optimizer. A ratio above
    1 means that ours is faster: the median of the ratios of steps that follow each other."""
    batch, n, d, f, layers = 8, 128, 128, 512, 4
    ids = torch.randint(V, (batch, n), device=s.device)
    pairs = {}
    try:
        from g_mlp_pytorch import gMLP
        pairs["causal gMLP, g-mlp-pytorch"] = (
            training_step(GMLPLanguageModel(V, n, d, f, layers, causal=True), ids, ids, s),
            training_step(gMLP(num_tokens=V, dim=d, depth=layers, seq_len=n, ff_mult=f // d,
                               causal=True), ids, ids, s))
    except ImportError:
        print("no g_mlp_pytorch here")
    shape = dict(d_model=d, n_layers=layers)
    try:
        from mlp_mixer_pytorch import MLPMixer
        pairs["Mixer, mlp-mixer-pytorch"] = (
            image_step(EncoderImageClassifier(32, 4, 10, d_ffn=f, d_token=64, **shape), 64, s),
            image_step(MLPMixer(image_size=32, channels=3, patch_size=4, dim=d, depth=layers,
                                num_classes=10, expansion_factor=64 / d,  # that of the tokens, and
                                expansion_factor_token=f / d), 64, s))  # that of the channels
    except ImportError:
        print("no mlp_mixer_pytorch here")
    try:
        from timm.models import mlp_mixer as timm
        size = dict(num_classes=10, img_size=32, patch_size=4, num_blocks=layers, embed_dim=d)
        pairs["Mixer, timm"] = (
            image_step(EncoderImageClassifier(32, 4, 10, d_ffn=f, d_token=64, **shape), 64, s),
            image_step(timm.MlpMixer(mlp_ratio=(64 / d, f / d), **size), 64, s))
        pairs["gMLP, timm"] = (
            image_step(GMLPImageClassifier(32, 4, 10, d_ffn=f, **shape), 64, s),
            image_step(timm.MlpMixer(mlp_ratio=f / d, block_layer=timm.SpatialGatingBlock,
                                     mlp_layer=timm.GatedMlp, **size), 64, s))
    except ImportError:
        print("no timm here")
    rows = []
    for name, (ours, theirs) in pairs.items():
        seconds = in_turns(dict(ours=ours, theirs=theirs), s, 2 * s.repeats)
        ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"])]
        rows.append(dict(pair=name, ms=statistics.median(seconds["ours"]) * 1e3,
                         their_ms=statistics.median(seconds["theirs"]) * 1e3,
                         ratio=statistics.median(ratios)))
    return rows


PARTS = dict(step=bench_step, length=bench_length, generate=bench_generate, peers=bench_peers)


def print_table(rows):
    def show(value):
        if isinstance(value, float):
            return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else value
    cells = [[name.replace("_", " ") for name in rows[0]], *([*map(show, row.values())]
                                                             for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.ljust(width) if isinstance(value, str) else cell.rjust(width)
                        for cell, width, value in zip(row, widths, rows[0].values())))


def parse_flags(argv):
    parser = common.Parser("bench.py", __doc__)
    add = parser.add_argument
    add("--only", choices=PARTS, help="one part alone")
    add("--quick", **common.SWITCH, help="fewer repeats, smaller sizes, no memory")
    add("--device", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of matrix products")
    add("--compile", **common.SWITCH, help="torch.compile the models that train")
    add("--out", type=common.path, help="the file to write (default: out/bench.json beside the "
        "scripts)")
    given = vars(parser.parse_args(argv))
    s = dict(only=None, quick=False, device="auto", dtype="auto", compile=False,
             out=str(common.HERE / "out" / "bench.json")) | given
    device = common.pick_device(s["device"])
    return types.SimpleNamespace(**s | dict(
        device=str(device), dtype=common.pick_dtype(s["dtype"], device, 128, 512),
        repeats=3 if s["quick"] else 15, threads=torch.get_num_threads()))


def main(argv=()):
    s = parse_flags(argv)
    machine = common.device_name(s.device)
    print(f"{machine}, {s.dtype}, {s.threads} threads, torch {torch.__version__}")
    begin, tables = time.perf_counter(), {}
    for part in [s.only] if s.only else PARTS:
        print(f"\n{part}: {' '.join(PARTS[part].__doc__.split())}")
        tables[part] = PARTS[part](s)
        if tables[part]:
            print_table(tables[part])
    seconds = time.perf_counter() - begin
    command = shlex.join(["python", "bench.py", *argv])
    result = dict(command=command, device=s.device, device_name=machine, dtype=s.dtype,
                  threads=s.threads, torch=torch.__version__, seconds=seconds, **tables)
    common.write_file(s.out, (json.dumps(result, indent=1) + "\n").encode())
    print(f"\n{seconds:.0f} s in all; the figures are in {s.out}")
    return result


if __name__ == "__main__":
    common.run_script(main)
