"""What the rest of the worker knows of an engine: one protocol and two exceptions.

    EngineRequestError   this request failed; carry on
    EngineDeadError      this process is finished; give the leases back and exit

An engine decides nothing about meaning: it gets a RequestSpec whose vectors lie in the vector
folder (`VectorCache`), and gives an Outcome.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app.completions.spec import RequestSpec
from app.steering.spec import Site
from worker.engine.groups import Seat
from worker.outcomes import Outcome, TokenLogprob


class EngineRequestError(Exception):
    """One request failed inside the engine; `code` is what the user sees."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the code and the sentence for the user."""
        super().__init__(message)
        self.code = code


class EngineDeadError(Exception):
    """The engine process is gone; nothing more can run in this worker process."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What every row of a result says about the engine that made it."""

    model: str
    revision: str
    engine: str  # "vllm 0.32.0"
    mode: str  # "eager" | "compiled"
    dtype: str  # "bfloat16" | "float32"
    hidden_size: int
    n_layers: int
    max_num_seqs: int
    site_widths: Mapping[Site, int] = field(default_factory=dict)  # the sites that it serves
    n_heads: int = 1
    urgent_seats: int = 0  # beside those of the batch, for urgent requests alone


@dataclass(frozen=True, slots=True)
class Group:
    """A request's place among those that run together, whole, in order and with nothing beside.

    Choices count one by one: `size` is how many there are in the group, `first` how many stand
    before this request's own. `key` is unique among running groups.
    """

    key: str
    size: int
    first: int

    def seat(self, choice: int) -> Seat:
        """Give the seat of a choice of this request."""
        return Seat(self.key, self.size, self.first + choice)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice gained: tokens, and the text that is certain by now.

    The pieces of a choice joined are its Choice; the last has a finish_reason. Text may lag
    behind its tokens. `prompt_logprobs` come with the first piece of choice 0.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None


class Engine(Protocol):
    """A running model. All methods but `facts` are called on the engine's own event loop."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about model and engine, fixed at start."""

    async def run(
        self,
        key: str,
        spec: RequestSpec,
        *,
        salt: str,
        group: Group | None = None,
        urgent: bool = False,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Outcome:
        """Run one request to its end. `key` is unique among running requests.

        An `urgent` request waits for no place that requests which are not urgent could take, and
        goes before all of them. With `on_piece`, pieces are given as they are made, on the event
        loop and before this returns or raises, also when it is cancelled.
        A request of a `group` starts when all of the group is there (or was refused), reads no
        prefix cache and shares no batch with requests outside of it.

        Returns Errored for a failure of this request alone. Raises EngineDeadError when the
        process is lost, asyncio.CancelledError (after aborting in the engine) when cancelled.
        """

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine cannot run requests any more."""

    async def shutdown(self) -> None:
        """Stop the engine and its processes; nothing of it is left when this returns."""
