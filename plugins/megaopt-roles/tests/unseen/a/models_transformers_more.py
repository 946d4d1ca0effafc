import math, os, sys
from collections import OrderedDict
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from unseen_common import *
from models_transformers import *

MODELS = []


def add(name, factory, example, rules):
    MODELS.append((name, factory, example, expect(factory, rules)))


# ---------------------------------------------------------------- NeoX: per-head q,k,v interleaved, rotary on a part of each head
class NeoXAttn(nn.Module):
    def __init__(self, d=30, h=5):
        super().__init__()
        self.h, self.hd = h, 6
        self.Wqkv = nn.Linear(d, 3 * h * 6)
        self.out = nn.Linear(h * 6, d)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.Wqkv(x).view(b, t, self.h, 3 * self.hd).transpose(1, 2).chunk(3, dim=-1)
        q, k = (torch.cat((rope(z[..., :4]), z[..., 4:]), -1) for z in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class NeoXClassifier(nn.Module):
    """Token classifier whose number of labels equals the width of a layer (30)."""
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 30, padding_idx=0)
        self.layers = nn.ModuleList([nn.ModuleDict({"n1": nn.LayerNorm(30), "att": NeoXAttn(), "n2": nn.LayerNorm(30),
                                                   "ff": nn.Sequential(OrderedDict(a=nn.Linear(30, 50), b=nn.GELU(), c=nn.Linear(50, 30)))})
                                     for _ in range(2)])
        self.dense = nn.Linear(30, 30)
        self.out = nn.Linear(30, 30)

    def forward(self, x):
        x = self.emb(x)
        for l in self.layers:
            x = x + l["att"](l["n1"](x))
            x = x + l["ff"](l["n2"](x))
        return self.out(torch.tanh(self.dense(x.mean(1))))


add("neox_classifier_square_head", NeoXClassifier, ids(64, 2, 7), {
    "emb.weight": EMB, "out.weight": OUT, "dense.weight": M,
    "*.Wqkv.weight": arg(mat([6, 6, 6], interleaved=True)),  # partial rotary could be read as further splits
    "*.att.out.weight": M, "*.ff.?.weight": M})


