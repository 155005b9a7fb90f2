"""`tg.check.attention` on attentions that others wrote: what it says of torch and of transformers.

Each wrapper has the signature that the check knows, and passes on to the original.
"""

import re

import numpy as np
import pytest

import tinygrad_mha as tg

torch = pytest.importorskip("torch")

X = np.random.default_rng(3).standard_normal((2, 7, 12)).astype(np.float32)
NO_CACHE = pytest.mark.xfail(strict=True, reason="the cache of a torch module is not tried yet")
IMPLEMENTATIONS = ["eager", pytest.param("sdpa", marks=NO_CACHE)]


def failed(verdict):
    assert not verdict.problem, verdict.problem
    return {finding.name: f"{finding.message} {finding.cause}" for finding in verdict.failed}


# --------------------------------------------------------------------------------------------------------------- torch


def sdpa(q, k, v, allow=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allow)


def causal_sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class MultiHead(torch.nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        torch.manual_seed(0)
        self.mha = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x, key_allow=None):
        hidden = None if key_allow is None else ~key_allow
        return self.mha(x, x, x, key_padding_mask=hidden, need_weights=self.need_weights)[0]


def test_sdpa_passes():
    assert failed(tg.check.attention(sdpa)) == {}


def test_is_causal_of_sdpa_is_aligned_at_the_top_left():
    said = failed(tg.check.attention(causal_sdpa))
    assert any(re.search("corner|top.left", text) for text in said.values()), said


def test_multihead_attention_gives_nan_where_all_keys_are_padding_if_it_returns_weights():
    assert failed(tg.check.attention(MultiHead(need_weights=False), X, causal=False)) == {}
    said = failed(tg.check.attention(MultiHead(need_weights=True), X, causal=False))
    assert any("nan" in text for text in said.values()), said


# -------------------------------------------------------------------------------------------------------- transformers


class Cache:
    """A cache of ours with the method that attention in transformers calls."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, k, v, *args, **options):
        k, v = self.cache.append(tg.Tensor(k.detach().numpy()), tg.Tensor(v.detach().numpy()))
        return torch.from_numpy(k.numpy().copy()), torch.from_numpy(v.numpy().copy())


def make_gpt2(transformers, implementation):
    config = transformers.GPT2Config(n_embd=12, n_head=3, n_layer=1, vocab_size=5)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    attention = transformers.models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=0).eval()

    class GPT2(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x, cache=None):
            return self.attention(x.contiguous(), cache=None if cache is None else Cache(cache))[0]

    return GPT2()


def make_llama(transformers, implementation):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=5)
    config._attn_implementation = implementation
    module = transformers.models.llama.modeling_llama
    torch.manual_seed(0)
    attention, rotary = module.LlamaAttention(config, layer_idx=0).eval(), module.LlamaRotaryEmbedding(config)

    class Llama(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x, cache=None):
            start = 0 if cache is None else cache.length
            places = torch.arange(start, start + x.shape[-2])[None]
            cos, sin = (z.to(x.dtype) for z in rotary(x, places))
            return self.attention(x, position_embeddings=(cos, sin), cache=None if cache is None else Cache(cache))[0]

    return Llama()


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_of_transformers_without_a_mask(make, implementation, transformers):
    """sdpa is causal then, and aligned at the top left; eager sees later tokens, since the model makes the mask."""
    said = failed(tg.check.attention(make(transformers, implementation), X, causal=True))
    if implementation == "eager":
        assert "causality" in said
    else:
        assert set(said) == {"cache"}
        assert re.search("corner|top.left", said["cache"])
