"""Train a masked language model on Shakespeare: it reads both ways and fills in blanks.

    python train_mlm.py                                  trains (minutes, no GPU needed)
    python train_mlm.py --fill="To be, or n__ to be"     fills the blanks of a line
    python train_mlm.py --model=gmlp                     another architecture in the same loop

Results go to out/mlm. To take this script along, copy gmlp.py, mixer.py and train_common.py too.
"""
from pathlib import Path

import torch
import torch.nn.functional as F

import train_common as common
from gmlp import GMLPLanguageModel
from mixer import EncoderLanguageModel

IGNORE = -100  # the target of a position that does not count, cross_entropy's default
BLANK = "_"  # stands for [MASK] in what we print, and in --fill

# Every knob of a training run. `laptop` is whole, the others list what they change. "laptop/amlp"
# is what changes with that preset and model: all models of a preset have equal parameters (5 %).
PRESETS = {
    "laptop": dict(
        model="mixer", toeplitz=True, positions="auto", mask_prob=0.15,
        seq_len=128, d_model=128, d_ffn=512, n_layers=4, n_heads=2, d_attn=64, d_token=None,
        dropout=0.0, drop_path=0.0,
        batch_size=16, grad_accum=1, max_iters=1200, eval_interval=400, log_interval=10,
        optimizer="muon", schedule="linear", learning_rate=8e-3, min_lr=0.0, warmup_iters=50,
        beta2=0.99, weight_decay=0.1, grad_clip=1.0,
        data=None, seed=1, dtype="auto", compile=False),
    "laptop/mixer": dict(d_ffn=384),
    "laptop/amlp": dict(d_ffn=328),
    "laptop/transformer": dict(n_layers=2, n_heads=4, learning_rate=2e-3),
    "gpu": dict(
        model="gmlp", seq_len=256, d_model=384, d_ffn=1536, n_layers=10, n_heads=8, dropout=0.1,
        batch_size=64, learning_rate=2e-3, max_iters=5000, eval_interval=250, warmup_iters=200),
    "gpu/mixer": dict(d_ffn=1152),
    "gpu/amlp": dict(d_ffn=1328),
    "gpu/transformer": dict(n_layers=5),
    # labml.ai's annotated MLP-Mixer experiment, 1,024 passes (Adam is AdamW without decay)
    "classic": dict(
        toeplitz=False, positions="sinusoidal", seq_len=32, d_model=128, d_ffn=256, d_token=128,
        n_layers=6, dropout=0.1, batch_size=64, max_iters=502_000, optimizer="adamw",
        schedule="noam", learning_rate=1.0, warmup_iters=2000, beta2=0.999, weight_decay=0.0,
        eval_interval=2000, log_interval=100),
}


def parse_flags(argv):
    parser = common.Parser(__doc__)
    models = ("mixer", "gmlp", "amlp", "transformer")
    common.add_common_flags(parser, PRESETS, models, "mlm")
    add = parser.add_argument
    add("--seq_len", type=common.COUNT, help="window: characters that the model sees at once")
    add("--mask_prob", type=common.number(float, 0, 1), help="share of the positions to predict")
    add("--fill", help=f"only fill the blanks ({BLANK}) of this text, from OUT_DIR/best.pt")
    return common.read_settings(parser, PRESETS, argv, "mlm", dict(vocabulary=str, data_sha256=str))


def build_model(s, vocab_size):
    sizes = vocab_size, s.seq_len, s.d_model, s.d_ffn, s.n_layers
    auto = "learned" if s.model == "transformer" else None  # the others need none
    positions = {"auto": auto, "none": None}.get(s.positions, s.positions)
    shared = dict(causal=False, positions=positions, dropout=s.dropout, drop_path=s.drop_path)
    if s.model in ("gmlp", "amlp"):
        return GMLPLanguageModel(*sizes, toeplitz=s.toeplitz, n_heads=s.n_heads,
                                 d_attn=s.d_attn if s.model == "amlp" else None, **shared)
    token_mixer = "mixer" if s.model == "mixer" else "attention"
    return EncoderLanguageModel(*sizes, token_mixer=token_mixer, toeplitz=s.toeplitz,
                                d_token=s.d_token, n_heads=s.n_heads, **shared)


