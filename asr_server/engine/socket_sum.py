"""Sums tensors of the ranks of a replica on the CPU, through sockets that they inherit.

Nothing listens, so that nobody else can take part; gloo would listen on TCP, and keep whoever connects.
Made by `ranks.py`. Runs in every rank's process, in the thread that computes. Knows no model.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from torch import Tensor

BUFFER_BYTES = 1 << 20


class SocketSum:
    """Rank 0 adds the others' parts in their order and sends the sum back: all have the same bits."""

    def __init__(self, rank: int, links: Sequence[socket.socket]) -> None:
        """`links`: rank 0's to the others; another rank's to rank 0."""
        self._leads, self._links = rank == 0, links
        for link in links:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def __call__(self, part: Tensor) -> None:
        """Replace the part by the sum. Raises OSError where a rank has ended."""
        if self._leads:
            self._add_up(part)
        else:
            self._links[0].sendall(_bytes_of(part))
            _receive(self._links[0], part)

    def _add_up(self, part: Tensor) -> None:
        received = torch.empty_like(part)
        for link in self._links:
            _receive(link, received)
            part += received
        for link in self._links:
            link.sendall(_bytes_of(part))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's own memory. It must be contiguous."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _receive(link: socket.socket, tensor: Tensor) -> None:
    view = _bytes_of(tensor)
    while view:
        if not (received := link.recv_into(view, 0, socket.MSG_WAITALL)):
            raise ConnectionAbortedError("a rank has ended")
        view = view[received:]
