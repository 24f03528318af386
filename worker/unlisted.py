"""Checks Completions that the API could not check: those of a model that it does not know.

The rules are the API's own, with this worker's model and tokenizer. What passes gets its real
number of prompt tokens into its row, so that the charge is what ran; the answer, or the chunks of
a stream, are written here, too, because the API could not turn its tokens into text.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from app.catalog import ServedModel, Tokenizer
from app.catalog.norms import TypicalNorms
from app.completions.answer import completion_object
from app.completions.intake import PreparedCompletion, load_vectors, prepare_completion
from app.completions.records import ClaimedCompletion, Failure, note_prompt
from app.completions.references import captured_of, vectors_of
from app.completions.stream_chunks import ChunkWriter
from app.errors import InvalidRequestError, UnavailableError
from app.kit.db import Conn, Database
from app.results.captured import CapturedLimits, CapturedRows
from app.settings import Limits
from app.steering.vectors import store_vectors
from app.storage import ObjectStore, StoreError
from worker.completion_answer import answer_bytes, pieces_bytes, stream_end_bytes
from worker.engine.protocol import Piece
from worker.outcomes import Succeeded

log = logging.getLogger(__name__)

NOT_READ = Failure(
    "unavailable",
    "The object store, which keeps the files of Jobs, cannot be reached. Send it again.",
)


@dataclass(frozen=True, slots=True)
class AdmittedCompletion(ClaimedCompletion):
    """A claimed Completion that was checked here; `specs` are what it asks for."""

    prepared: PreparedCompletion | None = None
    tokenizer: Tokenizer | None = None
    writer: ChunkWriter | None = None

    def answer(self, outcomes: Sequence[Succeeded]) -> bytes:
        """Write the whole answer. Raises ValueError for text that is no text."""
        assert self.prepared is not None
        assert self.tokenizer is not None
        given = orjson.loads(answer_bytes(outcomes))
        return orjson.dumps(completion_object(self.prepared, given, self.tokenizer))

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> bytes:
        """Write the next pieces of the stream as one, with its chunks; call it in their order.

        Raises ValueError for text that is no text.
        """
        assert self.writer is not None
        written = self.writer.write(orjson.loads(pieces_bytes(pieces)))
        token_ids = [token for _, piece in pieces for token in piece.token_ids]
        return orjson.dumps([{"token_ids": token_ids, "chunks": written}])

    def stream_end(self, outcomes: Sequence[Succeeded]) -> bytes:
        """Write what follows the chunks: how many tokens they were, and the last chunk."""
        assert self.writer is not None
        ends = orjson.loads(stream_end_bytes(outcomes))
        last = self.writer.last(ends)
        tokens = [{"completion_tokens": end["completion_tokens"]} for end in ends]
        return orjson.dumps([{**tokens[0], "last": last}, *tokens[1:]])


class Gate:
    """The rules of this worker's model."""

    def __init__(
        self, database: Database, store: ObjectStore, model: ServedModel, limits: Limits
    ) -> None:
        """Bind what rules look at; the tokenizer is loaded when it is first needed."""
        self._database = database
        self._captured = CapturedRows(database, store, CapturedLimits.of_completion(limits))
        self._norms = TypicalNorms(database)
        self._model = model
        self._limits = limits
        self._tokenizer: Tokenizer | None = None

    def admit(self, claimed: ClaimedCompletion) -> AdmittedCompletion | Failure:
        """Check what was passed on, store the vectors that it brings; blocking."""
        assert claimed.body is not None
        try:
            tokenizer = self._load_tokenizer()
            prepared = replace(self._prepare(claimed, claimed.body, tokenizer), id=claimed.id)
        except InvalidRequestError as error:
            return Failure(error.code, error.message, error.param)
        except (StoreError, UnavailableError) as error:
            log.warning("what a Completion names cannot be read", extra={"error": repr(error)})
            return NOT_READ
        prompt_tokens = sum(spec.prompt_tokens for spec in prepared.specs)

        def note(conn: Conn) -> None:
            store_vectors(conn, claimed.account_id, prepared.vectors.values())
            note_prompt(conn, claimed.id, prompt_tokens)

        self._database.run(note)
        return AdmittedCompletion(
            claimed.id,
            claimed.account_id,
            prepared.specs,
            claimed.stream,
            prepared=prepared,
            tokenizer=tokenizer,
            writer=ChunkWriter(prepared, tokenizer) if claimed.stream else None,
        )

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._model.tokenizer_path)
        return self._tokenizer

    def _prepare(
        self, claimed: ClaimedCompletion, body: dict[str, Any], tokenizer: Tokenizer
    ) -> PreparedCompletion:
        account_id, limits = claimed.account_id, self._limits
        return prepare_completion(
            body,
            self._model,
            tokenizer,
            limits,
            stored=vectors_of(
                body,
                limits,
                lambda names: self._database.run(
                    lambda conn: load_vectors(conn, account_id, names, limits)
                ),
            ),
            captured=captured_of(body, limits, lambda rows: self._captured.read(account_id, rows)),
            norms=self._norms.of(self._model),
        )
