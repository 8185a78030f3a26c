"""Train an image classifier without attention on CIFAR-10, on your own pictures, or on shapes.

    python train_vision.py                          CIFAR-10 with gMLP (minutes, no GPU needed)
    python train_vision.py --dataset=shapes         needs no data: ten coloured shapes
    python train_vision.py --data=DIR               images in DIR/train/<class>, DIR/test/<class>
    python train_vision.py --predict cat.png a.jpg  says what it sees, by the best checkpoint
    python train_vision.py --model=vit              another architecture in the same loop

An image is cut into patches, each a token. Results go to out/vision. To take this script along,
copy gmlp.py, mixer.py and train_common.py too.
"""
import argparse
import hashlib
import http.client
import io
import math
import os
import statistics
import tarfile
import tempfile
import time
import types
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

import train_common as common
from gmlp import GMLPImageClassifier
from mixer import EncoderImageClassifier

# Every knob of a training run. `laptop` is whole, the others list what they change. "laptop/vit"
# is what changes with that preset and model: all models of a preset have equal parameters (5 %).
PRESETS = {
    "laptop": dict(
        model="gmlp", toeplitz=True, positions="auto", dataset="cifar10",
        image_size=(32, 32), patch_size=(4, 4), in_channels=3, stored_size=None,
        d_model=128, d_ffn=512, n_layers=4, n_heads=4, d_attn=64, d_token=None,
        recipe="batch", flip=0.5, crop=4, erasing=0.0, mixup=0.0, cutmix=0.0, label_smoothing=0.0,
        dropout=0.0, drop_path=0.0,
        batch_size=64, grad_accum=1, max_iters=1800, eval_interval=600, log_interval=50,
        optimizer="muon", schedule="linear", learning_rate=4e-3, min_lr=0.0, warmup_iters=200,
        beta2=0.99, weight_decay=0.1, l2=0.0, grad_clip=1.0,
        data=None, seed=1, dtype="auto", compile=False),
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
        erasing=0.25, mixup=0.2, cutmix=1.0, label_smoothing=0.1, batch_size=256,
        max_iters=40_000, eval_interval=1000, warmup_iters=1000, learning_rate=2e-3),
    "gpu/amlp": dict(d_ffn=832),
    "gpu/mixer": dict(d_ffn=768, learning_rate=1e-3),
    "gpu/vit": dict(n_layers=6, learning_rate=1e-3),
    # The Paddle AI Studio article "gMLP & aMLP" (2022): gMLP-Ti, 100 passes over CIFAR-10
    "classic": dict(
        toeplitz=False, image_size=(224, 224), patch_size=(16, 16), stored_size=(32, 32),
        d_model=128, d_ffn=768, n_layers=30, n_heads=1, recipe="article", crop=0, mixup=0.2,
        label_smoothing=0.1, drop_path=0.1, batch_size=128, max_iters=39_100, eval_interval=391,
        optimizer="adamw", schedule="cosine", learning_rate=1e-3, warmup_iters=0, beta2=0.999,
        weight_decay=0.0, l2=1e-5, grad_clip=0.0),
}
IMAGENET = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]


def pair(text):
    """An argparse type: 32 or 32,64 (height, width) -> (height, width)."""
    sizes = [common.number(int, 1, 10_000)(part) for part in text.split(",")]
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor height,width")
    return sizes[0], sizes[-1]


