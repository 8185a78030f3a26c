"""Train a masked language model on Shakespeare: it reads both ways and fills in blanks.

    python train_mlm.py                                  trains (minutes, no GPU needed)
    python train_mlm.py --fill="To be, or n__ to be"     fills the blanks of a line
    python train_mlm.py --model=gmlp                     another architecture in the same loop

Results go to out/mlm. To take this script along, copy gmlp.py, mixer.py and train_common.py too.
"""
import math

import torch
import torch.nn.functional as F

import train_common as common
from gmlp import GMLPLanguageModel
from mixer import EncoderLanguageModel

IGNORE = -100  # the target of a position that does not count, cross_entropy's default
BERT = 0.15  # the share of positions that BERT predicts: we validate by it
BLANK = "_"  # stands for [MASK] in what we print, and in --fill

# Every knob of a training run. `laptop` is whole, the others list what they change. "laptop/amlp"
# is what changes with that preset and model, so that all models have equal parameters (5 %), but
# not in `classic`, which copies others. To mask twice as much as BERT teaches more (Wettig et al.
# 2022, arXiv:2202.08005); all validate with BERT's share.
PRESETS = {
    "laptop": dict(
        model="mixer", toeplitz=True, positions="auto", mask_prob=0.3,
        seq_len=128, d_model=128, d_ffn=512, n_layers=4, n_heads=2, d_attn=64, d_token=None,
        dropout=0.0, drop_path=0.0,
        batch_size=16, replacement=False, grad_accum=1, max_iters=1200,
        eval_interval=400, log_interval=10,
        optimizer="muon", schedule="linear", learning_rate=8e-3, min_lr=0.0, warmup_iters=50,
        beta2=0.99, weight_decay=0.1, grad_clip=1.0,
        eval_chars=120_000, data=None, seed=1, dtype="auto", compile=False),
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
        toeplitz=False, positions="sinusoidal", mask_prob=BERT,
        seq_len=32, d_model=128, d_ffn=256, d_token=128, n_layers=6, dropout=0.1, batch_size=64,
        max_iters=502_000, optimizer="adamw", schedule="noam", learning_rate=1.0,
        warmup_iters=2000, beta2=0.999, weight_decay=0.0, eval_interval=2000, log_interval=100),
}


def parse_flags(argv):
    models = ("mixer", "gmlp", "amlp", "transformer")
    parser = common.training_parser("mlm", __doc__, PRESETS, models)
    add = parser.add_argument
    add("--mask_prob", type=common.number(float, 1e-6, 1), help="share of positions to predict in "
        f"training; validation has BERT's {BERT}")
    add("--fill", help=f"only fill the blanks ({BLANK}) of this text, by OUT_DIR/best.pt")
    return common.read_settings(parser, PRESETS, describe_model, argv)


def describe_model(s, vocab_size):
    """The model's class, and the arguments that it is built from."""
    kind = GMLPLanguageModel if s.model in ("gmlp", "amlp") else EncoderLanguageModel
    return kind, dict(vocab_size=vocab_size, seq_len=s.seq_len, causal=False,
                      **common.model_args(s))


def mask_tokens(ids, n_chars, mask_id, *, mask_prob=BERT, generator=None):
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
    """(inputs, targets) of all of ids (length,), alike in every run, with BERT's share masked."""
    masked = mask_tokens(ids.long(), n_chars, n_chars, generator=torch.Generator().manual_seed(0))
    parts = common.windows_of(masked[1], s.seq_len, s.seq_len, math.inf if s.eval else s.eval_chars)
    if all((targets == IGNORE).all() for targets in parts):  # a loss of 0: the best for ever
        common.fail(f"none of the {len(ids)} characters to validate is masked: give more text")
    return masked


@torch.no_grad()
def evaluate(model, inputs, targets, s):
    """(loss, accuracy) on the chosen positions of what mask_validation returned, cut into
    consecutive windows of seq_len, the short last one included. While training, of more than
    eval_chars an even choice of windows."""
    model.eval()
    total, correct, count, most = 0.0, 0, 0, math.inf if s.eval else s.eval_chars
    for x, y in zip(*(common.windows_of(ids, s.seq_len, s.seq_len, most)
                      for ids in (inputs, targets))):
        y = y.to(s.device)  # (rows, seq_len), or fewer in the last
        with common.autocast(s):
            logits = model(x.to(s.device))  # (rows, seq_len, vocab_size)
        total += masked_loss(logits, y).item()
        correct += (logits.argmax(dim=-1) == y).sum().item()
        count += (y != IGNORE).sum().item()
    return total / max(1, count), correct / max(1, count)


