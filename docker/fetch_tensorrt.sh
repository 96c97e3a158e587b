#!/usr/bin/env bash
# Fills a folder with TensorRT's libraries for `docker build -f docker/Dockerfile.gpu --build-context tensorrt=DIR`.
#
#   docker/fetch_tensorrt.sh DIR
#
# For a host that reaches Maven's central repository and not NVIDIA's index: 550 MB. Needs mvn and unzip. The libraries are NVIDIA's, under
# their licence. 10.6 is the last version of this package with the resources of all GPUs up to sm_90.
set -euo pipefail
dir=${1:?usage: docker/fetch_tensorrt.sh DIR}
version=10.6-1.5.11
mvn -q -B dependency:get -Dtransitive=false -Dartifact="org.bytedeco:tensorrt:$version:jar:linux-x86_64-redist"
jar=$HOME/.m2/repository/org/bytedeco/tensorrt/$version/tensorrt-$version-linux-x86_64-redist.jar
mkdir -p "$dir"
for name in libnvinfer.so.10 libnvinfer_builder_resource.so.10.6.0 libnvinfer_plugin.so.10 libnvonnxparser.so.10; do
    unzip -qoj "$jar" "org/bytedeco/tensorrt/linux-x86_64/$name" -d "$dir"
done
du -sh "$dir"
