"""The checkpoints that slime's real converter wrote, kept small: everything but the reference is a zstandard delta against it.

    python tests/data/make/slime_cases.py CASES tests/data/cases

CASES is the folder with tiny8-hf, slime-0.2.4-ep1, slime-0.2.4-ep4, slime-fixed-ep4 and export-ep4-hf as the public converter wrote
them (THUDM/slime v0.2.4 = bd217a63f, its fix 43c5174f0, Megatron-LM 3714d81d4 with slime's patch, mbridge 89eb108).  `unpacked` gives
them back byte by byte.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import zstandard

REFERENCE = "tiny8-hf"
NAMES = ("slime-0.2.4-ep1", "slime-0.2.4-ep4", "slime-fixed-ep4", "export-ep4-hf")
SUMS = "sha256.json"


def dictionary(packed: Path) -> zstandard.ZstdCompressionDict:
    """The reference's files, one after another: what the deltas refer to."""
    files = sorted((packed / REFERENCE).glob("*.safetensors"))
    return zstandard.ZstdCompressionDict(b"".join(file.read_bytes() for file in files), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def files_of(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def sums(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(folder)}


def pack(cases: Path, packed: Path) -> None:
    """Writes the reference as it is, and a delta for each of the others."""
    packed.mkdir(parents=True, exist_ok=True)
    shutil.copytree(cases / REFERENCE, packed / REFERENCE, dirs_exist_ok=True)
    window = zstandard.ZstdCompressionParameters.from_level(19, window_log=25, enable_ldm=True)
    packer = zstandard.ZstdCompressor(dict_data=dictionary(packed), compression_params=window)
    for name in NAMES:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for file in files_of(cases / name):
                entry = tarfile.TarInfo(str(file.relative_to(cases / name)))
                entry.size = file.stat().st_size
                archive.addfile(entry, io.BytesIO(file.read_bytes()))
        (packed / f"{name}.tar.zst").write_bytes(packer.compress(buffer.getvalue()))
    (packed / SUMS).write_text(json.dumps({name: sums(cases / name) for name in NAMES}, indent=1) + "\n")


def unpacked(packed: Path, out: Path) -> dict[str, Path]:
    """Every case by name, unpacked into `out` and checked against its sums."""
    unpacker = zstandard.ZstdDecompressor(dict_data=dictionary(packed), max_window_size=1 << 25)
    expected = json.loads((packed / SUMS).read_text())
    found = {REFERENCE: packed / REFERENCE}
    for name in NAMES:
        with tarfile.open(fileobj=io.BytesIO(unpacker.decompress((packed / f"{name}.tar.zst").read_bytes()))) as archive:
            archive.extractall(out / name, filter="data")
        assert sums(out / name) == expected[name], f"{name} is not what was packed"
        found[name] = out / name
    return found


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