@torch.no_grad()
def guess(model, inputs, n_chars, s):
    """inputs (n,), n_chars where masked -> (n,), with the likeliest character in those places."""
    model.eval()
    with common.autocast(s):
        logits = model(inputs[None].to(s.device))[0].cpu()  # (n, V)
    best = logits[:, :n_chars].argmax(dim=-1)  # a character, never [MASK]
    return torch.where(inputs == n_chars, best, inputs)


def show_guesses(model, ids, vocabulary, s):
    """Three lines of ids (length,): with letters masked, as guessed, and as they are; / stands for
    a line break or another control character."""
    n_chars, generator = len(vocabulary), torch.Generator().manual_seed(s.seed)
    symbols = [c if common.visible(c) == c else "/" for c in vocabulary] + [BLANK]
    for start in (0, (len(ids) - s.seq_len) // 2, len(ids) - s.seq_len):
        truth = ids[start: start + s.seq_len].long()
        masked = torch.rand(truth.shape, generator=generator) < BERT
        inputs = truth.masked_fill(masked, n_chars)
        guessed = guess(model, inputs, n_chars, s)
        print()
        for name, line in (("masked", inputs), ("guess", guessed), ("truth", truth)):
            print(f"{name:7}", "".join(symbols[i] for i in line[:72].tolist()))
        print("+ right", "".join(" " if not m else "+" if g == t else "-" for m, g, t in
                                 zip(masked[:72], guessed[:72], truth[:72])))


def main(argv=()):
    s, checkpoint = parse_flags(argv)
    if s.fill is not None and BLANK not in s.fill:
        common.fail(f'--fill has no blank to fill: mark each with {BLANK}, "To be, or n__ to be"')
    if s.fill:  # needs no data
        vocabulary = checkpoint["vocabulary"]
        model = common.build(s, checkpoint, *describe_model(s, len(vocabulary) + 1))
        inputs = common.typed(s.fill, vocabulary + BLANK, "--fill").long()  # a blank is [MASK]
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
    model = common.build(s, checkpoint, *describe_model(s, n_chars + 1))
    if s.eval:
        val_loss, val_accuracy = evaluate(model, *validation, s)
        print(f"iteration {checkpoint['step']:,}: validation loss {val_loss:.4f} nats per masked "
              f"character (perplexity {math.exp(val_loss):.2f}), accuracy {val_accuracy:.2%}, "
              f"window {s.seq_len}")
        return dict(model=s.model, iters=checkpoint["step"], window=s.seq_len, val_loss=val_loss,
                    val_accuracy=val_accuracy)

    train_ids = corpus.train_ids.to(s.device)  # (characters,)
    with common.training(s, model, checkpoint, vocabulary=corpus.vocabulary,
                         data_sha256=corpus.sha256) as run:
        for step in run.steps():
            batch = common.draw_windows(train_ids, s.seq_len, step, s)  # (B, seq_len)
            inputs, targets = mask_tokens(batch, n_chars, mask_id, mask_prob=s.mask_prob)
            count = (targets != IGNORE).sum().clamp(min=1)  # with none chosen the loss is 0
            for x, y in zip(run.parts(inputs), run.parts(targets)):  # (B / parts, seq_len) each
                with common.autocast(s):
                    logits = run.forward(x)  # (B / parts, seq_len, vocab_size)
                run.backward(masked_loss(logits, y) / count * common.WORLD)  # DDP divides by it
            run.update()
            if run.evaluation_due():
                with run.paused():
                    loss, accuracy = evaluate(model, *validation, s)
                run.figures = dict(val_loss=loss, val_accuracy=accuracy)

        show_guesses(model, corpus.val_ids, corpus.vocabulary, s)
        if common.can_draw():
            common.draw_curve(run.log, "nats per masked character", f"{s.out_dir}/curve.png")
            if s.model in ("gmlp", "amlp"):
                common.draw_gates(model, f"{s.out_dir}/spatial.png")
        return run.write_result(
            argv, data=corpus.name, data_sha256=corpus.sha256, window=s.seq_len,
            tokens=run.step * s.batch_size * s.seq_len, half_reach=common.half_reach(model))


if __name__ == "__main__":
    common.run_script(main)
