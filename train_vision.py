"""Train an image classifier without attention on CIFAR-10, on your own pictures, or on shapes.

    python train_vision.py                          CIFAR-10 with gMLP (minutes, no GPU needed)
    python train_vision.py --dataset=shapes         needs no data: ten coloured shapes
    python train_vision.py --data=DIR               your own, in DIR/<class> or DIR/train/<class>
    python train_vision.py --predict cat.png DIR    says what it sees, by the best checkpoint
    python train_vision.py --model=vit              another architecture in the same loop
    python train_vision.py --preset=s16 --init_from=gmlp_s16_224.pth --data=DIR
                                                    goes on from ImageNet's weights

An image is cut into patches, each a token. Results go to out/vision. To take this script along,
copy gmlp.py, mixer.py and train_common.py too.
"""
import argparse
import contextlib
import glob
import hashlib
import http.client
import io
import json
import math
import os
import re
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import PIL
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

import train_common as common
from gmlp import GMLP_SIZES, GMLPImageClassifier
from mixer import MIXER_SIZES, EncoderImageClassifier

FINE_TUNING = dict(  # eps is that of timm's weights
    toeplitz=False, image_size=(224, 224), crop=16, eps=1e-6, batch_size=16, max_iters=120,
    eval_interval=40, log_interval=4, optimizer="adamw", schedule="cosine", learning_rate=1e-3,
    body_rate=0.1, warmup_iters=12, beta2=0.999, weight_decay=0.05)