def parse_flags(argv):
    parser = common.Parser(__doc__)
    models = ("gmlp", "amlp", "mixer", "vit")
    common.add_common_flags(parser, PRESETS, models, "vision")
    add = parser.add_argument
    add("--dataset", choices=("cifar10", "shapes"), help="the built-in data")
    add("--image_size", type=pair, help="32 or 32,64 (height,width): images are resized to it")
    add("--patch_size", type=pair, help="of a token, like --image_size")
    add("--in_channels", type=common.COUNT, choices=(1, 3), help="1: grey, 3: colour")
    add("--stored_size", type=pair, help="keep images smaller in memory, enlarge each batch")
    add("--flip", type=common.PROBABILITY, help="chance to mirror an image")
    add("--crop", type=common.number(int, 0), help="shift an image by up to this many pixels")
    add("--erasing", type=common.PROBABILITY, help="chance to cover a random box")
    add("--mixup", type=common.RATE, help="alpha of MixUp: blends pairs of images")
    add("--cutmix", type=common.RATE, help="alpha of CutMix: pastes a box of another image")
    add("--label_smoothing", type=common.PROBABILITY, help="of the training loss")
    add("--recipe", choices=("batch", "article"), help="article: its transforms image by image, "
        "ImageNet's mean and deviation, the same drop_path in all layers")
    add("--l2", type=common.RATE, help="penalty on the squares of all weights, as part of the loss")
    add("--predict", nargs="+", metavar="FILE", help="classify pictures, by OUT_DIR/best.pt")
    kept = dict(classes=list, mean=list, std=list, data_sha256=str)
    return common.read_settings(parser, PRESETS, argv, "vision", kept)


def check_settings(s):
    if s.data and s.dataset == "shapes" and not s.eval:
        common.fail(f"--data={s.data} and --dataset=shapes exclude each other")
    if s.model in ("gmlp", "amlp") and s.positions not in ("auto", "none"):
        common.fail(f"--positions={s.positions}: {s.model} knows the places by W, leave it out")
    if s.crop >= min(stored_size(s)):
        height, width = stored_size(s)
        common.fail(f"--crop={s.crop} shifts an image of {height} x {width} out of sight: lower it")
    if (1, 1) in (s.image_size, stored_size(s)):
        common.fail("--image_size and --stored_size: an image of 1 x 1 shows nothing, give more")
    common.check_sizes(build_model, s, 10)


def stored_size(s):
    return s.stored_size or s.image_size


def build_model(s, n_classes):
    shared = dict(in_channels=s.in_channels, dropout=s.dropout, drop_path=s.drop_path)
    sizes = s.image_size, s.patch_size, n_classes, s.d_model, s.d_ffn, s.n_layers
    if s.model in ("gmlp", "amlp"):
        d_attn = s.d_attn if s.model == "amlp" else None
        model = GMLPImageClassifier(
            *sizes, toeplitz=s.toeplitz, n_heads=s.n_heads, d_attn=d_attn, **shared)
    else:
        auto = "learned" if s.model == "vit" else None  # a Mixer needs none
        positions = {"auto": auto, "none": None}.get(s.positions, s.positions)
        model = EncoderImageClassifier(
            *sizes, token_mixer="mixer" if s.model == "mixer" else "attention",
            toeplitz=s.toeplitz, d_token=s.d_token, n_heads=s.n_heads, positions=positions,
            **shared)
    if s.recipe == "article":
        for block in model.trunk.blocks:
            block.drop_path.p = s.drop_path
    return model


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


def fetch_cifar(folder):
    """Unpack CIFAR-10 in folder: from the archive there, or else from the network."""
    archive = folder / CIFAR10.filename
    ways = (f"save it as {archive} by hand, take images of your own with --data=DIR, or drawn ones "
            "with --dataset=shapes")
    there = os.path.exists(archive)
    source = archive if there else CIFAR10.url
    try:
        if there:
            content = archive.read_bytes()
        else:
            print(f"getting CIFAR-10 (170 MB) from {source}")
            with urllib.request.urlopen(source, timeout=10) as response:
                content = response.read()
    except (OSError, http.client.HTTPException) as error:
        common.fail(f"no CIFAR-10: {source} is out of reach ({error}); {ways}", 1)
    found = hashlib.md5(content).hexdigest()
    if found != CIFAR10.tgz_md5:
        common.fail(f"{source} has md5 {found}, not {CIFAR10.tgz_md5}: "
                    + ("delete it, or " if there else "try again, or ") + ways, 1)
    if not there:
        common.write_file(archive, content)
    try:
        with (tarfile.open(fileobj=io.BytesIO(content)) as tar,
              tempfile.TemporaryDirectory(dir=folder) as beside):
            tar.extractall(beside, filter="data")
            os.replace(Path(beside, CIFAR10.base_folder), folder / CIFAR10.base_folder)
    except OSError as error:
        common.fail(f"cannot unpack {archive} beside itself: {error.strerror}", 1)


