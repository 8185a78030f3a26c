"""gMLP, a network without attention ("Pay Attention to MLPs", Liu et al. 2021, arXiv:2105.08050).

    Z      = gelu(norm(X) U)           X (B, n, d), U (d, f), Z (B, n, f)      each token alone
    Z1, Z2 = split(Z)                  (B, n, f/2) each
    S      = Z1 * (W norm(Z2) + b)     W (n, n), b (n, 1), S (B, n, f/2)       where tokens meet
    Y      = X + S V                   V (f/2, d), Y (B, n, d)                 each token alone

B batch, n tokens, d = d_model, f = d_ffn (the width before the split). Each norm is a LayerNorm of
its own, * goes element by element, U and V have biases. W starts near 0 and b at 1, so that at
first S is about Z1 and no token hears another; training finds out who should listen to whom. Causal
models keep W's lower triangle. The gate costs n^2 * f/2 multiply-adds a layer: at f = 4d as many as
attention's 2 n^2 * d, but there is no n x n matrix for each sample.

Beyond the paper: `n_heads` gives each group of c = f/(2h) channels a W and b of its own, h in all;
`toeplitz` lets W[i, j] depend on i - j alone and b on the head alone (the paper saw W become so on
text, and constrained it so in some experiments); a cache for generation. Imports torch alone.
"""
import torch
import torch.nn.functional as F
from torch import nn


