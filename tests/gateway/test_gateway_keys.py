"""API keys: who is let in, what is open to all, and what a bad key place says at the start."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fake_controller import make_config
from fake_engine import FakeEngine
from own_gateway import fatal_message, gateway
from raw_http import Connection, exchange

from moe_runtime.api_keys import VARIABLE
from moe_runtime.cli import run

FILE_KEYS = ("file-key-one", "sk-~!@#$%^&*()_+=")
ENVIRONMENT_KEYS = ("environment-key-one", "environment-key-two")
CLOSED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny/model")
COMPLETION = {"prompt": "x", "max_tokens": 1}


class Locked:
    """A gateway with keys; everything that it logged is in `log` once it has ended."""

    def __init__(self, url: str, engine: FakeEngine) -> None:
        self.url = url
        self.engine = engine


@pytest.fixture(scope="module")
def locked(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    key_file = tmp_path_factory.mktemp("keys") / "keys.txt"
    key_file.write_text(f"\ufeff# ours\n\n  {FILE_KEYS[0]}  \r\n# theirs: not-a-key\n{FILE_KEYS[1]}", encoding="utf-8")
    environment = {VARIABLE: f" {ENVIRONMENT_KEYS[0]},,{ENVIRONMENT_KEYS[1]} "}
    with gateway(model_dir, make_config(api_key_file=str(key_file)), environment) as (process, engine):
        yield Locked(process.wait_serving(), engine)
        log = process.close()
        assert not any(key in log for key in (*FILE_KEYS, *ENVIRONMENT_KEYS, "wrong"))


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", [*FILE_KEYS, *ENVIRONMENT_KEYS])
def test_every_key_opens(locked: Locked, key: str) -> None:
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model="tiny/model", prompt="x", max_tokens=1).choices[0].text == "x"
    assert client.models.list().data
    lower = {"AUTHORIZATION": f"bearer  {key}"}
    assert httpx.post(f"{locked.url}/tokenize", json={"prompt": "x"}, headers=lower).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {FILE_KEYS[0]}x",
        f"Bearer {FILE_KEYS[0][:-1]}",
        f"Bearer {FILE_KEYS[0].upper()}",
        "Bearer # ours",
        "Bearer not-a-key",
        f"Bearer {ENVIRONMENT_KEYS[0]},{ENVIRONMENT_KEYS[1]}",
        f"Basic {FILE_KEYS[0]}",
        FILE_KEYS[0],
        "Bearer \xff\xfe",
        "Bearer " + "x" * 10_000,
    ],
    ids=lambda given: str(given)[:30],
)
def test_others_are_refused_everywhere(locked: Locked, given: str | None) -> None:
    before = len(locked.engine.submitted)
    header = "" if given is None else f"Authorization: {given}\r\n"
    for path in CLOSED:
        method = "GET" if "models" in path else "POST"
        answer = exchange(locked.url, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n")
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (answer.error["code"], answer.error["type"]) == ("invalid_api_key", "authentication_error")
        assert answer.headers["x-request-id"]
    assert len(locked.engine.submitted) == before


def test_a_key_given_twice_is_refused(locked: Locked) -> None:
    header = f"Authorization: Bearer {FILE_KEYS[0]}\r\n"
    assert exchange(locked.url, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{header}{header}\r\n").status == 401


def test_the_openai_client_raises_authentication_error(locked: Locked) -> None:
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="tiny/model", messages=[{"role": "user", "content": "x"}])


def test_probes_and_scrapers_need_no_key(locked: Locked) -> None:
    for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        assert httpx.get(f"{locked.url}{path}").status_code == 200, path


def test_what_is_not_known_to_be_open_is_closed(locked: Locked) -> None:
    for path in ("/v1%2Fmodels", "//v1/models", "/V1/models", "/health/", "/health/../v1/models", "/docs", "/"):
        assert exchange(locked.url, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").status == 401, path
    key = authorization(FILE_KEYS[0])
    assert httpx.get(f"{locked.url}/docs", headers=key).status_code == 404


def test_the_check_comes_before_the_body(locked: Locked) -> None:
    """The answer is there although no byte of the body is; the connection then goes on with the next request."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with Connection(locked.url) as connection:
        connection.send(f"{head}Content-Length: 200000\r\n\r\n")
        assert connection.answer().status == 401
        connection.send(b"x" * 200_000 + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.answer().status == 200


def test_a_large_body_without_a_key_can_be_sent_whole(locked: Locked) -> None:
    answer = httpx.post(f"{locked.url}/v1/completions", content=b"x" * 900_000, headers=authorization("wrong"))
    assert answer.status_code == 401


def test_the_document_says_which_routes_need_a_key(locked: Locked) -> None:
    document = httpx.get(f"{locked.url}/openapi.json").json()
    assert document["components"]["securitySchemes"]["api_key"] == {"type": "http", "scheme": "bearer"}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            closed = path.startswith("/v1/") or path.endswith("tokenize")
            assert ("security" in operation) == closed == ("401" in operation["responses"]), path


def test_check_shows_where_keys_are_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.txt").write_text(FILE_KEYS[0])
    (tmp_path / "config.yaml").write_text(f"model: {{path: m}}\ngateway: {{api_key_file: {tmp_path}/keys.txt}}\n")
    monkeypatch.setenv(VARIABLE, ENVIRONMENT_KEYS[0])
    assert run(["check", str(tmp_path / "config.yaml")]) == 0
    output = "".join(capsys.readouterr())
    assert f"api_key_file: {tmp_path}/keys.txt" in output
    assert FILE_KEYS[0] not in output and ENVIRONMENT_KEYS[0] not in output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "holds no key"),
        ("\n # only a comment\n\n", "holds no key"),
        ("good\nwith space\n", "line 2 is no key"),
        ("schlüssel\n", "line 1 is no key"),
        ("x" * 600, "line 1 is no key"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_key_file_ends_the_start(model_dir: Path, tmp_path: Path, content: str | bytes | None, says: str) -> None:
    key_file = tmp_path / "keys.txt"
    if content is not None:
        key_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with gateway(model_dir, make_config(api_key_file=str(key_file))) as (process, _):
        message = fatal_message(process)
        assert "gateway.api_key_file" in message and says in message
        assert not any(key in message for key in ("good", "with space", "schl", "xxx"))


@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_variable_ends_the_start_and_does_not_open_the_server(model_dir: Path, value: str) -> None:
    with gateway(model_dir, environment={VARIABLE: value}) as (process, _):
        assert VARIABLE in fatal_message(process)
