"""Mistakes that mypy and pyright report: one on each line that ends with `# mistake`. This file is not run."""

from __future__ import annotations

import numpy as np

import tinygrad_mha as tg
from tinygrad_mha import Tensor, nn, ops

x = Tensor(np.ones((3, 5)))

ops.softmax(x, axs=-1)  # mistake
ops.cross_entropy(x, [1, 2, 0], label_smooting=0.1)  # mistake
ops.linear()  # mistake
x.sum(keepdim=True)  # mistake
ops.primitive(kind="sum")  # mistake
x.permute(1, 0)  # mistake
Tensor([1.0], require_grad=True)  # mistake
x.numpy().backward()  # mistake

nn.Linear(5, 7, bais=False)  # mistake
nn.Linear(5, 7)(x, 3)  # mistake
nn.LayerNorm(5)(x).backwards()  # mistake
nn.attention(x, x, x, keep=None)  # mistake
mha = nn.MultiHeadAttention(5, 2, d_k=7, d_v=11)
mha(x, casual=True)  # mistake
model = nn.GPT(nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8))
model.loss(np.ones((1, 3)))  # mistake
tg.generate(model, [1], 3, temprature=0.5)  # mistake
tg.grad(x, x, creategraph=True)  # mistake
tg.optim.AdamW(model.parameters(), beta=(0.9, 0.95))  # mistake
