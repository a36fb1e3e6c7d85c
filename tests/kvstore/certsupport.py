"""A CA and certificates of it, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """A CA and certificates of it."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def certificate(self, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
        key, crt = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        if not crt.exists():
            openssl(
                "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", key, "-out", crt, "-days", "2", "-subj", f"/CN={name}",
                "-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=CA:FALSE",
                "-CA", self.ca, "-CAkey", self.folder / "ca.key",
            )  # fmt: skip
        return crt, key


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_authority(folder: Path) -> Authority:
    authority = Authority(folder)
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", folder / "ca.key", "-out", authority.ca, "-days", "2", "-subj", "/CN=ca",
        # Python 3.13 refuses a CA certificate without the keyUsage extension.
        "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    return authority