# ---------------------------------------------------------------- GPT-2 with its own Conv1D ([in, out])
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(3 * d, d), "c_proj": Conv1D(d, d)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(4 * d, d), "c_proj": Conv1D(d, 4 * d)})

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 2, -1).transpose(1, 2) for z in self.attn["c_attn"](self.ln_1(x)).split(d, 2))
        w = (q @ k.transpose(-1, -2)).tril().softmax(-1)
        x = x + self.attn["c_proj"]((w @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2DoubleHeads(nn.Module):
    def __init__(self, d=22):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(58, d), nn.Parameter(torch.zeros(1, 12, d))
        self.h = nn.Sequential(*[GPT2Block(d) for _ in range(2)])
        self.ln_f = nn.LayerNorm(d)
        self.mc_score = nn.Linear(d, 1)

    def forward(self, ids):
        x = self.ln_f(self.h(self.wte(ids) + self.wpe[:, : ids.shape[1]]))
        return F.linear(x, self.wte.weight), self.mc_score(x[:, -1]).squeeze(-1)


add("gpt2_conv1d_tied_by_functional", GPT2DoubleHeads, ids(58, 3, 8), {
    "wte.weight": arg(EMB), "wpe": EL, "mc_score.weight": OUT,
    "*.attn.c_attn.weight": mat([22, 22, 22], transposed=True), "*.c_proj.weight": mat(transposed=True), "*.c_fc.weight": mat(transposed=True)})


# ---------------------------------------------------------------- flax style: einsum with named heads, bare parameters
class FlaxAttention(nn.Module):
    def __init__(self, d, h, k):
        super().__init__()
        self.query = nn.Parameter(torch.randn(d, h, k) * 0.05)
        self.key = nn.Parameter(torch.randn(d, h, k) * 0.05)
        self.value = nn.Parameter(torch.randn(d, h, k) * 0.05)
        self.out = nn.Parameter(torch.randn(h, k, d) * 0.05)

    def forward(self, x):
        q = torch.einsum("btd,dhk->bthk", x, self.query)
        k = torch.einsum("btd,dhk->bthk", x, self.key)
        v = torch.einsum("btd,dhk->bthk", x, self.value)
        a = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
        return torch.einsum("bthk,hkd->btd", torch.einsum("bhts,bshk->bthk", a, v), self.out)


class FlaxLM(nn.Module):
    def __init__(self, d=28):
        super().__init__()
        self.table = nn.Parameter(torch.randn(49, d))
        self.pos = nn.Parameter(torch.randn(16, d) * 0.01)
        self.blocks = nn.ModuleList([nn.ModuleList([FlaxAttention(d, 4, 5), nn.LayerNorm(d)]) for _ in range(2)])
        self.wi = nn.ParameterList([nn.Parameter(torch.randn(d, 2, 33) * 0.05) for _ in range(2)])  # gate and up on the middle axis
        self.wo = nn.ParameterList([nn.Parameter(torch.randn(33, d) * 0.05) for _ in range(2)])
        self.logits = nn.Parameter(torch.randn(d, 49) * 0.02)

    def forward(self, tokens):
        x = self.table[tokens] + self.pos[: tokens.shape[1]]
        for (att, norm), wi, wo in zip(self.blocks, self.wi, self.wo):
            x = x + att(norm(x))
            g, u = torch.einsum("btd,dcf->cbtf", norm(x), wi)
            x = x + (F.gelu(g) * u) @ wo
        return x @ self.logits


add("flax_style_einsum", FlaxLM, ids(49, 2, 6), {
    "table": EMB, "pos": EL, "logits": OUT,
    "*.query": mat(transposed=True), "*.key": mat(transposed=True), "*.value": mat(transposed=True),
    "*.out": mat(transposed=True, first_dims=2),
    "wi.*": mat([33, 33], transposed=True), "wo.*": mat(transposed=True)})


# ---------------------------------------------------------------- ALBERT: factorized table, one shared block, MLM transform + SOP
class AlbertBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 4, batch_first=True)
        self.ffn, self.ffn_output = nn.Linear(d, 72), nn.Linear(72, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        x = self.n1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.n2(x + self.ffn_output(F.gelu(self.ffn(x))))


class Albert(nn.Module):
    def __init__(self, v=83, e=10, d=36):
        super().__init__()
        self.word_embeddings = nn.Embedding(v, e)
        self.token_type_embeddings = nn.Embedding(2, e)
        self.embedding_hidden_mapping_in = nn.Linear(e, d)
        self.layer = AlbertBlock(d)
        self.pooler = nn.Linear(d, d)
        self.predictions = nn.ModuleDict({"dense": nn.Linear(d, e), "LayerNorm": nn.LayerNorm(e), "decoder": nn.Linear(e, v)})
        self.predictions["decoder"].weight = self.word_embeddings.weight
        self.sop_classifier = nn.Linear(d, 2)

    def forward(self, ids, types):
        x = self.embedding_hidden_mapping_in(self.word_embeddings(ids) + self.token_type_embeddings(types))
        for _ in range(3):
            x = self.layer(x)
        p = self.predictions
        return p["decoder"](p["LayerNorm"](F.gelu(p["dense"](x)))), self.sop_classifier(torch.tanh(self.pooler(x[:, 0])))


add("albert_shared_block", Albert, lambda: (torch.randint(0, 83, (2, 6)), torch.zeros(2, 6, dtype=torch.long)), {
    "word_embeddings.weight": arg(EMB), "token_type_embeddings.weight": EMB, "embedding_hidden_mapping_in.weight": M,
    "layer.attention.in_proj_weight": mat([36, 36, 36]), "layer.attention.out_proj.weight": M, "layer.ffn*.weight": M,
    "pooler.weight": M, "predictions.dense.weight": M, "sop_classifier.weight": OUT})


# ---------------------------------------------------------------- ViT (vit-pytorch style) with cls token, distillation head
class Attention(nn.Module):
    def __init__(self, dim, heads, dim_head):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.0))

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = map(lambda z: z.reshape(b, n, self.heads, -1).permute(0, 2, 1, 3), qkv)
        attn = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.to_out((attn @ v).permute(0, 2, 1, 3).reshape(b, n, -1))


