"""A server that speaks SGLang's or vLLM's protocol with numbers of the real tiny model, or misbehaves in a chosen way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine_room import Engine, Fault, healthy


class Answers:
    """What a served engine answers: prefill and decode may each have a fault."""

    def __init__(self, engine: Engine, kind: str, prefill: Fault = healthy, bos: int = 0) -> None:
        self.engine, self.kind, self.prefill, self.bos = engine, kind, prefill, bos
        self.asked: list[tuple[str, Any]] = []

    def to(self, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        if self.kind == "sglang":
            return self._sglang(path, body)
        return self._openai(path, body)

    def _ids(self, prompt: Any) -> list[int]:
        return prompt if isinstance(prompt, list) else [1] * self.bos + self.engine.tokenizer.ids(prompt)

    def _greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        logs = []
        row = list(ids)
        for _ in range(count):
            view = self.engine.logits([row])[0][-1].log_softmax(-1)
            row.append(int(view.argmax()))
            logs.append(float(view.max()))
        return row[len(ids) :], logs

    def _sglang(self, path: str, body: Any) -> Any:
        if path == "/get_model_info":
            return {"model_path": "tiny"}
        if path != "/generate":
            return None
        ids = body["input_ids"] if "input_ids" in body else self._ids(body["text"])
        scores = self.engine.score(ids, self.prefill).tolist()
        count = min(body["sampling_params"]["max_new_tokens"], 6)
        new, logs = self._greedy(ids, count)
        return {
            "text": self.engine.tokenizer.text(new),
            "meta_info": {
                "input_token_logprobs": [[None if i == 0 else score, token, None] for i, (score, token) in enumerate(zip(scores, ids, strict=True))],
                "output_token_logprobs": [[log, token, None] for log, token in zip(logs, new, strict=True)],
                "weight_version": "default",
            },
        }  # fmt: skip

    def _openai(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny"}]}
        if path != "/v1/completions":
            return None
        ids = self._ids(body["prompt"])
        scores = self.engine.score(ids, self.prefill).tolist()
        new, logs = self._greedy(ids, min(body["max_tokens"], 6))
        choice: dict[str, Any] = {"index": 0, "text": self.engine.tokenizer.text(new), "logprobs": None}
        if self.kind == "vllm":
            if "prompt_logprobs" in body:
                said = [{str(token): {"logprob": score, "rank": 1}} for score, token in zip(scores[1:], ids[1:], strict=True)]
                choice["prompt_logprobs"] = [None, *said]
            if body.get("return_token_ids"):
                choice |= {"prompt_token_ids": ids, "token_ids": new}
        if body.get("logprobs") is not None:
            heard = [None, *scores[1:]] if body.get("echo") else []
            choice["logprobs"] = {"tokens": [""] * (len(heard) + len(new)), "token_logprobs": heard + logs}
        return {"id": "cmpl-1", "choices": [choice]}


@contextmanager
def serving(answers: Answers | None, misbehave: str = "") -> Iterator[str]:
    """A server on a free port, until the block ends; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            hello = self.path in ("/get_model_info", "/v1/models")
            if misbehave and not (hello and misbehave.startswith("late ")):
                self._misbehave(misbehave.removeprefix("late "))
                return
            found = answers.to(self.path, body) if answers is not None else None
            self._send(404 if found is None else 200, json.dumps(found).encode())

        def _send(self, status: int, text: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _misbehave(self, how: str) -> None:
            if how == "hang":
                time.sleep(3)
            elif how == "500":
                self._send(500, b"{}")
            elif how == "junk":
                self._send(200, b"\x00\xff<html>")
            elif how == "no numbers":
                self._send(200, b'{"meta_info": {"input_token_logprobs": "none"}}')
            elif how == "endless":
                self.send_response(200)
                self.end_headers()
                try:
                    while True:
                        self.wfile.write(b"x" * 65536)
                        time.sleep(0.01)
                except OSError:
                    pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