# Every knob of a training run. `laptop` is whole, the others list what they change. "laptop/vit"
# is what changes with that preset and model, so that all models have equal parameters (5 %), but
# not in the copies of published set-ups.
PRESETS = {
    "laptop": dict(
        model="gmlp", toeplitz=True, positions="auto", dataset="cifar10",
        image_size=(32, 32), patch_size=(4, 4), in_channels=3,
        d_model=128, d_ffn=512, n_layers=4, n_heads=4, d_attn=64, d_token=None,
        recipe="batch", flip=None, crop=4, mixup=0.0, cutmix=0.0, label_smoothing=0.0,
        dropout=0.0, drop_path=0.0,
        batch_size=64, grad_accum=1, max_iters=1800, eval_interval=600, log_interval=50,
        optimizer="muon", schedule="linear", learning_rate=4e-3, min_lr=0.0, warmup_iters=200,
        beta2=0.99, weight_decay=0.1, l2=0.0, grad_clip=1.0,
        data=None, seed=1, dtype="auto", compile=False, mean=None, std=None, eps=1e-5,
        body_rate=1.0, json=False),
    "laptop/amlp": dict(d_ffn=328),
    "laptop/mixer": dict(d_ffn=384, learning_rate=2e-3),
    "laptop/vit": dict(n_layers=2, learning_rate=2e-3),
    "long": dict(
        d_model=160, d_ffn=640, n_layers=6, drop_path=0.1, label_smoothing=0.1, cutmix=0.2,
        max_iters=13_300, eval_interval=1000, warmup_iters=500, learning_rate=3e-3),
    "long/amlp": dict(d_ffn=448),
    "long/mixer": dict(d_ffn=480, learning_rate=2e-3),
    "long/vit": dict(n_layers=3, learning_rate=2e-3),
    "gpu": dict(
        patch_size=(2, 2), d_model=256, d_ffn=1024, n_layers=12, n_heads=8, drop_path=0.2,
        mixup=0.2, cutmix=1.0, label_smoothing=0.1, batch_size=256, max_iters=40_000,
        eval_interval=1000, warmup_iters=1000, learning_rate=2e-3),
    "gpu/amlp": dict(d_ffn=832),
    "gpu/mixer": dict(d_ffn=768, learning_rate=1e-3),
    "gpu/vit": dict(n_layers=6, learning_rate=1e-3),
    # The Paddle AI Studio article "gMLP & aMLP" (2022): gMLP-Ti, 100 passes over CIFAR-10
    "classic": dict(
        toeplitz=False, image_size=(224, 224), patch_size=(16, 16), d_model=128, d_ffn=768,
        n_layers=30, recipe="article", crop=0, mixup=0.2, label_smoothing=0.1, drop_path=0.1,
        batch_size=128, max_iters=39_100, eval_interval=391, optimizer="adamw", schedule="cosine",
        learning_rate=1e-3, warmup_iters=0, beta2=0.999, weight_decay=0.0, l2=1e-5, grad_clip=0.0,
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    # The papers' models, to go on from the weights that timm publishes
    "s16": dict(
        **GMLP_SIZES["S"] | dict(patch_size=(16, 16)), **FINE_TUNING),
    "mixer_b16": dict(
        model="mixer", **MIXER_SIZES["B/16"] | dict(patch_size=(16, 16)), **FINE_TUNING),
}


def pair(text):
    """An argparse type: 32 or 32,64 (height, width) -> (height, width)."""
    sizes = [common.number(int, 1, 10_000)(part) for part in text.split(",")]
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor height,width")
    return sizes[0], sizes[-1]


def channels(text):
    """An argparse type: a number for all channels, or one for each."""
    return tuple(common.number(float, 0, 1)(part) for part in text.split(","))


def parse_flags(argv):
    models = ("gmlp", "amlp", "mixer", "vit")
    parser = common.training_parser("vision", __doc__, PRESETS, models)
    add = parser.add_argument
    add("--dataset", choices=("cifar10", "shapes"), help="the built-in data")
    add("--image_size", type=pair, help="32 or 32,64 (height,width): images are resized to it")
    add("--patch_size", type=pair, help="of a token, like --image_size")
    add("--in_channels", type=common.COUNT, choices=(1, 3), help="1: grey, 3: colour")
    add("--mean", type=channels, help="of all channels or each, from 0 to 1 (default: measured, "
        "or that of the weights)")
    add("--std", type=channels, help="their deviation, like --mean")
    add("--flip", type=common.PROBABILITY, help="chance to mirror (default: 0.5, with --data 0)")
    add("--crop", type=common.number(int, 0), help="shift an image by up to this many pixels")
    add("--mixup", type=common.RATE, help="alpha of MixUp: blends pairs of images")
    add("--cutmix", type=common.RATE, help="alpha of CutMix: pastes a box of another image")
    add("--label_smoothing", type=common.PROBABILITY, help="of the training loss")
    add("--recipe", choices=("batch", "article"), help="article: its transforms image by image, "
        "the same drop_path in all layers")
    add("--l2", type=common.RATE, help="Adam with this penalty on the squares of all weights")
    add("--body_rate", type=common.PROBABILITY, help="learning rate of all but the head, a share")
    add("--predict", nargs="+", metavar="FILE", help="classify pictures, folders and patterns of "
        "them, by OUT_DIR/best.pt")
    add("--json", **common.SWITCH, help="--predict: a line of JSON for each picture")
    s, checkpoint = common.read_settings(parser, PRESETS, describe_model, argv, weights_of_timm)
    height, width = stored_size(s)
    if s.flip is None:  # in pictures of one's own left and right may differ
        s.flip = 0.0 if s.data else 0.5
    if s.model in ("gmlp", "amlp") and s.positions not in ("auto", "none"):
        common.fail(f"--positions={s.positions}: {s.model} knows the places by W, leave it out")
    if s.crop >= min(height, width):
        common.fail(f"--crop={s.crop} shifts an image of {height} x {width} out of sight: lower it")
    if s.image_size == (1, 1):
        common.fail("--image_size=1: an image of 1 x 1 shows nothing, give more")
    if s.l2 and (s.optimizer == "muon" or s.weight_decay):
        common.fail(f"--l2={s.l2} is for Adam: add --optimizer=adamw --weight_decay=0")
    mean, std = s.mean or (), s.std or ()
    if len(mean) != len(std) or len(mean) not in (0, 1, s.in_channels) or 0 in std:
        common.fail(f"--mean={mean} --std={std}: both take one number, or {s.in_channels} here, "
                    "and no deviation is 0")
    return s, checkpoint


def stored_size(s):
    """CIFAR-10 stays as small as it is and is enlarged batch by batch."""
    return (32, 32) if s.dataset == "cifar10" and not s.data else s.image_size


def describe_model(s, n_classes):
    """The model's class, and the arguments that it is built from."""
    args = dict(image_size=s.image_size, patch_size=s.patch_size, n_classes=n_classes,
                in_channels=s.in_channels, eps=s.eps, **common.model_args(s))
    if s.model not in ("gmlp", "amlp"):
        return EncoderImageClassifier, args
    del args["positions"]  # its W knows them
    return GMLPImageClassifier, args


TIMM = {  # what timm calls the parts of a Mixer, and of a gMLP, and what we do
    "^stem.proj": "patches", "^norm": "trunk.norm", "^blocks": "trunk.blocks",
    "mlp_tokens": "token_mixer.mlp", "mlp_channels": "feed_forward",
    "feed_forward.gate.proj.weight": "sgu.W", "feed_forward.gate.proj.bias": "sgu.b",
    "feed_forward.gate.norm": "sgu.norm"}
TIMM_GMLP = {"feed_forward.fc1": "proj_in", "feed_forward.fc2": "proj_out"}


def weights_of_timm(path):
    """A file of timm's (.safetensors or .pth) as a checkpoint of ours; None if it is none. Most of
    timm's weights were trained on (x - 0.5) / 0.5, x from 0 to 1."""
    if path.endswith(".safetensors"):
        try:
            from safetensors.torch import load
            state = load(Path(path).read_bytes())
        except ImportError:
            common.fail(f"{path} needs the package safetensors: pip install safetensors")
        except Exception as error:  # it is no such file, or it cannot be read
            common.fail(f"cannot read {path}: {error}")
    else:
        state = common.load_weights(path)
    if "stem.proj.weight" not in state:
        return None
    names = TIMM | (TIMM_GMLP if any(".gate." in key for key in state) else {})
    for theirs, ours in names.items():
        state = {re.sub(theirs, ours, key): weights for key, weights in state.items()}
    return dict(model=state, config={}, mean=[127.5] * 3, std=[127.5] * 3)


# ---------------------------------------------------------------- data: images (N, C, h, w), uint8

SHAPES = {  # each a set of points (u, v), by and large within the unit circle; v points down
    "cross": lambda u, v: ((u - v).abs().minimum((u + v).abs()) < 0.4) & (u.hypot(v) < 1),
    "diamond": lambda u, v: u.abs() + v.abs() < 1,
    "disc": lambda u, v: u.hypot(v) < 0.85,
    "frame": lambda u, v: (u.abs().maximum(v.abs()) - 0.65).abs() < 0.2,
    "moon": lambda u, v: (u.hypot(v) < 1) & ((u - 0.5).hypot(v) > 0.75),
    "plus": lambda u, v: (u.abs().minimum(v.abs()) < 0.3) & (u.hypot(v) < 1),
    "ring": lambda u, v: (u.hypot(v) - 0.75).abs() < 0.2,
    "square": lambda u, v: u.abs().maximum(v.abs()) < 0.8,
    "star": lambda u, v: u.hypot(v) < 0.65 + 0.35 * (5 * torch.atan2(u, -v)).cos(),
    "triangle": lambda u, v: (v < 0.6) & (2 * u.abs() - v < 1),
}


def draw_shapes(n, size, seed):
    """images (n, 3, H, W) and the names of their shapes, which take turns; the same for the same
    seed. Place, size, turn and colours are random, and there is noise."""
    generator = torch.Generator().manual_seed(seed)
    half_height, half_width = size[0] / min(size), size[1] / min(size)
    y = torch.linspace(-half_height, half_height, size[0])[:, None]  # (H, 1)
    x = torch.linspace(-half_width, half_width, size[1])  # (W,)
    labels, images = torch.arange(n) % len(SHAPES), []
    for part in labels.split(250):
        def uniform(low, high, channels=1, B=len(part)):
            return low + (high - low) * torch.rand(B, channels, 1, 1, generator=generator)
        radius, turn = uniform(0.45, 0.8), uniform(-0.2, 0.2)
        right = x - uniform(-1, 1) * (half_width - radius)  # (B, 1, 1, W)
        down = y - uniform(-1, 1) * (half_height - radius)  # (B, 1, H, 1)
        u = (turn.cos() * right + turn.sin() * down) / radius  # (B, 1, H, W)
        v = (turn.cos() * down - turn.sin() * right) / radius
        inside = torch.cat([shape(u, v) for shape in SHAPES.values()], dim=1)  # (B, 10, H, W)
        inside = inside[torch.arange(len(part)), part].unsqueeze(1)  # (B, 1, H, W)
        image = torch.where(inside, uniform(0.5, 1, 3), uniform(0, 0.5, 3))  # (B, 3, H, W)
        image = image + 0.1 * torch.randn(image.shape, generator=generator)
        images.append((image * 255).clamp(0, 255).to(torch.uint8))
    return torch.cat(images), [[*SHAPES][label] for label in labels.tolist()]


def read_cifar(s, train):
    """CIFAR-10's images (N, 3, 32, 32) and the names of their classes. torchvision downloads and
    checks it."""
    try:
        with warnings.catch_warnings():  # an old NumPy pickled the files, newer ones warn of it
            warnings.simplefilter("ignore")
            cifar = CIFAR10(s.data_dir, train=train, download=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        common.fail(f"no CIFAR-10 ({' '.join(str(error).split())}): save {CIFAR10.url} in "
                    f"{s.data_dir} by hand, take images of your own with --data=DIR, or drawn ones "
                    "with --dataset=shapes", 1)
    images = torch.from_numpy(cifar.data).permute(0, 3, 1, 2).contiguous()  # (N, 3, 32, 32)
    return images, [cifar.classes[label] for label in cifar.targets]


def read_image(file, size, channels):
    """The picture in a file (or its name), squeezed to size: (C, h, w), on white where it is
    transparent. Any error if it is broken, or so large that PIL warns of it (90 million pixels)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of EXIF that is broken
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file) as image:
            if image.mode == "F":
                raise ValueError("its pixels are fractions, of a range that it does not tell")
            image.draft("RGB", (2 * size[1], 2 * size[0]))  # no large JPEG need be decoded whole
            image.load()
            with contextlib.suppress(Exception):  # where its EXIF is broken it is read as it lies
                image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits, which convert() would cut off at 255
                pixels = np.array(image)
                if pixels.min() < 0 or pixels.max() > 65535:
                    raise ValueError("its pixels have more than 16 bits")
                image = Image.fromarray((pixels // 256).astype(np.uint8))
            if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            image = image.convert("RGB" if channels == 3 else "L")
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).view(*size, channels).permute(2, 0, 1)


WANTED = ("--data=DIR takes images in DIR/train/<class>/* and DIR/test/<class>/* (or val, valid, "
          "validation), or in DIR/<class>/*")
SPLITS = dict(train="train", training="train", test="test", testing="test", val="validate",
              valid="validate", validation="validate", dev="validate")


def read_images(files, s, digest):
    """The readable ones of the files, and their images (N, C, h, w); the others are told. digest
    is fed with the bytes of all."""
    height, width = stored_size(s)
    shape = len(files), s.in_channels, height, width
    if hasattr(os, "sysconf"):  # Windows has none
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 2 * math.prod(shape) > memory:  # where none is held out, a part of them is copied
            common.fail(f"{len(files):,} images of {height} x {width} take {math.prod(shape):,} "
                        "bytes of memory: take fewer, or a smaller --image_size", 1)
    images, readable, broken = torch.empty(shape, dtype=torch.uint8), [], []
    for file in files:
        try:
            content = Path(file).read_bytes()
            digest.update(content)
            picture = read_image(io.BytesIO(content), (height, width), s.in_channels)
        except UnidentifiedImageError:
            broken.append(f"{file} (it is no image)")
        except Exception as error:  # a broken file can raise nearly anything
            broken.append(f"{file} ({getattr(error, 'strerror', None) or error})")
        else:
            images[len(readable)] = picture
            readable.append(file)
    if broken:
        print(common.visible(f"{len(broken)} of {len(files)} files are no readable images and left "
                             f"out: {', '.join(broken[:5])}") + ", ..." * (len(broken) > 5),
              file=sys.stderr)
    return readable, images[:len(readable)]


def files_below(folder):
    """Its files at any depth, behind links too, and broken links, in order; nothing hidden."""
    names = sorted(glob.glob("**/*", root_dir=folder, recursive=True))
    files = [Path(folder, name) for name in names]
    return [file for file in files if file.is_file() or file.is_symlink() and not file.exists()]


def files_of(places):
    """The files that --predict names: a folder stands for all below it, and a pattern, where the
    shell has left it alone, for what it matches."""
    files = []
    for place in map(os.path.expanduser, places):
        matches = [place] if os.path.exists(place) else sorted(glob.glob(place, recursive=True))
        for match in matches or [place]:
            files += map(str, files_below(match)) if os.path.isdir(match) else [match]
    return files


def class_of(folder_name):
    """A name that can be printed and drawn: some systems split an accented letter in two, and old
    archives leave bytes that are no UTF-8."""
    return common.composed(os.fsencode(folder_name).decode("utf-8", "replace"))


def read_folder(folder, s, digest):
    """The images (N, C, h, w) below folder/<class> and the names of their classes."""
    with common.telling(f"{WANTED}; cannot read {folder}"):
        kinds = {class_of(place.name) for place in folder.iterdir()
                 if place.is_dir() and not place.name.startswith(".")}
    files = files_below(folder)
    in_a_class = [file for file in files if file.parent != folder]
    if len(in_a_class) < len(files):
        print(common.visible(f"{len(files) - len(in_a_class)} files in {folder} are in no class "
                             "and left out"))
    files, images = read_images(in_a_class, s, digest)
    if not files:
        common.fail(f"no image found in {folder}: {WANTED}")
    names = [class_of(file.relative_to(folder).parts[0]) for file in files]
    if empty := sorted(kinds - set(names)):
        print(common.visible(f"no images in {folder} for {', '.join(empty)}: left out"))
    digest.update(repr(names).encode())
    return images, names


def find_splits(data):
    """{split: its folder} in the folder data, by SPLITS; {} if the folders there are classes."""
    found, others = {}, []
    with common.telling(f"{WANTED}; cannot read {data}"):
        for folder in sorted(Path(data).iterdir()):
            split = SPLITS.get(folder.name.lower())
            if not folder.is_dir() or folder.name.startswith("."):
                continue
            if split is None:
                others.append(folder.name)
            elif split in found:
                raise ValueError(f"{found[split].name} and {folder.name} are the same split")
            else:
                found[split] = folder
        if others and not any(x.is_dir() for folder in found.values() for x in folder.iterdir()):
            return {}  # train may be a class, beside others
    if found and others:
        print(common.visible(f"left out beside {', '.join(found)}: {', '.join(others)}"))
    return found


def read_own(s, checkpoint, digest):
    """{split: (images (N, C, h, w), names of their classes)} of --data: train, test, validate, as
    far as there are such folders of classes. Where none is held out, a tenth of each class is, the
    same in all runs, one image at least of two; but of images that the run did not train on --eval
    takes all."""
    found = find_splits(s.data)
    if s.eval and found:
        best = next(split for split in ("test", "validate", "train") if split in found)
        found = {best: found[best]}
    elif not found:
        found = dict(train=Path(s.data))
    elif "train" not in found:
        common.fail(f"there is no folder train beside {', '.join(found)} in {s.data}; {WANTED}")
    splits = {split: read_folder(folder, s, digest) for split, folder in found.items()}
    if [*splits] != ["train"]:
        return splits
    images, names = splits["train"]
    if common.is_foreign(digest.hexdigest(), s, checkpoint):
        return dict(test=(images, names))
    generator, places, held_out = torch.Generator().manual_seed(0), {}, []
    for i in torch.randperm(len(names), generator=generator).tolist():
        places.setdefault(names[i], []).append(i)
    for some in places.values():
        if len(some) > 1:
            held_out += some[:max(1, round(len(some) / 10))]
    if not held_out:
        common.fail(f"no image can be held out of {s.data}, since each class has a single one: "
                    "give more")
    print("there are no images to validate: a tenth of each class is held out, "
          f"{len(held_out):,} images")
    rest = sorted({*range(len(names))} - {*held_out})
    return {split: (images[some], [names[i] for i in some])
            for split, some in (("train", rest), ("validate", sorted(held_out)))}


def load_data(s, checkpoint):
    """train, val (which chooses best.pt) and, where there are three, test: each images (N, C, h, w)
    and labels (N,); and classes, mean and std of the channels, name and sha256: of what the images
    come from, since drawing and resizing differ by a rounding between machines. --eval needs no
    train, and has test as val; a checkpoint tells classes, mean and std."""
    digest = hashlib.sha256()
    with common.first_process_first():
        if s.data:
            splits = read_own(s, checkpoint, digest)
        elif s.dataset == "shapes":
            splits = {split: draw_shapes(n, s.image_size, seed)
                      for split, n, seed in (("train", 4000, 1), ("test", 1000, 2))}
            digest.update(f"shapes {s.image_size}".encode())
        else:
            splits = {split: read_cifar(s, split == "train") for split in ("train", "test")}
            digest.update(CIFAR10.tgz_md5.encode())
    if s.eval:
        splits = dict(validate=splits.get("test") or splits["validate"])
    elif "validate" not in splits:
        splits["validate"] = splits.pop("test")
    new = not checkpoint or s.init_from
    classes = sorted(set(splits["train"][1])) if new else checkpoint["classes"]
    if len(classes) < 2:
        common.fail(f"the only class with training images is {classes[0]}: give two or more")
    data = types.SimpleNamespace(
        classes=classes, name=Path(s.data).name if s.data else s.dataset, sha256=digest.hexdigest())
    place = {name: i for i, name in enumerate(classes)}
    for split, (images, names) in splits.items():
        unknown = sorted(set(names) - set(classes))
        if unknown:
            print(common.visible(f"images to {split} of {', '.join(unknown)} are left out: there "
                                 "are none to train on"))
        known = [i for i, name in enumerate(names) if name in place]
        if not known:
            common.fail(f"there are images to {split} of {', '.join(unknown)}, and none of the "
                        f"classes trained on, {', '.join(classes)}")
        if s.in_channels == 1 and images.shape[1] == 3:
            images = v2.functional.rgb_to_grayscale(images)
        setattr(data, split, types.SimpleNamespace(
            images=images if len(known) == len(names) else images[known],
            labels=torch.tensor([place[names[i]] for i in known])))
    if new and s.mean:
        data.mean, data.std = ([255 * x for x in (numbers * 3)[:s.in_channels]]
                               for numbers in (s.mean, s.std))
    elif checkpoint:
        data.mean, data.std = checkpoint["mean"], checkpoint["std"]
    else:  # by counting each value, which takes no memory
        data.mean, data.std, values = [], [], torch.arange(256.0, dtype=torch.float64)
        for channel in data.train.images.unbind(dim=1):  # (N, h, w) each
            count, n = channel.flatten().bincount(minlength=256), channel.numel()  # (256,)
            mean = (count * values).sum() / n
            data.mean.append(mean.item())
            variance = (count * (values - mean) ** 2).sum() / (n - 1)
            data.std.append(max(1.0, variance.sqrt().item()))
    counts = ", ".join(f"{len(vars(data)[split].labels):,} images to {split}" for split in splits)
    height, width = stored_size(s)
    print(common.visible(f"data {data.name}: {counts}, {height} x {width} pixels, {len(classes)} "
                         f"classes: {', '.join(classes)}"))
    if not s.eval:
        kinds = [f"{kind} {vars(s)[kind]}" for kind in ("flip", "crop", "mixup", "cutmix")
                 if vars(s)[kind]] + ["the article's"] * (s.recipe == "article")
        print(f"augmentation: {', '.join(kinds) or 'none'}; mean "
              + ", ".join(f"{m:.4g} +- {d:.4g}" for m, d in zip(data.mean, data.std)) + " of 255")
    return data


# ------- augmentation of whole batches: each image its own draw, but for MixUp's and CutMix's share


def flip(images, p):
    """images (B, C, H, W) -> the same shape, each mirrored with probability p."""
    mirrored = torch.rand(len(images), 1, 1, 1).to(images.device) < p
    return torch.where(mirrored, images.flip(-1), images)


def crop(images, reach):
    """images (B, C, H, W) -> the same shape, each shifted by up to reach pixels both ways; what
    comes into view is the image mirrored at its edge. reach < H, W."""
    B, _, H, W = images.shape
    y, x = torch.randint(2 * reach + 1, (2, B)).to(images.device)
    padded = F.pad(images.float(), 4 * (reach,), mode="reflect")  # it takes no bytes
    windows = padded.unfold(2, H, 1).unfold(3, W, 1)  # (B, C, 2 reach + 1, 2 reach + 1, H, W)
    return windows[torch.arange(B, device=images.device), :, y, x].to(images.dtype)


def transform_as_article(images, s):
    """images (B, C, h, w) -> (B, C, H, W), one at a time, as the article does. Slow."""
    transform = v2.Compose([
        v2.ColorJitter(0.4, 0.4, 0.4), v2.RandomResizedCrop(s.image_size, scale=(0.6, 1.0)),
        v2.RandomRotation(30)])
    images = v2.functional.resize(images, list(s.image_size))
    return torch.stack([transform(image) for image in images])


def mix(images, labels, s, n_classes):
    """images (B, C, H, W), labels (B,) -> images, targets (B, n_classes): MixUp or CutMix, the one
    whose alpha is not 0, or either at random; one share (one box) for the whole batch."""
    mixers = [kind(alpha=alpha, num_classes=n_classes)
              for kind, alpha in ((v2.MixUp, s.mixup), (v2.CutMix, s.cutmix)) if alpha]
    return v2.RandomChoice(mixers)(images, labels)


def normalise(images, data, s):
    """images (B, C, h, w), uint8 -> what the model takes: (B, C, H, W) floats on its device."""
    images = v2.functional.resize(images.to(s.device), list(s.image_size)).float()
    mean, std = torch.tensor([data.mean, data.std], device=s.device)[..., None, None]  # (C, 1, 1)
    return (images - mean) / std


def draw_batch(data, step, s):
    """images (B, C, H, W), augmented and normalised, and targets (B,), or (B, classes) if mixed.
    Augmentation draws from PyTorch's global generator, as torchvision's transforms do."""
    index = common.draw(step, len(data.train.labels), s)[0].to(data.train.labels.device)
    images, targets = data.train.images[index], data.train.labels[index]
    if s.flip:
        images = flip(images, s.flip)
    if s.crop:
        images = crop(images, s.crop)
    if s.recipe == "article":
        images = transform_as_article(images, s)
    images = normalise(images, data, s)
    if s.mixup or s.cutmix:
        images, targets = mix(images, targets, s, len(data.classes))
    return images, targets


# ------------------------------------------------------------------------ evaluation and pictures


@torch.no_grad()
def predict(model, images, data, s):
    """images (N, C, h, w), uint8 -> logits (N, classes), on the CPU."""
    model.eval()
    logits, n = [], math.prod(s.image_size) // math.prod(s.patch_size)  # n: tokens of an image
    for part in images.split(max(1, 16_000 // n)):
        with common.autocast(s):
            logits.append(model(normalise(part, data, s)).float().cpu())
    return torch.cat(logits)


def evaluate(model, split, data, s):
    """(loss, accuracy) on all images of a split, as they are. Those of data.validate choose
    best.pt, whose accuracy is flattered by that, unlike that of the last evaluation, or on test."""
    logits = predict(model, split.images, data, s)
    loss = F.cross_entropy(logits, split.labels).item()
    return loss, (logits.argmax(dim=1) == split.labels).double().mean().item()


def draw_predictions(data, logits, path):
    """40 test images, evenly spread, with the guess and its probability below; wrong ones in red,
    with the truth. All are on the same axes, which is ten times as fast as axes each."""
    short = lambda name: name if len(name) <= 14 else f"{name[:13]}\u2026"
    n = len(data.validate.labels)
    some = torch.linspace(0, n - 1, min(40, n)).round().long()
    sure, guesses = logits[some].softmax(dim=1).max(dim=1)
    right = (guesses == data.validate.labels[some]).sum().item()
    with common.picture(path, f"{right} of {len(some)} right", 10, 8.5) as figure:
        axes = figure.subplots()
        for k, (i, p, guess) in enumerate(zip(some, sure, guesses)):
            x, y = k % 8, -1.3 * (k // 8)
            image = data.validate.images[i].permute(1, 2, 0).expand(-1, -1, 3)
            axes.imshow(image.numpy(), extent=(x, x + 0.92, y - 0.92, y))
            name, truth = data.classes[guess], data.classes[data.validate.labels[i]]
            text = f"{short(name)} {p:.0%}" + f"\nis {short(truth)}" * (name != truth)
            color = "black" if name == truth else "red"
            axes.text(x + 0.46, y - 0.95, text, ha="center", va="top", fontsize=8, color=color,
                      parse_math=False)
        axes.set(xlim=(0, min(8, len(some))), ylim=(y - 1.3, 0))
        axes.axis("off")


def main(argv=()):
    s, checkpoint = parse_flags(argv)
    if s.predict:  # needs no data
        view = types.SimpleNamespace(**{k: checkpoint[k] for k in ("classes", "mean", "std")})
        model = common.build(s, checkpoint, *describe_model(s, len(view.classes)))
        asked, answers = files_of(s.predict), {}
        if not asked:
            common.fail(f"there is no file in {', '.join(s.predict)}", 1)
        files, images = read_images(asked, s, hashlib.sha256())
        for file, p in zip(files, predict(model, images, view, s).softmax(dim=1) if files else ()):
            by_class = sorted(zip(view.classes, p.tolist()), key=lambda pair: -pair[1])
            answers[file] = dict(by_class)
            text = ", ".join(f"{name} {p:.1%}" for name, p in by_class[:3])
            print(json.dumps(dict(file=file, probabilities=answers[file])) if s.json else
                  common.visible(f"{file}: {text}"))
        return dict(model=s.model, iters=checkpoint["step"],
                    unreadable=[file for file in asked if file not in answers], predict=answers)

    data = load_data(s, checkpoint)
    if s.init_from and checkpoint.get("classes") != data.classes:  # a head for the new ones
        checkpoint["model"] = {k: x for k, x in checkpoint["model"].items() if k[:5] != "head."}
    elif not checkpoint and s.preset in ("s16", "mixer_b16"):
        print(f"--preset={s.preset} without --init_from: it trains from scratch")
    model = common.build(s, checkpoint, *describe_model(s, len(data.classes)))
    if s.eval:
        val_loss, val_accuracy = evaluate(model, data.validate, data, s)
        print(f"iteration {checkpoint['step']:,}: validation loss {val_loss:.4f} nats per image, "
              f"accuracy {val_accuracy:.2%} of {len(data.validate.labels):,} images")
        return dict(model=s.model, iters=checkpoint["step"], val_loss=val_loss,
                    val_accuracy=val_accuracy)

    if s.recipe == "article":
        for block in model.trunk.blocks:
            block.drop_path.p = s.drop_path
    data.train.images = data.train.images.to(s.device)
    data.train.labels = data.train.labels.to(s.device)
    with common.training(s, model, checkpoint, classes=data.classes, mean=data.mean,
                         std=data.std, data_sha256=data.sha256) as run:
        for step in run.steps():
            images, targets = draw_batch(data, step, s)
            for x, y in zip(run.parts(images), run.parts(targets)):
                with common.autocast(s):
                    logits = run.forward(x)  # (B / parts, classes)
                    loss = F.cross_entropy(logits, y, label_smoothing=s.label_smoothing)
                run.backward(loss / s.grad_accum)
            run.update()
            if run.evaluation_due():
                with run.paused():
                    loss, accuracy = evaluate(model, data.validate, data, s)
                run.figures = dict(val_loss=loss, val_accuracy=accuracy)

        logits, K = predict(model, data.validate.images, data, s), len(data.classes)
        pairs = data.validate.labels * K + logits.argmax(dim=1)
        confusion = pairs.bincount(minlength=K * K).view(K, K)  # the truth down, the guess across
        right = (confusion.diag() / confusion.sum(dim=1)).tolist()  # NaN: no images
        right = {name: None if math.isnan(r) else r for name, r in zip(data.classes, right)}
        grid = [size // patch for size, patch in zip(s.image_size, s.patch_size)]
        print("accuracy by class: " + common.visible(", ".join(
            f"{name} {r:.1%}" for name, r in right.items() if r is not None)))
        if common.can_draw():
            common.draw_curve(run.log, "nats per image", f"{s.out_dir}/curve.png")
            draw_predictions(data, logits, f"{s.out_dir}/predictions.png")
            if s.model in ("gmlp", "amlp"):
                common.draw_gates(model, f"{s.out_dir}/spatial.png", grid)
        figures = {}
        if hasattr(data, "test"):  # once, by the weights that data.validate has chosen
            with common.first_process_first():
                best = common.load_checkpoint(Path(s.out_dir, "best.pt"), s.script)
            model.load_state_dict(best["model"])
            loss, accuracy = evaluate(model, data.test, data, s)
            figures = dict(test_loss=loss, test_accuracy=accuracy)
            print(f"best.pt on the test images: loss {loss:.4f}, accuracy {accuracy:.2%}")
        return run.write_result(
            argv, data=data.name, data_sha256=data.sha256, images=run.step * s.batch_size,
            classes=data.classes, per_class_accuracy=right, confusion=confusion.tolist(),
            half_reach=common.half_reach(model, grid),
            torchvision=torchvision.__version__, pillow=PIL.__version__, **figures)


if __name__ == "__main__":
    common.run_script(main)
