"""One question to a running cluster over its own HTTP interface, answered as it streams; the standard library only."""

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from moe_runtime.errors import RequestError


class Answer:
    """The conversation with the server at `url`; timeout_s bounds each read. key: an API key, where it wants one."""

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        address = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._connection = HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)

    def model(self) -> str:
        """The name under which the server serves its model."""
        self._connection.request("GET", "/v1/models", headers=self._headers)
        return str(json.loads(_body(self._connection.getresponse()))["data"][0]["id"])

    def stream(self, model: str, question: str) -> Iterator[str]:
        """The greedy answer's text, piece by piece, from /v1/chat/completions.

        Raises RequestError when the server refuses or fails, OSError or HTTPException when it is gone.
        """
        body = {"model": model, "messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            _body(response)
        yield from _deltas(response)

    def close(self) -> None:
        self._connection.close()


class AnswerPrinter(threading.Thread):
    """Prints one answer to stdout while the launcher goes on watching; afterwards `error` is None if it came whole."""

    def __init__(self, url: str, question: str, timeout_s: float, key: str | None = None) -> None:
        super().__init__(name="ask", daemon=True)
        self.url = url
        self.model = ""
        self.error: str | None = "the answer did not come whole"
        self._question = question
        self._timeout_s = timeout_s
        self._key = key

    def run(self) -> None:
        answer = Answer(self.url, self._timeout_s, self._key)
        try:
            self.model = answer.model()
            for text in answer.stream(self.model, self._question):
                print(text, end="", flush=True)
            print(flush=True)
            self.error = None
        except (RequestError, OSError, HTTPException) as error:
            self.error = str(error) or type(error).__name__
        finally:
            answer.close()


def _body(response: HTTPResponse) -> bytes:
    body = response.read()
    if response.status != 200:
        raise RequestError(f"the gateway answered {response.status}: {body.decode(errors='replace')[:500]}")
    return body


def _deltas(response: HTTPResponse) -> Iterator[str]:
    for line in response:
        field, _, data = line.decode().rstrip("\r\n").partition(": ")
        if field != "data":
            continue
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RequestError(f"the answer broke off: {event['error'].get('message')}")
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise RequestError("the answer broke off: the connection ended before [DONE]")
