"""A real Ray cluster on this machine: two raylets, which are two hosts to Ray, on 127.0.0.1 alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20


class RayCluster:
    """The driver, which is the test, is with the first host."""

    def __init__(self, cluster: Any, other_host: Any) -> None:
        self.address: str = cluster.address
        self._cluster = cluster
        self._other_host = other_host

    def kill_other_host(self) -> None:
        """It stays dead when it is killed again."""
        if self._other_host:
            self._cluster.remove_node(self._other_host, allow_graceful=False)
        self._other_host = None


@contextmanager
def ray_cluster(cpus_for_each: int = 1) -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    node: Any = {
        "num_cpus": cpus_for_each,
        "object_store_memory": OBJECT_STORE_BYTES,
        "node_ip_address": "127.0.0.1",
    }
    without = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster: Any = Cluster(initialize_head=True, head_node_args=node | without)
    try:
        yield RayCluster(cluster, cluster.add_node(**node))
    finally:
        cluster.shutdown()
