"""/tokenize and /detokenize: the tokens that the generating routes would see, and the way back."""

import json
import threading
from typing import Any

import httpx
import pytest
from conftest import Cluster
from tiny_tokenizer import EOS, TOKENIZER, VOCAB, ids

MESSAGES = [{"role": "user", "content": "hé 🦙"}]
ANY_TEXT = '\x00\u2028\ufeff"\\</script>\U0010ffff Příliš <|im_end|>'


def tokenize(cluster: Cluster, **body: Any) -> Any:
    response = cluster.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 400
    return answer


@pytest.mark.parametrize("text", ["", "abc", ANY_TEXT, "x" * 1025, "é" * 50_000], ids=lambda text: repr(text[:9]))
def test_there_and_back(cluster: Cluster, text: str) -> None:
    answer = tokenize(cluster, prompt=text)
    assert answer["tokens"] == ids(text) and answer["token_strs"] is None
    back = cluster.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize("model", [None, "tiny/model", "tiny"])
def test_the_model_may_be_named(cluster: Cluster, model: str | None) -> None:
    assert tokenize(cluster, model=model, prompt="x")["tokens"] == ids("x")
    assert cluster.http.post("/detokenize", json={"model": model, "tokens": ids("x")}).json() == {"prompt": "x"}


def test_it_is_what_a_completion_sees(cluster: Cluster) -> None:
    tokens = tokenize(cluster, prompt=ANY_TEXT)["tokens"]
    cluster.http.post("/v1/completions", json={"prompt": ANY_TEXT, "max_tokens": 1}).raise_for_status()
    assert list(cluster.submitted[0].prompt_ids) == tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"tone": "calm"}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "I "}], "continue_final_message": True},
    ],
    ids=lambda more: str(list(more)),
)
def test_it_is_what_a_chat_sees(cluster: Cluster, more: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **more}
    tokens = tokenize(cluster, **body)["tokens"]
    cluster.http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).raise_for_status()
    assert list(cluster.submitted[0].prompt_ids) == tokens


@pytest.mark.parametrize("text", ["aé<|im_end|>", "xé" * 1000])
def test_token_strs_are_the_vocabularys_spelling(cluster: Cluster, text: str) -> None:
    answer = tokenize(cluster, prompt=text, return_token_strs=True)
    assert answer["token_strs"] == TOKENIZER.encode(text).tokens
    chat = tokenize(cluster, messages=MESSAGES, return_token_strs=True)
    assert chat["token_strs"][0] == "<|im_start|>" and len(chat["token_strs"]) == chat["count"]


def test_special_tokens_and_padding_ids(cluster: Cluster) -> None:
    def text(tokens: list[int]) -> str:
        return cluster.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    assert text([EOS]) == "<|im_end|>"
    assert text([*ids("a"), VOCAB - 1, *ids("b")]) == "ab"
    assert text(ids("€")[:2]) == "\ufffd"
    assert text([]) == ""


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**80])
@pytest.mark.parametrize("others", [0, 5000])
def test_ids_outside_the_vocabulary(cluster: Cluster, token: int, others: int) -> None:
    response = cluster.http.post("/detokenize", json={"tokens": [0] * others + [token]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tokens") and str(token) in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "promt": "x"}, "promt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": None}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
        ("/detokenize", {"tokens": [1], "skip": True}, "skip"),
    ],
    ids=str,
)
def test_bad_bodies(cluster: Cluster, path: str, body: dict[str, Any], param: str) -> None:
    response = cluster.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_unknown_models(cluster: Cluster) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = cluster.http.post(path, json={**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_long_text_holds_up_nobody(cluster: Cluster) -> None:
    """While one text takes its time, others are answered."""
    done = threading.Event()
    answers: list[httpx.Response] = []

    def ask() -> None:
        content = json.dumps({"prompt": "word " * 190_000})
        headers = {"content-type": "application/json"}
        answers.append(httpx.post(f"{cluster.url}/tokenize", content=content, headers=headers, timeout=60))
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    meanwhile = 0
    while not done.is_set():
        assert cluster.http.get("/health").status_code == 200
        meanwhile += not done.is_set()
    thread.join(60)
    assert answers[0].json()["count"] == 950_000
    assert meanwhile >= 5
