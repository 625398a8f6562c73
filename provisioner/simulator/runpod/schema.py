"""The part of RunPod's GraphQL schema that is spoken here, written from what the official clients send.

Sources: providers.md 2.1, from runpod-python's queries and mutations and runpodctl's graphql.go. The spot mutations are
a part of their own, because they are being removed (providers.md 0, fact 1).
"""

from __future__ import annotations

TYPES = """
enum CloudTypeEnum { ALL COMMUNITY SECURE }
type Port { ip: String isIpPublic: Boolean privatePort: Int publicPort: Int type: String }
type PodRuntime { uptimeInSeconds: Int ports: [Port] }
type PodMachine { podHostId: String gpuDisplayName: String location: String }
type Pod {
  id: ID! name: String imageName: String env: [String] machineId: String machine: PodMachine
  containerDiskInGb: Int costPerHr: Float desiredStatus: String dockerArgs: String dockerId: String gpuCount: Int
  lastStatusChange: String memoryInGb: Float podType: String port: Int ports: String uptimeSeconds: Int
  vcpuCount: Float volumeInGb: Float volumeMountPath: String runtime: PodRuntime
}
type NetworkVolume { id: ID! name: String size: Int dataCenterId: String }
type User { id: ID! email: String pubKey: String clientBalance: Float pods: [Pod] networkVolumes: [NetworkVolume] }
type LowestPrice {
  minimumBidPrice: Float uninterruptablePrice: Float stockStatus: String availableGpuCounts: [Int]
}
type GpuType {
  id: ID! displayName: String memoryInGb: Int maxGpuCount: Int manufacturer: String cudaCores: Int
  secureCloud: Boolean communityCloud: Boolean securePrice: Float communityPrice: Float oneMonthPrice: Float
  threeMonthPrice: Float oneWeekPrice: Float communitySpotPrice: Float secureSpotPrice: Float
  lowestPrice(input: LowestPriceInput): LowestPrice
}
input LowestPriceInput { gpuCount: Int secureCloud: Boolean minDisk: Int minMemoryInGb: Int minVcpuCount: Int }
input GpuTypeFilter { id: String ids: [String] }
input PodFilter { podId: String! }
input EnvironmentVariableInput { key: String! value: String! }
input PodFindAndDeployOnDemandInput {
  name: String imageName: String cloudType: CloudTypeEnum startSsh: Boolean gpuTypeId: String gpuTypeIdList: [String]
  supportPublicIp: Boolean gpuCount: Int volumeInGb: Int minVcpuCount: Int minMemoryInGb: Int
  allowedCudaVersions: [String] minCudaVersion: String dataCenterId: String dockerArgs: String countryCode: String
  containerDiskInGb: Int ports: String volumeMountPath: String env: [EnvironmentVariableInput] templateId: String
  networkVolumeId: String minDownload: Int minUpload: Int containerRegistryAuthId: String stopAfter: String
  terminateAfter: String compliance: [String]
}
input PodResumeInput { podId: String! gpuCount: Int }
input PodStopInput { podId: String! }
input PodTerminateInput { podId: String! }
type Query { myself: User pod(input: PodFilter): Pod gpuTypes(input: GpuTypeFilter): [GpuType] }
type Mutation {
  podFindAndDeployOnDemand(input: PodFindAndDeployOnDemandInput): Pod
  podResume(input: PodResumeInput!): Pod
  podStop(input: PodStopInput!): Pod
  podTerminate(input: PodTerminateInput!): Boolean
}
"""

SPOT = """
input PodRentInterruptableInput {
  name: String imageName: String cloudType: CloudTypeEnum startSsh: Boolean gpuTypeId: String bidPerGpu: Float!
  supportPublicIp: Boolean gpuCount: Int volumeInGb: Int minVcpuCount: Int minMemoryInGb: Int
  allowedCudaVersions: [String] dataCenterId: String dockerArgs: String countryCode: String containerDiskInGb: Int
  ports: String volumeMountPath: String env: [EnvironmentVariableInput] templateId: String networkVolumeId: String
  stopAfter: String terminateAfter: String
}
input PodBidResumeInput { podId: String! bidPerGpu: Float! gpuCount: Int }
extend type Mutation {
  podRentInterruptable(input: PodRentInterruptableInput!): Pod
  podBidResume(input: PodBidResumeInput!): Pod
}
"""
