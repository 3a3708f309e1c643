"""The server against its own OpenAPI document: thousands of requests made from it, right and wrong ones."""

import subprocess
import sys
from pathlib import Path

import httpx
from fake_controller import last_samples, make_config, wait_until
from own_gateway import gateway

from moe_runtime.api_keys import VARIABLE

KEY = "a-key-for-schemathesis"
EXAMPLES = 20
TIMEOUT_S = 300


def test_the_document_is_true(model_dir: Path, tmp_path: Path) -> None:
    """No 500, no status, content type, header or field that is not in the document, nothing let in that it forbids.

    Whether all that the document allows is let in is not asked: a schema cannot say how many tokens a text has.
    """
    with gateway(model_dir, make_config(), {VARIABLE: KEY}) as (process, engine):
        url = process.wait_serving()
        run = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance"),
                *("--max-examples", str(EXAMPLES), "--generation-deterministic", "--continue-on-failure"),
                *("--request-timeout", "30", "--warnings", "off"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert run.returncode == 0, run.stdout[-20_000:] + run.stderr
        assert len(engine.submitted) > 200, "hardly a request was good enough for the engine"

        wait_until(lambda: not engine.open, "the engine to be empty")
        wait_until(lambda: last_samples(process.controller)["gateway_open_requests"] == 0, "the gateway to be empty")
        assert last_samples(process.controller)["gateway_outstanding_tokens"] == 0
        assert process.process.poll() is None and httpx.get(f"{url}/health").status_code == 200
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "abc", "max_tokens": 3},
            headers={"authorization": f"Bearer {KEY}"},
        )
        assert answer.json()["choices"][0]["text"] == "abc"
        assert "Traceback" not in process.close()