class ViT(nn.Module):
    def __init__(self, dim=42, classes=17):
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, dim), nn.LayerNorm(dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, 18, dim))
        self.cls_token, self.dist_token = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(dim))
        self.layers = nn.ModuleList([nn.ModuleList([Attention(dim, 3, 8), nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))]) for _ in range(2)])
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        self.head_dist = nn.Linear(dim, classes)

    def forward(self, img):
        b = img.shape[0]
        x = img.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(b, 16, 48)
        x = torch.cat((self.cls_token.expand(b, -1, -1), self.dist_token.expand(b, 1, -1), self.to_patch_embedding(x)), 1) + self.pos_embedding
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        a, d = self.mlp_head(x[:, 0]), self.head_dist(x[:, 1])
        return (a, d) if self.training else (a + d) / 2


add("vit_distilled", ViT, lambda: (torch.randn(2, 3, 16, 16),), {
    "to_patch_embedding.0.*": EL, "to_patch_embedding.1.weight": M, "pos_embedding": EL, "cls_token": EL,
    "*.to_qkv.weight": mat([24, 24, 24]), "*.to_out.0.weight": M, "layers.*.1.0.*": EL, "layers.*.1.1.weight": M, "layers.*.1.3.weight": M,
    "mlp_head.0.*": EL, "mlp_head.1.weight": OUT, "head_dist.weight": OUT})


