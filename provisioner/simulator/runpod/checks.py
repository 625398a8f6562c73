"""REST v2's request schemas, as far as they are used: an unknown field or a wrong type is a 422 (providers.md 2.3).

They follow CreatePodRequest, UpdatePodRequest, PodActionRequest and UpdateSshKeysRequest of RunPod's OpenAPI file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

CudaVersion = Annotated[str, Field(pattern=r"^\d+\.\d+$")]
PublicKey = Annotated[str, Field(pattern=r"^(ssh|ecdsa|sk)-[^\s]+ [^\s]+([ \t][^\n\r]*)?$")]
Action = Literal["start", "stop", "restart", "terminate"]


class Strict(BaseModel):
    """An object that takes no other fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CreateGpu(Strict):
    """CreateGpuConfig."""

    id: str
    count: int = Field(default=1, ge=1)
    allowedCudaVersions: list[CudaVersion] = []
    minCudaVersion: CudaVersion | None = None


class CreateCpu(Strict):
    """CreateCpuConfig; CPU pods are outside the simulated market."""

    id: str
    vcpuCount: int | None = None


class PersistentMount(Strict):
    """PersistentMount."""

    size: int = Field(ge=10)
    path: str


class NetworkMount(Strict):
    """NetworkMount."""

    volumeId: str
    path: str


class Mounts(Strict):
    """Mounts: at most one of the two."""

    persistent: PersistentMount | None = None
    network: list[NetworkMount] | None = Field(default=None, max_length=1)


class Container(Strict):
    """ContainerConfig."""

    image: str | None = None
    args: str = ""
    disk: int = Field(default=20, ge=1)
    env: dict[str, str] = {}
    ports: list[str] = []
    registry: str | None = None
    mounts: Mounts = Mounts()
    templateId: str | None = Field(default=None, min_length=1)


class CreatePod(Container):
    """CreatePodRequest."""

    name: str = Field(min_length=1)
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    gpu: CreateGpu | None = None
    cpu: CreateCpu | None = None
    dataCenterIds: list[str] = []
    globalNetworking: bool = False
    startJupyter: bool = False
    startSsh: bool = False

    @model_validator(mode="after")
    def has_an_image(self) -> CreatePod:
        """Want an image unless a template is named."""
        if self.image is None and self.templateId is None:
            raise ValueError("image is required unless templateId is set")
        return self


class UpdatePod(Container):
    """UpdatePodRequest."""

    name: str | None = Field(default=None, min_length=1)
    locked: bool | None = None
    globalNetworking: bool | None = None


class PodActionBody(Strict):
    """PodActionRequest."""

    action: Action


class SshKeysBody(Strict):
    """UpdateSshKeysRequest."""

    keys: list[PublicKey]


def broken_rule(body: CreatePod) -> str | None:
    """Return which cross-field rule *body* breaks: a 400, as no capacity is (providers.md 2.3)."""
    if (body.gpu is None) == (body.cpu is None):
        return "exactly one of gpu or cpu must be set"
    if body.gpu and body.gpu.allowedCudaVersions and body.gpu.minCudaVersion:
        return "allowedCudaVersions and minCudaVersion are mutually exclusive"
    if body.mounts.persistent and body.mounts.network:
        return "mounts.persistent and mounts.network are mutually exclusive"
    if body.cpu:
        return "this simulator has no CPU pods"
    return None
