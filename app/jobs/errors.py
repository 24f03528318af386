"""Errors of Jobs: the one that lists what is wrong in many requests, and that there is no Job."""

from typing import Any

from app.completions.problems import Problem
from app.errors import InvalidRequestError, NotFoundError


def no_job(job_id: str) -> NotFoundError:
    """Make the error for an id that names no Job of the account; every route says the same."""
    return NotFoundError(f"There is no Job {job_id[:100]!r} in this account.", param="job_id")


class InvalidJobError(InvalidRequestError):
    """Requests of a Job break rules: `error.details` lists the first, `total` counts all."""

    def __init__(self, problems: list[tuple[int | None, Problem]], total: int) -> None:
        """Take problems as (request_index or None for the Job itself, problem)."""
        index, first = problems[0]
        where = "" if index is None else f"requests[{index}]: "
        more = f" ({total} problems in all; see details.)" if total > 1 else ""
        codes = {problem.code for _, problem in problems}
        super().__init__(
            where + first.message + more,
            param=_param(index, first.param),
            code=codes.pop() if len(codes) == 1 else None,
            details=[
                {
                    "index": number,
                    "param": problem.param,
                    "code": problem.code,
                    "message": problem.message,
                }
                for number, problem in problems
            ],
        )
        self.total = total

    def envelope(self, request_id: str) -> dict[str, Any]:
        """Write the body of the answer, with the number of all problems."""
        content = super().envelope(request_id)
        content["error"]["total"] = self.total
        return content


def _param(index: int | None, param: str | None) -> str | None:
    """Name the place of a problem from the Job's top."""
    if index is None:
        return param
    return f"requests[{index}]" if param is None else f"requests[{index}].{param}"