# ---------------------------------------------------------------- Swin-like
class WindowAttention(nn.Module):
    def __init__(self, dim, ws, heads):
        super().__init__()
        self.ws, self.heads = ws, heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * ws - 1) ** 2, heads))
        c = torch.stack(torch.meshgrid(torch.arange(ws), torch.arange(ws), indexing="ij")).flatten(1)
        r = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + ws - 1
        self.register_buffer("relative_position_index", r[..., 0] * (2 * ws - 1) + r[..., 1])
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1).permute(2, 0, 1)
        return self.proj(((attn + bias[None]).softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, shift):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.shift = nn.LayerNorm(dim), WindowAttention(dim, 2, heads), nn.LayerNorm(dim), shift
        self.mlp = nn.Sequential(nn.Linear(dim, int(dim * 2.5)), nn.GELU(), nn.Linear(int(dim * 2.5), dim))

    def forward(self, x):
        B, H, W, C = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(B, H // 2, 2, W // 2, 2, C).transpose(2, 3).reshape(-1, 4, C)
        y = self.attn(y).view(B, H // 2, W // 2, 2, 2, C).transpose(2, 3).reshape(B, H, W, C)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


class Swin(nn.Module):
    def __init__(self, n_classes=11):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 12, 2, 2)
        self.stages = nn.Sequential(SwinBlock(12, 2, 0), SwinBlock(12, 2, 1), PatchMerging(12), SwinBlock(24, 3, 0), SwinBlock(24, 3, 1))
        self.norm = nn.LayerNorm(24)
        self.fc = nn.Linear(24, n_classes)

    def forward(self, x):
        x = self.stages(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.fc(self.norm(x).mean((1, 2)))


add("swin", Swin, lambda: (torch.randn(2, 3, 16, 16),), {
    "patch_embed.weight": M, "fc.weight": OUT, "*.relative_position_bias_table": EL,
    "stages.0.attn.qkv.weight": mat([12] * 3), "stages.1.attn.qkv.weight": mat([12] * 3),
    "stages.?.attn.qkv.weight": mat([24] * 3), "*.proj.weight": M, "*.mlp.?.weight": M, "*.reduction.weight": M})


# ---------------------------------------------------------------- early exits inside blocks + multi-token prediction, gated q
class GatedAttnBlock(nn.Module):
    def __init__(self, d=33, h=3, hd=7, exit_to=None):
        super().__init__()
        self.h, self.hd = h, hd
        self.q_proj = nn.Linear(d, h * hd * 2, bias=False)  # per head: query, output gate
        self.kv_proj = nn.Linear(d, 2 * hd, bias=False)
        self.o_proj = nn.Linear(h * hd, d, bias=False)
        self.fc1, self.fc2 = nn.Linear(d, 57), nn.Linear(57, d)
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.to_vocab = nn.Linear(d, exit_to, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, gate = self.q_proj(y).unflatten(-1, (self.h, 2 * self.hd)).chunk(2, -1)
        k, v = self.kv_proj(y).chunk(2, -1)
        att = torch.einsum("bthd,bsd->bhts", q, k).softmax(-1)
        o = torch.einsum("bhts,bsd->bthd", att, v)
        x = x + self.o_proj((o * gate.sigmoid()).flatten(2))
        x = x + self.fc2(F.relu(self.fc1(self.norm2(x))).square())
        return x, self.to_vocab(x)


class EarlyExitMTP(nn.Module):
    def __init__(self, v=39, d=33):
        super().__init__()
        self.tok = nn.Embedding(v, d)
        self.blocks = nn.ModuleList(GatedAttnBlock(d, exit_to=v) for _ in range(3))
        self.mtp_eh_proj = nn.Linear(2 * d, d, bias=False)
        self.mtp_block = GatedAttnBlock(d, exit_to=v)

    def forward(self, t):
        x, outs = self.tok(t), []
        for b in self.blocks:
            x, o = b(x)
            outs.append(o)
        nxt = self.tok(t.roll(-1, 1))
        _, o = self.mtp_block(self.mtp_eh_proj(torch.cat([x, nxt], -1)))
        return outs, o


add("early_exit_mtp_gated", EarlyExitMTP, ids(39, 2, 6), {
    "tok.weight": EMB, "*.q_proj.weight": mat([7, 7], interleaved=True), "*.kv_proj.weight": mat([7, 7]), "*.o_proj.weight": M,
    "*.fc?.weight": M, "*.to_vocab.weight": OUT, "mtp_eh_proj.weight": M})


# ---------------------------------------------------------------- torch's own nn.Transformer for translation
class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(50, 16), nn.Embedding(66, 16)
        self.transformer = nn.Transformer(16, 2, 1, 2, 40, 0.0, batch_first=True)
        self.generator = nn.Linear(16, 66)

    def forward(self, src, trg):
        mask = nn.Transformer.generate_square_subsequent_mask(trg.size(1))
        pad = torch.zeros_like(src, dtype=torch.bool)
        return self.generator(self.transformer(self.src_tok_emb(src) * 4, self.tgt_tok_emb(trg) * 4, tgt_mask=mask, src_key_padding_mask=pad))


add("torch_transformer_mt", Seq2SeqTransformer, lambda: dict(src=torch.randint(0, 50, (2, 5)), trg=torch.randint(0, 66, (2, 4))), {
    "*_tok_emb.weight": EMB, "generator.weight": OUT, "*.in_proj_weight": mat([16] * 3), "*.out_proj.weight": M, "*.linear?.weight": M})


# ---------------------------------------------------------------- Perceiver IO: learned latents and output queries
class PerceiverIO(nn.Module):
    def __init__(self, d=20, latent=30):
        super().__init__()
        self.inp = nn.Linear(9, d)
        self.latents = nn.Parameter(torch.randn(6, latent))
        self.queries = nn.Parameter(torch.randn(4, 14))
        self.to_q, self.to_kv, self.cross_out = nn.Linear(latent, 24, bias=False), nn.Linear(d, 48, bias=False), nn.Linear(24, latent)
        self.self_blocks = nn.ModuleList([nn.TransformerEncoderLayer(latent, 3, 46, 0.0, batch_first=True, norm_first=True) for _ in range(2)])
        self.dec = nn.MultiheadAttention(14, 2, kdim=latent, vdim=latent, batch_first=True)
        self.final = nn.Linear(14, 5)

    def forward(self, x):
        z = self.latents.unsqueeze(0).repeat(x.size(0), 1, 1)
        k, v = self.to_kv(self.inp(x)).chunk(2, -1)
        z = z + self.cross_out((self.to_q(z) @ k.mT).softmax(-1) @ v)
        for b in self.self_blocks:
            z = b(z)
        q = self.queries.expand(x.size(0), -1, -1)
        return self.final(q + self.dec(q, z, z)[0])


add("perceiver_io", PerceiverIO, lambda: (torch.randn(2, 10, 9),), {
    "inp.weight": M, "latents": EL, "queries": EL, "to_q.weight": M, "to_kv.weight": mat([24, 24]), "cross_out.weight": M,
    "self_blocks.*.in_proj_weight": mat([30] * 3), "*.out_proj.weight": M, "*.linear?.weight": M,
    "dec.?_proj_weight": M, "final.weight": OUT})
