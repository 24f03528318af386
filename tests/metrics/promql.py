"""The part of PromQL that deploy/alerts.yaml uses, evaluated on scrapes.

A history is a list of scrapes in order; an expression is evaluated at the last of them. A vector
maps label sets to values; a scalar is a float. What the rules do not use is refused, not guessed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
Value: TypeAlias = "Vector | float"
Samples: TypeAlias = Mapping[tuple[str, Labels], float]

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<word>[a-zA-Z_]\w*)|(?P<text>\"[^\"]*\")"
    r"|(?P<range>\[\d+[smh]\])|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/<>=(){},]))"
)
SECONDS = {"s": 1, "m": 60, "h": 3600}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
MATCH: dict[str, Callable[[str, str], bool]] = {
    "=": lambda have, want: have == want,
    "!=": lambda have, want: have != want,
    "=~": lambda have, want: re.fullmatch(want, have) is not None,
    "!~": lambda have, want: re.fullmatch(want, have) is None,
}
FOLD: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum}


@dataclass(frozen=True)
class Scrape:
    """What one scrape found, and when, in seconds."""

    at: float
    samples: Samples


def duration(text: str) -> float:
    """Read a duration like 5m, in seconds."""
    return int(text[:-1]) * SECONDS[text[-1]]


def evaluate(expression: str, history: Sequence[Scrape]) -> Value:
    """Evaluate an expression at the last scrape. Raises ValueError for what is not understood."""
    reader = _Reader(expression, history)
    value = reader.unions()
    if reader.token:
        raise ValueError(f"{reader.token!r} in {expression!r}")
    return value


def fires(expression: str, seconds: float, history: Sequence[Scrape]) -> bool:
    """Tell whether an alert fires: some label set stays in the answer for so long.

    Between two scrapes nothing is known, so each stands until the next.
    """
    since: dict[Labels, float] = {}
    for count, scrape in enumerate(history, 1):
        found = evaluate(expression, history[:count])
        assert isinstance(found, dict), "an alert asks for a vector"
        since = {labels: since.get(labels, scrape.at) for labels in found}
        if any(scrape.at - began >= seconds for began in since.values()):
            return True
    return False


class _Reader:
    """Reads and evaluates at once: or < unless < compare < product < operand."""

    def __init__(self, expression: str, history: Sequence[Scrape]) -> None:
        self._history = history
        self._tokens = self._split(expression)
        self.token = ""
        self._kind = ""
        self._next()

    def _split(self, expression: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(expression.rstrip()):
            found = TOKEN.match(expression, at)
            if found is None or found.lastgroup is None:
                raise ValueError(f"not understood: {expression[at:]!r}")
            yield found.lastgroup, found[found.lastgroup]
            at = found.end()

    def _next(self) -> str:
        before = self.token
        self._kind, self.token = next(self._tokens, ("", ""))
        return before

    def _take(self, wanted: str) -> None:
        if self.token != wanted:
            raise ValueError(f"{wanted!r} expected, {self.token!r} found")
        self._next()

    def unions(self) -> Value:
        value = self._differences()
        while self.token == "or":
            self._next()
            other = self._differences()
            assert isinstance(value, dict)
            assert isinstance(other, dict)
            value = {**other, **value}
        return value

    def _differences(self) -> Value:
        value = self._comparison()
        while self.token == "unless":
            self._next()
            names = self._names("on")
            other = self._comparison()
            assert isinstance(value, dict)
            assert isinstance(other, dict)
            gone = {_only(labels, names) for labels in other}
            value = {
                labels: each for labels, each in value.items() if _only(labels, names) not in gone
            }
        return value

    def _comparison(self) -> Value:
        value = self._product()
        if self.token in COMPARE:
            compare = COMPARE[self._next()]
            other = self._product()
            assert isinstance(value, dict)
            value = {labels: a for labels, a, b in _pairs(value, other) if compare(a, b)}
        return value

    def _product(self) -> Value:
        value = self._operand()
        while self.token in ("*", "/"):
            by = self._next()
            other = self._operand()
            if isinstance(value, float) and isinstance(other, dict):
                value, other = other, value
                assert by == "*"
            if isinstance(value, float):
                assert isinstance(other, float)
                value = value * other if by == "*" else value / other
            else:
                value = {k: a * b if by == "*" else a / b for k, a, b in _pairs(value, other)}
        return value

    def _operand(self) -> Value:
        if self._kind == "number":
            return float(self._next())
        if self._kind != "word":
            raise ValueError(f"{self.token!r} is no operand")
        word = self._next()
        if word in FOLD:
            names = self._names("by")
            return self._fold(FOLD[word], names, self._inside())
        if word == "absent":
            return {} if self._inside() else {frozenset(): 1.0}
        if word == "rate":
            self._take("(")
            rate = self._rate(self._next())
            self._take(")")
            return rate
        return self._select(word, self._matchers(), self._history[-1].samples)

    def _inside(self) -> Vector:
        self._take("(")
        value = self.unions()
        self._take(")")
        assert isinstance(value, dict)
        return value

    def _fold(
        self, fold: Callable[[list[float]], float], names: list[str], vector: Vector
    ) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(_only(labels, names), []).append(value)
        return {labels: fold(values) for labels, values in groups.items()}

    def _names(self, word: str) -> list[str]:
        names: list[str] = []
        if self.token == word:
            self._next()
            self._take("(")
            while self.token != ")":
                names.append(self._next())
                if self.token == ",":
                    self._next()
            self._take(")")
        return names

    def _matchers(self) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = []
        if self.token == "{":
            self._next()
            while self.token != "}":
                name, by = self._next(), self._next()
                found.append((name, by, self._next().strip('"')))
                if self.token == ",":
                    self._next()
            self._take("}")
        return found

    def _select(self, name: str, wanted: list[tuple[str, str, str]], samples: Samples) -> Vector:
        return {
            labels: value
            for (sample, labels), value in samples.items()
            if sample == name
            and all(MATCH[by](dict(labels).get(label, ""), text) for label, by, text in wanted)
        }

    def _rate(self, name: str) -> Vector:
        """Give the increase a second from the first scrape in the range to the last."""
        wanted = self._matchers()
        seconds = duration(self._next().strip("[]"))
        last = self._history[-1]
        first = next(scrape for scrape in self._history if scrape.at >= last.at - seconds)
        if first is last:
            return {}
        before = self._select(name, wanted, first.samples)
        now = self._select(name, wanted, last.samples)
        passed = last.at - first.at
        return {labels: (now[labels] - before[labels]) / passed for labels in now.keys() & before}


def _only(labels: Labels, names: Sequence[str]) -> Labels:
    return frozenset((name, value) for name, value in labels if name in names)


def _pairs(vector: Vector, other: Value) -> list[tuple[Labels, float, float]]:
    if isinstance(other, float):
        return [(labels, value, other) for labels, value in vector.items()]
    return [(labels, value, other[labels]) for labels, value in vector.items() if labels in other]
