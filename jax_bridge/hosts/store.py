"""JAX's coordination service, as keys and values that all processes see."""

from __future__ import annotations

from typing import Any

from jax._src import distributed

ROOT = "torch_dflash/"
PIECE = 1 << 20
"""Bytes of a value that is sent in several."""


class Store:
    """What `jax.distributed.initialize` has joined. Every method may be called from any thread.

    Attributes:
        process, count: this process's index, and how many there are.
    """

    def __init__(self, client: Any, process: int, count: int):
        self._client, self.process, self.count = client, process, count

    @classmethod
    def joined(cls) -> Store | None:
        """That of this process; None: it has joined none."""
        state = distributed.global_state
        return None if state.client is None else cls(state.client, state.process_id, state.num_processes)

    def put(self, key: str, value: str) -> None:
        """Set a value, whatever stood there."""
        self._client.key_value_set(ROOT + key, value, allow_overwrite=True)

    def put_bytes(self, key: str, value: bytes) -> int:
        """Set a value of any size in pieces, of which the number is returned."""
        pieces = [value[at : at + PIECE] for at in range(0, len(value), PIECE)]
        for at, piece in enumerate(pieces):
            self._client.key_value_set_bytes(f"{ROOT}{key}/{at}", piece, allow_overwrite=True)
        return len(pieces)

    def wait(self, key: str, seconds: float) -> str:
        """A value, once it is set.

        Raises:
            jax.errors.JaxRuntimeError: it was not within ``seconds``, or the service has gone.
        """
        return self._client.blocking_key_value_get(ROOT + key, int(seconds * 1000))

    def wait_bytes(self, key: str, pieces: int, seconds: float) -> bytes:
        """The value of `put_bytes`; raises as `wait`."""
        milliseconds = int(seconds * 1000)
        found = [
            self._client.blocking_key_value_get_bytes(f"{ROOT}{key}/{at}", milliseconds)
            for at in range(pieces)
        ]
        return b"".join(found)

    def entries(self, folder: str) -> dict[int, str]:
        """The values of processes, by their index, in ``folder``."""
        found = self._client.key_value_dir_get(f"{ROOT}{folder}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def drop(self, key: str) -> None:
        """Forget a value, or a folder."""
        self._client.key_value_delete(ROOT + key)

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until every process is here; raises as `wait`."""
        self._client.wait_at_barrier(ROOT + name, int(seconds * 1000))
