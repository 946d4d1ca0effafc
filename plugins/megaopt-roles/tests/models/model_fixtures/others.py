"""The structure of real models that are no plain decoders, and small models that are plain torch in reality too."""

import warnings

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from model_fixtures.decoders import DECODERS, MLP, Attention, RMSNorm

__all__ = ["PLAIN_TORCH", "REPLICAS"]


class Held(nn.Module):
    """Modules one after the other, under whatever names."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class RelativeAttention(Attention):
    """Adds a bias per head and distance, which the first layer makes for all."""

    def __init__(self, *, makes_bias: bool) -> None:
        super().__init__("q k v o")
        self.relative_attention_bias = nn.Embedding(32, 4) if makes_bias else None

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.relative_attention_bias is not None:
            place = torch.arange(x.shape[1], device=x.device)
            distance = (place[None, :] - place[:, None]).clamp(-16, 15) + 16
            bias = self.relative_attention_bias(distance).permute(2, 0, 1)
        return super().forward(x, memory, bias), bias


class T5Attention(nn.Module):
    def __init__(self, name: str, attention: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, attention)
        self.layer_norm = RMSNorm(32)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = getattr(self, self.name)(self.layer_norm(x), memory, bias)
        return x + y, bias


class T5MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.DenseReluDense, self.layer_norm = MLP("wi wo", bias=False), RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nn.Module):
    def __init__(self, *, first: bool, decoder: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([T5Attention("SelfAttention", RelativeAttention(makes_bias=first))])
        if decoder:
            self.layer.append(T5Attention("EncDecAttention", RelativeAttention(makes_bias=False)))
        self.layer.append(T5MLP())

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, bias = self.layer[0](x, None, bias)
        if memory is not None:
            x, _ = self.layer[1](x, memory)
        return self.layer[-1](x), bias


class T5Stack(nn.Module):
    def __init__(self, table: nn.Embedding, *, decoder: bool) -> None:
        super().__init__()
        self.embed_tokens = table
        self.block = nn.ModuleList(T5Block(first=i == 0, decoder=decoder) for i in range(2))
        self.final_layer_norm = RMSNorm(32)

    def forward(self, ids: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x, bias = self.embed_tokens(ids), None
        for block in self.block:
            x, bias = block(x, memory, bias)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(96, 32)
        self.encoder, self.decoder = T5Stack(self.shared, decoder=False), T5Stack(self.shared, decoder=True)
        self.lm_head = nn.Linear(32, 96, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.decoder(targets, self.encoder(ids)) * 32**-0.5)


class PostNorm(nn.Module):
    """A projection, then the norm of its sum with what came before."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + before)


class BertSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class BertAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = BertSelf(), PostNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(x), x)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = BertAttention()
        self.intermediate = Held(dense=nn.Linear(32, 48), act=nn.GELU())
        self.output = PostNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class BertEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(96, 32), nn.Embedding(16, 32)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(2, 32), nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(place) + self.token_type_embeddings(kinds)
        return self.LayerNorm(x)


class BertBody(nn.Module):
    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.encoder = Held(layer=nn.Sequential(BertLayer(), BertLayer()))
        self.pooler = Held(dense=nn.Linear(32, 32), act=nn.Tanh()) if pooled else None

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.encoder(self.embeddings(ids, kinds))
        return x, None if self.pooler is None else self.pooler(x[:, 0])


class BertPredictions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Held(dense=nn.Linear(32, 32), act=nn.GELU(), LayerNorm=nn.LayerNorm(32))
        self.decoder = nn.Linear(32, 96)
        self.bias = self.decoder.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.transform(x))


class BertMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertBody(pooled=False)
        self.cls = Held(predictions=BertPredictions())
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x, _ = self.bert(ids, kinds)
        return self.cls(x)


class BertClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertBody(pooled=True)
        self.dropout, self.classifier = nn.Dropout(0.1), nn.Linear(32, 3)

    def forward(
        self, ids: torch.Tensor, kinds: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        _, pooled = self.bert(ids, kinds)
        logits = self.classifier(self.dropout(pooled))
        return logits if labels is None else F.cross_entropy(logits, labels)


class ViTEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 32))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 17, 32))
        self.patch_embeddings = Held(projection=nn.Conv2d(3, 32, 8, 8), flat=nn.Flatten(2))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch_embeddings(image).transpose(1, 2)
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.position_embeddings


class ViTLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(bias=True)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.mlp(self.layernorm_after(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(ViTLayer(), ViTLayer())
        self.vit = Held(embeddings=ViTEmbeddings(), layers=layers, layernorm=nn.LayerNorm(32))
        self.classifier = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.vit(image)[:, 0])


class TimmAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(32, 96), nn.Linear(32, 32), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(32), TimmAttention()
        self.norm2, self.mlp = nn.LayerNorm(32), MLP(inner=128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.zeros(1, 1, 32)),
            nn.Parameter(torch.zeros(1, 17, 32)),
        )
        self.patch_embed = Held(proj=nn.Conv2d(3, 32, 8, 8), flat=nn.Flatten(2))
        self.blocks = nn.Sequential(TimmBlock(), TimmBlock())
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(image).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        for i, (inputs, outputs) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), start=1):
            setattr(
                self, f"layer{i}", nn.Sequential(BasicBlock(inputs, outputs), BasicBlock(outputs, outputs))
            )
        self.fc = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class SpeechAttention(Attention):
    """The key has no bias."""

    def __init__(self) -> None:
        super().__init__("k_proj v_proj q_proj out_proj", bias=True)
        self.k_proj.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        y = F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(memory), self.v_proj(memory))
        return self.out_proj(y)


class SpeechLayer(nn.Module):
    def __init__(self, *, decoder: bool) -> None:
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = SpeechAttention(), nn.LayerNorm(32)
        if decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = SpeechAttention(), nn.LayerNorm(32)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(32, 48), nn.Linear(48, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        if memory is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class SpeechEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 32, 3, padding=1), nn.Conv1d(32, 32, 3, 2, 1)
        self.embed_positions = nn.Embedding(20, 32)
        self.layers = nn.ModuleList([SpeechLayer(decoder=False)])
        self.layer_norm = nn.LayerNorm(32)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).permute(0, 2, 1)
        x = x + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Positions(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[: ids.shape[1]]


class SpeechDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(96, 32), Positions(16, 32)
        self.layers = nn.ModuleList([SpeechLayer(decoder=True)])
        self.layer_norm = nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids) + self.embed_positions(ids)
        for layer in self.layers:
            x = layer(x, memory)
        return self.layer_norm(x)


class SpeechBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = SpeechEncoder(), SpeechDecoder()

    def forward(self, sound: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(ids, self.encoder(sound))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.proj_out = SpeechBody(), nn.Linear(32, 96, bias=False)
        self.proj_out.weight = self.model.decoder.embed_tokens.weight

    def forward(self, sound: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.model(sound, ids))


class LoraLinear(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.active = base_layer, "default"
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B[self.active](self.lora_A[self.active](x))


class LoraEmbedding(nn.Module):
    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 96))})
        self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.zeros(32, 2))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, self.lora_embedding_A["default"].T)
        return self.base_layer(ids) + rows @ self.lora_embedding_B["default"].T


def llama_lora() -> nn.Module:
    model = DECODERS["llama"]()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)
    model.model.embed_tokens = LoraEmbedding(model.model.embed_tokens)
    model.lm_head = LoraLinear(model.lm_head)
    return Held(base_model=Held(model=model))


class Translation(nn.Module):
    """What torch's own tutorial builds around `nn.Transformer`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.transformer = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)
        self.generator = nn.Linear(32, 96)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.generator(self.transformer(self.tokens(source), self.tokens(target)))


class LSTMLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(96, 32), nn.LSTM(32, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 96)

    def forward(
        self, ids: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        x, state = self.lstm(self.tokens(ids), state)
        return self.head(x), state


class WeightNorm(nn.Module):
    """Both styles of weight normalization, and a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.conv = parametrizations.weight_norm(nn.Conv1d(8, 16, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.hidden = nn.utils.weight_norm(nn.Linear(16, 24))
        self.spectral = parametrizations.spectral_norm(nn.Linear(24, 16))
        self.norm = nn.LayerNorm(16)
        self.head = parametrizations.weight_norm(nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x)).mean(-1)
        return self.head(self.norm(self.spectral(F.relu(self.hidden(x)))))


PLAIN_TORCH = {"transformer": Translation, "lstm": LSTMLanguageModel, "weight_norm": WeightNorm}
"""Models that are plain torch in reality too."""

REPLICAS = {
    **DECODERS,
    "t5": T5,
    "bert": BertMasked,
    "bert_classifier": BertClassifier,
    "vit": ViT,
    "vit_timm": TimmViT,
    "resnet": ResNet,
    "whisper": Speech,
    "llama_lora": llama_lora,
    **PLAIN_TORCH,
}
"""Stand-ins by name."""
