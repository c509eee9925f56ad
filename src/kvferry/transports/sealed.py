"""A tcp lane with TLS: spans are gathered into one buffer and sealed; opened, and scattered.

The kernel's scatter and gather calls cannot seal, so each byte is encrypted and copied twice more
on each side: expect a fraction of a plain lane's rate.
"""

from __future__ import annotations

import numpy as np

from kvferry.errors import PeerLostError
from kvferry.memory.copy import gather, scatter
from kvferry.regions import I64, U64
from kvferry.tls import CHUNK_BYTES, TlsSocket
from kvferry.transports.channel import Channel, Watch, cut


class TlsChannel(Channel):
    """One TCP connection inside TLS."""

    def __init__(self, sock: TlsSocket) -> None:
        super().__init__(sock)
        self._buffer = np.empty(CHUNK_BYTES, np.uint8)

    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        for part, sizes, nbytes in cut(addresses, lengths, CHUNK_BYTES):
            watch.check_sometimes(watch.bytes_done)
            gather(self._buffer.ctypes.data, part, sizes)
            view = self._buffer[:nbytes].data
            while view:
                try:
                    view = view[self.sock.send(view) :]
                except BlockingIOError:
                    watch.check()
            watch.bytes_done += nbytes

    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        for part, sizes, nbytes in cut(addresses, lengths, CHUNK_BYTES):
            watch.check_sometimes(watch.bytes_done)
            view = self._buffer[:nbytes].data
            while view:
                try:
                    got = self.sock.recv_into(view)
                except BlockingIOError:
                    watch.check()
                    continue
                if got == 0:
                    raise PeerLostError(
                        "the lane was closed by the peer in the middle of a transfer"
                    )
                view = view[got:]
            scatter(self._buffer.ctypes.data, part, sizes)
            watch.bytes_done += nbytes
