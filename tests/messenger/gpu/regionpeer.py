"""The second process of test_device_region: attaches to the regions whose descriptions come over
the socket (its descriptor is the argument), and answers with the bytes that it read."""

from __future__ import annotations

import socket
import sys

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.copier import DeviceCopier
from tiffin.messenger.gpu.device_region import DeviceRegion


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
            if not data:
                return
            try:
                answer = act(data, fds)
            except MessengerError as error:
                answer = f"{type(error).__name__}: {error}".encode()
            sock.sendall(answer)


def act(data: bytes, fds: list[int]) -> bytes:
    verb, _, descriptor = data.partition(b" ")
    with DeviceRegion.attach(descriptor, fds=fds, writable=verb == b"write") as region:
        if verb == b"write":
            with DeviceCopier("cpu") as copier:
                copier.submit([[(region.tensor[:4], b"peer")]])
            return b"written"
        return bytes(region.tensor[:4].tolist()) + str(region.nbytes).encode()


if __name__ == "__main__":
    main()