class GMLPBlock(nn.Module):
    """X + S V (paper, figure 1). With d_attn, the width of a tiny attention, it is aMLP (section
    4.3): S = Z1 * (W norm(Z2) + b + attention(norm(X))).
    dropout acts on what the block adds, element by element; drop_path drops it for whole samples.
    eps is that of norm(X); timm's weights want 1e-6 here, and 1e-5 in the gate, which has no other.
    """

    def __init__(self, d_model, d_ffn, seq_len, *, causal=False, toeplitz=False, n_heads=1,
                 d_attn=None, dropout=0.0, drop_path=0.0, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(d_model, eps)
        self.proj_in = nn.Linear(d_model, d_ffn)  # U
        self.sgu = SpatialGatingUnit(
            d_ffn, seq_len, causal=causal, toeplitz=toeplitz, n_heads=n_heads)
        self.proj_out = nn.Linear(d_ffn // 2, d_model)  # V
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)
        window = seq_len if self.sgu.unbounded else None  # attention looks as far as the gate
        self.attn = None if d_attn is None else TinyAttention(
            d_model, d_ffn // 2, d_attn, causal=causal, window=window)

    def forward(self, x, mask=None, cache=None):
        """x (B, n, d) -> (B, n, d); mask and cache as in SpatialGatingUnit."""
        self.sgu.check(x, mask, cache)  # before attention remembers what the gate refuses
        normed = self.norm(x)
        z = F.gelu(self.proj_in(normed))  # (B, n, f)
        attended = None if self.attn is None else self.attn(normed, mask, cache)  # (B, n, f/2)
        s = self.sgu(z, mask, attended, cache)  # (B, n, f/2)
        return x + self.drop_path(self.dropout(self.proj_out(s)))  # (B, n, d)


class SpatialGatingUnit(nn.Module):
    """S = Z1 * (W norm(Z2) + b) (paper, section 2.1).

    seq_len is the largest n, or a grid (rows, columns) of which the n tokens are a prefix in raster
    order. toeplitz: W holds one number per offset i - j; on a line of tokens (not a grid) n is then
    unbounded, and offsets of seq_len or more weigh nothing. W starts within init_eps / n of 0.
    """

    def __init__(self, d_ffn, seq_len, *, causal=False, toeplitz=False, n_heads=1, init_eps=1e-3):
        super().__init__()
        self.grid = seq_len if isinstance(seq_len, (tuple, list)) else None
        self.seq_len = n = seq_len[0] * seq_len[1] if self.grid else seq_len
        self.unbounded = toeplitz and not self.grid
        if n < 1 or n_heads < 1:
            raise ValueError(f"seq_len = {n} and n_heads = {n_heads} must be 1 or more")
        if d_ffn % (2 * n_heads):
            raise ValueError(f"d_ffn = {d_ffn} is no multiple of 2 * n_heads = {2 * n_heads}")
        self.causal, self.toeplitz, self.n_heads = causal, toeplitz, n_heads
        self.norm = nn.LayerNorm(d_ffn // 2)
        if not toeplitz:
            shape = (n_heads, n, n)
        elif self.grid:
            shape = (n_heads, (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1))
        else:
            shape = (n_heads, n if causal else 2 * n - 1)
        self.W = nn.Parameter(torch.empty(shape).uniform_(-init_eps / n, init_eps / n))
        self.b = nn.Parameter(torch.ones(n_heads, 1 if toeplitz else n))

    def forward(self, z, mask=None, gate_residual=None, cache=None):
        """z (B, n, f) -> (B, n, f/2).

        mask, boolean (n, n) or (B, n, n): row i may look at column j. gate_residual (B, n, f/2) is
        added to the gate. cache, a dict, for causal gates: z follows the tokens it remembers, and
        joins them. ValueError for a wrong n, mask or cache, which then stays as it was.
        """
        self.check(z, mask, cache)
        z1, z2 = z.chunk(2, dim=-1)  # (B, n, f/2) each
        keep = self.seq_len - 1 if self.unbounded else None  # no token looks back farther
        z2 = remember(cache, "z2", self.norm(z2), keep)  # (B, total, f/2), total = past + n
        total, past = z2.shape[1], z2.shape[1] - z1.shape[1]  # past: 0 without a cache
        W = self.matrix(total, past)  # (h, n, total)
        b = self.b if self.toeplitz else self.b[:, past:total]  # (h, 1) or (h, n)
        if mask is not None:
            W = W * mask.unsqueeze(-3)  # (h, n, n) or (B, h, n, n)
        z2 = z2.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, h, total, c)
        gate = W @ z2 + b.unsqueeze(-1)  # (B, h, n, c)
        gate = gate.transpose(1, 2).flatten(2)  # (B, n, f/2)
        if gate_residual is not None:
            gate = gate + gate_residual
        return z1 * gate

    def check(self, x, mask, cache):
        """ValueError unless the gate takes x (B, n, ...) with this mask and cache."""
        past = check_inputs(x, mask, cache, "z2", self.causal)
        self.check_length(past + x.shape[1])

    def check_length(self, n):
        if n < 1 or (n > self.seq_len and not self.unbounded):
            raise ValueError(f"got {n} tokens, the gate takes 1 to seq_len = {self.seq_len}")

    def matrix(self, n=None, past=0):
        """W as applied to n tokens (default seq_len), without its first `past` rows: (h, n - past,
        n). ValueError for an n that the gate does not take."""
        n = self.seq_len if n is None else n
        self.check_length(n)
        if self.unbounded:
            return toeplitz_1d(self.W, n, self.seq_len, self.causal, past)
        W = toeplitz_2d(self.W, *self.grid) if self.toeplitz else self.W  # (h, seq_len, seq_len)
        W = W[:, past:n, :n]  # (h, n - past, n)
        return W.tril(past) if self.causal else W


def toeplitz_1d(w, n, seq_len, causal, past):
    """w (h, seq_len) or (h, 2 seq_len - 1), by rising offset i - j -> (h, n - past, n), where row i
    runs from offset i down to i - n + 1.

    By padding (a negative pad crops) and unfold rather than an index, whose backward adds in no
    fixed order on threads.
    """
    w = F.pad(w, (n - 1 if causal else n - seq_len, n - seq_len))  # (h, 2n - 1): 1 - n to n - 1
    return w.unfold(-1, n, 1)[:, past:].flip(-1)  # (h, n - past, n)


def toeplitz_2d(w, rows, columns):
    """w (h, (2 rows - 1) (2 columns - 1)), by rising offset of row and column -> (h, seq_len,
    seq_len)."""
    w = w.unflatten(-1, (2 * rows - 1, 2 * columns - 1))  # (h, 2 rows - 1, 2 columns - 1)
    W = w.unfold(1, rows, 1).unfold(2, columns, 1).flip(-2, -1)  # (h, rows, columns, rows, columns)
    return W.flatten(3).flatten(1, 2)  # (h, seq_len, seq_len)


def remember(cache, name, rows, keep):
    """Append rows (B, n, c) to the past ones (B, m, c) in the cache, which keeps the last `keep` of
    all (None: all of them). Returns (B, m + n, c); without a cache, rows."""
    if cache is None:
        return rows
    if name in cache:
        rows = torch.cat([cache[name], rows], dim=1)  # (B, m + n, c)
    cache[name] = rows if keep is None else rows[:, max(0, rows.shape[1] - keep):]
    return rows


def check_inputs(x, mask, cache, name, causal):
    """The number of tokens whose rows the cache holds under name. ValueError unless mask, None or
    boolean, says for x (B, n, ...) who may look at whom, and cache, None or a dict, fits x."""
    B, n = x.shape[:2]
    if mask is not None and cache is not None:
        raise ValueError("mask and cache exclude each other: a cached model sees all of the past")
    if mask is not None and (mask.dtype != torch.bool or mask.shape not in ((n, n), (B, n, n))):
        raise ValueError(f"mask must be boolean of shape {(n, n)} or {(B, n, n)}, "
                         f"got {mask.dtype} of shape {tuple(mask.shape)}")
    if cache is not None and not causal:
        raise ValueError("a cache needs causal=True: here earlier tokens see later ones")
    rows = (cache or {}).get(name, x[:, :0])  # (B, m, ...)
    if len(rows) != B:
        raise ValueError(f"got a batch of {B}, the cache remembers one of {len(rows)}")
    return rows.shape[1]


class TinyAttention(nn.Module):
    """One small attention head (paper, section 4.3), to be added to the gate.

    causal: row i sees columns j <= i. window: |i - j| < window, the band of a Toeplitz gate.
    """

    def __init__(self, d_in, d_out, d_attn=64, *, causal=False, window=None):
        super().__init__()
        self.causal, self.window, self.d_attn = causal, window, d_attn
        self.qkv = nn.Linear(d_in, 3 * d_attn, bias=False)
        self.out = nn.Linear(d_attn, d_out)

    def forward(self, x, mask=None, cache=None):
        """x (B, n, d_in) -> (B, n, d_out); mask and cache as in SpatialGatingUnit.

        A row that may look at nothing gets zero attention: the bias of out is left.
        """
        check_inputs(x, mask, cache, "k", self.causal)
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (B, n, d_attn) each
        keep = None if self.window is None else self.window - 1
        k = remember(cache, "k", k, keep)  # (B, total, d_attn)
        v = remember(cache, "v", v, keep)  # (B, total, d_attn)
        n, total = q.shape[1], k.shape[1]
        columns = torch.arange(total, device=x.device)
        offsets = columns[total - n:, None] - columns  # (n, total): i - j
        window = total if self.window is None else self.window
        if self.causal:
            visible = (0 <= offsets) & (offsets < window)
        else:
            visible = offsets.abs() < window
        if mask is not None:
            visible = visible & mask  # (n, n) or (B, n, n)
        blind = ~visible.any(dim=-1, keepdim=True)  # (n, 1) or (B, n, 1): softmax would give NaN
        scores = q * self.d_attn**-0.5 @ k.mT  # (B, n, total); scaled late, float16 overflows
        scores = scores.masked_fill(~(visible | blind), float("-inf"))
        weights = scores.softmax(dim=-1).masked_fill(blind, 0.0)
        return self.out(weights @ v)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382): in training each sample of the batch
    loses what a block adds with probability p; the others get it divided by 1 - p, so the mean
    stays."""

    def __init__(self, p):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"drop path p = {p} is no probability")
        self.p = p

    def forward(self, x):
        """x (B, ...) -> (B, ...)."""
        if not self.training or self.p == 0:
            return x
        kept = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.p)  # (B, 1, ...)
        return x * (kept / (1 - self.p) if self.p < 1 else kept)


class GMLP(nn.Module):
    """The trunk: n_layers blocks, LayerNorm. DropPath grows from 0 to drop_path over the depth; the
    other block_options: see GMLPBlock."""

    def __init__(self, n_layers, d_model, d_ffn, seq_len, *, drop_path=0.0, eps=1e-5,
                 **block_options):
        super().__init__()
        rates = [drop_path * i / max(1, n_layers - 1) for i in range(n_layers)]
        self.blocks = nn.ModuleList(
            GMLPBlock(d_model, d_ffn, seq_len, drop_path=rate, eps=eps, **block_options)
            for rate in rates)
        self.norm = nn.LayerNorm(d_model, eps)

    def forward(self, x, mask=None, caches=None):
        """x (B, n, d) -> (B, n, d); caches holds one dict per block."""
        for i, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[i])
        return self.norm(x)


class Cache:
    """What a language model remembers while it writes: the number of tokens so far, and for each
    block the rows of norm(Z2), and of k and v with tiny attention, that later tokens can still
    see."""

    def __init__(self, n_layers):
        self.length = 0
        self.blocks = [{} for _ in range(n_layers)]


class GMLPLanguageModel(nn.Module):
    """Token ids to logits of the next token (causal) or of a masked one (causal=False).

    positions: None (W knows places, or offsets if Toeplitz), "learned", or "sinusoidal" (Vaswani et
    al. 2017, sections 3.4 and 3.5). Takes 1 to seq_len tokens; with toeplitz=True any number,
    unless positions are learned. block_options: see GMLPBlock.
    """

    def __init__(self, vocab_size, seq_len, d_model, d_ffn, n_layers, *, causal=True,
                 positions=None, toeplitz=False, **block_options):
        super().__init__()
        if positions not in (None, "learned", "sinusoidal"):
            raise ValueError(f'positions = {positions!r} is none of None, "learned", "sinusoidal"')
        self.seq_len, self.causal, self.positions = seq_len, causal, positions
        self.unbounded = toeplitz and positions != "learned"
        self.embedding = nn.Embedding(vocab_size, d_model)
        if positions == "learned":
            self.position_embedding = nn.Embedding(seq_len, d_model)
            for table in (self.embedding, self.position_embedding):  # GPT-2's, for both alike
                nn.init.normal_(table.weight, std=0.02)
        self.trunk = GMLP(
            n_layers, d_model, d_ffn, seq_len, causal=causal, toeplitz=toeplitz, **block_options)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids, mask=None, cache=None, start=0):
        """ids (B, n) -> logits (B, n, vocab_size). mask as in SpatialGatingUnit.

        cache, from new_cache(): ids are the next n tokens of each row, and join it. Without one,
        start is the place of the first token. ValueError for more than seq_len places, unless the
        model is unbounded.
        """
        if cache is not None:
            start = cache.length
        n = ids.shape[1]
        if n < 1 or (start + n > self.seq_len and not self.unbounded):
            total = start + n if n else 0
            raise ValueError(f"got {total} tokens, the model takes 1 to seq_len = {self.seq_len}")
        x = self.embedding(ids)  # (B, n, d)
        if self.positions is not None:
            places = torch.arange(start, start + n, device=ids.device)
            if self.positions == "learned":
                x = x + self.position_embedding(places)
            else:
                x = x * x.shape[-1] ** 0.5 + sinusoids(places, x.shape[-1]).to(x)
        x = self.trunk(x, mask, None if cache is None else cache.blocks)  # (B, n, d)
        if cache is not None:
            cache.length += n
        return self.head(x)  # (B, n, vocab_size)

    def new_cache(self):
        """An empty memory for forward: the past of a causal model that is fed piece by piece."""
        return Cache(len(self.trunk.blocks))

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, *, temperature=1.0, top_k=None, use_cache=True,
                 generator=None):
        """ids (B, n), n >= 1 -> (B, n + max_new_tokens): ids, then what the model writes.

        temperature 0 takes the likeliest token; top_k samples among the k likeliest; generator is
        the CPU torch.Generator to draw from. An unbounded model sees the last n_layers * (seq_len -
        1) + 1 tokens, all that its layers can reach. Any other sees a window: the last seq_len
        tokens of ids at first; when it is full, half of it is left behind. use_cache=False computes
        the same to rounding, slower.
        """
        if not self.causal:
            raise ValueError("generate needs causal=True")
        n = ids.shape[1]
        if n < 1 or max_new_tokens < 0 or temperature < 0 or top_k is not None and top_k < 1:
            raise ValueError(
                "generate takes a prompt of 1 token or more, max_new_tokens >= 0, temperature >= 0 "
                f"and top_k >= 1, got a prompt of {n}, {max_new_tokens = }, {temperature = }, "
                f"{top_k = }")
        was_training = self.training
        self.eval()
        start = 0 if self.unbounded else max(0, n - self.seq_len)  # of the window, in ids
        fed, cache = start, self.new_cache()  # ids[:, start:fed] are in the cache
        reach = len(self.trunk.blocks) * (self.seq_len - 1) + 1  # what an unbounded model sees
        try:
            for length in range(n, n + max_new_tokens):
                if not self.unbounded and length - start > self.seq_len:
                    start = length - max(1, self.seq_len // 2)
                    fed, cache = start, self.new_cache()
                if use_cache:
                    for piece in ids[:, fed:].split(self.seq_len, dim=1):  # several: a long prompt
                        logits = self(piece, cache=cache)  # (B, n of the piece, vocab_size)
                    fed = length
                elif self.unbounded:
                    logits = self(ids[:, -reach:], start=max(0, length - reach))
                else:
                    logits = self(ids[:, start:])
                chosen = sample(logits[:, -1], temperature, top_k, generator)  # (B, 1)
                ids = torch.cat([ids, chosen.to(ids)], dim=1)
        finally:
            self.train(was_training)
        return ids


def sinusoids(places, d_model):
    """places (n,) -> (n, d): sines in even channels, cosines in odd ones, wavelengths 2 pi to
    10,000 * 2 pi."""
    rates = 10_000.0 ** (-torch.arange(0, d_model, 2, device=places.device) / d_model)  # (d/2,)
    angles = places[:, None] * rates  # (n, d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]  # (n, d)


def sample(logits, temperature, top_k, generator):
    """logits (B, vocab_size) -> ids (B, 1), drawn on the CPU: the same draw whatever device made
    the logits."""
    logits = logits.cpu().double()
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        # of equal logits the lower ids, as argmax does: k candidates, not k and their ties
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        kept = torch.full_like(logits, float("-inf"))
        logits = kept.scatter(-1, ids[:, :top_k], values[:, :top_k])
    logits = logits - logits.max(dim=-1, keepdim=True).values  # no NaN at a small temperature
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


class GMLPImageClassifier(nn.Module):
    """Images cut into patches, each patch a token (paper, section 3). Sizes are int or (height,
    width); block_options: see GMLPBlock."""

    def __init__(self, image_size, patch_size, n_classes, d_model, d_ffn, n_layers, *,
                 in_channels=3, **block_options):
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        p1, p2 = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if height % p1 or width % p2:
            raise ValueError(f"image {height} x {width} is no multiple of patch {p1} x {p2}")
        self.image_shape = (in_channels, height, width)
        self.patches = nn.Conv2d(in_channels, d_model, (p1, p2), stride=(p1, p2))
        self.trunk = GMLP(n_layers, d_model, d_ffn, (height // p1, width // p2), **block_options)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, images):
        """images (B, in_channels, height, width) -> logits (B, n_classes). ValueError for another
        shape."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"got images of shape {tuple(images.shape[1:])}, "
                             f"the model takes {self.image_shape}")
        x = self.patches(images).flatten(2).mT  # (B, n, d)
        return self.head(self.trunk(x).mean(dim=1))


# Table 1: GMLPImageClassifier(224, n_classes=1000, **GMLP_SIZES["S"]). Ti, S and B: 5,867,328,
# 19,422,656 and 73,075,392 parameters.
GMLP_SIZES = {
    "Ti": dict(patch_size=16, d_model=128, d_ffn=768, n_layers=30),
    "S": dict(patch_size=16, d_model=256, d_ffn=1536, n_layers=30),
    "B": dict(patch_size=16, d_model=512, d_ffn=3072, n_layers=30),
}
