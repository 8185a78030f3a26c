"""Train a character language model on Shakespeare, and let it write.

    python train_lm.py                              trains (minutes, no GPU needed) and writes
    python train_lm.py --sample --prompt="ROMEO:"   writes by the best checkpoint
    python train_lm.py --resume                     goes on after Ctrl-C or a crash, or for longer
    python train_lm.py --model=transformer          another architecture in the same loop

Results go to out/lm. To take this script along, copy gmlp.py, mixer.py and train_common.py too.
"""
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

import train_common as common
from gmlp import GMLPLanguageModel
from mixer import EncoderLanguageModel

# Every knob of a training run. `laptop` is whole, the others list what they change. "laptop/mixer"
# is what changes with that preset and model, so that all models have equal parameters (5 %), but
# not in `nanogpt` and `classic`, which copy others.
PRESETS = {
    "laptop": dict(
        model="gmlp", toeplitz=True, positions="auto",
        seq_len=128, d_model=128, d_ffn=512, n_layers=4, n_heads=2, d_attn=64, d_token=None,
        dropout=0.0, drop_path=0.0,
        batch_size=16, replacement=False, grad_accum=1, max_iters=1200,
        eval_interval=400, log_interval=10,
        optimizer="muon", schedule="linear", learning_rate=8e-3, min_lr=0.0, warmup_iters=50,
        beta2=0.99, weight_decay=0.1, grad_clip=1.0,
        eval_chars=120_000, data=None, seed=1, dtype="auto", compile=False,
        prompt=None, max_new_tokens=500, temperature=0.8, top_k=None),
    "laptop/mixer": dict(d_ffn=384),
    "laptop/transformer": dict(n_layers=2, n_heads=4),
    "laptop/amlp": dict(d_ffn=328),
    "fast": dict(
        n_layers=2, batch_size=8, learning_rate=1.6e-2, warmup_iters=10, max_iters=220,
        eval_interval=220),
    "fast/mixer": dict(d_ffn=384),
    "fast/transformer": dict(d_ffn=480, n_layers=1, n_heads=4),
    "fast/amlp": dict(d_ffn=328),
    "small": dict(
        seq_len=256, d_model=192, d_ffn=768, n_layers=6, n_heads=4, dropout=0.1, batch_size=8,
        learning_rate=6e-3, weight_decay=0.7, max_iters=5000, eval_interval=500),
    "small/mixer": dict(d_ffn=576),
    "small/amlp": dict(d_ffn=576),
    "small/transformer": dict(n_layers=3),
    "gpu": dict(
        seq_len=256, d_model=384, d_ffn=1536, n_layers=10, n_heads=8, dropout=0.2, batch_size=64,
        learning_rate=2e-3, weight_decay=2.0, max_iters=5000, eval_interval=250, warmup_iters=200),
    "gpu/mixer": dict(d_ffn=1152),
    "gpu/amlp": dict(d_ffn=1328),
    "gpu/transformer": dict(n_layers=5),
    # nanoGPT's recipe for a CPU, published as 1.88: the yardstick
    "nanogpt": dict(
        model="transformer", seq_len=64, d_model=128, d_ffn=512, n_layers=4, n_heads=4,
        batch_size=12, replacement=True, max_iters=2000, eval_interval=250, log_interval=25,
        optimizer="adamw", schedule="cosine", learning_rate=1e-3, min_lr=1e-4, warmup_iters=100,
        dtype="float32"),
    # labml.ai's annotated gMLP experiment, 128 passes over the text (Adam is AdamW without decay)
    "classic": dict(
        toeplitz=False, positions="sinusoidal", seq_len=256, d_model=512, d_ffn=2048, n_layers=6,
        batch_size=32, max_iters=15_700, optimizer="adamw", schedule="noam",
        learning_rate=1.0, warmup_iters=2000, beta2=0.999, weight_decay=0.0, eval_interval=1000),
}


def parse_flags(argv):
    models = ("gmlp", "amlp", "mixer", "transformer")
    parser = common.training_parser("lm", __doc__, PRESETS, models)
    add = parser.add_argument
    add("--sample", **common.SWITCH, help="only write, by OUT_DIR/best.pt")
    add("--prompt", help="what the writing starts from")
    add("--max_new_tokens", type=common.number(int, 0), help="characters to write")
    add("--temperature", type=common.RATE, help="0 takes the likeliest character")
    add("--top_k", type=common.COUNT, help="draw among the k likeliest characters only")
    return common.read_settings(parser, PRESETS, describe_model, argv)


def describe_model(s, vocab_size):
    """The model's class, and the arguments that it is built from."""
    kind = GMLPLanguageModel if s.model in ("gmlp", "amlp") else EncoderLanguageModel
    return kind, dict(vocab_size=vocab_size, seq_len=s.seq_len, causal=True,
                      **common.model_args(s))


