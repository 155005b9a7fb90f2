"""`tg.check.attention` on attentions that others wrote: what it says of torch and of transformers.

Each wrapper has the signature that the check knows, and passes on to the original.
"""

import re

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn

torch = pytest.importorskip("torch")

X = np.random.default_rng(3).standard_normal((2, 7, 12)).astype(np.float32)


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
            return self.attention(x.contiguous(), cache=cache and Cache(cache))[0]

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
            return self.attention(x, position_embeddings=(cos, sin), cache=cache and Cache(cache))[0]

    return Llama()


BOTH = pytest.mark.parametrize("make", [make_gpt2, make_llama])


@BOTH
def test_attention_of_transformers_sees_later_tokens_without_a_mask_if_eager_and_not_if_sdpa(make, transformers):
    assert "causality" in failed(tg.check.attention(make(transformers, "eager"), X, causal=True))
    assert failed(tg.check.attention(make(transformers, "sdpa"), X, causal=True)) == {}


@BOTH
def test_sdpa_of_transformers_aligns_chunks_behind_a_cache_at_the_top_left(make, transformers):
    attention = make(transformers, "sdpa").double()

    class Ours(nn.Module):
        def forward(self, x, cache=None):
            with torch.no_grad():
                rows = x.numpy().reshape(-1, *x.shape[-2:])
                return tg.Tensor(attention(torch.tensor(rows), cache).numpy().reshape(x.shape))

    verdict = tg.check.kv_cache(Ours(), X[0])
    assert verdict.failed[0].name == "chunks"
    assert re.search("corner|top.left", verdict.first_divergence.cause), verdict


def make_masked(transformers, implementation):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = make_gpt2(transformers, implementation).attention

        def forward(self, x, attention_mask=None):
            mask = None if attention_mask is None else attention_mask[None, None]
            return self.attention(x.contiguous(), attention_mask=mask)[0]

    return Masked().eval()


def test_eager_attention_of_transformers_adds_its_mask_and_gives_nan_where_all_is_hidden(transformers):
    masked = make_masked(transformers, "eager")
    verdict = tg.check.attention(masked, X)
    assert list(failed(verdict)) == ["empty"]
    assert "0 and -inf are added" in next(f.message for f in verdict.findings if f.name == "mask")
    x = torch.tensor(X)
    allow = torch.ones(7, 7, dtype=torch.bool).tril()
    y = [masked(z, attention_mask=allow)[:, 0] for z in (x, x + torch.eye(7)[3][:, None])]
    assert not torch.allclose(*y)  # a boolean mask is added as 0 and 1: token 0 sees token 3


def test_a_mask_switches_the_causal_mask_of_sdpa_attention_of_transformers_off(transformers):
    assert list(failed(tg.check.attention(make_masked(transformers, "sdpa"), X))) == ["mask"]
