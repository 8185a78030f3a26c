"""MLP-Mixer, perceptrons in the place of attention (Tolstikhin et al. 2021, arXiv:2105.01601).

    Y = X + T(norm(X)^T)^T        T: Linear(n, t), GELU, Linear(t, n)   tokens meet, channels do not
    Z = Y + C(norm(Y))            C: Linear(d, f), GELU, Linear(f, d)   each token alone

B batch, n tokens, d = d_model, t = d_token (d/2), f = d_ff (4d in the paper);
X, Y, Z (B, n, d). T fixes n, and lets every token see every other. Its cost, 2 n * t * d
multiply-adds a layer, is linear in n where attention is quadratic, while t does not grow with n
(in CausalTokenMLP and ToeplitzTokenMLP it does).

A Transformer's layer differs in one thing, attention in the place of T. Both are called alike, so
that swapping them is one argument:

    EncoderLayer(d, MLPMixer(FeedForward(n, t)), FeedForward(d, f))     # MLP-Mixer
    EncoderLayer(d, SelfAttention(d, n_heads),   FeedForward(d, f))     # Transformer

Beyond the paper: a T that never looks ahead (CausalTokenMLP), one that treats all places alike
(ToeplitzTokenMLP), texts shorter than n (PaddedMixer), positions, dropout, and replace_attention
for other people's models. Unlike the paper's code: exact GELU, and a head that does not start at
zero. Imports torch alone.
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
    """The first half of a layer, T(X^T)^T: any mlp, applied over the tokens and called like
    self-attention (paper, section 2).

    It takes exactly the n of its mlp: the in_features of the mlp's first nn.Linear. An mlp without
    nn.Linear sees to its own length. Fewer tokens are for CausalTokenMLP, ToeplitzTokenMLP and
    PaddedMixer. The last bias of T (fc2.bias, b2) adds one number to all channels of a token, which
    every later LayerNorm takes out again: without dropout its gradient is rounding noise.
    """

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        layers = [m for m in mlp.modules() if isinstance(m, nn.Linear)]
        self.n_tokens = layers[0].in_features if layers else None

    def forward(self, query, key, value, mask=None):
        """query (B, n, d) -> (B, n, d). ValueError for another key or value, a mask, a wrong n."""
        if key is not query or value is not query or mask is not None:
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
    is that of both norms; timm's weights want 1e-6.
    """

    def __init__(self, d_model, token_mixer, feed_forward, *, dropout=0.0, drop_path=0.0,
                 eps=1e-5):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps)
        self.token_mixer = token_mixer
        self.norm2 = nn.LayerNorm(d_model, eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x, mask=None):
        """x (B, n, d) -> (B, n, d); mask as in SelfAttention, refused by a Mixer."""
        h = self.norm1(x)
        x = x + self.drop_path(self.dropout(self.token_mixer(h, h, h, mask)))
        return x + self.drop_path(self.dropout(self.feed_forward(self.norm2(x))))


class SelfAttention(nn.Module):
    """What a Mixer replaces: softmax(Q K^T / sqrt(c)) V, in h heads of c = d/h channels.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.2. dropout acts on the attention weights.
    """

    def __init__(self, d_model, n_heads, *, causal=False, dropout=0.0):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model = {d_model} is no multiple of n_heads = {n_heads}")
        self.n_heads, self.causal = n_heads, causal
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        """query (B, n, d) -> (B, n, d), any n. ValueError for another key or value, a wrong mask.

        mask, boolean (n, n) or (B, n, n): row i may look at column j. A row that may look at
        nothing gets zero attention: the bias of out is left.
        """
        if key is not query or value is not query:
            raise ValueError("SelfAttention takes query again as key and as value")
        B, n = query.shape[:2]
        if mask is not None and (mask.dtype != torch.bool or mask.shape not in ((n, n), (B, n, n))):
            raise ValueError(f"mask must be boolean of shape {(n, n)} or {(B, n, n)}, "
                             f"got {mask.dtype} of shape {tuple(mask.shape)}")
        qkv = self.qkv(query).unflatten(-1, (3, self.n_heads, -1))  # (B, n, 3, h, c)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, h, n, c) each
        if query.is_cuda and mask is None:  # the best kernel there; slow on CPUs for small heads
            p = self.dropout.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        else:
            visible = torch.ones(n, n, dtype=torch.bool, device=query.device)
            visible = visible.tril() if self.causal else visible
            if mask is not None:
                visible = visible & mask.unsqueeze(-3)  # (1, n, n) or (B, 1, n, n)
            blind = ~visible.any(dim=-1, keepdim=True)  # (..., n, 1): softmax would give NaN
            hidden = ~(visible | blind)
            bias = q.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            scores = q * q.shape[-1] ** -0.5 @ k.mT + bias  # (B, h, n, n)
            weights = self.dropout(scores.softmax(dim=-1))
            y = (weights @ v).masked_fill(blind, 0.0)  # (B, h, n, c)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, n, d)


