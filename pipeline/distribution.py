"""The name, version and revision of this Crucible, and the command that installs its extras."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

DISTRIBUTION = "crucible-compiler"
"""As in pyproject.toml. PyPI's `crucible` is another project, so no message may name it."""

GIT_LIMIT_S = 10  # it takes milliseconds; a network disk that hangs must not stop --version
ABSENT = "absent"


def install_command(*extras: str) -> str:
    """Return the command that adds these extras. It needs a checkout: no index has Crucible."""
    return f"pip install -e '.[{','.join(extras)}]' in the checkout of Crucible"


def version() -> str:
    """The installed version, or `absent` where the packages lie on the path without an install."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def revision() -> str:
    """The commit of the checkout, or the one that pip installed from; "" where neither is known."""
    root = Path(__file__).resolve().parents[1]
    return checkout_revision(root) or installed_revision()


def checkout_revision(root: Path) -> str:
    """The commit that is checked out at `root`; "" where `root` itself is no checkout."""
    if not (root / ".git").exists():  # site-packages may lie inside somebody else's checkout
        return ""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        process = subprocess.run(command, capture_output=True, timeout=GIT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.decode().strip() if process.returncode == 0 else ""


def installed_revision() -> str:
    """The commit in pip's record of a direct install (PEP 610), or ""."""
    try:
        record = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return ""
    commit = json.loads(record or "{}").get("vcs_info", {}).get("commit_id", "")
    return str(commit)


def version_line() -> str:
    """Return the output of `crucible --version`."""
    commit = revision()
    suffix = f", revision {commit[:12]}" if commit else ""
    return f"crucible {version()} (distribution {DISTRIBUTION}{suffix})"
