"""One name of a capture, one kind of read: all files below captures/<name> must look alike.

Requests of one Job may use a name for other positions, layers or directions. Another site,
another reduction or another number of directions would give its files other columns, or columns
that mean something else, and no reader could open them together. Intake refuses it with
`CaptureNames`; the worker's part writer asks the same question again and errors that request alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from app.completions.problems import Problem
from app.steering.spec import Capture, Reduce, Site


@dataclass(frozen=True, slots=True)
class CaptureShape:
    """What the rows of a capture are; equal for all captures of one name in a Job.

    `directions` and `unit` belong to Reduce.project.
    """

    site: Site
    before: bool
    reduce: Reduce
    directions: int
    unit: bool

    @classmethod
    def of(cls, capture: Capture) -> "CaptureShape":
        """Describe a capture."""
        projects = capture.reduce is Reduce.project
        return cls(
            capture.site,
            capture.before,
            capture.reduce,
            len(capture.directions) if projects else 0,
            capture.unit if projects else False,
        )

    @property
    def when(self) -> str:
        """Name the moment of the read as users do: before or after."""
        return "before" if self.before else "after"

    def __str__(self) -> str:
        """Describe the rows in words."""
        what = {
            Reduce.none: "the rows",
            Reduce.mean: "the mean",
            Reduce.norm: "the norms",
            Reduce.project: f"{self.directions} projections ({'unit' if self.unit else 'raw'})",
        }[self.reduce]
        return f"{what} of {self.site.value} {self.when} all ops"


class CaptureNames:
    """Watches the captures of a Job's requests as they come, in any order."""

    def __init__(self) -> None:
        """Start with no name."""
        self._first: dict[str, tuple[int, CaptureShape]] = {}

    def problems(self, index: int, captures: Iterable[Capture]) -> list[Problem]:
        """Take in the captures of request `index`; list those that disagree with an earlier one."""
        found = []
        for capture in captures:
            shape = CaptureShape.of(capture)
            first, wanted = self._first.setdefault(capture.name, (index, shape))
            if wanted != shape:
                message = (
                    f"captures: {capture.name!r} reads {shape} here, but {wanted} in "
                    f"requests[{first}]. All requests of a Job that use a name must read the same "
                    "site, at the same moment, with the same reduce; use another name."
                )
                found.append(Problem("captures", message, "capture_conflict"))
        return found
