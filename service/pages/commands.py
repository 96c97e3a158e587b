"""What a form does, as texts to copy: a plan, and the commands that send it."""

from __future__ import annotations

import shlex

from service.storage.drafts import Draft

PLAN_FILE = "plan.yaml"


def commands(draft: Draft, plan: str, url: str, with_key: bool) -> dict[str, str]:
    """Return the texts by their titles. `with_key`: the service needs a key."""
    files = {name: part.filename for name, part in draft.parts.items()}
    return {
        PLAN_FILE: plan,
        "CLI": _cli(files, url, with_key),
        "curl": _curl(files, url, with_key),
        "Python": _python(files, url, with_key),
    }


def _cli(files: dict[str, str], url: str, with_key: bool) -> str:
    key = "# CRUCIBLE_KEY holds your key\n" if with_key else ""
    words = ["crucible", "submit", _path(files["model"]), "--plan", PLAN_FILE]
    for name, filename in files.items():
        if name != "model":
            words += [f"--{name.replace('_', '-')}", _path(filename)]
    return f"{key}{shlex.join([*words, '--url', url, '--wait'])}\n"


def _curl(files: dict[str, str], url: str, with_key: bool) -> str:
    header = '(umask 077; echo "Authorization: Bearer $CRUCIBLE_KEY" > auth)\n' if with_key else ""
    words = ["curl", *(("-H", "@auth") if with_key else ()), f"{url}/compile"]
    for name, filename in {**files, "plan": PLAN_FILE}.items():
        quoted = filename.replace("\\", "\\\\").replace('"', '\\"')  # curl splits at `;` and `,`
        words += ["-F", f'{name}=@"{quoted}"']
    return f"{header}{shlex.join(words)}\n"


def _python(files: dict[str, str], url: str, with_key: bool) -> str:
    data = [f"{name}=Path({filename!r})" for name, filename in files.items() if name != "model"]
    upload = ", ".join([f"Path({files['model']!r})", f"Path({PLAN_FILE!r})", *data])
    key = ', os.environ["CRUCIBLE_KEY"]' if with_key else ""
    return (
        ("import os\n" if with_key else "")
        + "from pathlib import Path\n\n"
        + "from service.client import Client, Upload\n\n"
        + f"with Client({url!r}{key}) as client:\n"
        + f"    job = client.submit(Upload({upload}))\n"
        + "    print(job.id)\n"
    )


def _path(filename: str) -> str:
    """Return a path that no command takes for an option."""
    return f"./{filename}" if filename.startswith("-") else filename
