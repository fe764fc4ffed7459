"""Manifests are what Kubernetes and KubeRay take, and say what the service needs."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KUBERNETES = "1.37"
SCHEMAS = {kind: HERE / "data" / f"{kind.lower()}_v1.json" for kind in ("RayCluster", "RayJob", "PodMonitor")}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
BUILDER_BYTES = 512 << 20
"""Of a builder's process beside what it keeps: Python, numpy, pyarrow and Ray take some 300 MB."""


def check(item):
    """Raise if Kubernetes would not take it."""
    if item["kind"] in SCHEMAS:
        jsonschema.validate(item, json.loads(SCHEMAS[item["kind"]].read_text()))
    else:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def number(quantity):
    text = str(quantity)
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


def named(objects, kind):
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def groups_of(cluster):
    """Name -> (start parameters, template) of every group of a RayCluster's spec."""
    head = cluster["headGroupSpec"]
    groups = {"head": (head["rayStartParams"], head["template"])}
    return groups | {
        group["groupName"]: (group["rayStartParams"], group["template"])
        for group in cluster["workerGroupSpecs"]
    }


def clusters_of(objects):
    found = [item["spec"] for item in objects if item["kind"] == "RayCluster"]
    return found + [item["spec"]["rayClusterSpec"] for item in objects if item["kind"] == "RayJob"]


def flag(template, name):
    words = template["spec"]["containers"][0]["args"][0].split()
    return words[words.index(name) + 1]


def test_every_object_is_taken(objects):
    for item in objects:
        check(item)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayCluster", "spec.headGroupSpecs", {}),
        ("RayCluster", "spec.enableInTreeAutoscaling", "yes"),
        ("RayCluster", "spec.authOptions.mode", "password"),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.imagePullPolice", "Always"),
        ("PodDisruptionBudget", "spec.minAvailabel", 1),
        ("NetworkPolicy", "spec.policyTypes", "Ingress"),
        ("Service", "spec.ports.0.port", "flight"),
        ("PersistentVolumeClaim", "spec.accessMode", ["ReadWriteMany"]),
    ],
)
def test_a_fault_is_found(base, kind, path, value):
    item = copy.deepcopy(next(item for item in base if item["kind"] == kind))
    *steps, last = path.split(".")
    at = item
    for step in steps:
        at = at[int(step)] if step.isdecimal() else at[step]
    at[last] = value

    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(item)


def test_names_are_unique_and_in_one_namespace(objects):
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]

    assert len(set(names)) == len(names)
    assert {item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"} == {
        "ringfeed"
    }


def test_pods_have_no_rights_that_they_do_not_need(objects, find_templates, find_containers):
    for template in find_templates(objects):
        pod = template["spec"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]
    for container in [*find_containers(objects), *autoscalers(objects)]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security.get("privileged")
        assert container["resources"]["limits"]["memory"]


def autoscalers(objects):
    return [
        cluster["autoscalerOptions"] for cluster in clusters_of(objects) if "autoscalerOptions" in cluster
    ]


def test_only_the_autoscaler_talks_to_the_api_server(objects, find_templates):
    for template in find_templates(objects):
        if template["metadata"]["labels"].get("ringfeed.io/role") != "head":
            assert template["spec"]["automountServiceAccountToken"] is False


def test_no_secret_is_written_down(objects, find_containers):
    assert [item for item in objects if item["kind"] == "Secret"] == []
    for container in find_containers(objects):
        for variable in container.get("env", []):
            assert not re.search(r"TOKEN$|SECRET|PASSWORD|KEY", variable["name"]) or "value" not in variable


def test_every_mount_has_its_volume_and_every_claim_is_there(everything, objects, find_templates):
    claims = named(everything, "PersistentVolumeClaim")
    for template in find_templates(objects):
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounted = {mount["name"] for item in pod["containers"] for mount in item.get("volumeMounts", [])}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims


