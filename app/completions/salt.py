"""The prefix-cache salt: who may share cached key-value blocks with whom.

Equal interventions of one account share; nothing else ever meets. A position decides what a
cached row is only together with P once an intervention is not the same at every position.
"""

import hashlib
import json
from uuid import UUID

from app.completions.spec import RequestSpec
from app.steering.spec import Intervention, to_json

_VERSION = "tiller-salt-2"  # to be changed when the meaning of an intervention changes


def salt_for(account_id: UUID, spec: RequestSpec) -> str:
    """Return the salt of a request: 64 hexadecimal digits, never empty."""
    active = [item for item in spec.interventions if not item.changes_nothing]
    content: dict[str, object] = {
        "version": _VERSION,
        "account": str(account_id),
        "interventions": [to_json(item) for item in active],
    }
    if not all(map(_everywhere, active)):
        content["prompt_tokens"] = spec.prompt_tokens
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _everywhere(item: Intervention) -> bool:
    return item.positions is None and item.spans is None
