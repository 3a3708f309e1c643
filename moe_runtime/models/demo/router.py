"""Router rows whose load is skewed on purpose, calibrated on the dense model's own hidden states.

Shape suffixes: T tokens, D hidden, C copies (groups of experts that share one router row).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel

from moe_runtime.models.demo.source import DenseModel

ZIPF_EXPONENT = 0.65


@torch.inference_mode()
def ffn_inputs(dense: DenseModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What each layer's FFN receives (after its norm) for these token sequences: one [T, D] fp32 tensor a layer."""
    model = LlamaModel(LlamaConfig(**dense.config)).eval()
    model.load_state_dict({name.removeprefix("model."): x.float() for name, x in dense.tensors.items()})
    seen: list[list[torch.Tensor]] = [[] for _ in model.layers]
    for layer, captured in zip(model.layers, seen, strict=True):
        layer.post_attention_layernorm.register_forward_hook(_recorder(captured))
    for token_ids in sequences:
        model(torch.tensor([list(token_ids)]), use_cache=False)
    return [torch.cat(captured) for captured in seen]


def _recorder(captured: list[torch.Tensor]) -> Callable[..., None]:
    def record(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output_BTD: torch.Tensor) -> None:
        captured.append(output_BTD[0, 1:])  # the first token is an outlier that attention parks on

    return record


def skewed_router(hidden_TD: torch.Tensor, copies: int, seed: int, layer: int) -> torch.Tensor:
    """Random rows [C, D] with the tokens' mean logit replaced by a Zipf bias (ZIPF_EXPONENT) in a random order.

    Logits vary by 1 (standard deviation) about their mean. Mixtral's gate has no bias, so the bias is folded into the
    rows along the mean hidden state, where it adds itself to a token's logit on average.
    """
    generator = np.random.default_rng([seed, layer, 1])
    rows_CD = torch.from_numpy(generator.standard_normal((copies, hidden_TD.shape[1]))).float()
    log_share_C = torch.from_numpy(-ZIPF_EXPONENT * np.log(1.0 + generator.permutation(copies))).float()
    mean_D = hidden_TD.mean(0)
    unit_D = mean_D / mean_D.square().sum()
    rows_CD = rows_CD - torch.outer(rows_CD @ mean_D, unit_D)
    rows_CD = rows_CD / (hidden_TD @ rows_CD.T).std(0)[:, None]
    return rows_CD + torch.outer(log_share_C - log_share_C.mean(), unit_D)
