"""What every parameter of the real models is: written by hand, read against the models' sources.

A rule is a glob over qualified names and what its parameters are. Parameters of one dimension are element-wise without
a rule. Every other parameter must match exactly one rule, and every rule at least one parameter.
"""

from megaopt_core.params import MatrixView, Role

__all__ = ["EXPECTED"]

EMBEDDING, OUTPUT, ELEMENTWISE = Role.EMBEDDING, Role.OUTPUT, Role.ELEMENTWISE
PLAIN = MatrixView()
CONV1D = MatrixView(transposed=True)  # stored [in, out]
STACK = MatrixView(batch_dims=1)  # [experts, out, in]


def split(*sizes: int, **view: object) -> MatrixView:
    """Return a view with its outputs split."""
    return MatrixView(split_sizes=sizes, **view)  # type: ignore[arg-type]


_LLAMA_LAYER = {
    "model.layers.*.self_attn.[qkvo]_proj.weight": PLAIN,
    "model.layers.*.mlp.*_proj.weight": PLAIN,
}
_MOE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.layers.*.self_attn.[qkvo]_proj.weight": PLAIN,
    "model.layers.*.mlp.gate.weight": PLAIN,  # the router: a projection onto experts
    "model.layers.*.mlp.experts.down_proj": STACK,
    "lm_head.weight": OUTPUT,
}
_BERT = {
    "bert.embeddings.*_embeddings.weight": EMBEDDING,
    "bert.encoder.layer.*.attention.self.*.weight": PLAIN,
    "bert.encoder.layer.*.dense.weight": PLAIN,
}

EXPECTED: dict[str, dict[str, Role | MatrixView]] = {
    "gpt2": {
        "transformer.wte.weight": EMBEDDING,  # and the head, tied
        "transformer.wpe.weight": EMBEDDING,
        "transformer.h.*.attn.c_attn.weight": split(32, 32, 32, transposed=True),
        "transformer.h.*.attn.c_proj.weight": CONV1D,
        "transformer.h.*.mlp.c_*.weight": CONV1D,
    },
    "llama": {"model.embed_tokens.weight": EMBEDDING, **_LLAMA_LAYER, "lm_head.weight": OUTPUT},
    "llama_tied": {"model.embed_tokens.weight": EMBEDDING, **_LLAMA_LAYER},
    "qwen3_moe": {**_MOE, "model.layers.*.mlp.experts.gate_up_proj": split(24, 24, batch_dims=1)},
    "mixtral": {**_MOE, "model.layers.*.mlp.experts.gate_up_proj": split(48, 48, batch_dims=1)},
    "gpt_oss": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.self_attn.[qkvo]_proj.weight": PLAIN,
        "model.layers.*.mlp.router.weight": PLAIN,
        # [experts, in, out]; gate is every even output, up every odd one
        "model.layers.*.mlp.experts.gate_up_proj": split(1, 1, batch_dims=1, transposed=True),
        "model.layers.*.mlp.experts.down_proj": MatrixView(batch_dims=1, transposed=True),
        "model.layers.*.mlp.experts.*_bias": ELEMENTWISE,
        "lm_head.weight": OUTPUT,
    },
    "gpt_neox": {
        "gpt_neox.embed_in.weight": EMBEDDING,
        # [heads, 3, head size], one head after the other
        "gpt_neox.layers.*.attention.query_key_value.weight": split(8, 8, 8),
        "gpt_neox.layers.*.attention.dense.weight": PLAIN,
        "gpt_neox.layers.*.mlp.dense_*.weight": PLAIN,
        "lm_head.weight": OUTPUT,
    },
    "phi3": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.self_attn.qkv_proj.weight": split(32, 16, 16),
        "model.layers.*.self_attn.o_proj.weight": PLAIN,
        "model.layers.*.mlp.gate_up_proj.weight": split(48, 48),
        "model.layers.*.mlp.down_proj.weight": PLAIN,
        "lm_head.weight": OUTPUT,
    },
    "t5": {
        "shared.weight": EMBEDDING,  # of encoder, decoder and head
        "*.relative_attention_bias.weight": EMBEDDING,
        "*.SelfAttention.[qkvo].weight": PLAIN,
        "*.EncDecAttention.[qkvo].weight": PLAIN,
        "*.DenseReluDense.w[io].weight": PLAIN,
    },
    "bert": {
        **_BERT,
        "cls.predictions.transform.dense.weight": PLAIN,
    },  # the decoder after it is the tied head
    "bert_classifier": {**_BERT, "bert.pooler.dense.weight": PLAIN, "classifier.weight": OUTPUT},
    "vit": {
        "vit.embeddings.cls_token": ELEMENTWISE,
        "vit.embeddings.position_embeddings": ELEMENTWISE,
        "vit.embeddings.patch_embeddings.projection.weight": PLAIN,
        "vit.layers.*.attention.[qkvo]_proj.weight": PLAIN,
        "vit.layers.*.mlp.fc?.weight": PLAIN,
        "classifier.weight": OUTPUT,
    },
    "vit_timm": {
        "cls_token": ELEMENTWISE,
        "pos_embed": ELEMENTWISE,
        "patch_embed.proj.weight": PLAIN,
        "blocks.*.attn.qkv.weight": split(32, 32, 32),
        "blocks.*.attn.proj.weight": PLAIN,
        "blocks.*.mlp.fc?.weight": PLAIN,
        "head.weight": OUTPUT,
    },
    "resnet": {
        "conv1.weight": PLAIN,
        "layer?.*.conv?.weight": PLAIN,
        "layer?.0.downsample.0.weight": PLAIN,
        "fc.weight": OUTPUT,
    },
    "mamba": {
        "backbone.embeddings.weight": EMBEDDING,  # and the head, tied
        "backbone.layers.*.mixer.A_log": ELEMENTWISE,
        "backbone.layers.*.mixer.conv1d.weight": ELEMENTWISE,
        "backbone.layers.*.mixer.in_proj.weight": split(64, 64),  # hidden, gate
        "backbone.layers.*.mixer.x_proj.weight": split(3, 4, 4),  # time step, B, C
        "backbone.layers.*.mixer.dt_proj.weight": PLAIN,
        "backbone.layers.*.mixer.out_proj.weight": PLAIN,
    },
    "whisper": {
        "model.encoder.conv?.weight": PLAIN,
        "model.encoder.embed_positions.weight": EMBEDDING,
        "model.decoder.embed_positions.weight": EMBEDDING,
        "model.decoder.embed_tokens.weight": EMBEDDING,  # and the head, tied
        "model.*.layers.*_attn.[qkv]_proj.weight": PLAIN,
        "model.*.layers.*_attn.out_proj.weight": PLAIN,
        "model.*.layers.*.fc?.weight": PLAIN,
    },
    "llama_lora": {
        "base_model.model.model.embed_tokens.base_layer.weight": EMBEDDING,
        "*.embed_tokens.lora_embedding_?.default": ELEMENTWISE,
        "*.self_attn.[qv]_proj.base_layer.weight": PLAIN,
        "*.self_attn.[qv]_proj.lora_?.default.weight": PLAIN,
        "*.self_attn.[ko]_proj.weight": PLAIN,
        "*.mlp.*_proj.weight": PLAIN,
        "*.lm_head.base_layer.weight": OUTPUT,
        "*.lm_head.lora_?.default.weight": ELEMENTWISE,
    },
}
