"""What a client sees of a stream: its chunks, and how it ended."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.completions_api.served import Served
from tests.fixtures.documented import Described

DONE = "[DONE]"


@dataclass
class Stream:
    """Events of one answer as they arrive, and when they did."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False
    was_cut: bool = False
    body: str = ""

    def take(self, line: str) -> None:
        """Take one line of the body; nothing may come after the end."""
        if not line.startswith("data: "):
            assert not line or line.startswith(":"), line
            return
        assert not self.is_done, f"after [DONE]: {line}"
        assert self.error is None, f"after an error: {line}"
        data = line.removeprefix("data: ")
        if data == DONE:
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event
        else:
            self.chunks.append(event)

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """List what belongs to one choice."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def text(self, index: int = 0) -> str:
        """Join the text of a choice."""
        return "".join(choice["text"] for choice in self.choices(index))

    def token_ids(self, index: int = 0) -> list[int]:
        """Join the token ids of a choice."""
        return [token for choice in self.choices(index) for token in choice["token_ids"]]

    def joined(self) -> dict[str, Any]:
        """Put the plain answer together again, but for its id and time."""
        answer: dict[str, Any] = {"model": self.chunks[0]["model"], "choices": []}
        for index in sorted({c["index"] for chunk in self.chunks for c in chunk["choices"]}):
            answer["choices"].append(_joined(self.choices(index)))
        for chunk in self.chunks:
            for name in ("usage", "activations", "warnings"):
                if chunk.get(name) is not None:
                    assert name not in answer, f"{name} came twice"
                    answer[name] = chunk[name]
        return answer


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(pieces[0])
    for piece in pieces[1:]:
        assert whole["finish_reason"] is None, "a piece after the last"
        assert not piece.keys() & {"prompt_token_ids", "prompt_logprobs"}
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        whole["stop_reason"] = piece["stop_reason"]
        if "token_ids" in whole:
            whole["token_ids"] = whole["token_ids"] + piece["token_ids"]
        if whole["logprobs"] is not None:
            whole["logprobs"] = {
                name: column + piece["logprobs"][name] for name, column in whole["logprobs"].items()
            }
    return whole


def streamed(served: Served, *, described: Described | None = None, **fields: Any) -> Stream:
    """Post a streamed Completion and read it to its end."""
    stream = Stream()
    with opened(served, stream, **fields) as answer:
        if described is not None:
            described(answer)
        if stream.error is None:
            lines = answer.iter_lines() if described is None else answer.text.split("\n")
            for line in lines:
                stream.take(line)
    return stream


@contextlib.contextmanager
def opened(served: Served, stream: Stream, **fields: Any) -> Iterator[httpx.Response]:
    """Post a streamed Completion; the answer is read by the caller."""
    body = {"model": "tiny", "prompt": [6, 7, 8], "max_tokens": 4, "stream": True, **fields}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        stream.status, stream.headers = answer.status_code, answer.headers
        if answer.status_code != 200:
            stream.body = answer.read().decode()
            stream.error = json.loads(stream.body)
        yield answer


class Reading:
    """A stream that a thread reads; `close` breaks the connection off, as a client that leaves."""

    def __init__(self, served: Served, **fields: Any) -> None:
        """Begin to read."""
        self.stream = Stream()
        self._answer: httpx.Response | None = None
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(served, fields), daemon=True)
        self._thread.start()

    def _read(self, served: Served, fields: dict[str, Any]) -> None:
        try:
            with opened(served, self.stream, **fields) as answer:
                if answer.status_code == 200:
                    for line in answer.iter_lines():
                        self.stream.take(line)
                        if self._leave.is_set():
                            return
        except httpx.TransportError:
            self.stream.was_cut = True

    def wait(self, condition: Callable[[Stream], Any], seconds: float = 30.0) -> None:
        """Wait until the stream is as wanted."""
        deadline = time.monotonic() + seconds
        while not condition(self.stream):
            assert time.monotonic() < deadline, self.stream
            time.sleep(0.01)

    def wait_tokens(self, count: int) -> None:
        """Wait until so many chunks are there."""
        self.wait(lambda stream: len(stream.chunks) >= count)

    def end(self, seconds: float = 40.0) -> Stream:
        """Wait for the end of the stream."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream does not end"
        return self.stream
