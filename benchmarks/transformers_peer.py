"""transformers' batched generate as a peer: reads batches from stdin, answers each with its time.

    python benchmarks/transformers_peer.py build/models/demo float32 grouped_mm

One JSON line in, {"prompts": [[ids], ...] of one length, "tokens": N}; one JSON line out, {"tokens": made, "seconds":
s}.
"""

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("experts", choices=["grouped_mm", "batched_mm", "eager"])
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), experts_implementation=arguments.experts
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["tokens"],
            min_new_tokens=request["tokens"],
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        made = (out.shape[1] - ids.shape[1]) * len(ids)
        print(json.dumps({"tokens": made, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