def read_cifar(s, train):
    """CIFAR-10's images (N, 3, 32, 32) and the names of their classes, fetched if need be."""
    folder = Path(s.data_dir)
    if not os.path.exists(folder / CIFAR10.base_folder):
        fetch_cifar(folder)
    try:
        with warnings.catch_warnings():  # an old NumPy pickled the files, newer ones warn of it
            warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
            cifar = CIFAR10(folder, train=train)
    except (RuntimeError, OSError):
        common.fail(f"{folder / CIFAR10.base_folder} is not whole: delete it and run again", 1)
    images = torch.from_numpy(cifar.data).permute(0, 3, 1, 2).contiguous()  # (N, 3, 32, 32)
    return images, [cifar.classes[label] for label in cifar.targets]


def read_image(path, size, channels):
    """The picture at path, squeezed to size: (C, h, w), on white where it is transparent. Any error
    if it is broken, or so large that PIL warns of it (90 million pixels)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as image:
            if image.mode == "F":
                raise ValueError("its pixels are fractions, of a range that it does not tell")
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


def read_folder(folder, size, channels, data_dir):
    """The images (N, C, h, w) of folder/<class>/* and the names of their classes: from the cache in
    data_dir, unless a file has changed. Hidden folders and files do not count."""
    wanted = "--data=DIR takes images in DIR/train/<class>/* and DIR/test/<class>/*"
    try:
        kinds = [kind for kind in sorted(folder.iterdir()) if kind.is_dir() and kind.name[0] != "."]
        files = [file for kind in kinds for file in sorted(kind.iterdir())
                 if file.is_file() and file.name[0] != "."]
        state = [(str(file), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)
                 for file in files for at in [file.stat()]]
    except OSError as error:
        common.fail(f"cannot read {folder}: {error.strerror}; {wanted}")
    key = hashlib.sha256(repr((state, size, channels)).encode()).hexdigest()
    name = f"{folder.resolve().parent.name}-{folder.name}-{size[0]}x{size[1]}x{channels}.pt"
    try:
        kept = common.read_checkpoint(Path(data_dir) / name)
        current = kept["key"] == key
    except Exception:  # none there, or broken, which can raise nearly anything
        current = False
    if not current:
        kept, opened = decode(files, size, channels)
        if opened:
            common.save_checkpoint(Path(data_dir) / name, key=key, **kept)
    images, names, broken = kept["images"], kept["names"], kept["broken"]
    if broken:
        print(common.visible(
            f"{len(broken)} files in {folder} are no readable images and left out: "
            f"{', '.join(broken[:5])}{', ...' if len(broken) > 5 else ''}"))
    if not names:
        common.fail(f"no image found in {folder}: {wanted}")
    empty = [kind.name for kind in kinds if kind.name not in set(names)]
    if empty:
        print(common.visible(f"no images in {folder} for {', '.join(empty)}: left out"))
    return images, names


def decode(files, size, channels):
    """The readable files: images (N, C, h, w) and the names of their classes; and the others. Then
    whether all could be opened: who may read a file can change, and the file does not show it."""
    images = torch.empty(len(files), channels, *size, dtype=torch.uint8)
    names, broken, opened, shown = [], [], True, time.perf_counter()
    for done, file in enumerate(files):
        if time.perf_counter() - shown > 5:
            print(f"decoding images: {done:,} of {len(files):,}", flush=True)
            shown = time.perf_counter()
        try:
            images[len(names)] = read_image(file, size, channels)
            names.append(file.parent.name)
        except MemoryError:
            raise
        except Exception as error:  # a broken file can raise nearly anything
            broken.append(str(file))
            opened = opened and not getattr(error, "errno", None)  # the system's have a number
    if broken:
        images = images[:len(names)].clone()  # or the rest would be saved along
    return dict(images=images, names=names, broken=broken), opened


def load_split(s, split):
    """"train" or "test": the images (N, C, h, w) and the names of their classes."""
    size = stored_size(s)
    if s.data:
        return read_folder(Path(s.data) / split, size, s.in_channels, s.data_dir)
    if s.dataset == "shapes":
        images, names = draw_shapes(*((4000, size, 1) if split == "train" else (1000, size, 2)))
    else:
        images, names = read_cifar(s, split == "train")
    images = v2.functional.resize(images, list(size))
    return images if s.in_channels == 3 else v2.functional.rgb_to_grayscale(images), names


def load_data(s, checkpoint):
    """(data name, view, train, test). view is what a checkpoint keeps of the data: the classes, and
    the mean and std of each channel. train and test hold images and labels (N,); with --eval, train
    is None and not looked at."""
    with common.first_process_first():
        test, train = load_split(s, "test"), None if s.eval else load_split(s, "train")
    classes = checkpoint["classes"] if s.eval else sorted(set(train[1]))
    if checkpoint and classes != checkpoint["classes"]:
        common.fail(f"the checkpoint's classes are {', '.join(checkpoint['classes'])}, the data's "
                    f"{', '.join(classes)}: resume with the data that the run began with")
    if len(classes) < 2:
        common.fail(f"the only class with training images is {classes[0]}: give two or more")
    unknown = sorted(set(test[1]) - set(classes))
    if unknown:
        print(f"test images of {common.visible(', '.join(unknown))} are left out: there are none "
              "to train on")
    if not set(test[1]) - set(unknown):
        common.fail(f"there are test images of {', '.join(unknown)}, and none of the classes "
                    f"trained on, {', '.join(classes)}")

    def labelled(images, names):
        place = {name: i for i, name in enumerate(classes)}
        labels = torch.tensor([place.get(name, -1) for name in names])
        if labels.min() < 0:
            images, labels = images[labels >= 0], labels[labels >= 0]
        return types.SimpleNamespace(images=images, labels=labels)
    test, train = labelled(*test), train and labelled(*train)
    if checkpoint:
        mean, std = checkpoint["mean"], checkpoint["std"]
    elif s.recipe == "article" and s.in_channels == 3:
        mean, std = IMAGENET
    else:
        mean = [channel.float().mean().item() for channel in train.images.unbind(dim=1)]
        std = [max(1.0, channel.float().std().item()) for channel in train.images.unbind(dim=1)]
    name = Path(s.data).resolve().name if s.data else s.dataset
    count = f"{len(train.labels):,} images to train on, " if train else ""
    height, width = stored_size(s)
    print(common.visible(
        f"data {name}: {count}{len(test.labels):,} images to test, {height} x {width} pixels, "
        f"{len(classes)} classes: {', '.join(classes)}"))
    return name, types.SimpleNamespace(classes=classes, mean=mean, std=std), train, test


def sha256_of(*splits):
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.images.numpy())
        digest.update(split.labels.numpy())
    return digest.hexdigest()


# ------- augmentation of whole batches: each image its own draw, but for MixUp's and CutMix's share


def flip(images, p, generator):
    """images (B, C, H, W) -> the same shape, each mirrored with probability p."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator).to(images.device) < p
    return torch.where(mirrored, images.flip(-1), images)


def crop(images, reach, generator):
    """images (B, C, H, W) -> the same shape, each shifted by up to reach pixels both ways; what
    comes into view is the image mirrored at its edge. reach < H, W."""
    B, C, H, W = images.shape

    def places(length):  # (B, length): which row (or column) to show at each
        shift = torch.randint(-reach, reach + 1, (B, 1), generator=generator).to(images.device)
        place, last = torch.arange(length, device=images.device) + shift, length - 1
        return last - (last - place.abs()).abs()  # -1 becomes 1, last + 1 becomes last - 1
    pixels = places(H)[:, :, None] * W + places(W)[:, None]  # (B, H, W)
    pixels = pixels.view(B, 1, H * W).expand(B, C, H * W)
    return images.flatten(2).gather(2, pixels).view(images.shape)


def erase(images, p, generator):
    """images (B, C, H, W), normalised -> the same shape; with probability p each loses a box to the
    mean colour: 2 to 33 % of its area, sides up to 1 : 3.3 (Zhong et al. 2017,
    arXiv:1708.04896)."""
    B, _, H, W = images.shape
    chance, area, ratio, top, left = torch.rand(5, B, 1, generator=generator)  # (B, 1) each
    area = 0.02 + area * 0.31
    ratio = (math.log(3.3) * (2 * ratio - 1)).exp()
    height = ((area * ratio).sqrt() * H).clamp(max=H).round()
    width = ((area / ratio).sqrt() * W).clamp(max=W).round()
    top, left = (top * (H - height + 1)).floor(), (left * (W - width + 1)).floor()
    y, x = torch.arange(H), torch.arange(W)
    rows = (top <= y) & (y < top + height) & (chance < p)  # (B, H)
    columns = (left <= x) & (x < left + width)  # (B, W)
    box = rows[:, None, :, None] & columns[:, None, None, :]  # (B, 1, H, W)
    return images.masked_fill(box.to(images.device), 0.0)


def mix(images, labels, s, n_classes):
    """images (B, C, H, W), labels (B,) -> images, targets (B, n_classes): MixUp or CutMix, the one
    whose alpha is not 0, or either at random; one share (one box) for the whole batch. Draws from
    PyTorch's global generator."""
    mixers = [kind(alpha=alpha, num_classes=n_classes)
              for kind, alpha in ((v2.MixUp, s.mixup), (v2.CutMix, s.cutmix)) if alpha]
    return v2.RandomChoice(mixers)(images, labels)


def transform_as_article(images, s):
    """images (B, C, h, w) -> (B, C, H, W), one at a time, as the article does. Slow. Draws from
    PyTorch's global generator."""
    transform = v2.Compose([
        v2.ColorJitter(0.4, 0.4, 0.4), v2.RandomResizedCrop(s.image_size, scale=(0.6, 1.0)),
        v2.RandomRotation(30)])
    images = v2.functional.resize(images, list(s.image_size))
    return torch.stack([transform(image) for image in images])


def normalise(images, view, s):
    """images (B, C, h, w), uint8 -> what the model takes: (B, C, H, W) floats on its device."""
    images = v2.functional.resize(images.to(s.device), list(s.image_size)).float()
    mean, std = torch.tensor([view.mean, view.std], device=s.device)[..., None, None]  # (C, 1, 1)
    return (images - mean) / std


def draw_batch(train, view, s, generator):
    """images (B, C, H, W), augmented and normalised, and targets (B,), or (B, classes) if mixed."""
    index = torch.randint(len(train.labels), (s.batch_size,), generator=generator).to(s.device)
    images, targets = train.images[index], train.labels[index]
    if s.flip:
        images = flip(images, s.flip, generator)
    if s.crop:
        images = crop(images, s.crop, generator)
    if s.recipe == "article":
        images = transform_as_article(images, s)
    images = normalise(images, view, s)
    if s.erasing:
        images = erase(images, s.erasing, generator)
    if s.mixup or s.cutmix:
        images, targets = mix(images, targets, s, len(view.classes))
    return images, targets


def share_of_batches(train, view, s, t):
    """The part of a training step that draw_batch takes: its median time over the mean step's."""
    seconds = []
    for _ in range(9):
        clock = common.Clock(s.device)
        clock.start()
        draw_batch(train, view, s, torch.Generator().manual_seed(0))
        clock.stop()
        seconds.append(clock.seconds)
    return statistics.median(seconds) / (t.clock.seconds / t.step)


# ------------------------------------------------------------------------ evaluation and pictures


@torch.no_grad()
def predict(model, images, view, s):
    """images (N, C, h, w), uint8 -> logits (N, classes), on the CPU."""
    was_training = model.training
    model.eval()
    logits, n = [], math.prod(s.image_size) // math.prod(s.patch_size)  # n: tokens of an image
    for part in images.split(max(1, 16_000 // n)):
        with common.autocast(s):
            logits.append(model(normalise(part, view, s)).float().cpu())
    model.train(was_training)
    return torch.cat(logits)


def evaluate(model, test, view, s):
    """(loss, accuracy) on all test images, as they are. There is no third split: they also choose
    best.pt, whose accuracy is flattered by that, unlike that of the last evaluation."""
    logits = predict(model, test.images, view, s)
    loss = F.cross_entropy(logits, test.labels).item()
    return loss, (logits.argmax(dim=1) == test.labels).double().mean().item()


def confusion_of(guesses, labels, n_classes):
    """guesses (N,), labels (N,) -> (n_classes, n_classes) counts: the truth down, the guess
    across."""
    pairs = labels * n_classes + guesses
    return pairs.bincount(minlength=n_classes**2).view(n_classes, n_classes)


def spread(test, count):
    """The places of count test images (fewer if there are fewer), evenly spread."""
    count = min(count, len(test.labels))
    return torch.linspace(0, len(test.labels) - 1, count).round().long()


def shown(images, pixels=96):
    """images (N, C, h, w), uint8 -> (N, 3, H, W), 0 to 1, enlarged to that many pixels or more."""
    images = F.interpolate(images / 255, scale_factor=math.ceil(pixels / images.shape[-1]))
    return images.expand(-1, 3, -1, -1)


def draw_predictions(test, logits, classes, path):
    """40 test images with the guess and its probability; wrong ones in red, with the truth."""
    some, tiles = spread(test, 40), []
    sure, guesses = logits[some].softmax(dim=1).max(dim=1)
    for picture, p, guess, label in zip(shown(test.images[some]), sure, guesses, test.labels[some]):
        frame = F.pad(torch.ones_like(picture), (4, 4, 4, 4), value=1.0)  # (3, H + 8, W + 8)
        text = f"{classes[guess]} {p:.0%}"
        if guess != label:
            frame[1:] = 0.0
            text += f"\nis {classes[label]}"
        frame[:, 4:-4, 4:-4] = picture
        tile = v2.functional.to_pil_image(F.pad(frame, (0, 0, 0, 26), value=1.0))
        text = text.encode("ascii", "replace").decode()  # all that every font has
        ImageDraw.Draw(tile).multiline_text((4, tile.height - 26), text, fill="black", spacing=1)
        tiles.append(v2.functional.pil_to_tensor(tile) / 255)
    common.save_picture(torch.stack(tiles), path, columns=8)


def draw_spatial(model, s, path):
    """For each layer (across) and head, what two tokens (marked) hear from the patches around."""
    rows, columns = (size // patch for size, patch in zip(s.image_size, s.patch_size))
    tokens = [(rows // 2, columns // 2), (rows // 4, columns // 4)]
    matrices = []
    for block in model.trunk.blocks:
        W = block.sgu.matrix().unflatten(-1, (rows, columns))  # (h, n, rows, columns)
        matrices.append(torch.cat([W[:, i * columns + j] for i, j in tokens]))
    marks = [token for token in tokens for _ in range(s.n_heads)]
    common.draw_spatial(matrices, path, marks)


def draw_where(model, test, view, s, path):
    """12 test images, each beside a map of what covering a patch by grey does to the probability of
    the right answer: red where it falls, blue where it rises; by square roots, all maps on one
    scale."""
    rows, columns = (size // patch for size, patch in zip(s.image_size, s.patch_size))
    some = spread(test, 12)
    images = v2.functional.resize(test.images[some], list(s.image_size))  # (12, C, H, W)
    cover = torch.eye(rows * columns).view(-1, 1, rows, columns)
    cover = F.interpolate(cover, s.image_size).bool()  # (n, 1, H, W)
    falls = []
    for image, label in zip(images, test.labels[some]):
        covered = torch.where(cover, 128, image).to(torch.uint8)  # (n, C, H, W)
        p = predict(model, torch.cat([image[None], covered]), view, s).softmax(dim=1)[:, label]
        falls.append((p[0] - p[1:]).view(rows, columns))
    falls = torch.stack(falls)  # (12, rows, columns)
    falls = falls / falls.abs().max().clamp(min=1e-12)
    pictures, maps = shown(images), common.red_and_blue(falls.sign() * falls.abs().sqrt())
    maps = F.interpolate(maps, pictures.shape[2:])  # (12, 3, H, W), zoomed
    common.save_picture(torch.stack([pictures, maps], dim=1).flatten(0, 1), path, columns=8)


def read_pictures(s):
    """The files of --predict: (N, C, h, w)."""
    pictures = []
    for file in s.predict:
        try:
            pictures.append(read_image(file, stored_size(s), s.in_channels))
        except Exception as error:  # a broken file can raise nearly anything
            common.fail(f"cannot read the picture {file}: {getattr(error, 'strerror', 0) or error}")
    return torch.stack(pictures)


def main(argv=None):
    s, checkpoint = parse_flags(argv)
    check_settings(s)

    if s.predict:  # needs no data
        view = types.SimpleNamespace(**{k: checkpoint[k] for k in ("classes", "mean", "std")})
        pictures = read_pictures(s)
        model = common.new_model(build_model, s, len(view.classes), checkpoint=checkpoint)
        best = predict(model, pictures, view, s).softmax(dim=1).topk(min(3, len(view.classes)))
        answers = {file: [(view.classes[i], p) for i, p in zip(places, ps)] for file, places, ps
                   in zip(s.predict, best.indices.tolist(), best.values.tolist())}
        for file, answer in answers.items():
            answer = ", ".join(f"{name} {p:.1%}" for name, p in answer)
            print(common.visible(f"{file}: {answer}"))
        return dict(model=s.model, iters=checkpoint["step"], predict=answers)

    name, view, train, test = load_data(s, checkpoint)
    model = common.new_model(build_model, s, len(view.classes), checkpoint=checkpoint)

    if s.eval:
        val_loss, val_accuracy = evaluate(model, test, view, s)
        print(f"iteration {checkpoint['step']:,}: validation loss {val_loss:.4f} nats per image, "
              f"accuracy {val_accuracy:.2%} of {len(test.labels):,} test images")
        return dict(model=s.model, iters=checkpoint["step"], val_loss=val_loss,
                    val_accuracy=val_accuracy)

    data_sha256 = sha256_of(train, test)
    t = common.start_training("vision", s, model, checkpoint, "images", s.batch_size,
                              data_sha256=data_sha256, **vars(view))
    train.images, train.labels = train.images.to(s.device), train.labels.to(s.device)
    with t.interrupt:
        while t.step < s.max_iters and not t.interrupt.signal:
            t.step += 1
            images, targets = draw_batch(train, view, s, t.generator)
            loss = 0.0
            for x, y in zip(common.my_parts(images, s), common.my_parts(targets, s)):
                with common.autocast(s):
                    logits = t.forward(x)  # (B / parts, classes)
                    part_loss = F.cross_entropy(logits, y, label_smoothing=s.label_smoothing)
                t.scaler.scale(part_loss / s.grad_accum).backward()
                loss += part_loss.detach() / s.grad_accum
            if s.l2:  # by way of the gradient, as in Adam before AdamW
                penalty = s.l2 / 2 * sum(p.square().sum() for p in model.parameters())
                t.scaler.scale(penalty).backward()
            common.update(model, loss, s, t)
            if common.evaluation_due(s, t):
                with t.clock.paused():
                    val_loss, val_accuracy = evaluate(model, test, view, s)
                common.log(model, s, t, score=val_accuracy, val_loss=val_loss,
                           val_accuracy=val_accuracy)
            else:
                common.log(model, s, t)
    common.stop_if_interrupted(model, s, t)

    share = share_of_batches(train, view, s, t)
    print(f"drawing and augmenting a batch takes {share:.1%} of a step")
    logits = predict(model, test.images, view, s)
    confusion = confusion_of(logits.argmax(dim=1), test.labels, len(view.classes))
    accuracies = (confusion.diag() / confusion.sum(dim=1)).tolist()  # NaN: no test images
    accuracies = {c: None if math.isnan(a) else a for c, a in zip(view.classes, accuracies)}
    print("accuracy by class: " + common.visible(", ".join(
        f"{c} {a:.1%}" for c, a in accuracies.items() if a is not None)))
    result = common.write_result(
        argv, s, t, data=name, data_sha256=data_sha256, images=t.step * s.batch_size,
        batch_share=share, classes=view.classes, per_class_accuracy=accuracies,
        confusion=confusion.tolist())
    out = Path(s.out_dir)
    common.draw_curve(t.log, "nats per image", out / "curve.png")
    draw_predictions(test, logits, view.classes, out / "predictions.png")
    draw_where(model, test, view, s, out / "where.png")
    if s.model in ("gmlp", "amlp"):
        draw_spatial(model, s, out / "spatial.png")
    return result


if __name__ == "__main__":
    common.run(main)