def test_the_service_cannot_write_what_it_reads(base, find_templates):
    read = {
        template["metadata"]["labels"]["ringfeed.io/role"]: mount["readOnly"]
        for template in find_templates(base)
        for mount in template["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] == "data"
    }

    assert read == {"directory": True, "builder": True}


def test_memory_limits_hold_what_is_in_shared_memory_too(objects):
    for cluster in clusters_of(objects):
        groups = groups_of(cluster)
        for name, (parameters, template) in groups.items():
            pod = template["spec"]
            limit = number(pod["containers"][0]["resources"]["limits"]["memory"])
            shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
            assert shm["medium"] == "Memory"
            store = int(parameters.get("object-store-memory") or directory_store(template))
            shared = heap = 0
            if name == "builders":
                node_bytes = int(flag(groups["directory"][1], "--node-bytes"))
                shared, keep = node_bytes // 2, node_bytes // 4
                heap = keep + int(parameters["num-cpus"]) * BUILDER_BYTES
                assert node_bytes // 4 <= store
            assert store + shared <= number(shm["sizeLimit"]), name
            assert number(shm["sizeLimit"]) + max(heap, 1 << 30) <= limit, name


def directory_store(template):
    script = template["spec"]["containers"][0]["args"][0]
    return script.partition("--object-store-memory=")[2].split()[0]


def test_logs_and_what_does_not_fit_go_to_a_volume(objects):
    for cluster in clusters_of(objects):
        for _, template in groups_of(cluster).values():
            container = template["spec"]["containers"][0]
            name = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}["/tmp/ray"]  # noqa: S108
            volume = next(volume for volume in template["spec"]["volumes"] if volume["name"] == name)
            assert "medium" not in volume["emptyDir"]


def test_ray_is_as_the_service_wants_it(objects):
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    for cluster in clusters_of(objects):
        assert cluster["rayVersion"] == pinned[1]
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_builders_are_scaled_to_what_serve_asks_for(base):
    cluster = named(base, "RayCluster")["ringfeed"]["spec"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    builders, directory = groups["builders"], groups["directory"]

    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert builders["minReplicas"] < builders["maxReplicas"]
    cpus = int(builders["rayStartParams"]["num-cpus"])
    assert int(flag(directory["template"], "--builders")) <= cpus * builders["maxReplicas"]
    assert directory["minReplicas"] == directory["maxReplicas"] == directory["replicas"] == 1
    assert "--num-cpus=0" in directory["template"]["spec"]["containers"][0]["args"][0]


def test_no_view_is_spilled_to_disk(base):
    parameters = named(base, "RayCluster")["ringfeed"]["spec"]["headGroupSpec"]["rayStartParams"]

    # KubeRay puts it into a line of the shell as it is.
    assert json.loads(parameters["system-config"].strip("'")) == {"automatic_object_spilling_enabled": False}
    assert parameters["system-config"][0] == parameters["system-config"][-1] == "'"


def test_the_ports_of_serve_are_those_of_services_and_policies(base):
    cluster = named(base, "RayCluster")["ringfeed"]["spec"]
    groups = groups_of(cluster)
    ports = {
        "directory": int(flag(groups["directory"][1], "--port")),
        "builders": int(flag(groups["directory"][1], "--feeder-port")),
    }
    for group, port in ports.items():
        container = groups[group][1]["spec"]["containers"][0]
        assert {"name": "flight", "containerPort": port} in container["ports"]
    services = {
        item["spec"]["selector"]["ray.io/group"]: item["spec"] for item in base if item["kind"] == "Service"
    }
    assert {group: spec["ports"][0]["port"] for group, spec in services.items()} == ports
    assert {spec["clusterIP"] for spec in services.values()} == {"None"}
    flight = named(base, "NetworkPolicy")["ringfeed-flight"]["spec"]["ingress"]
    assert [sorted(port["port"] for port in rule["ports"]) for rule in flight] == [sorted(ports.values())]


def labels_of(name, group, template, node_type):
    """What a pod bears: its template's labels, and KubeRay's."""
    own = {"ray.io/cluster": name, "ray.io/group": group, "ray.io/node-type": node_type}
    return {**template["metadata"]["labels"], **own}


def pods_of(objects):
    pods = []
    for item in objects:
        if item["kind"] == "RayCluster":
            for group, (_, template) in groups_of(item["spec"]).items():
                kind = "head" if group == "head" else "worker"
                name = "headgroup" if group == "head" else group
                pods.append(labels_of(item["metadata"]["name"], name, template, kind))
        elif item["kind"] == "Job":
            labels = item["spec"]["template"]["metadata"]["labels"]
            pods.append({**labels, "job-name": item["metadata"]["name"]})
        elif item["kind"] == "RayJob":
            pods += [
                template["metadata"]["labels"]
                for _, template in groups_of(item["spec"]["rayClusterSpec"]).values()
            ]
    return pods


def selects(selector, labels):
    """Whether a selector, plain or of a policy, takes a pod."""
    plain = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return plain.items() <= labels.items()


def test_every_selector_takes_some_pod(objects):
    pods = pods_of(objects)
    for item in objects:
        if item["kind"] in {"Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"}:
            selector = item["spec"].get("podSelector") or item["spec"]["selector"]
            assert any(selects(selector, pod) for pod in pods), item["metadata"]["name"]


def test_every_pod_of_the_cluster_is_shut_in_and_opened_for_what_it_needs(base):
    policies = [item["spec"] for item in base if item["kind"] == "NetworkPolicy"]
    for pod in pods_of(base):
        mine = [spec for spec in policies if selects(spec["podSelector"], pod)]
        assert {kind for spec in mine for kind in spec["policyTypes"]} == {"Ingress", "Egress"}
        reached = {
            port["port"]
            for spec in mine
            for rule in spec.get("ingress", [])
            for port in rule.get("ports", [])
        }
        has_flight = pod["ray.io/group"] in {"directory", "builders"}
        assert ({8815, 8816} <= reached) == has_flight
        asks = {
            port["port"] for spec in mine for rule in spec.get("egress", []) for port in rule.get("ports", [])
        }
        assert (443 in asks) == (pod["ray.io/node-type"] == "head")
        assert 53 in asks


def test_a_budget_is_a_number_of_pods(base):
    """No maxUnavailable: a RayCluster has no scale that it could be taken of."""
    budgets = named(base, "PodDisruptionBudget")

    assert budgets.keys() == {"ringfeed-head", "ringfeed-directory", "ringfeed-builders"}
    for item in budgets.values():
        assert item["spec"].keys() == {"minAvailable", "selector"}
        assert isinstance(item["spec"]["minAvailable"], int)


def test_every_port_that_is_scraped_is_there(built):
    monitored = [item["spec"] for item in built["overlays/monitoring"] if item["kind"] == "PodMonitor"]
    cluster = named(built["base"], "RayCluster")["ringfeed"]["spec"]
    for spec in monitored:
        kind = spec["selector"]["matchLabels"]["ray.io/node-type"]
        for group, (_, template) in groups_of(cluster).items():
            if (group == "head") == (kind == "head"):
                ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
                assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} <= ports, group


