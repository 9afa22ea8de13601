"""Read a run of the scheme `store` without sync-core, by docs/how-to/store-format.md alone.

Type `pip install cryptography numpy obstore safetensors torch`, and then
`python docs/examples/read_run.py URL PUBLIC_KEY [VERSION]`.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from typing import Any

import numpy as np
import obstore
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from obstore.store import LocalStore, from_url
from safetensors.torch import load

INCREMENT = "__sync__.increment"


class Run:
    """A run, checked by the trainer's public key (hexadecimal)."""

    def __init__(self, url: str, key: str) -> None:
        self.store: Any = from_url(url) if "://" in url else LocalStore(url)
        line, content = self.get("HEAD").split(b"\n", 1)
        signature = bytes.fromhex(line.decode().removeprefix(f"ed25519 {key} "))
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(signature, b"sync-plugin-store HEAD 1\n" + content)
        self.head = json.loads(content)

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, name).bytes())

    def checked(self, name: str, digest: str) -> bytes:
        if hashlib.sha256(data := self.get(name)).hexdigest() != digest:
            raise ValueError(f"{name} has other bytes")
        return data

    def manifest(self, version: int) -> dict[str, Any]:
        digest = self.head["versions"][str(version)]
        found: dict[str, Any] = json.loads(self.checked(f"manifests/{digest}.json", digest))
        if (found["run"], found["version"]) != (self.head["run"], version):
            raise ValueError(f"the manifest of version {version} is another's")
        return found

    def file(self, pieces: list[tuple[str, int]]) -> bytearray:
        return bytearray().join(self.checked(f"objects/{d}", d) for d, _ in pieces)

    def read(self, version: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors of a version by name, tied ones and extras too; 0: the newest."""
        chain = [self.manifest(version or self.head["version"])]
        if chain[0]["format"] == 2:
            return self.of_ranks(chain[0])
        while chain[-1]["base"]:
            chain.append(self.manifest(chain[-1]["base"]))
            if chain[-2]["base_digest"] != self.head["versions"][str(chain[-1]["version"])]:
                raise ValueError("an increment builds on another version than the run has")
        data = self.file(chain.pop()["pieces"])
        start = 8 + int.from_bytes(data[:8], "little")
        header, length = bytes(data[:start]), len(data)
        data.extend(bytes(-(length - start) % 64))
        body = np.frombuffer(data, np.uint8)[start:]
        for each in reversed(chain):
            patch(body, load(bytes(self.file(each["pieces"])))[INCREMENT].numpy(), header)
        return tensors_of(bytes(data[:length]))

    def of_ranks(self, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
        digest, _ = manifest["holdings"]
        holdings = json.loads(self.checked(f"objects/{digest}", digest))
        whole: dict[str, torch.Tensor] = {}
        for held, file in zip(holdings, manifest["ranks"], strict=True):
            have = tensors_of(bytes(self.file(file["pieces"])))
            for name, _, region, shape in held["tensors"]:
                part = have.pop(name)
                target = whole.setdefault(name, torch.empty(shape, dtype=part.dtype))
                target[tuple(slice(first, stop) for first, stop in region)] = part
            whole.update(have)  # extras, in the file of the first
        made_of = holdings[0]["made_of"]
        if made_of is not None:
            extras = {n: t for n, t in whole.items() if n.startswith("__sync__.")}
            return {name: made(whole, sources) for name, sources in made_of.items()} | extras
        for name, owner in (pair for held in holdings for pair in held["aliases"]):
            whole[name] = whole[owner]
        return whole


def patch(body: np.ndarray, data: np.ndarray, header: bytes) -> None:
    """Apply an increment to a body, the size of which is a multiple of 64."""
    magic, unit, gap, flags, *_, size, _, values_nbytes, gaps_nbytes, layout = struct.unpack(
        "<4s3Bx8Q32s", data[:104].tobytes()
    )
    if (magic, size * unit, flags & 1) != (b"SCP2", len(body), 0):
        raise ValueError("an increment of another size, or a compressed one")
    if layout != hashlib.sha256(header).digest():
        raise ValueError("an increment of another layout")
    end = 104 + values_nbytes
    gaps = data[end : end + gaps_nbytes].view(f"<u{gap}").astype(np.int64)
    positions = np.cumsum(gaps)[gaps != (1 << 8 * gap) - 1]
    body.view(f"<u{unit}")[positions] = data[104:end].view(f"<u{unit}")


def tensors_of(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` file of a run, tied ones too."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    found = {name: t for name, t in load(data).items() if not name.startswith("__filler__.")}
    for name, (dtype, shape) in json.loads(metadata.get("sync.raw", "{}")).items():
        found[name] = found[name].view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
    for alias, owner in json.loads(metadata.get("sync.aliases", "{}")).items():
        found[alias] = found[owner]
    return found


def made(whole: dict[str, torch.Tensor], sources: list[Any]) -> torch.Tensor:
    """Return a tensor that layers have made of regions of others."""
    placed = []
    for name, region, start in sources:
        part = whole[name][tuple(slice(first, stop) for first, stop in region)]
        placed.append((part, [(a, a + n) for a, n in zip(start, part.shape, strict=True)]))
    shape = [max(stops) for stops in zip(*([b for _, b in at] for _, at in placed), strict=True)]
    target = torch.empty(shape, dtype=placed[0][0].dtype)
    for part, at in placed:
        target[tuple(slice(first, stop) for first, stop in at)] = part
    return target


if __name__ == "__main__":
    run = Run(*sys.argv[1:3])
    for name, tensor in run.read(*map(int, sys.argv[3:4])).items():
        print(name, tensor.dtype, list(tensor.shape), float(tensor.double().sum()))
