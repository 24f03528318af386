"""What the engine benchmarks ask for: prompts, vectors and turns, the same for every side.

A turn is one timed run of all requests. It travels to a side's process as JSON; nothing here
needs torch or vLLM.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site

MODEL = "smollm2-135m"
N_LAYERS, WIDTH = 30, 576
ONE_LAYER = (15,)
ALL_LAYERS = tuple(range(N_LAYERS))
SCALE = 1.5
NORM_SCALE = 0.05  # at every layer; more would drown the stream after a few of them
CAP = 1.0
OPS = ("add", "norm_match", "orthogonal", "cap")

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Load:
    """How much a turn asks for, in requests and tokens; `batch` requests run at once."""

    requests: int = 64
    prompt: int = 32
    tokens: int = 32
    batch: int = 64
    kv_cache_mb: int = 512
    context: int = 256
    prefix_caching: bool = False

    @property
    def rows(self) -> int:
        """How many positions of a request run (the last token never does)."""
        return self.prompt + self.tokens - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One timed run: layers that are steered and captured, and with what.

    `distinct` is how many different vectors the requests share (0: each has its own). With
    `mixed` requests take turns in the ops of OPS; else all add. With `positions` the first so
    many positions are steered, with a vector each; else all of them, with the same one.
    """

    name: str
    round: int = 0
    steered: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()
    mixed: bool = False
    distinct: int = 0
    positions: int = 0

    def at(self, number: int) -> "Turn":
        """Give the same turn for another round, which has prompts of its own."""
        return replace(self, round=number)

    def op(self, request: int) -> str:
        """Name the op of a request."""
        return OPS[request % len(OPS)] if self.mixed else OPS[0]

    def vector(self, request: int) -> int:
        """Number the vector of a request."""
        return request % self.distinct if self.distinct else request


def turn_to_line(turn: Turn) -> str:
    """Write a turn as one line of JSON."""
    return json.dumps(asdict(turn))


def turn_from_line(line: str) -> Turn:
    """Read a turn as `turn_to_line` wrote it."""
    fields = json.loads(line)
    layers = {key: tuple(fields[key]) for key in ("steered", "captured")}
    return Turn(**{**fields, **layers})


def prompts(load: Load, number: int) -> list[list[int]]:
    """Draw the prompts of a round."""
    rng = np.random.default_rng(1000 + number)
    return [[int(t) for t in rng.integers(100, 40_000, load.prompt)] for _ in range(load.requests)]


def vectors(load: Load) -> Rows:
    """Give a vector for each request and layer: [requests, layers, width]."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((load.requests, N_LAYERS, WIDTH)).astype(np.float32)


def position_vectors(load: Load) -> Iterator[Rows]:
    """Give for each request a vector for each position: [rows, width] one after the other."""
    rng = np.random.default_rng(8)
    for _ in range(load.requests):
        yield rng.standard_normal((load.rows, WIDTH)).astype(np.float32)


def spec_of(turn: Turn, request: int, ids: list[int], load: Load) -> RequestSpec:
    """Describe one request of a turn, with vectors by the names that the steered side stores."""
    captures = (Capture("residual_stream", Site.resid_post, turn.captured),)
    return RequestSpec(
        prompt_token_ids=tuple(ids),
        prompt=None,
        sampling=Sampling(max_tokens=load.tokens, temperature=0.0, ignore_eos=True),
        interventions=tuple(_intervention(turn, request, layer) for layer in turn.steered),
        captures=captures if turn.captured else (),
    )


def _intervention(turn: Turn, request: int, layer: int) -> Intervention:
    number = turn.vector(request)
    if turn.positions:
        return Intervention(
            Op.add,
            Site.resid_post,
            layer,
            f"sv_positions_{number}",
            0,
            scale=SCALE,
            positions=tuple(range(turn.positions)),
        )
    item = Intervention(Op.add, Site.resid_post, layer, f"sv_bench_{number}", layer, SCALE)
    match turn.op(request):
        case "norm_match":
            return replace(item, scale=NORM_SCALE, norm_match=True)
        case "orthogonal":
            return replace(item, op=Op.orthogonal, scale=1.0, coeff=0.0)
        case "cap":
            return replace(item, op=Op.cap, scale=1.0, low=-CAP, high=CAP)
        case _:
            return item


def steered_by(op: str, rows: Rows, vector: Rows) -> Rows:
    """Say what an op of this workload makes of rows [rows, width], in float64 sums."""
    rows64, vector64 = rows.astype(np.float64), vector.astype(np.float64)
    unit = vector64 / np.linalg.norm(vector64)
    along = (rows64 @ unit)[:, None]
    match op:
        case "add":
            change = SCALE * vector64
        case "norm_match":
            change = NORM_SCALE * np.linalg.norm(rows64, axis=1, keepdims=True) * unit
        case "orthogonal":
            change = -along * unit
        case "cap":
            change = (np.clip(along, -CAP, CAP) - along) * unit
        case _:
            msg = f"no op {op!r}"
            raise ValueError(msg)
    return (rows64 + change).astype(np.float32)


def share_right(was: Rows, now: Rows, expected: Rows, *, steps: float = 2.0) -> float:
    """Say which share of the numbers is as expected, up to `steps` roundings to bfloat16.

    Both `was` and `now` are rounded, so their difference may be off by one step of each.
    """
    step = 2.0**-8 * np.maximum(np.abs(now), np.abs(was))
    return float(np.mean(np.abs(now - expected) <= steps * step + 1e-6))


def widen(rows: npt.NDArray[np.uint16]) -> Rows:
    """Turn bfloat16 bit patterns into float32."""
    return (rows.astype(np.uint32) << 16).view(np.float32)
