"""What lies in deploy/, as Kubernetes would get it.

kustomize is not needed for what the overlays do: ``build`` does resources, a namespace, labels without
selectors, image tags and JSON patches, and refuses all else.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay"
FOLDERS = ["base", "shard", "overlays/gpu-trainers", "overlays/torchrun", "overlays/monitoring"]
CLUSTER_WIDE = {"Namespace"}


def build(folder):
    """The objects of a folder with a kustomization."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    del kustomization["apiVersion"], kustomization["kind"]
    objects: list[Any] = []
    for name in kustomization.pop("resources"):
        path = folder / name
        objects += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for patch in kustomization.pop("patches", []):
        patch_objects(objects, patch, yaml.safe_load((folder / patch["path"]).read_text()))
    for pair in kustomization.pop("labels", []):
        assert pair.keys() == {"pairs"}, pair
        for item in objects:
            item["metadata"].setdefault("labels", {}).update(pair["pairs"])
    if namespace := kustomization.pop("namespace", None):
        for item in objects:
            if item["kind"] not in CLUSTER_WIDE:
                item["metadata"]["namespace"] = namespace
    for image in kustomization.pop("images", []):
        for container in containers_in(objects):
            if container.get("image") == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    assert kustomization == {}, f"{folder}: build() does not know {sorted(kustomization)}"
    return objects


def patch_objects(objects, patch, operations):
    target = patch["target"]
    wanted = (f"{target['group']}/{target['version']}", target["kind"], target["name"])
    found = [
        item for item in objects if (item["apiVersion"], item["kind"], item["metadata"]["name"]) == wanted
    ]
    assert len(found) == 1, f"{wanted} is patched, and there are {len(found)} of it"
    for operation in operations:
        patch_json(found[0], operation)


def patch_json(item, operation):
    """RFC 6902, as far as it is used: add at the end of a list or as a key, and replace what is there."""
    *steps, last = operation["path"].strip("/").split("/")
    for step in steps:
        item = item[int(step)] if isinstance(item, list) else item[step]
    value = copy.deepcopy(operation["value"])
    if operation["op"] == "add" and isinstance(item, list) and last == "-":
        item.append(value)
    elif operation["op"] == "add" and isinstance(item, dict):
        item[last] = value
    else:
        assert operation["op"] == "replace", operation
        key = int(last) if isinstance(item, list) else last
        assert item[key] is not None
        item[key] = value


def containers_in(value):
    """Every container at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in containers_in(part)]
    if not isinstance(value, dict):
        return []
    own = [*value.get("containers", []), *value.get("initContainers", [])]
    deeper = [found for key, part in value.items() if "ontainers" not in key for found in containers_in(part)]
    return [*own, *deeper]


def pod_templates(value):
    """Every pod template at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in pod_templates(part)]
    if not isinstance(value, dict):
        return []
    own = [value] if "spec" in value and "containers" in (value["spec"] or {}) else []
    return [*own, *(found for part in value.values() for found in pod_templates(part))]


@pytest.fixture(scope="session", params=FOLDERS)
def objects(request):
    """What one folder makes."""
    return build(KUBERAY / request.param)


@pytest.fixture(scope="session")
def built():
    """Folder -> what it makes."""
    return {name: build(KUBERAY / name) for name in FOLDERS}


@pytest.fixture(scope="session")
def base(built):
    return built["base"]


@pytest.fixture(scope="session")
def everything(built):
    """Every object once."""
    named = {
        (item["kind"], item["metadata"]["name"], name if item["kind"] == "RayCluster" else ""): item
        for name, made in built.items()
        for item in made
    }
    return list(named.values())


@pytest.fixture(scope="session")
def find_templates():
    return pod_templates


@pytest.fixture(scope="session")
def find_containers():
    return containers_in
