"""Many completions at once against a running server, each through the openai client."""

import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI


def openai_client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)


def complete_all(
    url: str, prompts: Sequence[str], max_tokens: int, options: Sequence[Mapping[str, object]]
) -> list[str]:
    """Texts of all prompts, sent at once; options[i] are prompt i's further fields."""
    with openai_client(url) as client:
        model = client.models.list().data[0].id

        def complete(index: int) -> str:
            body = dict(options[index])
            extra = {key: body.pop(key) for key in ("top_k", "min_p") if key in body}
            answer = client.completions.create(
                model=model, prompt=prompts[index], max_tokens=max_tokens, extra_body=extra, **body
            )
            return answer.choices[0].text

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(complete, range(len(prompts))))


def metric(url: str, name: str) -> dict[str, float]:
    """A metric's values by label text, from /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith(f"moe_runtime_{name}") and line[len(f"moe_runtime_{name}")] in "{ ":
            labels, _, value = line.rpartition(" ")
            values[labels[len(f"moe_runtime_{name}") :]] = float(value)
    return values
