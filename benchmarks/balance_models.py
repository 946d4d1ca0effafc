"""The hidden matrices of published models, from their configurations: shapes of `[out, in]` weights, layer by layer."""

from collections.abc import Callable, Iterator, Mapping

__all__ = ["MODELS", "REST", "Shapes"]

type Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes in model order."""

type Model = Callable[[bool], Shapes]
"""Takes whether the experts of a layer lie in one batch `[experts, out, in]`, or each is a parameter of its own."""


def _grouped_attention(layer: str, hidden: int, heads: int, groups: int, head: int) -> Shapes:
    yield f"{layer}.attn.q", (heads * head, hidden)
    yield f"{layer}.attn.k", (groups * head, hidden)
    yield f"{layer}.attn.v", (groups * head, hidden)
    yield f"{layer}.attn.out", (hidden, heads * head)


def _gated(layer: str, hidden: int, inner: int) -> Shapes:
    yield f"{layer}.gate", (inner, hidden)
    yield f"{layer}.up", (inner, hidden)
    yield f"{layer}.down", (hidden, inner)


def _experts(layer: str, hidden: int, inner: int, experts: int, batched: bool) -> Shapes:
    if batched:
        for name, shape in _gated(f"{layer}.experts", hidden, inner):
            yield name, (experts, *shape)
        return
    for expert in range(experts):
        yield from _gated(f"{layer}.experts.{expert}", hidden, inner)


def _dense(hidden: int, inner: int, layers: int, heads: int, groups: int) -> Model:
    def shapes(batched: bool) -> Shapes:
        for number in range(layers):
            layer = f"layers.{number}"
            yield from _grouped_attention(layer, hidden, heads, groups, hidden // heads)
            yield from _gated(f"{layer}.mlp", hidden, inner)

    return shapes


def _mixture(hidden: int, inner: int, layers: int, heads: int, groups: int, head: int, experts: int) -> Model:
    def shapes(batched: bool) -> Shapes:
        for number in range(layers):
            layer = f"layers.{number}"
            yield from _grouped_attention(layer, hidden, heads, groups, head)
            yield f"{layer}.router", (experts, hidden)
            yield from _experts(layer, hidden, inner, experts, batched)

    return shapes


def _deepseek_v3(batched: bool) -> Shapes:
    hidden, heads, rotary, head, query_rank, key_value_rank = 7168, 128, 64, 128, 1536, 512
    for number in range(61):
        layer = f"layers.{number}"
        yield f"{layer}.attn.q_down", (query_rank, hidden)
        yield f"{layer}.attn.q_up", (heads * (head + rotary), query_rank)
        yield f"{layer}.attn.kv_down", (key_value_rank + rotary, hidden)
        yield f"{layer}.attn.kv_up", (heads * (head + head), key_value_rank)
        yield f"{layer}.attn.out", (hidden, heads * head)
        if number < 3:
            yield from _gated(f"{layer}.mlp", hidden, 18432)
            continue
        yield f"{layer}.router", (256, hidden)
        yield from _gated(f"{layer}.shared", hidden, 2048)
        yield from _experts(layer, hidden, 2048, 256, batched)


MODELS: Mapping[str, Model] = {
    "Llama-3 8B": _dense(4096, 14336, 32, 32, 8),
    "Llama-3 70B": _dense(8192, 28672, 80, 64, 8),
    "Llama-3 405B": _dense(16384, 53248, 126, 128, 8),
    "DeepSeek-V3": _deepseek_v3,
    "Qwen3-235B": _mixture(4096, 1536, 94, 64, 4, 128, 128),
    "gpt-oss-120b": _mixture(2880, 2880, 36, 64, 8, 64, 128),
}
"""Embeddings, heads, norms and biases are not among them: nobody orthogonalizes those."""

REST: Mapping[str, int] = {
    "Llama-3 8B": 2 * 128256 * 4096,
    "Llama-3 70B": 2 * 128256 * 8192,
    "Llama-3 405B": 2 * 128256 * 16384,
    "DeepSeek-V3": 2 * 129280 * 7168,
    "Qwen3-235B": 2 * 151936 * 4096,
    "gpt-oss-120b": 2 * 201088 * 2880,
}
"""Elements of embeddings and heads, which Adam steps; norms and biases are thousandths of that."""
