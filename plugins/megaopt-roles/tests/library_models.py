"""Real models, small, built from configurations: nothing is downloaded, nothing needs memory."""

import warnings
from collections.abc import Callable

from torch import nn

__all__ = ["REAL"]

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _transformers(name: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return build


def _timm(name: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, **settings)

    return build


def _lora() -> nn.Module:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])
        return peft.get_peft_model(REAL["llama"](), config)


_LLAMA = {**_SMALL, "num_key_value_heads": 2}
_MOE = {**_LLAMA, "num_experts_per_tok": 2, "head_dim": 8}

REAL: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _transformers(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4
    ),
    "llama": _transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA, tie_word_embeddings=False),
    "llama_tied": _transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA, tie_word_embeddings=True),
    "qwen3_moe": _transformers(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_MOE, num_experts=4, moe_intermediate_size=24
    ),
    "mixtral": _transformers("MixtralForCausalLM", "MixtralConfig", **_MOE, num_local_experts=4),
    "gpt_oss": _transformers("GptOssForCausalLM", "GptOssConfig", **_MOE, num_local_experts=4),
    "gpt_neox": _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SMALL),
    "phi3": _transformers("Phi3ForCausalLM", "Phi3Config", **_LLAMA, pad_token_id=0),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
    ),
    "bert": _transformers("BertForMaskedLM", "BertConfig", **_SMALL, max_position_embeddings=16),
    "bert_classifier": _transformers(
        "BertForSequenceClassification", "BertConfig", **_SMALL, max_position_embeddings=16, num_labels=3
    ),
    "vit": _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=10,
    ),
    "vit_timm": _timm(
        "vit_tiny_patch16_224", embed_dim=32, depth=2, num_heads=4, img_size=32, patch_size=8, num_classes=10
    ),
    "resnet": _timm("resnet18", num_classes=10),
    "mamba": _transformers(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        time_step_rank=3,
    ),
    "whisper": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=96,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "llama_lora": _lora,
}
"""Builders by name; those of transformers, timm and peft are imported when they are called."""
