"""The layout of files under the service's home.

home/uploads/<job>/     the client's files, and plan.json: the plan over those files. Written by the
                        server before the job is added
home/uploads/<draft>/   of the web pages: files that wait for their plan, and draft.json
home/uploads/<job>/compiled/    of a benchmark: the report and the engine to measure again
home/jobs/<job>/        the child's work: log, home/ (its CRUCIBLE_HOME), tmp/, out/ (the report
                        before it is verified)
home/reports/<job>/     the report and the engine, published by the server
home/models/<name>/<version>/   the engine of a promoted version
home/serving/           logs and temporary files of the serving processes
home/artifacts/, ...    the store that all jobs read; it adopts the artifacts of finished jobs
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.llm.plan import AnyPlan, any_plan_from_json
from pipeline.plan.schema import Plan

# The only place that decides it: a process under another uid needs more, such as 0o711.
HOME_MODE = 0o700
PLAN = "plan.json"
DRAFT = "draft.json"
FOLDERS_OF_JOB = ("uploads", "jobs", "reports")  # each holds one folder of a job
UPLOAD = "$UPLOAD"  # in a plan.json: the folder that it lies in, on any server
MAX_LOG_BYTES = 2**20  # of a log that clients can read; the rest is cut when the job has ended


def secure_home(home: Path) -> str:
    """Create the home, or give an existing one HOME_MODE. Returns its earlier mode in octal; empty
    if nothing had to change. PermissionError if it belongs to another user.
    """
    home.mkdir(mode=HOME_MODE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(home.stat().st_mode)
    if not mode & ~HOME_MODE:
        return ""
    home.chmod(HOME_MODE)
    return f"{mode:04o}"


@dataclass(frozen=True, slots=True)
class Work:
    """One job's work directory."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def prepare(self) -> None:
        """Prepare the folder for a new attempt: keep finished artifacts, delete partial output."""
        for folder in (self.temporary, self.out):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.home, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)

    def clear_temporary(self) -> None:
        """Delete temporary files after the child has ended."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def start_log(self, lines: Sequence[str]) -> None:
        """Write the first lines of the log."""
        self.root.mkdir(parents=True)
        self.log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def read_log(self, most: int, after: int = 0) -> tuple[bytes, int]:
        """Return the end of the log after its byte `after`, at most `most` bytes, and where that
        begins. Nothing if there is no log, or a symbolic link in its place: a job's code may put
        one there.
        """
        try:
            with open(self.log, "rb", opener=_open_plain) as stream:
                begin = max(after, os.fstat(stream.fileno()).st_size - most)
                stream.seek(begin)
                return stream.read(most), begin
        except FileNotFoundError:  # the job has not started
            return b"", 0
        except OSError as error:
            if error.errno == errno.ELOOP:
                return b"", 0
            raise

    def shorten_log(self) -> None:
        """Keep only the end of the log, which is all that clients can read. A symbolic link instead
        of the log is not followed.
        """
        if (
            self.log.is_file()
            and not self.log.is_symlink()
            and self.log.stat().st_size > MAX_LOG_BYTES
        ):
            with self.log.open("r+b") as file:
                file.seek(-MAX_LOG_BYTES, os.SEEK_END)
                end = file.read()
                file.seek(0)
                file.write(end)
                file.truncate()

    def empty(self) -> None:
        """Delete everything except the log."""
        for folder in (self.home, self.temporary, self.out):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one home."""

    home: Path

    def uploads(self, job_id: str) -> Path:
        return self.home / "uploads" / job_id

    def compiled(self, job_id: str) -> Path:
        return self.uploads(job_id) / "compiled"

    def work(self, job_id: str) -> Work:
        return Work(self.home / "jobs" / job_id)

    def report(self, job_id: str) -> Path:
        return self.home / "reports" / job_id

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def serving(self) -> Path:
        return self.home / "serving"

    def version(self, model: str, version: int) -> Path:
        return self.models / model / str(version)

    def save_plan(self, job_id: str, plan: AnyPlan) -> None:
        """Write the plan beside the upload."""
        folder = self.uploads(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        _write_plan(folder, plan.model_dump_json(indent=1), folder)

    def load_plan(self, job_id: str) -> Plan:
        """Read the job's plan of engines. StoreError as for `load_any_plan`, or if it is one of a
        language model.
        """
        plan = self.load_any_plan(job_id)
        if not isinstance(plan, Plan):
            raise StoreError(
                f"job {job_id} compiled a language model, expected one that compiled engines",
                "name another job",
            )
        return plan

    def load_any_plan(self, job_id: str) -> AnyPlan:
        """Read the job's plan. StoreError if it is missing or damaged."""
        file = self.uploads(job_id) / PLAN
        try:
            return plan_of_upload(file)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"the upload of job {job_id} cannot be read: {error}", "send the model again"
            ) from error

    def share_upload(self, old: str, new: str) -> None:
        """Share one job's upload with another job: link its files, but for the plan."""
        shutil.copytree(
            self.uploads(old), self.uploads(new), copy_function=os.link, dirs_exist_ok=True
        )
        text = (self.uploads(old) / PLAN).read_text(encoding="utf-8")
        _write_plan(self.uploads(new), text, self.uploads(old))

    def take_over(self, old: str, new: str) -> None:
        """Share one job's upload with another job, and move the old job's store there, so that the
        new job continues from its artifacts.
        """
        self.share_upload(old, new)
        if self.work(old).home.is_dir():
            self.work(new).root.mkdir(parents=True, exist_ok=True)
            self.work(old).home.rename(self.work(new).home)

    def give_back(self, old: str, new: str) -> None:
        """Undo `take_over`, as far as it has come."""
        if self.work(new).home.is_dir():
            self.work(new).home.rename(self.work(old).home)
        self.remove(new)

    def remove(self, job_id: str) -> None:
        """Delete all files of one job."""
        for folder in (self.uploads(job_id), self.work(job_id).root, self.report(job_id)):
            shutil.rmtree(folder, ignore_errors=True)


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def plan_of_upload(file: Path) -> AnyPlan:
    """Read the plan beside an upload. OSError or ValueError if it is missing or damaged."""
    text = file.read_text(encoding="utf-8")
    return any_plan_from_json(text.replace(f"{UPLOAD}/", _json_path(file.parent)))


def _write_plan(folder: Path, text: str, files: Path) -> None:
    """Write a plan over `files` so that it can be read on any server."""
    new = folder / f"{PLAN}.new"  # the old one may be linked elsewhere
    new.write_text(text.replace(_json_path(files), f"{UPLOAD}/"), encoding="utf-8")
    new.replace(folder / PLAN)


def _json_path(folder: Path) -> str:
    return json.dumps(f"{folder}/")[1:-1]