class CausalTokenMLP(nn.Module):
    """A T for MLPMixer that never looks ahead: output i depends on inputs j <= i alone.

    As in MADE (Germain et al. 2015, arXiv:1502.03509) each hidden unit belongs to a position:
    position j owns k = hidden_per_token of them. They read the tokens up to j, and output i reads
    the units of the positions up to i. So k * seq_len * (seq_len + 1) / 2 numbers of W1 and of W2
    count, the rest is multiplied by 0. n < seq_len tokens use the upper left corner of both. They
    are no nn.Linear: an optimizer that turns whole matrices (Muon) would mix in the dead half.
    """

    def __init__(self, seq_len, hidden_per_token=2):
        super().__init__()
        self.seq_len, self.hidden_per_token = n, k = seq_len, hidden_per_token
        if n < 1 or k < 1:
            raise ValueError(f"seq_len = {n} and hidden_per_token = {k} must be 1 or more")
        reach1, reach2 = n ** -0.5, (n * k) ** -0.5  # all start as an nn.Linear's
        self.W1 = nn.Parameter(torch.empty(n * k, n).uniform_(-reach1, reach1))
        self.b1 = nn.Parameter(torch.empty(n * k).uniform_(-reach1, reach1))
        self.W2 = nn.Parameter(torch.empty(n, n * k).uniform_(-reach2, reach2))
        self.b2 = nn.Parameter(torch.empty(n).uniform_(-reach2, reach2))

    def forward(self, x):
        """x (..., n) -> (..., n), 1 <= n <= seq_len: else ValueError."""
        n, k = x.shape[-1], self.hidden_per_token
        if not 1 <= n <= self.seq_len:
            raise ValueError(f"got {n} tokens, CausalTokenMLP takes 1 to seq_len = {self.seq_len}")
        visible = torch.ones_like(self.W1[:n, :n]).tril()  # (n, n): 1 where i may look at j
        W1 = self.W1[:n * k, :n] * visible.repeat_interleave(k, dim=0)  # (nk, n)
        W2 = self.W2[:n, :n * k] * visible.repeat_interleave(k, dim=1)  # (n, nk)
        hidden = F.gelu(F.linear(x, W1, self.b1[:n * k]))  # (..., nk)
        return F.linear(hidden, W2, self.b2[:n])  # (..., n)


class ToeplitzTokenMLP(nn.Module):
    """A T for MLPMixer that treats all places alike: its weights depend on offsets i - j alone.

    Each token owns k = hidden_per_token hidden units. Two convolutions that reach over the whole
    text join tokens, units and outputs:

        u[r, i] = gelu(b1[r] + sum over j of W1[r, i - j] x[j])      unit r of token i
        y[i]    = b2 + sum over r and j of W2[r, i - j] u[r, j]      output i

    seq_len is the largest n, or a grid (rows, columns) of which the n tokens are a prefix in raster
    order, with offsets of row and column. causal: the sums end at j = i. A free T of t = k n units
    has k n^2 weights each way, this one k per offset; the operations are as many.
    """

    def __init__(self, seq_len, hidden_per_token=1, *, causal=False):
        super().__init__()
        self.grid = tuple(seq_len) if isinstance(seq_len, (tuple, list)) else (1, seq_len)
        self.causal = causal
        self.seq_len = n = self.grid[0] * self.grid[1]
        k = hidden_per_token
        if n < 1 or k < 1:
            raise ValueError(f"seq_len = {n} and hidden_per_token = {k} must be 1 or more")
        self.n_ahead = 2 * n - sum(self.grid)  # offsets of tokens j > i; those of j < i are as many
        n_offsets = self.n_ahead + 1 if causal else 2 * self.n_ahead + 1
        reach1, reach2 = n ** -0.5, (n * k) ** -0.5  # the weights start as an nn.Linear's
        self.W1 = nn.Parameter(torch.empty(k, n_offsets).uniform_(-reach1, reach1))
        self.b1 = nn.Parameter(torch.zeros(k, 1))
        self.W2 = nn.Parameter(torch.empty(k, n_offsets).uniform_(-reach2, reach2))
        self.b2 = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        """x (..., n) -> (..., n), 1 <= n <= seq_len: else ValueError."""
        n = x.shape[-1]
        if not 1 <= n <= self.seq_len:
            raise ValueError(
                f"got {n} tokens, ToeplitzTokenMLP takes 1 to seq_len = {self.seq_len}")
        W1, W2 = self.matrix(self.W1, n), self.matrix(self.W2, n)  # (k, n, n)
        u = F.gelu(F.linear(x, W1.flatten(0, 1), self.b1.expand(-1, n).flatten()))  # (..., kn)
        return F.linear(u, W2.transpose(0, 1).flatten(1), self.b2.expand(n))  # (..., n)

    def matrix(self, w, n):
        """w (k, n_offsets), by rising offset -> (k, n, n), w[r, i - j] in row i and column j."""
        if self.causal:
            w = F.pad(w, (self.n_ahead, 0))  # tokens ahead weigh nothing
        return toeplitz_2d(w, *self.grid)[:, :n, :n]


