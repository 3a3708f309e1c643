"""Models, health and metrics of a running gateway."""

import time

from conftest import Cluster
from fake_controller import wait_until
from fake_engine import Answer
from prometheus_client.parser import text_string_to_metric_families

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
    (model,) = cluster.openai.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert cluster.openai.models.retrieve(MODEL).id == MODEL


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


def test_the_openapi_document_lists_the_bodies(cluster: Cluster) -> None:
    document = cluster.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["CompletionRequest"]["properties"]
    reference = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert reference == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["properties"]["messages"]["items"]["$ref"] == "#/components/schemas/ChatMessage"
