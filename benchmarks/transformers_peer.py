"""transformers' batched generate on the same prompts, in a process of its own: prints one JSON line per turn.

    python benchmarks/transformers_peer.py build/models/demo prompts.json float32 grouped_mm --tokens 64 --turns 3
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", help="JSON: a list of batches, each a list of prompts of one length in token ids")
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("experts", choices=["grouped_mm", "batched_mm", "eager"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), experts_implementation=arguments.experts
    )
    batches = [torch.tensor(batch) for batch in json.loads(Path(arguments.prompts).read_text(encoding="utf-8"))]
    for turn in range(arguments.turns):
        for ids in batches:
            start = time.perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=arguments.tokens,
                min_new_tokens=arguments.tokens,
                do_sample=False,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
            made = (out.shape[1] - ids.shape[1]) * len(ids)
            print(json.dumps({"turn": turn, "requests": len(ids), "tokens": made, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
