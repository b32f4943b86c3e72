#!/usr/bin/env bash
# Regenerates proto/kvstore_proto/v1/*_pb2*.py(i) with the pinned, old-enough generator: code made by current tools
# refuses to load under the protobuf 5.29 and 6.33 that engine environments still pin.
# usage: proto/generate.sh [OUTPUT_ROOT]      (default: proto/)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
tools=${KVSTORED_PROTO_VENV:-$here/../.venv-proto}
if [ ! -x "$tools/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check 'grpcio-tools==1.71.2' 'mypy-protobuf==3.6.0' 'setuptools<80'
fi
PATH="$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I "$here" \
  --python_out="$out" --mypy_out="quiet:$out" "$here"/kvstore_proto/v1/*.proto
PATH="$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I "$here" \
  --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
  "$here"/kvstore_proto/v1/kvstore.proto "$here"/kvstore_proto/v1/admin.proto "$here"/kvstore_proto/v1/unary.proto