def toeplitz_2d(w, rows, columns):
    """w (h, (2 rows - 1) (2 columns - 1)), by rising offset of row and column -> (h, seq_len,
    seq_len)."""
    w = w.unflatten(-1, (2 * rows - 1, 2 * columns - 1))  # (h, 2 rows - 1, 2 columns - 1)
    W = w.unfold(1, rows, 1).unfold(2, columns, 1).flip(-2, -1)  # (h, rows, columns, rows, columns)
    return W.flatten(3).flatten(1, 2)  # (h, seq_len, seq_len)


class PaddedMixer(MLPMixer):
    """An MLPMixer for 1 <= n <= n_tokens: zeros stand for the missing tokens, on the right."""

    def __init__(self, mlp):
        super().__init__(mlp)
        if self.n_tokens is None:
            raise ValueError(f"{type(mlp).__name__} does not tell how many tokens to pad to; if it "
                             "takes fewer by itself, use an MLPMixer")

    def mix(self, x):
        """x (B, n, d) -> (B, n, d)."""
        n = x.shape[-2]
        x = F.pad(x, (0, 0, 0, max(0, self.n_tokens - n)))  # (B, n_tokens, d)
        return super().mix(x)[..., :n, :]  # (B, n, d)


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


class Encoder(nn.Module):
    """The trunk: positions, layers, LayerNorm. DropPath grows from 0 to drop_path over the depth.

    seq_len: n, or a grid (rows, columns) of n tokens. token_mixer: "mixer" or "attention"; toeplitz
    makes the Mixer's T a ToeplitzTokenMLP. d_token: t, by default d/2, in a Toeplitz T n, in any
    other causal T 2n; those two round t up to a multiple of n, and have no dropout within.
    positions: None, "learned", or "sinusoidal" (Vaswani et al. 2017, sections 3.4 and 3.5).
    """

    def __init__(self, n_layers, d_model, d_ff, seq_len, *, token_mixer="mixer", toeplitz=False,
                 d_token=None, n_heads=8, causal=False, positions=None, dropout=0.0,
                 drop_path=0.0, eps=1e-5):
        super().__init__()
        n = seq_len[0] * seq_len[1] if isinstance(seq_len, (tuple, list)) else seq_len
        if token_mixer not in ("mixer", "attention"):
            raise ValueError(f'token_mixer = {token_mixer!r} is none of "mixer", "attention"')
        if positions not in (None, "learned", "sinusoidal"):
            raise ValueError(f'positions = {positions!r} is none of None, "learned", "sinusoidal"')

        def new_token_mixer():
            if token_mixer == "attention":
                return SelfAttention(d_model, n_heads, causal=causal, dropout=dropout)
            hidden_per_token = (d_token + n - 1) // n if d_token else 1 if toeplitz else 2
            if toeplitz:
                return MLPMixer(ToeplitzTokenMLP(seq_len, hidden_per_token, causal=causal))
            if causal:
                return MLPMixer(CausalTokenMLP(n, hidden_per_token))
            return PaddedMixer(FeedForward(n, d_token or d_model // 2, dropout=dropout))

        self.positions = positions
        if positions == "learned":
            self.position_embedding = nn.Embedding(n, d_model)
            nn.init.normal_(self.position_embedding.weight, std=0.02)
        rates = [drop_path * i / max(1, n_layers - 1) for i in range(n_layers)]
        self.blocks = nn.ModuleList(
            EncoderLayer(d_model, new_token_mixer(), FeedForward(d_model, d_ff, dropout=dropout),
                         dropout=dropout, drop_path=rate, eps=eps) for rate in rates)
        self.norm = nn.LayerNorm(d_model, eps)

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


def sinusoids(places, d_model):
    """places (n,) -> (n, d): sines in even channels, cosines in odd ones, wavelengths 2 pi to
    10,000 * 2 pi."""
    rates = 10_000.0 ** (-torch.arange(0, d_model, 2, device=places.device) / d_model)  # (d/2,)
    angles = places[:, None] * rates  # (n, d/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]  # (n, d)


class EncoderLanguageModel(nn.Module):
    """Token ids to logits of a masked token, or (causal=True) of the next one.

    Takes 1 to seq_len tokens, with either token mixer. encoder_options: see Encoder.
    """

    def __init__(self, vocab_size, seq_len, d_model, d_ff, n_layers, *, causal=False,
                 **encoder_options):
        super().__init__()
        self.seq_len, self.causal = seq_len, causal
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.trunk = Encoder(n_layers, d_model, d_ff, seq_len, causal=causal, **encoder_options)
        if self.trunk.positions == "learned":  # as in GPT-2
            nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids, mask=None):
        """ids (B, n) -> logits (B, n, vocab_size); mask as in SelfAttention. ValueError for a wrong
        n."""
        n = ids.shape[1]
        if not 1 <= n <= self.seq_len:
            raise ValueError(f"got {n} tokens, the model takes 1 to seq_len = {self.seq_len}")
        return self.head(self.trunk(self.embedding(ids), mask))

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, *, temperature=1.0, top_k=None, generator=None):
        """ids (B, n), n >= 1 -> (B, n + max_new_tokens): ids, then what the model writes.

        temperature 0 takes the likeliest token; top_k samples among the k likeliest; generator is
        the CPU torch.Generator to draw from. The model sees a window: at first the last seq_len
        tokens of ids; when it is full, half of it is left behind.
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
        start = max(0, n - self.seq_len)  # of the window, in ids
        try:
            for length in range(n, n + max_new_tokens):
                if length - start > self.seq_len:
                    start = length - max(1, self.seq_len // 2)
                logits = self(ids[:, start:])[:, -1]  # (B, vocab_size)
                chosen = sample(logits, temperature, top_k, generator)  # (B, 1)
                ids = torch.cat([ids, chosen.to(ids)], dim=1)
        finally:
            self.train(was_training)
        return ids


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


class EncoderImageClassifier(nn.Module):
    """Images cut into patches, each a token (paper, section 2). Sizes are int or (height, width).

    encoder_options: see Encoder. Attention needs positions; a Mixer knows places, or offsets if it
    is Toeplitz.
    """

    def __init__(self, image_size, patch_size, n_classes, d_model, d_ff, n_layers, *, in_channels=3,
                 **encoder_options):
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        p1, p2 = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if height % p1 or width % p2:
            raise ValueError(f"image {height} x {width} is no multiple of patch {p1} x {p2}")
        self.image_shape = (in_channels, height, width)
        grid = height // p1, width // p2
        self.patches = nn.Conv2d(in_channels, d_model, (p1, p2), stride=(p1, p2))
        self.trunk = Encoder(n_layers, d_model, d_ff, grid, **encoder_options)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, images):
        """images (B, in_channels, height, width) -> logits (B, n_classes). ValueError for another
        shape."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"got images of shape {tuple(images.shape[1:])}, "
                             f"the model takes {self.image_shape}")
        x = self.patches(images).flatten(2).mT  # (B, n, d)
        return self.head(self.trunk(x).mean(dim=1))


