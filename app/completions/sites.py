"""Reads `site` and refuses what a model does not have, with the list of what it has."""

from typing import Any

from app.catalog import ServedModel
from app.completions.problems import RefusedError, shown
from app.steering.spec import Site


def read_site(sent: Any, model: ServedModel) -> Site:
    """Read the site of an intervention or capture; missing means resid_post.

    Raises RefusedError with the rest of a sentence whose subject is the intervention or capture.
    """
    site = Site.resid_post if sent is None else sent
    if not isinstance(site, str) or site not in model.sites:
        msg = f"has the site {shown(site)}; {offered(model)}"
        raise RefusedError(msg)
    return Site(site)


def offered(model: ServedModel) -> str:
    """Say which sites a model has."""
    if not model.sites:
        return (
            f"{model.name} has no sites, because its architecture {model.architecture} is not one "
            "that this server can steer and read"
        )
    return f"{model.name} has {', '.join(model.sites)}"
