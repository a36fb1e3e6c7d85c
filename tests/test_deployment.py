"""The manifests in docs/deploy: nothing in them is refused by Kubernetes or by the program.

Nothing here needs a cluster. The schemas are those that Kubernetes publishes for its API. Image and
Compose have their own file, test_image.py.
"""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deploysupport import (
    FLUSH_S,
    KUBERNETES,
    MANIFESTS,
    NODE_BYTES,
    ROOT,
    Pod,
    check,
    commands_in,
    documents,
    environment,
    memory_bytes,
    nodes,
    option,
    pods,
    redis_pod,
    resources,
    services,
    walk,
    words_of,
)

from tiffin.kvstore.credentials import TOKEN_FILE_VARIABLE
from tiffin.kvstore.directory.url import PASSWORD_VARIABLE
from tiffin.kvstore.sizes import parse_bytes

# The oldest API that the library still knows, and the newest.
KNOWN = kubernetes_validate.utils.all_versions()
VERSIONS = [KNOWN[0], KNOWN[-1]]

each_node = pytest.mark.parametrize("pod", nodes(), ids=str)
each_pod = pytest.mark.parametrize("pod", pods(), ids=str)


def test_all_of_it_is_looked_at() -> None:
    names = {path.name for path in MANIFESTS}
    assert names == {"docker-compose.yaml", "redis.yaml", "daemonset.yaml", "statefulset.yaml"}
    assert [str(pod) for pod in pods()] == [
        "DaemonSet-node",
        "Deployment-redis",
        "StatefulSet-node",
    ]
    assert [str(pod) for pod in nodes()] == ["DaemonSet-node", "StatefulSet-node"]


# -- what Kubernetes takes -------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_document(version: str) -> None:
    for document in resources():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replica"), 3),
        (("spec", "template", "spec", "initContainer"), []),
        (("spec", "template", "spec", "containers", 0, "volumeMount"), []),
        (("spec", "template", "spec", "containers", 0, "ports"), [{"containerPort": "x"}]),
        (("spec", "template", "spec", "terminationGracePeriodSeconds"), "360 s"),
    ],
    ids=lambda given: given[-1] if isinstance(given, tuple) else "",
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_typo_in_a_manifest_is_refused(
    path: tuple[str | int, ...], value: Any, version: str
) -> None:
    (document,) = [pod.document for pod in nodes() if str(pod) == "StatefulSet-node"]
    document = place = copy.deepcopy(document)
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError) as refused:
        kubernetes_validate.validate(document, version, strict=True)
    assert str(path[-1]) in refused.value.message or path[-1] in refused.value.path


@each_pod
def test_labels_select_their_pods(pod: Pod) -> None:
    labels = pod.document["spec"]["template"]["metadata"]["labels"]
    assert pod.document["spec"]["selector"]["matchLabels"] == labels
    for spread in pod.spec.get("topologySpreadConstraints", []):
        assert spread["labelSelector"]["matchLabels"] == labels


def test_every_selector_finds_pods() -> None:
    labels = [pod.document["spec"]["template"]["metadata"]["labels"] for pod in pods()]
    for document in resources():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels
        if document["kind"] == "PodDisruptionBudget":
            assert document["spec"]["selector"]["matchLabels"] in labels


def test_the_network_policy_lets_in_machines_whose_pods_have_their_network() -> None:
    """No podSelector matches a pod with hostNetwork: other pods see its machine's address."""
    (policy,) = [document for document in resources() if document["kind"] == "NetworkPolicy"]
    assert any("hostNetwork" in pod.spec for pod in pods())
    (rule,) = policy["spec"]["ingress"]
    assert [kind for source in rule["from"] for kind in source] == ["podSelector", "ipBlock"]


