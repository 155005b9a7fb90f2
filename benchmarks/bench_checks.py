"""The time of `check.dependencies` for a GPT of 4 layers on 16 tokens: python benchmarks/bench_checks.py"""

from time import perf_counter

import tinygrad_mha as tg

config = tg.nn.GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=64)
model = tg.nn.GPT(config, seed=0)
start = perf_counter()
tg.check.dependencies(model, list(range(16))).assert_causal()
print(f"dependencies of a GPT, 4 layers, 16 tokens: {perf_counter() - start:.2f} s")
