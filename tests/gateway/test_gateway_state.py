"""Models, health and metrics of a running gateway."""

import json
import time
from importlib.metadata import version
from urllib.parse import quote

import pytest
from conftest import Cluster
from fake_controller import ALIASES, wait_until
from fake_engine import Answer
from prometheus_client.parser import text_string_to_metric_families
from raw_http import exchange

from moe_runtime.protocol.control import Sample

MODEL = "tiny/model"


def metrics(cluster: Cluster) -> dict[str, float]:
    """Every sample as `name{label=value,...}`; the parser refuses a family that appears twice."""
    response = cluster.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_models(cluster: Cluster) -> None:
    cards = cluster.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [MODEL, *ALIASES]
    for card in cards:
        created = card.pop("created")
        expected = {"object": "model", "owned_by": "moe-runtime", "root": MODEL, "parent": None, "max_model_len": 400}
        assert card == {"id": card["id"], **expected} and abs(created - time.time()) < 600
    assert [model.id for model in cluster.openai.models.list().data] == [MODEL, *ALIASES]


@pytest.mark.parametrize("name", [MODEL, *ALIASES])
def test_each_name_has_its_card_and_answers(cluster: Cluster, name: str) -> None:
    target = quote(name, safe="")
    card = exchange(cluster.url, f"GET /v1/models/{target} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert card.status == 200 and json.loads(card.body)["id"] == name
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    assert cluster.http.post("/v1/completions", json=body).json()["model"] == name
    body = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    assert (
        f'"model":{json.dumps(name, ensure_ascii=False)}' in cluster.http.post("/v1/chat/completions", json=body).text
    )
    assert cluster.http.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 200


def test_slashes_of_a_name_need_no_escape(cluster: Cluster) -> None:
    assert cluster.http.get("/v1/models/tiny/model").json()["id"] == MODEL
    assert cluster.openai.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("name", ["", "tiny%2", "tiny%2Fmodel%00", "Tiny", "tiny/model/", "%ff", "x" * 5000, "%F0%9F"])
def test_other_names_have_none(cluster: Cluster, name: str) -> None:
    answer = exchange(cluster.url, f"GET /v1/models/{name} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.status == 404 and answer.error["code"] == "model_not_found" and len(answer.body) < 500


def test_the_version(cluster: Cluster) -> None:
    assert cluster.http.get("/version").json() == {"version": version("moe-runtime")}


def test_health_follows_the_controllers_reports(cluster: Cluster) -> None:
    assert cluster.http.get("/health").json() == {"status": "ok"}
    assert cluster.http.get("/ready").status_code == 200
    cluster.controller.silent = True
    try:
        wait_until(lambda: cluster.http.get("/health").status_code == 503, "ill health", timeout_s=10)
        assert "no news" in cluster.http.get("/health").json()["error"]["message"]
    finally:
        cluster.controller.silent = False
    wait_until(lambda: cluster.http.get("/health").status_code == 200, "good health")


def test_metrics_count_and_time_requests(cluster: Cluster) -> None:
    before = metrics(cluster)
    cluster.hold(False, step_s=0.01)
    start = time.perf_counter()
    cluster.openai.completions.create(model=MODEL, prompt="abc", max_tokens=11)
    took = time.perf_counter() - start
    after = metrics(cluster)

    def gained(key: str) -> float:
        return after[f"moe_runtime_{key}"] - before.get(f"moe_runtime_{key}", 0)

    assert gained("prompt_tokens_total{}") == 3
    assert gained("generation_tokens_total{}") == 11
    assert gained("request_success_total{finished_reason=length}") == 1
    assert gained("e2e_request_latency_seconds_count{}") == 1
    ttft, e2e = gained("time_to_first_token_seconds_sum{}"), gained("e2e_request_latency_seconds_sum{}")
    assert 0 < ttft < e2e <= took
    assert abs(gained("inter_token_latency_seconds_sum{}") - (e2e - ttft) / 10) < 1e-6


def test_failures_are_counted_by_kind(cluster: Cluster) -> None:
    before = metrics(cluster)
    cluster.script(lambda submit: Answer([], failure=("overloaded", "full")))
    cluster.http.post("/v1/completions", json={"prompt": "x"})
    key = "moe_runtime_request_failure_total{kind=overloaded}"
    assert metrics(cluster)[key] == before.get(key, 0) + 1


def test_node_samples_have_node_labels(cluster: Cluster) -> None:
    cluster.controller.stats = {
        "controller": (Sample("node_heartbeat_age_seconds", "gauge", 0.5, {"node": "a0"}),),
        "a0": (Sample("kv_usage", "gauge", 0.25), Sample("prompt_tokens_total", "counter", 7.0, {"lane": "0"})),
        "a1": (Sample("kv_usage", "gauge", 0.75),),
    }
    wait_until(lambda: "moe_runtime_kv_usage{node=a1}" in metrics(cluster), "the new samples")
    samples = metrics(cluster)
    assert samples["moe_runtime_kv_usage{node=a0}"] == 0.25
    assert samples["moe_runtime_node_prompt_tokens_total{lane=0,node=a0}"] == 7
    assert samples["moe_runtime_node_heartbeat_age_seconds{node=a0}"] == 0.5
    assert samples["moe_runtime_gateway_open_requests{node=gateway0}"] == 0


def test_answers_are_counted_by_route_and_status(cluster: Cluster) -> None:
    before = metrics(cluster)
    cluster.http.get("/v1/models/tiny/model")
    cluster.http.get("/v1/models/none/such")
    cluster.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    cluster.http.post("/v1/completions", json={})
    cluster.http.get("/nothing/like/it")
    after = metrics(cluster)
    for route, status in (
        ("/v1/models/{model:path}", 200),
        ("/v1/models/{model:path}", 404),
        ("/v1/completions", 200),
        ("/v1/completions", 400),
        ("none", 404),
    ):
        key = f"moe_runtime_http_responses_total{{route={route},status={status}}}"
        assert after[key] == before.get(key, 0) + 1, key


def test_the_openapi_document_lists_the_bodies(cluster: Cluster) -> None:
    document = cluster.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["CompletionRequest"]["properties"]
    reference = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert reference == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["properties"]["messages"]["items"]["$ref"] == "#/components/schemas/ChatMessage"
    assert "security" not in document["paths"]["/v1/completions"]["post"]