@each_pod
def test_pods_keep_to_the_standard_named_restricted(pod: Pod) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted

    Pods that need the machine itself are exempt, from exactly what they need.
    """
    of_machine = {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
    allowed = {"hostNetwork", "hostPID"} if pod.document["kind"] == "DaemonSet" else set()
    assert of_machine == allowed
    around = pod.spec["securityContext"]
    assert around["runAsNonRoot"] is True
    assert around["runAsUser"] > 0
    assert around["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod.containers:
        inside = container["securityContext"]
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert inside["readOnlyRootFilesystem"] is True
        assert not inside.keys() & {"runAsUser", "privileged", "seccompProfile"}
    kinds = {kind for volume in pod.spec.get("volumes", []) for kind in volume} - {"name"}
    assert kinds <= {"emptyDir", "secret"} | ({"hostPath"} if allowed else set())


# -- what belongs together -------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_commands_have_only_options_that_exist(path: Path) -> None:
    commands = commands_in(documents(path))
    assert commands or path.name == "redis.yaml"
    for words in commands:
        check(words)


def test_images_are_those_of_this_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {c["image"] for pod in nodes() for c in pod.containers}
    assert found == {f"tiffin:{project['version']}"}


@each_pod
def test_every_volume_is_mounted_and_every_mount_has_one(pod: Pod) -> None:
    mounted = {mount["name"] for c in pod.containers for mount in c.get("volumeMounts", [])}
    assert mounted == pod.volumes.keys()


def unread_variables(container: Any) -> set[str]:
    """Variables that neither the program nor the container's own words ask for."""
    words = " ".join(part for part in walk(container) if isinstance(part, str))
    read = {TOKEN_FILE_VARIABLE, PASSWORD_VARIABLE}
    read |= set(re.findall(r"\$[({]?(\w+)", words))
    return set(environment(container)) - read


@each_node
def test_every_variable_is_read_and_every_name_is_one(pod: Pod) -> None:
    assert not unread_variables(pod.main)
    known = environment(pod.main)
    for word in [part for part in walk(pod.main) if isinstance(part, str)]:
        assert set(re.findall(r"\$[({]?([A-Z]\w*)", word)) <= known.keys()


def test_a_variable_that_nobody_reads_is_noticed() -> None:
    container = copy.deepcopy(nodes()[0].main)
    container["env"].append({"name": "TIFFIN_TOKEN", "value": "/private/token"})
    assert unread_variables(container) == {"TIFFIN_TOKEN"}


def files_of(container: Any) -> list[str]:
    """Paths that a node reads or writes, as its options and variables name them."""
    words = words_of(container)
    text = " ".join([*words, *(value or "" for value in environment(container).values())])
    found = [option(words, "--socket"), option(words, "--nvme").partition(":")[0]]
    found += [
        option(words, "--token-file") or environment(container).get(TOKEN_FILE_VARIABLE) or ""
    ]
    return [*filter(None, found), *re.findall(r"password_file=([^&\s]+)", text)]


@each_node
def test_every_file_of_a_node_is_in_a_volume_that_it_may_write(pod: Pod) -> None:
    folders = [m["mountPath"] for m in pod.main["volumeMounts"] if not m.get("readOnly")]
    files = files_of(pod.main)
    assert len(files) >= 4, "socket, slab, token and password"
    for file in files:
        assert any(file == folder or file.startswith(f"{folder}/") for folder in folders), file


@each_node
def test_the_first_container_lays_out_what_the_second_one_reads(pod: Pod) -> None:
    """Nodes refuse secrets that other users can read, and a cluster's secrets belong to root."""
    (first,) = pod.spec["initContainers"]
    (sources, target) = re.findall(
        r"install -m 0600 ((?:/secret/\S+ ?)+) (/\S+)", words_of(first)[-1]
    )[0]
    private = {f"{target}/{Path(source).name}" for source in sources.split()}
    assert private == {file for file in files_of(pod.main) if file.startswith(f"{target}/")} - {
        option(words_of(pod.main), "--socket")
    }
    made = re.findall(r"install -d -m 0700 (/\S+)", words_of(first)[-1])
    assert made == [option(words_of(pod.main), "--nvme").partition(":")[0]] * bool(pod.claims)
    header = (KUBERNETES / "redis.yaml").read_text()
    for source in sources.split():
        assert f"--from-file={Path(source).name}" in header


