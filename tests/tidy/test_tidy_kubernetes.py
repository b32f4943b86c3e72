"""The files for Kubernetes are what its API takes, and pods share sockets of the node and no memory."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstored.config import load_config
from tests.tidy.tree import ROOT

yaml = pytest.importorskip("yaml", reason="kubernetes-validate (of the dev extra) is not installed")
_KUBERNETES = ROOT / "deploy/kubernetes"
_FORBIDDEN = ("hostIPC", "hostPID", "hostNetwork")
_VERSIONS = ("1.28", "1.32", "1.37")


def _documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module", params=["base", "example"])
def built(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The objects that kustomize makes of a folder."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            run = subprocess.run([*command, _KUBERNETES / request.param], capture_output=True, text=True, timeout=60)
            assert (run.returncode, run.stderr) == (0, "")
            return _documents(run.stdout)
    pytest.skip("neither kustomize nor kubectl is installed")


def _check(documents: list[dict[str, Any]]) -> None:
    """Hold `documents` against the API's schemas of several versions: no field that they do not know."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate (of the dev extra) is missing")
    for document in documents:
        for version in _VERSIONS:
            validate.validate(document, version, strict=True)


def _pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"]["spec"] for each in documents if each["kind"] in ("DaemonSet", "Deployment")]


def test_the_api_takes_what_kustomize_makes(built: list[dict[str, Any]]) -> None:
    _check(built)
    wrong = json.loads(json.dumps(built[-1])) | {"specification": {}}
    with pytest.raises(Exception, match="specification"):
        _check([wrong])


def test_pods_share_sockets_and_nothing_else_of_the_node(built: list[dict[str, Any]]) -> None:
    for pod in _pods(built):
        assert not any(pod.get(name) for name in _FORBIDDEN)
        assert not any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"])
        hosts = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
        assert all(path.startswith(("/run/kvstored", "/var/lib/kvstored")) for path in hosts)
    daemon, *engines = _pods(sorted(built, key=lambda document: document["kind"] != "DaemonSet"))
    assert daemon["containers"][0]["securityContext"]["runAsNonRoot"]
    for engine in engines:
        hosts = [volume["hostPath"] for volume in engine["volumes"] if "hostPath" in volume]
        assert hosts == [{"path": "/run/kvstored/tenants/chat", "type": "Directory"}], "of its own tenant alone"


def test_the_daemon_takes_the_configuration_that_is_mounted(built: list[dict[str, Any]], tmp_path: Path) -> None:
    text = next(each for each in built if each["kind"] == "ConfigMap")["data"]["kvstored.toml"]
    (tmp_path / "kvstored.toml").write_text(text)
    config = load_config(tmp_path / "kvstored.toml")
    memory = _pods(sorted(built, key=lambda each: each["kind"] != "DaemonSet"))[0]["containers"][0]["resources"]
    limit_bytes = int(memory["limits"]["memory"].removesuffix("Gi")) << 30
    assert config.host.capacity_bytes + (1 << 30) <= limit_bytes
    assert str(config.daemon.socket_dir) == "/run/kvstored"


def test_the_chart_says_what_the_base_says(built: list[dict[str, Any]], tmp_path: Path) -> None:
    """Rendered by Helm's own engine, with the chart's own values."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-all installs it)")
    with helm.Chart.load(str(_KUBERNETES / "chart")) as chart_files:
        texts = chart_files.render(name="kvstored", namespace="kvstored")
    rendered = [document for text in texts.values() for document in _documents(text)]
    _check(rendered)
    ours = next(each for each in built if each["kind"] == "DaemonSet")
    chart = next(each for each in rendered if each["kind"] == "DaemonSet")
    for pod in (ours, chart):
        volumes = pod["spec"]["template"]["spec"]["volumes"]
        next(each for each in volumes if "configMap" in each)["configMap"]["name"] = "kvstored"
        for container in pod["spec"]["template"]["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
        for container in pod["spec"]["template"]["spec"]["initContainers"]:
            container.pop("imagePullPolicy", None)
    assert chart["spec"]["template"]["spec"] == ours["spec"]["template"]["spec"]