def initialise_as_nanogpt(model, n_layers):
    """GPT-2's weights at the start: normal with deviation 0.02, smaller where a residual branch
    ends, and biases of 0. PyTorch's own, which the other presets keep, learn faster here."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif "norm" not in name:
            ends_branch = name.endswith(("out.weight", "fc2.weight"))
            nn.init.normal_(p, std=0.02 / (2 * n_layers) ** 0.5 if ends_branch else 0.02)


@torch.no_grad()
def evaluate(model, ids, s):
    """Mean loss in nats per character over ids (length,), cut into consecutive windows of seq_len,
    the short last one included; a character sees what stands before it in its window. While
    training, of more than eval_chars an even choice of windows."""
    model.eval()
    total, count = 0.0, 0
    most = math.inf if s.eval else s.eval_chars
    for rows in common.windows_of(ids, s.seq_len + 1, s.seq_len, most):
        rows = rows.to(s.device)  # (rows, seq_len + 1), or fewer in the last
        with common.autocast(s):
            logits = model(rows[:, :-1]).flatten(0, 1)  # (tokens, vocab_size)
        total += F.cross_entropy(logits.float(), rows[:, 1:].flatten(), reduction="sum").item()
        count += rows[:, 1:].numel()
    return total / count


def prompt_of(s, vocabulary):
    """--prompt as ids (n,); by default a line break, or else the first of the vocabulary."""
    default = "\n" if "\n" in vocabulary else vocabulary[:1]
    return common.typed(default if s.prompt is None else s.prompt, vocabulary, "--prompt")


def write(model, prompt, vocabulary, s):
    """Print the prompt and, letter by letter, what the model makes of it. Returns the text."""
    model.eval()
    ids, generator = prompt[None].long().to(s.device), torch.Generator().manual_seed(s.seed)
    tokens = model.stream(ids, temperature=s.temperature, top_k=s.top_k, generator=generator)
    text = [vocabulary[i] for i in prompt.tolist()]
    print(common.visible("".join(text), keep="\n\t"), end="", flush=True)
    with common.autocast(s):
        for token in itertools.islice(tokens, s.max_new_tokens):  # (1, 1)
            text.append(vocabulary[token.item()])
            print(common.visible(text[-1], keep="\n\t"), end="", flush=True)
    print()
    return "".join(text)


def main(argv=()):
    s, checkpoint = parse_flags(argv)
    if s.prompt == "":
        common.fail('--prompt is empty: give a character or more, for instance --prompt="ROMEO:"')
    if s.sample:  # needs no data
        vocabulary = checkpoint["vocabulary"]
        model = common.build(s, checkpoint, *describe_model(s, len(vocabulary)))
        text = write(model, prompt_of(s, vocabulary), vocabulary, s)
        return dict(model=s.model, iters=checkpoint["step"], sample=text)

    corpus = common.load_corpus(s, checkpoint)
    model = common.build(s, checkpoint, *describe_model(s, len(corpus.vocabulary)))
    if s.eval:
        val_loss = evaluate(model, corpus.val_ids, s)
        print(f"iteration {checkpoint['step']:,}: validation loss {val_loss:.4f} nats per "
              f"character (perplexity {math.exp(val_loss):.2f}), window {s.seq_len}")
        return dict(model=s.model, iters=checkpoint["step"], window=s.seq_len, val_loss=val_loss)
    prompt = prompt_of(s, corpus.vocabulary)
    if s.preset == "nanogpt" and s.model == "transformer" and not checkpoint:
        initialise_as_nanogpt(model, s.n_layers)
    train_ids = corpus.train_ids.to(s.device)  # (characters,)
    with common.training(s, model, checkpoint, vocabulary=corpus.vocabulary,
                         data_sha256=corpus.sha256) as run:
        for step in run.steps():
            batch = common.draw_windows(train_ids, s.seq_len + 1, step, s)  # (B, seq_len + 1)
            for part in run.parts(batch):  # (B / parts, seq_len + 1)
                with common.autocast(s):
                    logits = run.forward(part[:, :-1])  # (B / parts, seq_len, vocab_size)
                    loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                run.backward(loss / s.grad_accum)
            run.update()
            if run.evaluation_due():
                with run.paused():
                    run.figures = dict(val_loss=evaluate(model, corpus.val_ids, s))  # saved next

        print()
        sample = write(model, prompt, corpus.vocabulary, s)
        if common.can_draw():
            common.draw_curve(run.log, "nats per character", f"{s.out_dir}/curve.png")
            if s.model in ("gmlp", "amlp"):
                common.draw_gates(model, f"{s.out_dir}/spatial.png")
        return run.write_result(
            argv, data=corpus.name, data_sha256=corpus.sha256, window=s.seq_len,
            tokens=run.step * s.batch_size * s.seq_len, half_reach=common.half_reach(model),
            sample=sample)


if __name__ == "__main__":
    common.run_script(main)
