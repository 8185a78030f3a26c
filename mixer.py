"""MLP-Mixer, perceptrons in the place of attention (Tolstikhin et al. 2021, arXiv:2105.01601).

    Y = X + T(norm(X)^T)^T        T: Linear(n, t), GELU, Linear(t, n)   tokens meet, channels do not
    Z = Y + C(norm(Y))            C: Linear(d, f), GELU, Linear(f, d)   each token alone

B batch, n tokens, d = d_model, t = d_token (d/2), f = d_ffn (4d in the paper); X, Y, Z (B, n, d).
T fixes n, and lets every token hear every other. It costs 2 n * t * d multiply-adds a layer: linear
in n, where attention is quadratic, unless t grows with n (as in the TokenMLPs below).

A Transformer's layer differs in one thing, attention in the place of T. Both are called alike, so
that swapping them is one argument:

    EncoderLayer(d, MLPMixer(FeedForward(n, t)), FeedForward(d, f))     # MLP-Mixer
    EncoderLayer(d, SelfAttention(d, n_heads),   FeedForward(d, f))     # Transformer

Unlike the paper's code: exact GELU, and a head that does not start at zero. Beyond the paper: text,
positions, dropout; and at the end a T that never looks ahead (CausalTokenMLP), one that treats all
places alike (ToeplitzTokenMLP), one for fewer than n tokens (PaddedMixer), and replace_attention
for other people's models. Imports torch alone.
"""
import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """Linear-GELU-Linear over the last axis: T if that counts tokens, C if it counts channels."""

    def __init__(self, d_in, d_hidden, *, dropout=0.0):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.fc2 = nn.Linear(d_hidden, d_in)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """x (..., d_in) -> (..., d_in)."""
        return self.fc2(self.dropout(F.gelu(self.fc1(x))))


class MLPMixer(nn.Module):
    """T(X^T)^T (paper, section 2): half a layer, although elsewhere the name means the whole model.

    T is any mlp over the last axis; n is the in_features of its first nn.Linear, or what an mlp
    without one (the TokenMLPs below) takes. T's last bias adds one number to all channels of a
    token: each later LayerNorm takes that out again, so its gradient is rounding noise.
    """

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        layers = [m for m in mlp.modules() if isinstance(m, nn.Linear)]
        self.n_tokens = layers[0].in_features if layers else None

    def forward(self, query, key=None, value=None, mask=None):
        """query (B, n, d) -> (B, n, d). ValueError for another key or value, a mask, a wrong n."""
        if any(x is not None and x is not query for x in (key, value)) or mask is not None:
            raise ValueError("a Mixer mixes the tokens of query: it takes no other key or value "
                             "and no mask; the causal variant is MLPMixer(CausalTokenMLP(seq_len))")
        return self.mix(query)

    def mix(self, x):
        """x (B, n, d) -> (B, n, d)."""
        n = x.shape[-2]
        if self.n_tokens not in (None, n):
            raise ValueError(f"got n = {n} tokens, the Mixer takes exactly {self.n_tokens}")
        return self.mlp(x.mT).mT  # (B, d, n) inside


class EncoderLayer(nn.Module):
    """X + token_mixer(norm(X)), then Y + feed_forward(norm(Y)): a layer of a Mixer or Transformer.
    dropout acts on what either adds, element by element; drop_path drops it for whole samples. eps
    is that of both norms: timm's weights have 1e-6."""

    def __init__(self, d_model, token_mixer, feed_forward, *, dropout=0.0, drop_path=0.0, eps=1e-5):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps=eps)
        self.token_mixer = token_mixer
        self.norm2 = nn.LayerNorm(d_model, eps=eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x, mask=None):
        """x (B, n, d) -> (B, n, d); mask as in SelfAttention, refused by a Mixer."""
        h = self.norm1(x)  # as query, key and value: a Mixer is called like attention
        x = x + self.drop_path(self.dropout(self.token_mixer(h, h, h, mask)))
        return x + self.drop_path(self.dropout(self.feed_forward(self.norm2(x))))


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