def test_a_job_ends_its_cluster_and_does_not_run_for_ever(built):
    """The rules of RayJob that its schema does not have: see ValidateRayJobSpec in KubeRay."""
    spec = named(built["shard"], "RayJob")["ringfeed-shard"]["spec"]

    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["backoffLimit"] > 0
    assert spec["activeDeadlineSeconds"] > 0
    # Retries go with a cluster of its own only; a lifetime after the end only with a shutdown; and whoever
    # names rules of deletion may not ask for a shutdown as well.
    assert "clusterSelector" not in spec
    assert "deletionStrategy" not in spec
    assert spec.get("managedBy", "ray.io/kuberay-operator") in {
        "ray.io/kuberay-operator",
        "kueue.x-k8s.io/multikueue",
    }
    workers = sum(
        int(g["rayStartParams"]["num-cpus"]) * g["replicas"]
        for g in spec["rayClusterSpec"]["workerGroupSpecs"]
    )
    assert f"--workers {workers} " in spec["entrypoint"]


def test_gpu_trainers_are_one_group_more(built):
    base, more = (
        {g["groupName"]: g for g in named(built[name], "RayCluster")["ringfeed"]["spec"]["workerGroupSpecs"]}
        for name in ("base", "overlays/gpu-trainers")
    )

    assert more.keys() - base.keys() == {"trainers"}
    assert {name: more[name] for name in base} == base
    trainers = more["trainers"]
    limits = trainers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert trainers["rayStartParams"]["num-gpus"] == limits["nvidia.com/gpu"]
    assert trainers["replicas"] == trainers["minReplicas"] == trainers["maxReplicas"]
    assert trainers["template"]["spec"]["tolerations"]


def test_images_bear_this_version(objects, find_containers):
    version = re.search(r'^version = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version

    assert {container["image"] for container in find_containers(objects)} == {f"ringfeed:{version[1]}"}


def test_every_file_of_the_folder_is_used():
    folder = ROOT / "deploy" / "kuberay"
    used = set()
    for path in folder.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        names = [*content["resources"], *(patch["path"] for patch in content.get("patches", []))]
        used |= {path, *((path.parent / name).resolve() for name in names)}

    assert set(folder.rglob("*.yaml")) <= used
