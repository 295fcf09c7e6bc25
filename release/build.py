"""Build the source distribution and the wheel into a folder, as ``make dist`` does.

    python -m release.build [--out dist]

Only files that git tracks are copied and built: neither remains of earlier builds nor files that lie in
the working tree by chance are packed. The wheel is built from the source distribution, which shows that the
latter is complete. The setuptools of this environment builds both; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_SDIST_SCRIPT = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@dataclass(frozen=True)
class Distributions:
    """The two files of a release."""

    sdist: Path
    wheel: Path


def build(out: Path) -> Distributions:
    """Build both files into a folder that may not exist yet."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        _copy_files(source)
        built = Path(folder) / "built"
        built.mkdir()
        _run([sys.executable, "-c", _SDIST_SCRIPT, str(built)], source)
        (sdist,) = built.glob("*.tar.gz")
        offline = ["--no-deps", "--no-build-isolation", "--no-index"]
        _run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(built), str(sdist)], built)
        (wheel,) = built.glob("*.whl")
        return Distributions(Path(shutil.copy(sdist, out)), Path(shutil.copy(wheel, out)))


def source_files(root: Path = ROOT) -> list[str]:
    """Return the files of a repository that git tracks, as paths from its root.

    MANIFEST.in takes whole folders, so an untracked file, which may hold anything, must not be copied.
    """
    listed = _run(["git", "ls-files", "-z"], root)
    names = [name for name in listed.split("\0") if name]
    # A file that was deleted and not committed is listed still.
    return sorted(name for name in names if (root / name).is_file())


def _copy_files(target: Path) -> None:
    for name in source_files():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)


def _run(command: list[str], folder: Path) -> str:
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder to write to")
    built = build(parser.parse_args().out)
    for path in (built.sdist, built.wheel):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