@each_node
def test_probes_ask_the_nodes_own_socket(pod: Pod) -> None:
    own = option(words_of(pod.main), "--socket")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (words,) = commands_in(pod.main[probe])
        assert words[0] == "status"
        assert option(words, "--socket") == own
        assert pod.main[probe]["timeoutSeconds"] >= 5, "a look takes most of a second of CPU"


@each_node
def test_addresses_and_ports_are_the_same_everywhere(pod: Pod) -> None:
    words = words_of(pod.main)
    _, _, port = option(words, "--listen").rpartition(":")
    (declared,) = pod.main["ports"]
    assert str(declared["containerPort"]) == port
    assert declared.get("hostPort", declared["containerPort"]) == declared["containerPort"]
    if advertised := option(words, "--advertise"):
        host, _, other = advertised.rpartition(":")
        service = services()[host.removeprefix("$(POD_NAME).")]
        assert other == port
        assert [p["port"] for p in service["ports"]] == [declared["containerPort"]]
        assert host.startswith(f"$(POD_NAME).{pod.document['spec']['serviceName']}.")
        labels = pod.document["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
    redis_host, redis_port = re.findall(r"^redis://([\w.]+):(\d+)\?", option(words, "--directory"))[
        0
    ]
    (served,) = services()[redis_host]["ports"]
    assert str(served["port"]) == redis_port
    assert redis_pod().main["ports"] == [{"containerPort": served["port"]}]


# -- memory, disks, time ---------------------------------------------------------------------------


@each_node
def test_a_pods_memory_is_its_dram_and_room_for_the_node(pod: Pod) -> None:
    asked, limit = (pod.main["resources"][of]["memory"] for of in ("requests", "limits"))
    assert asked == limit, "memory that was touched is never given back"
    dram_bytes = parse_bytes(option(words_of(pod.main), "--dram"))
    in_memory = [v["emptyDir"] for v in pod.volumes.values() if "emptyDir" in v]
    assert all(volume["medium"] == "Memory" for volume in in_memory)
    private_bytes = sum(parse_bytes(volume["sizeLimit"]) for volume in in_memory)
    assert parse_bytes(limit) >= dram_bytes + private_bytes + NODE_BYTES


def test_the_memory_of_redis_is_what_it_may_fill_and_a_tenth_more() -> None:
    """What its allocator loses comes on top of maxmemory."""
    redis = redis_pod().main
    (most,) = re.findall(r"^maxmemory (\w+)$", words_of(redis)[-1], re.MULTILINE)
    assert parse_bytes(redis["resources"]["limits"]["memory"]) > 1.1 * memory_bytes(most)


@each_node
def test_a_claim_holds_the_slab(pod: Pod) -> None:
    path, _, size = option(words_of(pod.main), "--nvme").partition(":")
    slab_bytes = parse_bytes(size) * (1 + 1 / 1024)
    for mount in pod.main["volumeMounts"]:
        if mount["name"] in pod.claims:
            assert path.startswith(mount["mountPath"])
            claimed = pod.claims[mount["name"]]["resources"]["requests"]["storage"]
            # ext4 keeps a twentieth for root.
            assert parse_bytes(claimed) * 0.95 > slab_bytes


@each_node
def test_a_pod_has_time_to_drain_and_to_write_back(pod: Pod) -> None:
    (drain,) = commands_in(pod.main["lifecycle"]["preStop"])
    assert drain[0] == "drain"
    assert drain[2] == "$" + re.findall(r"\$\((\w+)\)", " ".join(pod.main["args"]))[0]
    needed_s = float(option(drain, "--timeout-s"))
    needed_s += float(option(words_of(pod.main), "--flush-s") or FLUSH_S)
    assert pod.spec["terminationGracePeriodSeconds"] > needed_s
