"""Who may reach whom: exactly those who must."""

from tests.support.k8s.network import Peer, may_connect
from tests.support.k8s.rendering import MANIFESTS, Objects, rendered

_OURS = {"app.kubernetes.io/name": "drafthouse"}
HEAD = Peer({**_OURS, "ray.io/node-type": "head"})
WORKER = Peer({**_OURS, "ray.io/node-type": "worker"})
REDIS = Peer({"app.kubernetes.io/name": "drafthouse-redis"})


def pod_in(namespace: str, name: str = "", **labels: str) -> Peer:
    """A pod of another namespace, by its name in `app.kubernetes.io/name`."""
    return Peer(
        {"app.kubernetes.io/name": name, **labels}, {"kubernetes.io/metadata.name": namespace}
    )


CLIENT = Peer({"app": "web"}, {"kubernetes.io/metadata.name": "web", "drafthouse/client": "true"})
STRANGER = pod_in("web", "web")
NEIGHBOUR = Peer({"app": "web"})
OPERATOR = pod_in("kuberay-system", "kuberay-operator")
PROMETHEUS = pod_in("monitoring", "prometheus")
DNS = Peer({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
INTERNET, PRIVATE, METADATA = (
    Peer(address=address) for address in ("142.250.1.1", "10.0.0.7", "169.254.169.254")
)
API_SERVER = Peer(address="192.0.2.1")  # the place-holder of overlays/autoscaling

GCS, DASHBOARD, METRICS, DATA_PLANE, HTTP, GRPC = 6379, 8265, 8080, 41234, 8000, 9000
ALL_PORTS = (GCS, DASHBOARD, METRICS, DATA_PLANE, HTTP, GRPC)


def test_a_pod_of_the_cluster_is_reached_by_those_who_must_and_at_what_they_need(
    objects: Objects,
):
    others = (
        pod_in("elsewhere", name) for name in ("kuberay-operator", "prometheus", "drafthouse")
    )
    strangers = (STRANGER, NEIGHBOUR, INTERNET, *others, pod_in("kuberay-system", "something-else"))
    reached = [
        (WORKER, ALL_PORTS),
        (HEAD, ALL_PORTS),
        (CLIENT, (HTTP, GRPC)),
        (OPERATOR, (DASHBOARD,)),
        (PROMETHEUS, (METRICS, HTTP)),
        *((each, ()) for each in (*strangers, pod_in("monitoring", "grafana"))),
    ]
    for source, ports in reached:
        for target in (HEAD, WORKER):
            found = tuple(p for p in ALL_PORTS if may_connect(objects, source, target, p))
            assert found == ports, (source, target)


def test_a_pod_of_the_cluster_reaches_names_and_its_like_and_nothing_else(
    name: str, objects: Objects
):
    others = [(DNS, 443), (pod_in("kube-system", "other"), 53), (STRANGER, 443), (NEIGHBOUR, 443)]
    others += [(PRIVATE, 443), (METADATA, 80), (METADATA, 443), (INTERNET, 80), (INTERNET, 53)]
    # Whatever it would offer or ask beside.
    others += [(STRANGER, 12345)]
    if "gpu" not in name and "h100" not in name:  # which fetch models
        others += [(INTERNET, 443)]
    for source in (HEAD, WORKER):
        for protocol in ("UDP", "TCP"):
            assert may_connect(objects, source, DNS, 53, protocol)
        assert [each for each in others if may_connect(objects, source, *each)] == []
        assert not may_connect(objects, source, STRANGER, 53, "UDP")
        assert not may_connect(objects, STRANGER, source, 12345)


def test_only_workers_of_who_opted_for_it_reach_the_model_hub(everything: Objects):
    assert may_connect(everything, WORKER, INTERNET, 443)
    assert not may_connect(everything, HEAD, INTERNET, 443)
    for address in (PRIVATE, METADATA):
        assert not may_connect(everything, WORKER, address, 443)


def test_only_the_head_of_who_wants_an_autoscaler_reaches_kubernetes():
    found = rendered(MANIFESTS["autoscaling"][0])
    assert may_connect(found, HEAD, API_SERVER, 6443)
    assert not may_connect(found, HEAD, API_SERVER, 22)
    assert not may_connect(found, WORKER, API_SERVER, 6443)
    assert not may_connect(rendered("k8s/base"), HEAD, API_SERVER, 6443)


def test_only_the_head_and_the_job_that_cleans_up_reach_redis():
    found = rendered(MANIFESTS["high-availability"][0])
    cleaner = Peer({**_OURS, "ray.io/node-type": "redis-cleanup"})
    assert [may_connect(found, each, REDIS, 6379) for each in (HEAD, cleaner)] == [True, True]
    strangers = (WORKER, CLIENT, STRANGER, NEIGHBOUR, OPERATOR, PROMETHEUS)
    assert not any(may_connect(found, each, REDIS, 6379) for each in strangers)
    assert not any(may_connect(found, REDIS, each, 443) for each in (HEAD, INTERNET, DNS))
