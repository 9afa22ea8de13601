"""Read a run without sync-core, using only docs/how-to/store-format.md.

Type `pip install cryptography numpy obstore safetensors torch`, and then
`python docs/examples/read_run.py URL PUBLIC_KEY [VERSION]`.
"""

import hashlib
import json
import struct
import sys
from collections import defaultdict
from itertools import starmap
from operator import add
from typing import Any

import numpy as np
import obstore
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from obstore.store import LocalStore, from_url
from safetensors.torch import load

Tensors = dict[str, torch.Tensor]


class Run:
    """A run, checked with the trainer's public key (hexadecimal)."""

    def __init__(self, url: str, key: str) -> None:
        self.store: Any = from_url(url) if "://" in url else LocalStore(url)
        line, content = self.get("HEAD").split(b"\n", 1)
        signature = bytes.fromhex(line.decode().removeprefix(f"ed25519 {key} "))
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(signature, b"sync-plugin-store HEAD 1\n" + content)
        self.head = json.loads(content)

    def get(self, name: str, digest: str = "") -> bytes:
        data = bytes(obstore.get(self.store, name).bytes())
        if digest and hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{name} has other bytes")
        return data

    def join(self, pieces: list[tuple[str, int]]) -> bytes:
        return b"".join(self.get(f"objects/{digest}", digest) for digest, _ in pieces)

    def manifest(self, digest: str) -> Any:
        return json.loads(self.get(f"manifests/{digest}.json", digest))

    def read(self, version: int = 0) -> Tensors:
        """Return a version's tensors by name, including tied ones and extras; 0 is the newest."""
        found = self.manifest(self.head["versions"][str(version or self.head["version"])])
        return self.of_ranks(found) if found["format"] == 2 else tensors_of(self.file(found))

    def file(self, manifest: Any) -> bytes:
        data = self.join(manifest["pieces"])
        if not manifest["base"]:
            return data
        return patched(self.file(self.manifest(manifest["base_digest"])), data)

    def of_ranks(self, manifest: Any) -> Tensors:
        holdings = json.loads(self.join([manifest["holdings"]]))
        whole, made, parts = Tensors(), Tensors(), defaultdict(list)
        for held, file in zip(holdings, manifest["ranks"], strict=True):
            whole |= tensors_of(self.join(file["pieces"]))
            for name, _, region, _ in held["tensors"]:
                parts[name].append((whole.pop(name), [first for first, _ in region]))
        found = {name: placed(each) for name, each in parts.items()}  # the extras are in `whole`
        for name, sources in (holdings[0]["made_of"] or {}).items():
            cut = ((found[n][tuple(starmap(slice, region))], start) for n, region, start in sources)
            made[name] = placed(list(cut))
        tied = {a: found[b] for held in holdings for a, b in held["aliases"]}
        return whole | (made or found | tied)


def placed(parts: list[Any]) -> torch.Tensor:
    """Return the tensor made of parts, each with its start indices."""
    at = [tuple(map(slice, start, map(add, start, part.shape))) for part, start in parts]
    shape = [max(each.stop for each in dimension) for dimension in zip(*at, strict=True)]
    whole = torch.empty(shape, dtype=parts[0][0].dtype)
    for (part, _), region in zip(parts, at, strict=True):
        whole[region] = part
    return whole


def patched(file: bytes, increment: bytes) -> bytes:
    """Return the file of a version, made from an increment and the file of its base."""
    data = load(increment)["__sync__.increment"].numpy()
    magic, unit, width, flags, *_, stop, _, layout = struct.unpack("<4s3Bx8Q32s", data[:104].data)
    start = 8 + int.from_bytes(file[:8], "little")
    if (magic, flags & 1, layout) != (b"SCP2", 0, hashlib.sha256(file[:start]).digest()):
        raise ValueError("an increment of another layout, or a compressed one")
    body = np.frombuffer(bytearray(file[start:] + bytes((start - len(file)) % 64)), np.uint8)
    gaps = data[104 + stop :].view(f"<u{width}").astype(np.int64)
    positions = np.cumsum(gaps)[gaps != (1 << 8 * width) - 1]
    body.view(f"<u{unit}")[positions] = data[104 : 104 + stop].view(f"<u{unit}")
    return file[:start] + body.tobytes()[: len(file) - start]


def tensors_of(file: bytes) -> Tensors:
    """Return the tensors of a run's `.safetensors` file, including tied ones."""
    more = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]).get("__metadata__", {})
    found = {name: t for name, t in load(file).items() if not name.startswith("__filler__.")}
    for name, (dtype, shape) in json.loads(more.get("sync.raw", "{}")).items():
        found[name] = found[name].view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
    return found | {a: found[b] for a, b in json.loads(more.get("sync.aliases", "{}")).items()}


if __name__ == "__main__":
    for name, tensor in Run(*sys.argv[1:3]).read(*map(int, sys.argv[3:4])).items():
        print(name, tensor.dtype, list(tensor.shape), float(tensor.double().sum()))
