"""A loopback transport on which one byte turns over in the destination, once it has landed and is not yet checked."""

from blockferry.connectors.transport.loopback import LoopbackTransport


class CorruptingPeer:
    """A peer whose first checksums come after an accident."""

    def __init__(self, peer, transport, *, local, remote):
        self.is_direct = peer.is_direct
        self._peer = peer
        self._transport = transport
        self._local, self._remote = local, remote
        self._landed = None

    def write(self, local_offsets, remote_offsets, lengths):
        self._landed = self._remote, int(remote_offsets[-1])
        self._peer.write(local_offsets, remote_offsets, lengths)

    def read(self, local_offsets, remote_offsets, lengths):
        self._landed = self._local, int(local_offsets[-1])
        self._peer.read(local_offsets, remote_offsets, lengths)

    def flush(self):
        return self._peer.flush()

    def checksum(self, remote_offsets, lengths):
        if self._transport.num_accidents:
            self._transport.num_accidents -= 1
            memory, offset = self._landed
            memory[offset] ^= 0x10
        return self._peer.checksum(remote_offsets, lengths)

    def close(self):
        self._peer.close()


class CorruptingTransport(LoopbackTransport):
    """Corrupts `num_accidents` batches."""

    def __init__(self, fabric, num_accidents=1):
        super().__init__(fabric)
        self._fabric = fabric
        self.num_accidents = num_accidents

    def connect(self, address, *, local, remote_key):
        peer = super().connect(address, local=local, remote_key=remote_key)
        return CorruptingPeer(peer, self, local=local.view, remote=self._fabric.find_region(remote_key))
