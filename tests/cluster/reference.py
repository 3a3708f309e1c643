"""transformers' own fp32 greedy text on the demo model: computed once, kept under build/ for the checkpoint's
fingerprint.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cluster.cores import available_cores
from moe_runtime.models.loader import fingerprint

TIE = 1e-3


@dataclass(frozen=True)
class GreedyReference:
    """One prompt's continuation: its tokens, and at each of them how far the best logit was above the second."""

    prompt: str
    token_ids: list[int]
    gaps: list[float]


def prompts() -> list[str]:
    """32 prompts of many kinds and lengths."""
    lines = (Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines]


def greedy_references(model_dir: Path, tokens: int) -> list[GreedyReference]:
    cache = Path("build/reference") / f"greedy-{fingerprint(model_dir):x}-{tokens}.json"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        computed = json.dumps([vars(reference) for reference in _compute(model_dir, tokens)])
        temporary = cache.with_suffix(".tmp")
        temporary.write_text(computed, encoding="utf-8")
        temporary.rename(cache)
    stored = [GreedyReference(**entry) for entry in json.loads(cache.read_text(encoding="utf-8"))]
    assert [reference.prompt for reference in stored] == prompts(), f"{cache} is of other prompts: remove it"
    return stored


def _compute(model_dir: Path, tokens: int) -> list[GreedyReference]:
    torch.set_num_threads(available_cores())
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, experts_implementation="grouped_mm")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts(), return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(
            **batch,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    best_STK = torch.stack([step.float().topk(2).values for step in out.logits])
    gaps_ST = best_STK[..., 0] - best_STK[..., 1]
    eos = set(_ids(model.generation_config.eos_token_id))
    references = []
    for row, prompt in enumerate(prompts()):
        made = out.sequences[row, batch["input_ids"].shape[1] :].tolist()
        end = next((i + 1 for i, token in enumerate(made) if token in eos), len(made))
        references.append(GreedyReference(prompt, made[:end], gaps_ST[:end, row].tolist()))
    return references


def _ids(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def compare(tokenizer: AutoTokenizer, reference: GreedyReference, text: str) -> str:
    """`equal`, `tie` (they part at a token where the two best logits are within TIE), or what differs."""
    expected = tokenizer.decode(reference.token_ids, skip_special_tokens=True)
    if text == expected:
        return "equal"
    for count in range(1, len(reference.token_ids) + 1):
        if not text.startswith(
            tokenizer.decode(reference.token_ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        ):
            if reference.gaps[count - 1] < TIE:
                return "tie"
            return f"token {count - 1} (gap {reference.gaps[count - 1]:.4f}): got {text!r}, expected {expected!r}"
    return f"length: got {text!r}, expected {expected!r}"