# Table 1 of the paper. With 224-pixel images and 1,000 classes S/16, B/16 and L/16 have 18.5, 59.9
# and 208.2 million parameters.
MIXER_SIZES = {
    "S/32": dict(patch_size=32, d_model=512, d_ff=2048, n_layers=8, d_token=256),
    "S/16": dict(patch_size=16, d_model=512, d_ff=2048, n_layers=8, d_token=256),
    "B/32": dict(patch_size=32, d_model=768, d_ff=3072, n_layers=12, d_token=384),
    "B/16": dict(patch_size=16, d_model=768, d_ff=3072, n_layers=12, d_token=384),
    "L/32": dict(patch_size=32, d_model=1024, d_ff=4096, n_layers=24, d_token=512),
    "L/16": dict(patch_size=16, d_model=1024, d_ff=4096, n_layers=24, d_token=512),
    "H/14": dict(patch_size=14, d_model=1280, d_ff=5120, n_layers=32, d_token=640),
}


class AttentionSubstitute(MLPMixer):
    """An MLPMixer with the arguments, the layouts and the returned pair of MultiheadAttention."""

    # Not the layout: nn.TransformerEncoderLayer reads it, and where it is True takes a fast path in
    # evaluation mode that computes attention from MultiheadAttention's weights, past this module.
    batch_first = False

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
    for nn.TransformerDecoderLayer and keys or values of another width; in the model's forward for
    masks, another key, another n.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # all paths of a shared module
    attentions = {p: m for p, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
    if "" in attentions:
        raise ValueError("model is itself an nn.MultiheadAttention: pass the module that holds it")
    crossing = [p for p, m in attentions.items() if not m.kdim == m.vdim == m.embed_dim]
    crossing += [p for p, m in modules.items() if isinstance(m, nn.TransformerDecoderLayer)]
    if crossing:
        raise ValueError(f"{crossing[0] or 'model'} attends to other tokens than its own, which no "
                         f"Mixer does; for a causal model without that, the causal variant is "
                         f"MLPMixer(CausalTokenMLP(seq_len))")
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
