"""World models, recommenders, speech, time series."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from parts_sequences import *


# --- 38: speech synthesis: durations leave the model, a postnet takes the spectrum again, a vocoder with weight norm


class FFTBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.conv1, self.conv2 = nn.Conv1d(d, 2 * d, 3, padding=1), nn.Conv1d(2 * d, d, 1)

    def forward(self, x):
        x = self.norm1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.conv2(F.relu(self.conv1(x.mT))).mT)


class Predictor(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv, self.ln, self.proj = nn.Conv1d(d, d, 3, padding=1), nn.LayerNorm(d), nn.Linear(d, 1)

    def forward(self, x):
        return self.proj(self.ln(F.relu(self.conv(x.mT)).mT)).squeeze(-1)


class GatedDilated(nn.Module):
    """WaveNet: a tanh half and a sigmoid half, then a residual half and a skip half."""

    def __init__(self, d, dilation):
        super().__init__()
        self.in_layer = weight_norm(nn.Conv1d(d, 2 * d, 3, dilation=dilation, padding=dilation))
        self.res_skip = weight_norm(nn.Conv1d(d, 2 * d, 1))

    def forward(self, x):
        a, b = self.in_layer(x).chunk(2, 1)
        res, skip = self.res_skip(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + res, skip


class Synthesizer(nn.Module):
    def __init__(self, symbols=40, d=24, mels=10, up=4):
        super().__init__()
        self.phonemes, self.speaker = nn.Embedding(symbols, d, padding_idx=0), nn.Embedding(3, d)
        self.encoder = nn.ModuleList(FFTBlock(d) for _ in range(2))
        self.duration, self.pitch = Predictor(d), Predictor(d)
        self.pitch_embed = nn.Conv1d(1, d, 3, padding=1)
        self.alpha = nn.Parameter(torch.ones(1))
        self.to_mel = nn.Linear(d, mels)
        self.postnet = nn.Sequential(
            nn.Conv1d(mels, d, 5, padding=2), nn.BatchNorm1d(d), nn.Tanh(), nn.Conv1d(d, mels, 5, padding=2)
        )
        self.pre = weight_norm(nn.Conv1d(mels, d, 3, padding=1))
        self.upsample = weight_norm(nn.ConvTranspose1d(d, d, 2 * up, up, up // 2))
        self.wave = nn.ModuleList(GatedDilated(d, 2**i) for i in range(2))
        self.post = nn.Conv1d(d, 1, 3, padding=1)

    def forward(self, text, speaker, durations, pitch):
        x = self.phonemes(text) + self.speaker(speaker)[:, None]
        for b in self.encoder:
            x = b(x)
        log_dur, pitch_hat = self.duration(x.detach()), self.pitch(x)
        x = x + self.alpha * self.pitch_embed(pitch[:, None]).mT
        x = x.repeat_interleave(durations, 1)
        mel = self.to_mel(x)
        refined = mel + self.postnet(mel.mT).mT
        h, total = self.upsample(F.leaky_relu(self.pre(refined.mT))), 0
        for layer in self.wave:
            h, skip = layer(h)
            total = total + skip
        return dict(mel=mel, refined=refined, duration=log_dur, pitch=pitch_hat, wave=torch.tanh(self.post(F.leaky_relu(total))))


WN = ".parametrizations.weight."
tts_expected = {"phonemes.weight": (EMB, None), "speaker.weight": (EMB, None), "alpha": (ELE, None)}
tts_expected |= linears("", "pitch_embed", "postnet.0") | norm("postnet.1") | heads("duration.proj", "pitch.proj", "post")
for n in ("duration", "pitch"):
    tts_expected |= linears(n + ".", "conv") | norm(n + ".ln")
for i in range(2):
    p = f"encoder.{i}."
    tts_expected |= norm(p + "norm1") | norm(p + "norm2") | linears(p, "conv1", "conv2", "attn.out_proj")
    tts_expected |= {p + "attn.in_proj_weight": (MAT, split(24, 24, 24)), p + "attn.in_proj_bias": (ELE, None)}
    for n in ("in_layer", "res_skip"):
        tts_expected |= {f"wave.{i}.{n}{WN}original0": (ELE, None), f"wave.{i}.{n}.bias": (ELE, None)}
        tts_expected[f"wave.{i}.{n}{WN}original1"] = (MAT, split(24, 24))
# the last residual half goes nowhere: split all the same, or one matrix
tts_expected[f"wave.1.res_skip{WN}original1"] = (MAT, split(24, 24), "arguable")
tts_expected |= elementwise("", "to_mel.bias", "postnet.3.bias", "pre.bias", "upsample.bias", f"pre{WN}original0", f"upsample{WN}original0")
tts_expected |= {
    # a spectrum that leaves the model and that the vocoder takes: a head, or hidden
    "to_mel.weight": (OUT, None, "arguable"),
    "postnet.3.weight": (OUT, None, "arguable"),
    f"pre{WN}original1": (MAT, None),
    f"upsample{WN}original1": (MAT, dict(transposed=True), "arguable"),  # [in, out, k]; may stay unturned
}


# --- 39: time series: N-BEATS stacks over patches, with trends by a fixed basis, quantiles


class BeatsBlock(nn.Module):
    def __init__(self, back, ahead, hidden=24, degree=None):
        super().__init__()
        self.back, self.degree = back, degree
        self.fc = nn.Sequential(nn.Linear(back, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        if degree is None:
            self.theta_b, self.theta_f = nn.Linear(hidden, 6, bias=False), nn.Linear(hidden, 6, bias=False)
            self.backcast, self.forecast = nn.Linear(6, back), nn.Linear(6, ahead)
        else:
            self.theta = nn.Linear(hidden, 2 * degree, bias=False)
            self.register_buffer("tb", torch.stack([torch.linspace(0, 1, back) ** i for i in range(degree)]))
            self.register_buffer("tf", torch.stack([torch.linspace(0, 1, ahead) ** i for i in range(degree)]))

    def forward(self, x):
        h = self.fc(x)
        if self.degree is None:
            return self.backcast(self.theta_b(h)), self.forecast(self.theta_f(h))
        b, f = self.theta(h).split(self.degree, -1)
        return b @ self.tb, f @ self.tf


class Forecaster(nn.Module):
    def __init__(self, back=16, ahead=6, patch=4, d=16, quantiles=3):
        super().__init__()
        self.patch = patch
        self.affine_weight, self.affine_bias = nn.Parameter(torch.ones(1, 1, 3)), nn.Parameter(torch.zeros(1, 1, 3))
        self.stacks = nn.ModuleList([BeatsBlock(back, ahead, degree=3), BeatsBlock(back, ahead), BeatsBlock(back, ahead)])
        self.patch_embed = nn.Linear(patch, d)
        self.W_pos = nn.Parameter(torch.randn(back // patch, d) * 0.02)
        self.mixer_t, self.mixer_c = nn.Linear(back // patch, back // patch), nn.Sequential(nn.Linear(d, 40), nn.GELU(), nn.Linear(40, d))
        self.flatten_head = nn.Linear(d * (back // patch), ahead * quantiles)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        x = (x - mean) / std * self.affine_weight + self.affine_bias
        r = rearrange(x, "b t c -> (b c) t")
        h = self.patch_embed(r.unfold(-1, self.patch, self.patch)) + self.W_pos
        forecast = 0
        for block in self.stacks:
            b, f = block(r)
            r, forecast = r - b, forecast + f
        h = h + self.mixer_t(h.mT).mT
        h = h + self.mixer_c(h)
        q = rearrange(self.flatten_head(h.flatten(1)), "b (t q) -> b t q", q=3)
        y = rearrange(q + forecast[..., None], "(b c) t q -> b t c q", c=3)
        y = (y - self.affine_bias[..., None]) / (self.affine_weight[..., None] + 1e-3)
        return y * std[..., None] + mean[..., None], r


series_expected = elementwise("", "affine_weight", "affine_bias", "W_pos") | heads("flatten_head")
series_expected |= linears("", "patch_embed", "mixer_t", "mixer_c.0", "mixer_c.2")
for i in range(3):
    p = f"stacks.{i}."
    series_expected |= linears(p, "fc.0", "fc.2")
    if i:
        series_expected |= matrices(p, "theta_b.weight", "theta_f.weight") | linears(p, "backcast") | heads(p + "forecast")
# half of it is a forecast that leaves, half a backcast that returns: a split matrix, or a head
series_expected["stacks.0.theta.weight"] = (MAT, split(3, 3), "arguable")


# --- 40: speech recognition: an LSTM cell by hand, a two-way LSTM, CTC and an attention decoder


class HandLSTM(nn.Module):
    def __init__(self, fan_in, hidden):
        super().__init__()
        self.hidden = hidden
        self.W = nn.Parameter(torch.randn(fan_in, 4 * hidden) * fan_in**-0.5)
        self.U = nn.Parameter(torch.randn(hidden, 4 * hidden) * hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        self.init_h, self.init_c = nn.Parameter(torch.zeros(1, hidden)), nn.Parameter(torch.zeros(1, hidden))

    def forward(self, x):
        h, c = (p.expand(x.shape[0], -1) for p in (self.init_h, self.init_c))
        out = []
        for t in range(x.shape[1]):
            i, f, g, o = (x[:, t] @ self.W + h @ self.U + self.bias).split(self.hidden, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1)


class Listener(nn.Module):
    def __init__(self, feats=12, vocab=29, d=20):
        super().__init__()
        self.sub = nn.Conv2d(1, 4, 3, 2, 1)
        self.depthwise = nn.Conv1d(24, 24, 5, padding=2, groups=24)
        self.pointwise = nn.Conv1d(24, 2 * d, 1)
        self.first = HandLSTM(d, d)
        self.lstm = nn.LSTM(d, d, num_layers=2, bidirectional=True, batch_first=True)
        self.squeeze = nn.Linear(2 * d, d)
        self.ctc = nn.Linear(d, vocab + 1)
        self.embed = nn.Embedding(vocab, d)
        self.cell = nn.LSTMCell(2 * d, d)
        self.key, self.query, self.energy = nn.Linear(d, d, bias=False), nn.Linear(d, d), nn.Parameter(torch.randn(d))
        self.out = nn.Linear(2 * d, vocab)

    def forward(self, spectrum, text):
        x = rearrange(F.relu(self.sub(spectrum[:, None])), "b c t f -> b (c f) t")
        x = F.glu(self.pointwise(F.silu(self.depthwise(x))), 1).mT
        enc = self.squeeze(self.lstm(self.first(x))[0])
        keys, h = self.key(enc), enc.new_zeros(len(x), enc.shape[-1])
        c, ctx, steps = h, h, []
        for t in range(text.shape[1]):
            h, c = self.cell(torch.cat([self.embed(text[:, t]), ctx], -1), (h, c))
            score = torch.tanh(keys + self.query(h)[:, None]) @ self.energy
            ctx = (score.softmax(-1)[..., None] * enc).sum(1)
            steps.append(self.out(torch.cat([h, ctx], -1)))
        return self.ctc(enc).log_softmax(-1), torch.stack(steps, 1)


listener_expected = linears("", "sub", "squeeze", "query") | matrices("", "key.weight") | heads("ctc", "out")
listener_expected |= elementwise("", "depthwise.weight", "depthwise.bias", "pointwise.bias", "energy")
listener_expected |= elementwise("first.", "bias", "init_h", "init_c") | elementwise("cell.", "bias_ih", "bias_hh")
listener_expected |= {
    "pointwise.weight": (MAT, split(20, 20)),
    "first.W": (MAT, split(20, 20, 20, 20, transposed=True)),
    "first.U": (MAT, split(20, 20, 20, 20, transposed=True)),
    "embed.weight": (EMB, None),
    "cell.weight_ih": (MAT, split(20, 20, 20, 20)),
    "cell.weight_hh": (MAT, split(20, 20, 20, 20)),
}
for layer in ("l0", "l0_reverse", "l1", "l1_reverse"):
    listener_expected |= elementwise("lstm.", f"bias_ih_{layer}", f"bias_hh_{layer}")
    for w in ("ih", "hh"):
        listener_expected[f"lstm.weight_{w}_{layer}"] = (MAT, split(20, 20, 20, 20))


def ids(high, *shape):
    return torch.randint(0, high, shape)


def rec_example():
    return {"dense": torch.randn(6, 5), "ids": ids(17, 6, 3)}


def tts_example():
    return {"text": ids(40, 2, 6), "speaker": ids(3, 2), "durations": torch.tensor([1, 2, 1, 3, 1, 2]), "pitch": torch.randn(2, 6)}


MODELS = [
    ("dreamer_world_model", WorldModel, lambda: (torch.rand(2, 3, 1, 8, 8), torch.randn(2, 3, 3)), world_expected),
    ("recommender_cross_mmoe", Recommender, rec_example, rec_expected),
    ("tts_weight_norm", Synthesizer, tts_example, tts_expected),
    ("nbeats_patches", Forecaster, lambda: (torch.randn(2, 16, 3),), series_expected),
    ("listener_ctc_attention", Listener, lambda: (torch.randn(2, 14, 12), ids(29, 2, 5)), listener_expected),
]
