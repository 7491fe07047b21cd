"""JAX's coordination service as a store of keys and values, which all processes share."""

from __future__ import annotations

from typing import Any

from jax._src import distributed

ROOT = "torch_dflash/"
PIECE = 1 << 20
"""Most bytes of a piece of a value that is sent in pieces."""


class Store:
    """The store of the processes that `jax.distributed.initialize` has joined; any thread may call it.

    Attributes:
        process: index of this process. count: number of processes.
    """

    def __init__(self, client: Any, process: int, count: int):
        self._client, self.process, self.count = client, process, count

    @classmethod
    def joined(cls) -> Store | None:
        """The store of this process; None: this process has joined no others."""
        state = distributed.global_state
        return None if state.client is None else cls(state.client, state.process_id, state.num_processes)

    def put(self, key: str, value: str) -> None:
        """Set a value, or replace it."""
        self._client.key_value_set(ROOT + key, value, allow_overwrite=True)

    def put_bytes(self, key: str, value: bytes) -> int:
        """Set a value of any size in pieces; returns their number."""
        pieces = [value[at : at + PIECE] for at in range(0, len(value), PIECE)]
        for at, piece in enumerate(pieces):
            self._client.key_value_set_bytes(f"{ROOT}{key}/{at}", piece, allow_overwrite=True)
        return len(pieces)

    def wait(self, key: str, seconds: float) -> str:
        """The value of ``key``, once it is set.

        Raises:
            jax.errors.JaxRuntimeError: the value was not set within ``seconds``, or the service has ended.
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
        """The values in ``folder`` by the index of their process."""
        found = self._client.key_value_dir_get(f"{ROOT}{folder}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def drop(self, key: str) -> None:
        """Delete a value, or a folder."""
        self._client.key_value_delete(ROOT + key)

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until every process has come to the barrier ``name``; raises as `wait`."""
        self._client.wait_at_barrier(ROOT + name, int(seconds * 1000))