def mask_tokens(ids, n_chars, mask_id, *, mask_prob=0.15, generator=None):
    """BERT's masking (Devlin et al. 2018, arXiv:1810.04805, section 3.1): ids of any shape ->
    (inputs, targets) of that shape, ids untouched.

    Each position is chosen with mask_prob. Of the chosen, 80 % are shown as mask_id, 10 % as a
    random character (ids 0 to n_chars - 1), 10 % as they are. targets is IGNORE where not chosen.
    """
    u = torch.rand(ids.shape, generator=generator).to(ids.device)
    characters = torch.randint(n_chars, ids.shape, generator=generator).to(ids.device)
    swapped = (0.8 * mask_prob <= u) & (u < 0.9 * mask_prob)
    inputs = torch.where(swapped, characters, ids).masked_fill(u < 0.8 * mask_prob, mask_id)
    return inputs, ids.masked_fill(u >= mask_prob, IGNORE)


def masked_loss(logits, targets):
    """logits (B, n, vocab_size), targets (B, n) -> the sum of the losses where targets count, in
    nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE,
                           reduction="sum")


def mask_validation(ids, n_chars, s):
    """(inputs, targets) of all of ids (length,), the same in every run."""
    masked = mask_tokens(ids, n_chars, n_chars, mask_prob=s.mask_prob,
                         generator=torch.Generator().manual_seed(0))
    if (masked[1] == IGNORE).all():  # a loss of 0, which would be the best for ever
        common.fail(f"--mask_prob={s.mask_prob} chooses none of the {len(ids):,} characters to "
                    "validate: raise it, or give more text")
    return masked


@torch.no_grad()
def evaluate(model, inputs, targets, s):
    """(loss, accuracy) on the chosen positions of what mask_validation returned, cut into
    consecutive windows of seq_len, the short last one included."""
    was_training = model.training
    model.eval()
    total = correct = 0.0
    for x, y in common.windows_of(inputs, targets, s.seq_len):  # (rows, seq_len) each
        y = y.to(s.device)
        with common.autocast(s):
            logits = model(x.to(s.device))  # (B, n, vocab_size)
        total += masked_loss(logits, y).item()
        correct += (logits.argmax(dim=-1) == y).sum().item()
    model.train(was_training)
    count = (targets != IGNORE).sum().item()
    return total / count, correct / count


@torch.no_grad()
def guess(model, inputs, n_chars, s):
    """inputs (n,), n_chars where masked -> (n,), with the likeliest character in those places."""
    was_training = model.training
    model.eval()
    with common.autocast(s):
        logits = model(inputs[None].to(s.device))[0].cpu()  # (n, V)
    model.train(was_training)
    best = logits[:, :n_chars].argmax(dim=-1)  # a character, never [MASK]
    return torch.where(inputs == n_chars, best, inputs)


def show_guesses(model, ids, vocabulary, s):
    """Three lines of ids (length,): with letters masked, as guessed, and as they are; / stands for
    a line break or another control character."""
    length, n_chars = min(72, s.seq_len), len(vocabulary)
    generator = torch.Generator().manual_seed(s.seed)
    symbols = [c if common.visible(c) == c else "/" for c in vocabulary] + [BLANK]
    for start in (0, (len(ids) - s.seq_len) // 2, len(ids) - s.seq_len):
        truth = ids[start: start + s.seq_len]
        masked = torch.rand(truth.shape, generator=generator) < s.mask_prob
        inputs = truth.masked_fill(masked, n_chars)
        guessed = guess(model, inputs, n_chars, s)
        print()
        for name, line in (("masked", inputs), ("guess", guessed), ("truth", truth)):
            print(f"{name:7}", "".join(symbols[i] for i in line[:length].tolist()))
        print("+ right", "".join(" " if not m else "+" if g == t else "-" for m, g, t in
                                 zip(masked[:length], guessed[:length], truth[:length])))


def main(argv=None):
    s, checkpoint = parse_flags(argv)
    if s.fill is not None and BLANK not in s.fill:
        common.fail(f'--fill has no blank to fill: mark each with {BLANK}, "To be, or n__ to be"')
    if s.mask_prob == 0:
        common.fail("--mask_prob=0 leaves nothing to predict: give more than 0")
    common.check_sizes(build_model, s, 2)

    if s.fill:  # needs no data
        vocabulary = checkpoint["vocabulary"]
        inputs = common.encode(s.fill, vocabulary + BLANK, "--fill")  # a blank becomes [MASK]
        model = common.new_model(build_model, s, len(vocabulary) + 1, checkpoint=checkpoint)
        try:
            filled = guess(model, inputs, len(vocabulary), s)
        except ValueError as error:  # longer than the window
            common.fail(f"--fill: {error}")
        text = "".join(vocabulary[i] for i in filled.tolist())
        print(common.visible(text, keep="\n\t"))
        return dict(model=s.model, iters=checkpoint["step"], fill=text)

    corpus = common.load_corpus(s, checkpoint)
    n_chars = mask_id = len(corpus.vocabulary)  # ids 0 to n_chars - 1 are the characters
    validation = mask_validation(corpus.val_ids, n_chars, s)
    model = common.new_model(build_model, s, n_chars + 1, checkpoint=checkpoint)

    if s.eval:
        val_loss, val_accuracy = evaluate(model, *validation, s)
        print(f"iteration {checkpoint['step']:,}: validation loss {val_loss:.4f} nats per masked "
              f"character (perplexity {torch.tensor(val_loss).exp():.2f}), accuracy "
              f"{val_accuracy:.2%}, window {s.seq_len}")
        return dict(model=s.model, iters=checkpoint["step"], val_loss=val_loss,
                    val_accuracy=val_accuracy)

    t = common.start_training("mlm", s, model, checkpoint, "tokens", s.batch_size * s.seq_len,
                              vocabulary=corpus.vocabulary, data_sha256=corpus.sha256)
    windows = corpus.train_ids.to(s.device).unfold(0, s.seq_len, 1)  # (starts, seq_len)
    with t.interrupt:
        while t.step < s.max_iters and not t.interrupt.signal:
            t.step += 1
            starts = torch.randint(len(windows), (s.batch_size,), generator=t.generator)
            inputs, targets = mask_tokens(windows[starts.to(s.device)], n_chars, mask_id,
                                          mask_prob=s.mask_prob, generator=t.generator)
            count = (targets != IGNORE).sum().clamp(min=1)  # with none chosen the loss is 0
            loss = 0.0
            for x, y in zip(common.my_parts(inputs, s), common.my_parts(targets, s)):
                with common.autocast(s):
                    logits = t.forward(x)  # (B / parts, seq_len, vocab_size)
                part_loss = masked_loss(logits, y) / count * common.WORLD  # DDP divides by it
                t.scaler.scale(part_loss).backward()
                loss += part_loss.detach()
            common.update(model, loss, s, t)
            if common.evaluation_due(s, t):
                with t.clock.paused():
                    val_loss, val_accuracy = evaluate(model, *validation, s)
                common.log(model, s, t, score=-val_loss, val_loss=val_loss,
                           val_accuracy=val_accuracy)
            else:
                common.log(model, s, t)
    common.stop_if_interrupted(model, s, t)

    show_guesses(model, corpus.val_ids, corpus.vocabulary, s)
    result = common.write_result(
        argv, s, t, data=corpus.name, data_sha256=corpus.sha256, window=s.seq_len,
        tokens=t.step * s.batch_size * s.seq_len)
    common.draw_curve(t.log, "nats per masked character", Path(s.out_dir) / "curve.png")
    if s.model in ("gmlp", "amlp"):
        matrices = [block.sgu.matrix() for block in model.trunk.blocks]  # (h, n, n) each
        common.draw_spatial(matrices, Path(s.out_dir) / "spatial.png")
    return result


if __name__ == "__main__":
    common.run(main)