class Encoder(nn.Module):
    """The trunk: positions, layers, LayerNorm. DropPath grows from 0 to drop_path over the depth.

    seq_len: n, or a grid (rows, columns) of n tokens. positions: None, "learned", or "sinusoidal"
    (Vaswani et al. 2017, sections 3.4 and 3.5). mixer_options: see new_token_mixer.
    """

    def __init__(self, d_model, d_ffn, seq_len, n_layers, *, positions=None, dropout=0.0,
                 drop_path=0.0, eps=1e-5, **mixer_options):
        super().__init__()
        if positions not in (None, "learned", "sinusoidal"):
            raise ValueError(f'positions = {positions!r} is none of None, "learned", "sinusoidal"')
        self.positions = positions
        if positions == "learned":
            n = seq_len[0] * seq_len[1] if isinstance(seq_len, (tuple, list)) else seq_len
            self.position_embedding = SmallEmbedding(n, d_model)
        rates = [drop_path * i / max(1, n_layers - 1) for i in range(n_layers)]
        self.blocks = nn.ModuleList(EncoderLayer(
            d_model, new_token_mixer(d_model, seq_len, dropout=dropout, **mixer_options),
            FeedForward(d_model, d_ffn, dropout=dropout), dropout=dropout, drop_path=rate, eps=eps)
            for rate in rates)
        self.norm = nn.LayerNorm(d_model, eps=eps)

    def forward(self, x, mask=None):
        """x (B, n, d) -> (B, n, d); mask as in SelfAttention."""
        places = torch.arange(x.shape[1], device=x.device)
        if self.positions == "learned":
            x = x + self.position_embedding(places)
        elif self.positions == "sinusoidal":
            x = x * x.shape[-1] ** 0.5 + sinusoids(places, x.shape[-1]).to(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def new_token_mixer(d_model, seq_len, *, token_mixer="mixer", toeplitz=False, causal=False,
                    d_token=None, n_heads=8, dropout=0.0):
    """What joins the tokens in a layer:

        token_mixer  toeplitz  causal
        "attention"  either    either    SelfAttention(d_model, n_heads)
        "mixer"      True      either    MLPMixer(ToeplitzTokenMLP(seq_len, k)), k = 1 by default
        "mixer"      False     True      MLPMixer(CausalTokenMLP(n, k)), k = 2 by default
        "mixer"      False     False     PaddedMixer(FeedForward(n, t)), t = d_model / 2 by default

    d_token is t, and k is d_token / n, rounded up: the hidden units of each token.
    """
    n = seq_len[0] * seq_len[1] if isinstance(seq_len, (tuple, list)) else seq_len
    if token_mixer not in ("mixer", "attention"):
        raise ValueError(f'token_mixer = {token_mixer!r} is none of "mixer", "attention"')
    if token_mixer == "attention":
        return SelfAttention(d_model, n_heads, causal=causal, dropout=dropout)
    k = (d_token + n - 1) // n if d_token else 1 if toeplitz else 2
    if toeplitz:
        return MLPMixer(ToeplitzTokenMLP(seq_len, k, causal=causal))
    if causal:
        return MLPMixer(CausalTokenMLP(n, k))
    return PaddedMixer(FeedForward(n, d_token or d_model // 2, dropout=dropout))


class EncoderImageClassifier(nn.Module):
    """Images cut into patches, each a token (paper, section 2). Sizes are int or (height, width);
    encoder_options: see Encoder. Attention needs positions; a Mixer knows places, or offsets."""

    def __init__(self, image_size, patch_size, n_classes, d_model, d_ffn, n_layers, *,
                 in_channels=3, **encoder_options):
        super().__init__()
        height, width = image_size if isinstance(image_size, (tuple, list)) else 2 * (image_size,)
        p1, p2 = patch_size if isinstance(patch_size, (tuple, list)) else 2 * (patch_size,)
        if height % p1 or width % p2:
            raise ValueError(f"image {height} x {width} is no multiple of patch {p1} x {p2}")
        self.image_shape = (in_channels, height, width)
        self.patches = nn.Conv2d(in_channels, d_model, (p1, p2), stride=(p1, p2))
        self.trunk = Encoder(
            d_model, d_ffn, (height // p1, width // p2), n_layers, **encoder_options)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, images):
        """images (B, in_channels, height, width), else ValueError -> logits (B, n_classes)."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"got images {tuple(images.shape)}, not a batch of {self.image_shape}")
        x = self.patches(images).flatten(2).mT  # (B, n, d)
        return self.head(self.trunk(x).mean(dim=1))


# Table 1 of the paper: EncoderImageClassifier(224, n_classes=1000, **MIXER_SIZES["B/16"]). S/16,
# B/16 and L/16 have 18,528,264, 59,880,472 and 208,196,168 parameters.
MIXER_SIZES = {
    "S/32": dict(patch_size=32, d_model=512, d_ffn=2048, n_layers=8, d_token=256),
    "S/16": dict(patch_size=16, d_model=512, d_ffn=2048, n_layers=8, d_token=256),
    "B/32": dict(patch_size=32, d_model=768, d_ffn=3072, n_layers=12, d_token=384),
    "B/16": dict(patch_size=16, d_model=768, d_ffn=3072, n_layers=12, d_token=384),
    "L/32": dict(patch_size=32, d_model=1024, d_ffn=4096, n_layers=24, d_token=512),
    "L/16": dict(patch_size=16, d_model=1024, d_ffn=4096, n_layers=24, d_token=512),
    "H/14": dict(patch_size=14, d_model=1280, d_ffn=5120, n_layers=32, d_token=640),
}


class EncoderLanguageModel(nn.Module):
    """Token ids to logits of the next token (causal=True) or of a masked one (causal=False), for 1
    to seq_len tokens, with any token mixer. encoder_options: see Encoder."""

    def __init__(self, vocab_size, seq_len, d_model, d_ffn, n_layers, *, causal, **encoder_options):
        super().__init__()
        self.seq_len, self.causal = int(seq_len), causal
        learned = encoder_options.get("positions") == "learned"
        self.embedding = (SmallEmbedding if learned else nn.Embedding)(vocab_size, d_model)
        self.trunk = Encoder(d_model, d_ffn, seq_len, n_layers, causal=causal, **encoder_options)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids, mask=None):
        """ids (B, n), else ValueError -> logits (B, n, vocab_size); mask as in SelfAttention."""
        if ids.ndim != 2:
            raise ValueError(f"ids must be (B, n), got shape {tuple(ids.shape)}")
        if not 1 <= (n := ids.shape[1]) <= self.seq_len:
            raise ValueError(f"got {n} tokens, the model takes 1 to seq_len = {self.seq_len}")
        return self.head(self.trunk(self.embedding(ids), mask))

    def stream(self, ids, *, temperature=1.0, top_k=None, generator=None):
        """What a causal model writes after ids (B, n), n >= 1: yields the next token of each row,
        (B, 1), without end and dropout; between two, each module is in its own mode. ValueError, at
        the first token, for wrong ids and options.

        temperature 0 takes the likeliest token; top_k samples among the k likeliest; generator is
        the CPU torch.Generator to draw from. The model sees a window: at first the last seq_len
        tokens of ids; when it is full, half of it is left behind.
        """
        if not self.causal:
            raise ValueError("writing needs causal=True: here earlier tokens see later ones")
        window = ids[..., -self.seq_len:]
        while True:
            logits = infer(self, window)  # (B, n, vocab_size)
            fresh = sample(logits[:, -1], temperature, top_k, generator).to(ids)  # (B, 1)
            yield fresh
            window = torch.cat([window, fresh], dim=1)
            if window.shape[1] > self.seq_len:
                window = window[:, -max(1, self.seq_len // 2):]

    def generate(self, ids, max_new_tokens, **options):
        """ids (B, n) -> (B, n + max_new_tokens): ids, then what stream writes with its options."""
        if max_new_tokens < 0:
            raise ValueError(f"{max_new_tokens = } must be 0 or more")
        written = zip(range(max_new_tokens), self.stream(ids, **options))
        return torch.cat([ids, *(token for _, token in written)], dim=1)


class SmallEmbedding(nn.Embedding):
    """Tokens and learned positions that start alike, as in GPT-2, or one would drown the other."""

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)


def sinusoids(places, d_model):
    """places (n,) -> (n, d): sines in even channels, cosines in odd; wavelengths 2 to 20,000 pi."""
    rates = 10_000.0 ** (-torch.arange(0, d_model, 2, device=places.device) / d_model)  # (d/2,)
    angles = places[:, None] * rates  # (n, d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]  # (n, d)


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


# ------------------------------------------------------------------------------ Beyond the paper


class SelfAttention(nn.Module):
    """What a Mixer replaces: softmax(Q K^T / sqrt(c)) V, in h heads of c = d/h channels (Vaswani et
    al. 2017, arXiv:1706.03762, section 3.2). dropout acts on the attention weights."""

    def __init__(self, d_model, n_heads, *, causal=False, dropout=0.0):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model = {d_model} is no multiple of n_heads = {n_heads}")
        self.n_heads, self.causal = n_heads, causal
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key=None, value=None, mask=None):
        """query (B, n, d) -> (B, n, d), any n. mask, boolean (n, n) or (B, n, n): row i may look at
        column j; one that may look at nothing gets zero attention, so the bias of out. ValueError
        for another key or value, a wrong mask."""
        if any(x is not None and x is not query for x in (key, value)):
            raise ValueError("SelfAttention takes query again as key and as value")
        B, n, _ = query.shape
        if mask is not None and (mask.dtype != torch.bool or mask.shape not in ((n, n), (B, n, n))):
            raise ValueError(f"mask must be boolean of shape {(n, n)} or {(B, n, n)}, "
                             f"got {mask.dtype} of shape {tuple(mask.shape)}")
        qkv = self.qkv(query).unflatten(-1, (3, self.n_heads, -1))  # (B, n, 3, h, c)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, h, n, c) each
        visible, blind, p = None, None, self.dropout.p if self.training else 0.0
        if mask is not None:
            visible = mask.tril() if self.causal else mask
            visible = visible.unsqueeze(-3)  # (1, n, n) or (B, 1, n, n)
            blind = ~visible.any(dim=-1, keepdim=True)  # (..., n, 1): softmax would give NaN
            visible = visible | blind
        y = F.scaled_dot_product_attention(  # softmax(q k^T / sqrt(c)) v: (B, h, n, c)
            q, k, v, visible, dropout_p=p, is_causal=self.causal and mask is None)
        y = y if mask is None else y.masked_fill(blind, 0.0)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, n, d)


class CausalTokenMLP(nn.Module):
    """A T for MLPMixer that never looks ahead: output i depends on inputs j <= i alone.

    As in MADE (Germain et al. 2015, arXiv:1502.03509) each token owns k = hidden_per_token hidden
    units. Those of token j read the tokens up to j, and output i reads the units of the tokens up
    to i. So k * seq_len * (seq_len + 1) / 2 numbers of W1 and of W2 count, the rest is multiplied
    by 0 (Muon, which turns whole matrices, would mix it in).
    """

    def __init__(self, seq_len, hidden_per_token=2):
        super().__init__()
        self.seq_len, self.hidden_per_token = n, k = seq_len, hidden_per_token
        if n < 1 or k < 1:
            raise ValueError(f"{seq_len = } and hidden_per_token = {k} must be 1 or more")
        self.W1, self.b1 = nn.Parameter(torch.empty(n * k, n)), nn.Parameter(torch.empty(n * k))
        self.W2, self.b2 = nn.Parameter(torch.empty(n, n * k)), nn.Parameter(torch.empty(n))
        self.reset_parameters()

    def reset_parameters(self):
        for W, b in ((self.W1, self.b1), (self.W2, self.b2)):
            reach = W.shape[1] ** -0.5  # as an nn.Linear's
            nn.init.uniform_(W, -reach, reach)
            nn.init.uniform_(b, -reach, reach)

    def forward(self, x):
        """x (..., n) -> (..., n), 1 <= n <= seq_len: else ValueError."""
        n, k = x.shape[-1], self.hidden_per_token
        if not 1 <= n <= self.seq_len:
            raise ValueError(f"got {n} tokens, the Mixer takes 1 to seq_len = {self.seq_len}")
        more = self.seq_len - n  # later tokens, which change nothing: zeros
        visible = self.W1.new_ones(2 * (self.seq_len,)).tril()  # (N, N): 1 where i may look at j
        W1 = self.W1 * visible.repeat_interleave(k, dim=0)  # (Nk, N)
        W2 = self.W2 * visible.repeat_interleave(k, dim=1)  # (N, Nk)
        u = F.gelu(F.linear(F.pad(x, (0, more)), W1, self.b1))  # (..., Nk)
        return F.pad(F.linear(u, W2, self.b2), (0, -more))  # (..., n)


class ToeplitzTokenMLP(nn.Module):
    """A T for MLPMixer that treats all places alike: two convolutions over the whole text, whose
    weights depend on offsets i - j alone. Each token owns k = hidden_per_token hidden units:

        u[r, i] = gelu(b1[r] + sum over j of W1[r, i - j] x[j])      unit r of token i
        y[i]    = b2 + sum over r and j of W2[r, i - j] u[r, j]      output i

    seq_len is the largest n, or a grid (rows, columns) of which the n tokens are a prefix in raster
    order, with offsets of row and column. causal: the sums end at j = i.
    """

    def __init__(self, seq_len, hidden_per_token=1, *, causal=False):
        super().__init__()
        self.grid = tuple(seq_len) if isinstance(seq_len, (tuple, list)) else (1, seq_len)
        self.causal, self.seq_len, k = causal, self.grid[0] * self.grid[1], hidden_per_token
        if self.seq_len < 1 or k < 1:
            raise ValueError(f"{seq_len = } and hidden_per_token = {k} must be 1 or more")
        self.n_ahead = 2 * self.seq_len - sum(self.grid)  # offsets of later tokens; as many earlier
        n_offsets = self.n_ahead + 1 if causal else 2 * self.n_ahead + 1
        self.W1, self.b1 = nn.Parameter(torch.empty(k, n_offsets)), nn.Parameter(torch.empty(k, 1))
        self.W2, self.b2 = nn.Parameter(torch.empty(k, n_offsets)), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self):
        for W, b, fan_in in (self.W1, self.b1, 1), (self.W2, self.b2, len(self.W2)):
            reach = (self.seq_len * fan_in) ** -0.5  # the weights as an nn.Linear's
            nn.init.uniform_(W, -reach, reach)
            nn.init.zeros_(b)

    def forward(self, x):
        """x (..., n) -> (..., n), 1 <= n <= seq_len: else ValueError."""
        if not 1 <= (n := x.shape[-1]) <= self.seq_len:
            raise ValueError(f"got {n} tokens, the Mixer takes 1 to seq_len = {self.seq_len}")
        W1, W2 = self.matrix(self.W1, n), self.matrix(self.W2, n)  # (k, n, n)
        u = F.gelu(F.linear(x, W1.flatten(0, 1), self.b1.expand(-1, n).flatten()))  # (..., kn)
        return F.linear(u, W2.transpose(0, 1).flatten(1), self.b2.expand(n))  # (..., n)

    def matrix(self, w, n):
        """w (k, n_offsets), by rising offset -> (k, n, n), w[r, i - j] in row i and column j."""
        if self.causal:
            w = F.pad(w, (self.n_ahead, 0))  # tokens ahead weigh nothing
        return F.pad(toeplitz_2d(w, *self.grid), 2 * (0, n - self.seq_len))


def toeplitz_2d(w, rows, columns):
    """w (..., (2 rows - 1) (2 columns - 1)), by rising offset of row and column -> (..., n, n)."""
    w = w.unflatten(-1, (2 * rows - 1, 2 * columns - 1))  # (..., 2 rows - 1, 2 columns - 1)
    W = w.unfold(-2, rows, 1).unfold(-2, columns, 1)  # (..., rows, columns, rows, columns)
    return W.flip(-2, -1).flatten(-2).flatten(-3, -2)  # (..., n, n)


class PaddedMixer(MLPMixer):
    """An MLPMixer for 1 <= n <= n_tokens: zeros stand for the missing tokens, on the right."""

    def __init__(self, mlp):
        super().__init__(mlp)
        if self.n_tokens is None:
            raise ValueError(f"{type(mlp).__name__} does not tell its n: use an MLPMixer")

    def mix(self, x):
        """x (B, n, d) -> (B, n, d)."""
        more = max(0, self.n_tokens - x.shape[-2])
        padded = F.pad(x, (0, 0, 0, more))  # (B, n_tokens, d)
        return F.pad(super().mix(padded), (0, 0, 0, -more))  # (B, n, d)


class AttentionSubstitute(MLPMixer):
    """An MLPMixer with the arguments, the layouts and the returned pair of MultiheadAttention."""

    batch_first = False  # not the layout: True lets nn.TransformerEncoderLayer bypass this module

    def __init__(self, mlp, tokens_first):
        super().__init__(mlp)
        self.tokens_first = tokens_first

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                average_attn_weights=True, is_causal=False):
        """query (B, n, d), or (n, B, d) if tokens_first, or (n, d) -> the same shape, and None."""
        masked = is_causal or key_padding_mask is not None or attn_mask is not None
        return super().forward(query, key, value, mask=masked or None), None

    def mix(self, x):
        """x (n, B, d) if tokens_first, else (B, n, d) -> the same shape."""
        if self.tokens_first and x.ndim == 3:
            return super().mix(x.transpose(0, 1)).transpose(0, 1)
        return super().mix(x)


def replace_attention(model, seq_len, d_token=None):
    """Swap each self-attending nn.MultiheadAttention in model for a Mixer of seq_len tokens.

    In place; returns how many. Width, layout, dropout, device and dtype stay, weights are drawn
    afresh: train the model. d_token defaults to half the width. ValueError, with nothing changed,
    for nn.TransformerDecoderLayer and keys of another width; in forward for masks, other keys or n.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # all paths of a shared module
    attentions = {p: m for p, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
    if "" in attentions:
        raise ValueError("model is itself an nn.MultiheadAttention: pass the module that holds it")
    crossing = [p for p, m in attentions.items() if not m.kdim == m.vdim == m.embed_dim]
    crossing += [p for p, m in modules.items() if isinstance(m, nn.TransformerDecoderLayer)]
    if crossing:
        raise ValueError(f"{crossing[0] or 'model'} attends to other tokens than its own, which no "
                         "Mixer does; the causal variant is MLPMixer(CausalTokenMLP(seq_len))")
    mixers = {}
    for path, old in attentions.items():
        if old not in mixers:
            mlp = FeedForward(seq_len, d_token or old.embed_dim // 2, dropout=old.dropout)
            mixer = AttentionSubstitute(mlp, tokens_first=not old.batch_first)
            mixers[old] = mixer.to(old.out_proj.weight).train(old.training)
        model.set_submodule(path, mixers[old])
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # or evaluation mode would ask for in_proj_weight
    return len(mixers)
