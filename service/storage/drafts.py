"""Drafts: uploads of the web pages that wait for their plan. They end after DRAFT_S.

A draft is a folder of uploads without a job. `draft.json` in it says what it is.
"""

from __future__ import annotations

import datetime as dt
import re
import shutil
from collections.abc import Callable

from pydantic import ValidationError

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import TensorSpec
from service.errors import NotFound
from service.storage.files import Files
from service.storage.layout import DRAFT, Folders

DRAFT_S = 3600
ID = re.compile(r"[0-9a-f]{1,64}")


class StoredPart(Frozen):
    """One file of a draft."""

    file: str  # its name in the folder
    sha256: str
    size: int
    filename: str  # the client's name


class Interface(Frozen):
    """What an ONNX file says of its model; empty for other formats."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic dimensions of the inputs, in order, each once."""
        return tuple(dict.fromkeys(name for spec in self.inputs for name in spec.symbols))


class Draft(Frozen):
    """An upload that waits for its plan."""

    id: str
    owner: str
    created: dt.datetime
    parts: dict[str, StoredPart]
    interface: Interface = Interface()


class Drafts:
    """The drafts of one home."""

    def __init__(
        self,
        folders: Folders,
        files: Files,
        clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._folders, self._files, self._clock = folders, files, clock

    def add(self, draft: Draft) -> None:
        """Make a draft of a complete upload."""
        folder = self._folders.uploads(draft.id)
        new = folder / f"{DRAFT}.new"
        new.write_text(draft.model_dump_json(), encoding="utf-8")
        new.rename(folder / DRAFT)
        self._files.insert(self._files.upload(folder))

    def get(self, draft_id: str, owner: str) -> Draft:
        """Return a draft. NotFound if it has ended, or belongs to another owner."""
        draft = self._read(draft_id) if ID.fullmatch(draft_id) else None
        if draft is None or draft.owner != owner or self._has_ended(draft):
            raise gone()
        return draft

    def of(self, owner: str) -> list[Draft]:
        """Return all drafts of an owner that are on the disk."""
        return [draft for draft in self._all() if draft.owner == owner]

    def remove(self, draft_id: str) -> None:
        """Delete a draft with its files. No effect if there is none."""
        self._files.forget([self._folders.uploads(draft_id)])
        shutil.rmtree(self._folders.uploads(draft_id), ignore_errors=True)

    def remove_ended(self) -> int:
        """Delete the drafts that have ended. Returns their number."""
        ended = [draft for draft in self._all() if self._has_ended(draft)]
        for draft in ended:
            self.remove(draft.id)
        return len(ended)

    def _has_ended(self, draft: Draft) -> bool:
        return self._clock() - draft.created >= dt.timedelta(seconds=DRAFT_S)

    def _all(self) -> list[Draft]:
        if self._files.are_shared:
            ids = [folder.rpartition("/")[2] for folder in self._files.with_file(DRAFT)]
        else:
            files = self._folders.uploads("any").parent.glob(f"*/{DRAFT}")
            ids = [file.parent.name for file in files]
        drafts = map(self._read, ids)
        return [draft for draft in drafts if draft is not None]

    def _read(self, draft_id: str) -> Draft | None:
        try:
            file = self._folders.uploads(draft_id) / DRAFT
            if self._files.are_shared and not self._files.fetch(file.parent, (DRAFT,)):
                return None
            return Draft.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):  # removed meanwhile, or damaged
            return None


def gone() -> NotFound:
    """Return the refusal of a draft that is not there."""
    return NotFound(
        "there is no such draft: it was submitted, it has expired after an hour, or it belongs to"
        " another owner",
        "upload the model again, or look for its job among the jobs",
    )
