"""gMLP, a network without attention ("Pay Attention to MLPs", Liu et al. 2021, arXiv:2105.08050).

    Z      = gelu(norm(X) U)           X (B, n, d), U (d, f), Z (B, n, f)      each token alone
    Z1, Z2 = split(Z)                  (B, n, f/2) each
    S      = Z1 * (W norm(Z2) + b)     W (n, n), b (n, 1), S (B, n, f/2)       where tokens meet
    Y      = X + S V                   V (f/2, d), Y (B, n, d)                 each token alone

B batch, n tokens, d = d_model, f = d_ffn (the width before the split). Each norm is a LayerNorm of
its own, * goes element by element, U and V have biases. W starts near 0 and b at 1, so that at
first S is about Z1 and no token hears another; training finds out who should listen to whom. Causal
models keep W's lower triangle. The gate costs n^2 * f/2 multiply-adds a layer: at f = 4d as many as
attention's 2 n^2 * d, but without a softmax, and with one n x n matrix for all samples.

Beyond the paper: masks, positions, a cache for writing, and ToeplitzGatingUnit with heads (W[i, j]
depends on i - j alone: the paper saw W become so on text, and tried it). Imports torch alone.
"""
import torch
import torch.nn.functional as F
from torch import nn


class GMLPBlock(nn.Module):
    """X + S V (paper, figure 1). With d_attn, the width of a tiny attention, it is aMLP (section
    4.3): S = Z1 * (W norm(Z2) + b + attention(norm(X))).

    dropout acts on what the block adds, element by element; drop_path drops it for whole samples.
    eps is that of norm(X): timm's weights have 1e-6. The other arguments: see SpatialGatingUnit.
    """

    def __init__(self, d_model, d_ffn, seq_len, *, causal=False, toeplitz=False, n_heads=1,
                 d_attn=None, dropout=0.0, drop_path=0.0, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(d_model, eps=eps)
        self.proj_in = nn.Linear(d_model, d_ffn)  # U
        if toeplitz:
            self.sgu = ToeplitzGatingUnit(d_ffn, seq_len, causal=causal, n_heads=n_heads)
        else:
            self.sgu = SpatialGatingUnit(d_ffn, seq_len, causal=causal)
        if self.sgu.n_heads != n_heads:
            raise ValueError(f"n_heads = {n_heads}: more than 1 needs toeplitz=True")
        self.proj_out = nn.Linear(d_ffn // 2, d_model)  # V
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)
        window = seq_len if self.sgu.any_length else None  # attention looks as far as the gate
        self.attn = None if d_attn is None else TinyAttention(
            d_model, d_ffn // 2, d_attn, causal=causal, window=window)

    def forward(self, x, mask=None, cache=None):
        """x (B, n, d) -> (B, n, d); mask and cache as in SpatialGatingUnit."""
        check(self.sgu, x, mask, cache)  # first, since attention, too, adds to the cache
        normed = self.norm(x)
        z = F.gelu(self.proj_in(normed))  # (B, n, f)
        attended = None if self.attn is None else self.attn(normed, mask, cache)  # (B, n, f/2)
        s = self.sgu(z, mask, attended, cache)  # (B, n, f/2)
        return x + self.drop_path(self.dropout(self.proj_out(s)))  # (B, n, d)


class SpatialGatingUnit(nn.Module):
    """S = Z1 * (W norm(Z2) + b) (paper, section 2.1).

    Row i of W says how much token i takes from each token, in every channel alike: if W[i, j] is 0,
    token i hears nothing of token j. seq_len is the largest n, or a grid (rows, columns) of which
    the n tokens are a prefix in raster order. causal: no token hears a later one.
    """

    any_length, n_heads = False, 1  # ToeplitzGatingUnit sets its own
    keep, remembers = None, "z2"  # a cache keeps all past rows of norm(Z2), under this key

    def __init__(self, d_ffn, seq_len, *, causal=False, init_eps=1e-3):
        super().__init__()
        n = seq_len[0] * seq_len[1] if isinstance(seq_len, (tuple, list)) else seq_len
        if n < 1 or d_ffn < 2 or d_ffn % 2:
            raise ValueError(f"seq_len = {seq_len} must be 1 or more, d_ffn = {d_ffn} even")
        self.seq_len, self.causal, self.init_eps = int(n), causal, init_eps
        self.norm = nn.LayerNorm(d_ffn // 2)  # whatever the size of Z2, W weighs rows of one size
        self.W = nn.Parameter(torch.empty(n, n))
        self.b = nn.Parameter(torch.empty(n))
        self.reset_parameters()

    def reset_parameters(self):
        """W uniform within init_eps / n of 0, so that its rows sum to little at any n; b is 1."""
        nn.init.uniform_(self.W, -self.init_eps / self.seq_len, self.init_eps / self.seq_len)
        nn.init.ones_(self.b)

    def forward(self, z, mask=None, gate_residual=None, cache=None):
        """z (B, n, f) -> (B, n, f/2). mask, boolean (n, n) or (B, n, n): row i may look at j.
        gate_residual (B, n, f/2) is added to the gate. cache, a dict, for causal gates: the tokens
        of z come after those that it holds, and are added to it. ValueError for a wrong n, mask or
        cache; the cache is then unchanged."""
        n, total = z.shape[1], check(self, z, mask, cache)  # total: n, and those in the cache
        z1, z2 = z.chunk(2, dim=-1)  # (B, n, f/2) each
        z2 = remember(cache, "z2", self.norm(z2), self.keep)  # (B, total, f/2)
        gate = self.gate(z2, total - n, mask)  # (B, n, f/2)
        if gate_residual is not None:
            gate = gate + gate_residual
        return z1 * gate

    def gate(self, z2, past, mask):
        """W z2 + b, without its first `past` rows: z2 (B, total, f/2) -> (B, total - past, f/2)."""
        W = self.matrix(z2.shape[1], past)  # (total - past, total)
        if mask is not None:
            W = W * mask  # (n, n) or (B, n, n)
        b = self.b[past:z2.shape[1], None]  # (total - past, 1)
        return torch.einsum("...ij,...jc->...ic", W, z2) + b  # W @ z2 + b, but faster

    def matrix(self, n=None, past=0):
        """W for n tokens (default seq_len), without its first `past` rows: (n - past, n)."""
        more = 0 if n is None else n - self.seq_len  # 0 or negative: to pad by that is to crop
        W = F.pad(self.W, (0, more, -past, more))  # W[past:n, :n], which torch.export refuses
        return W.tril(past) if self.causal else W  # its row 0 is that of token `past`


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382): in training each sample of the batch
    loses what a block adds with probability p; the others get it divided by 1 - p, so the mean
    stays. p = 1 gives zeros, not 0/0."""

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


class TinyAttention(nn.Module):
    """One small attention head (paper, section 4.3), to be added to the gate.

    causal: row i sees columns j <= i. window: |i - j| < window, the band of a Toeplitz gate.
    """

    any_length, remembers = True, "k"  # for check()

    def __init__(self, d_in, d_out, d_attn=64, *, causal=False, window=None):
        super().__init__()
        self.causal, self.window, self.d_attn = causal, window, d_attn
        self.keep = None if window is None else window - 1  # no token looks back farther
        self.qkv = nn.Linear(d_in, 3 * d_attn, bias=False)
        self.out = nn.Linear(d_attn, d_out)

    def forward(self, x, mask=None, cache=None):
        """x (B, n, d_in) -> (B, n, d_out); mask and cache as in SpatialGatingUnit.

        A row that may look at nothing gets zero attention: the bias of out is left.
        """
        total = check(self, x, mask, cache)
        window = self.window or total  # None: no token is out of reach
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # (B, n, d_attn) each
        k = remember(cache, "k", k, self.keep)  # (B, total, d_attn)
        v = remember(cache, "v", v, self.keep)  # (B, total, d_attn)
        columns = torch.arange(total, device=x.device)
        offsets = columns[total - x.shape[1]:, None] - columns  # (n, total): i - j
        visible = (offsets >= (0 if self.causal else 1 - window)) & (offsets < window)
        if mask is not None:
            visible = visible & mask  # (n, n) or (B, n, n)
        blind = ~visible.any(dim=-1, keepdim=True)  # (n, 1) or (B, n, 1): softmax would give NaN
        scores = q * self.d_attn**-0.5 @ k.mT  # (B, n, total); scaled late, float16 overflows
        scores = scores.masked_fill(~(visible | blind), float("-inf"))
        weights = scores.softmax(dim=-1).masked_fill(blind, 0.0)
        return self.out(weights @ v)


class GMLP(nn.Module):
    """The trunk: n_layers blocks, LayerNorm. DropPath grows from 0 to drop_path over the depth; the
    other block_options: see GMLPBlock."""

    def __init__(self, d_model, d_ffn, seq_len, n_layers, *, drop_path=0.0, eps=1e-5,
                 **block_options):
        super().__init__()
        rates = [drop_path * i / max(1, n_layers - 1) for i in range(n_layers)]
        self.blocks = nn.ModuleList(
            GMLPBlock(d_model, d_ffn, seq_len, drop_path=rate, eps=eps, **block_options)
            for rate in rates)
        self.norm = nn.LayerNorm(d_model, eps=eps)

    def forward(self, x, mask=None, caches=None):
        """x (B, n, d) -> (B, n, d); caches holds one dict per block."""
        for i, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[i])
        return self.norm(x)


class GMLPLanguageModel(nn.Module):
    """Token ids to logits of the next token (causal=True) or of a masked one (causal=False).

    positions: None (W knows places, or offsets if Toeplitz), "learned", or "sinusoidal" (Vaswani et
    al. 2017, sections 3.4 and 3.5). Takes 1 to seq_len tokens; with toeplitz=True any number,
    unless positions are learned. block_options: see GMLPBlock.
    """

    def __init__(self, vocab_size, seq_len, d_model, d_ffn, n_layers, *, causal, positions=None,
                 toeplitz=False, **block_options):
        super().__init__()
        if positions not in (None, "learned", "sinusoidal"):
            raise ValueError(f'positions = {positions!r} is none of None, "learned", "sinusoidal"')
        self.seq_len, self.causal, self.positions = int(seq_len), causal, positions
        self.any_length = toeplitz and positions != "learned"
        learned = positions == "learned"
        self.embedding = (SmallEmbedding if learned else nn.Embedding)(vocab_size, d_model)
        if learned:
            self.position_embedding = SmallEmbedding(seq_len, d_model)
        self.trunk = GMLP(
            d_model, d_ffn, seq_len, n_layers, causal=causal, toeplitz=toeplitz, **block_options)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids, mask=None, cache=None):
        """ids (B, n) -> logits (B, n, vocab_size). mask as in SpatialGatingUnit.

        cache, from new_cache(): ids are the next n tokens of each row, and join it. ValueError for
        more than seq_len tokens in all, unless the model takes any number.
        """
        if ids.ndim != 2:
            raise ValueError(f"ids must be (B, n), got shape {tuple(ids.shape)}")
        n, start = ids.shape[1], 0 if cache is None else cache.length
        if n < 1 or (start + n > self.seq_len and not self.any_length):
            raise ValueError(f"got {n and start + n} tokens, the model takes 1 to seq_len = "
                             f"{self.seq_len}")
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

    def stream(self, ids, *, temperature=1.0, top_k=None, generator=None):
        """What a causal model writes after ids (B, n), n >= 1: yields the next token of each row,
        (B, 1), without end and dropout; between two, each module is in its own mode. ValueError, at
        the first token, for wrong ids and options.

        temperature 0 takes the likeliest token; top_k samples among the k likeliest; generator is
        the CPU torch.Generator to draw from. A model that takes any number of tokens sees all that
        its layers can reach, the last n_layers * (seq_len - 1) + 1. Any other sees a window: at
        first the last seq_len tokens of ids; when it is full, half of it is left behind.
        """
        window = fresh = ids if self.any_length else ids[..., -self.seq_len:]
        cache = self.new_cache()
        while True:
            for piece in fresh.split(self.seq_len, dim=-1):  # several: a long prompt
                logits = infer(self, piece, cache=cache)  # (B, n of the piece, vocab_size)
            fresh = sample(logits[:, -1], temperature, top_k, generator).to(ids)  # (B, 1)
            yield fresh
            if not self.any_length:
                window = torch.cat([window, fresh], dim=1)
                if window.shape[1] > self.seq_len:
                    window = fresh = window[:, -max(1, self.seq_len // 2):]
                    cache = self.new_cache()

    def generate(self, ids, max_new_tokens, **options):
        """ids (B, n) -> (B, n + max_new_tokens): ids, then what stream writes with its options."""
        if max_new_tokens < 0:
            raise ValueError(f"{max_new_tokens = } must be 0 or more")
        written = zip(range(max_new_tokens), self.stream(ids, **options))
        return torch.cat([ids, *(token for _, token in written)], dim=1)


class GMLPImageClassifier(nn.Module):
    """Images cut into patches, each patch a token (paper, section 3). Sizes are int or (height,
    width); block_options: see GMLPBlock."""

    def __init__(self, image_size, patch_size, n_classes, d_model, d_ffn, n_layers, *,
                 in_channels=3, **block_options):
        super().__init__()
        height, width = image_size if isinstance(image_size, (tuple, list)) else 2 * (image_size,)
        p1, p2 = patch_size if isinstance(patch_size, (tuple, list)) else 2 * (patch_size,)
        if height % p1 or width % p2:
            raise ValueError(f"image {height} x {width} is no multiple of patch {p1} x {p2}")
        self.image_shape = (in_channels, height, width)
        self.patches = nn.Conv2d(in_channels, d_model, (p1, p2), stride=(p1, p2))
        self.trunk = GMLP(d_model, d_ffn, (height // p1, width // p2), n_layers, **block_options)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, images):
        """images (B, in_channels, height, width), else ValueError -> logits (B, n_classes)."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"got images {tuple(images.shape)}, not a batch of {self.image_shape}")
        x = self.patches(images).flatten(2).mT  # (B, n, d)
        return self.head(self.trunk(x).mean(dim=1))


# Table 1: GMLPImageClassifier(224, n_classes=1000, **GMLP_SIZES["S"]). Ti, S and B: 5,867,328,
# 19,422,656 and 73,075,392 parameters.
GMLP_SIZES = {
    "Ti": dict(patch_size=16, d_model=128, d_ffn=768, n_layers=30),
    "S": dict(patch_size=16, d_model=256, d_ffn=1536, n_layers=30),
    "B": dict(patch_size=16, d_model=512, d_ffn=3072, n_layers=30),
}


# ------------------------------------------------------------------------------ Beyond the paper


def check(unit, x, mask, cache):
    """How many tokens a gate or attention is to read: those of x (B, n, ...) and of the cache.
    ValueError unless x, mask and cache fit it and each other."""
    B, n, _ = x.shape
    if mask is not None and (mask.dtype != torch.bool or mask.shape not in ((n, n), (B, n, n))):
        raise ValueError(f"mask must be boolean of shape {(n, n)} or {(B, n, n)}, "
                         f"got {mask.dtype} of shape {tuple(mask.shape)}")
    if mask is not None and cache is not None:
        raise ValueError("mask and cache exclude each other: a cached model sees all of the past")
    if cache is not None and not unit.causal:
        raise ValueError("a cache needs causal=True: here earlier tokens see later ones")
    rows = (cache or {}).get(unit.remembers, x[:, :0])  # (B, m, ...)
    if rows.shape[0] != B:
        raise ValueError(f"got a batch of {B}, the cache remembers one of {rows.shape[0]}")
    total, most = rows.shape[1] + n, float("inf") if unit.any_length else unit.seq_len
    if n < 1 or total > most:
        raise ValueError(f"got {n and total} tokens, {type(unit).__name__} takes 1 to {most}")
    return total


class SmallEmbedding(nn.Embedding):
    """Tokens and learned positions that start alike, as in GPT-2, or one would drown the other."""

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)


def sinusoids(places, d_model):
    """places (n,) -> (n, d): sines in even channels, cosines in odd; wavelengths 2 to 20,000 pi."""
    rates = 10_000.0 ** (-torch.arange(0, d_model, 2, device=places.device) / d_model)  # (d/2,)
    angles = places[:, None] * rates  # (n, d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]  # (n, d)


class ToeplitzGatingUnit(SpatialGatingUnit):
    """A SpatialGatingUnit that treats all places alike: W holds one number per offset i - j, and b
    one for all tokens. Each of n_heads groups of c = f/(2h) channels has a W and b of its own.

    On a line of tokens n is then unbounded: offsets of seq_len or more weigh nothing, so that W is
    a band, and a token hears the last seq_len tokens (causal) or as many on either side. On a grid
    W holds one number per offset of row and column, and seq_len stays the largest n.
    """

    def __init__(self, d_ffn, seq_len, *, causal=False, n_heads=1, init_eps=1e-3):
        super().__init__(d_ffn, seq_len, causal=causal, init_eps=init_eps)
        if n_heads < 1 or d_ffn % (2 * n_heads):
            raise ValueError(f"d_ffn = {d_ffn} is no multiple of 2 * n_heads = {2 * n_heads}")
        self.n_heads = n_heads
        self.grid = seq_len if isinstance(seq_len, (tuple, list)) else None
        if self.grid:
            n_offsets = (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1)
        else:
            self.any_length, self.keep = True, self.seq_len - 1  # no token looks back farther
            n_offsets = self.seq_len if causal else 2 * self.seq_len - 1
        self.W = nn.Parameter(torch.empty(n_heads, n_offsets))  # by rising offset
        self.b = nn.Parameter(torch.empty(n_heads, 1))  # of all tokens
        self.reset_parameters()

    def gate(self, z2, past, mask):
        """As above, head by head."""
        W = self.matrix(z2.shape[1], past)  # (h, total - past, total)
        if mask is not None:
            W = W * mask.unsqueeze(-3)  # (h, n, n) or (B, h, n, n)
        z2 = z2.unflatten(-1, (self.n_heads, -1))  # (B, total, h, c)
        return (torch.einsum("...hij,...jhc->...ihc", W, z2) + self.b).flatten(2)

    def matrix(self, n=None, past=0):
        """W for n tokens (default seq_len), without its first `past` rows: (h, n - past, n)."""
        n = self.seq_len if n is None else n
        if self.any_length:
            return toeplitz_1d(self.W, n, self.seq_len, self.causal, past)
        W = toeplitz_2d(self.W, *self.grid)[:, past:n, :n]  # (h, n - past, n)
        return W.tril(past) if self.causal else W


def toeplitz_1d(w, n, seq_len, causal, past):
    """w (h, seq_len) or (h, 2 seq_len - 1), by rising offset i - j -> (h, n - past, n), where row i
    runs from offset i down to i - n + 1.

    By padding (a negative pad crops) and unfold rather than an index, whose backward adds in no
    fixed order on threads.
    """
    m = max(n, seq_len)
    w = F.pad(w, (m - 1 if causal else m - seq_len, m - seq_len))  # (h, 2m - 1): 1 - m to m - 1
    return F.pad(w.unfold(-1, m, 1), (n - m, 0, -past, n - m)).flip(-1)  # (h, n - past, n)


def toeplitz_2d(w, rows, columns):
    """w (..., (2 rows - 1) (2 columns - 1)), by rising offset of row and column -> (..., n, n)."""
    w = w.unflatten(-1, (2 * rows - 1, 2 * columns - 1))  # (..., 2 rows - 1, 2 columns - 1)
    W = w.unfold(-2, rows, 1).unfold(-2, columns, 1)  # (..., rows, columns, rows, columns)
    return W.flip(-2, -1).flatten(-2).flatten(-3, -2)  # (..., n, n)


class Cache:
    """What a language model remembers while it writes. The gate of token t needs norm(Z2) of the
    tokens before it, and nothing else of them; so one more token costs n * f/2 multiply-adds in
    W, not n^2 * f/2. `blocks` holds these rows for each block, and those of k and v with tiny
    attention, as far as later tokens can see them; `length` counts the tokens so far."""

    def __init__(self, n_layers):
        self.length = 0
        self.blocks = [{} for _ in range(n_layers)]


def remember(cache, name, rows, keep):
    """Append rows (B, n, c) to the past ones (B, m, c) in the cache, which keeps the last `keep` of
    all (None: all of them). Returns (B, m + n, c); without a cache, rows."""
    if cache is None:
        return rows
    if name in cache:
        rows = torch.cat([cache[name], rows], dim=1)  # (B, m + n, c)
    cache[name] = rows if keep is None else rows[:, max(0, rows.shape[1] - keep):]
    return rows


@torch.no_grad()
def infer(model, ids, **options):
    """model(ids, ...) without gradients and dropout; then each module has its mode again."""
    awake = [module for module in model.modules() if module.training]
    try:
        for module in awake:
            module.training = False
        return model(ids, **options)
    finally:
        for module in awake:
            module.training = True


def sample(logits, temperature, top_k, generator):
    """logits (B, vocab_size) -> ids (B, 1), drawn on the CPU: the same draw whatever device made
    the logits. ValueError unless temperature >= 0 and top_k >= 1."""
    if not 0 <= temperature < float("inf") or (top_k is not None and top_k < 1):
        raise ValueError(f"{temperature = } must be 0 or more, {top_k = } 1 or more")
    logits = logits.cpu().double()
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:  # exactly k stay: of equal logits those of lower ids, as in argmax
        others = logits.argsort(dim=-1, descending=True, stable=True)[:, top_k:]  # (B, V - k)
        logits = logits.scatter(-1, others, float("-inf"))
    logits = logits - logits.max(dim=-1, keepdim=True).values  # no NaN at a small temperature
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


if __name__ == "__main__":  # four letters walked through a small causal block
    torch.manual_seed(1)
    embedding, block = nn.Embedding(128, 6), GMLPBlock(6, 8, seq_len=4, causal=True)
    nn.init.normal_(block.sgu.W)  # as if it had learned: it starts near 0

    @torch.no_grad()
    def steps(word):
        x = embedding(torch.tensor([list(word.encode())]))  # (1, 4, 6)
        z = F.gelu(block.proj_in(block.norm(x)))  # (1, 4, 8)
        z1, z2 = z.chunk(2, dim=-1)  # (1, 4, 4) each
        z2 = block.sgu.norm(z2)
        gate = block.sgu.matrix() @ z2 + block.sgu.b[:, None]  # (1, 4, 4)
        y = x + block.proj_out(z1 * gate)  # (1, 4, 6)
        assert torch.allclose(y, block(x), atol=1e-6)
        return {"X": x, "Z": z, "Z1": z1, "norm(Z2)": z2, "gate": gate, "S": z1 * gate, "Y": y}

    gate, late, gats = map(steps, ("gate", "late", "gats"))
    print('"gate", step by step: the row of e, and the letters whose rows "late" and "gats" change')
    for name, x in gate.items():
        row = "".join(f"{number:6.2f}" for number in x[0, -1].tolist())
        changes = ("".join(letter if (a - b).abs().max() > 1e-6 else "." for letter, a, b in
                           zip("gate", x[0], other[name][0])) for other in (late, gats))
        print(f"{name:9}{tuple(x.shape)}{row:50}", *changes)
